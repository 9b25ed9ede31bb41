"""From sampled tokens to the text that may be shown: nothing of a stop sequence, no half characters."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Detokenizer(Protocol):
    """Decodes token by token and never cuts a character; segue_model.tokenizer has it."""

    def push(self, token_id: int) -> str:
        """The text this token completes, often with bytes of earlier ones; empty inside a character."""
        ...

    def flush(self) -> str:
        """What is left of an unfinished character at the end."""
        ...


@dataclass(frozen=True, slots=True)
class TextStep:
    """What one more token adds to the shown text."""

    text: str  # may be shown now
    stop: str | None = None  # the stop sequence that has just been completed: the turn ends
    overhang_tokens: int = 0  # with `stop`: trailing ledger tokens of which nothing or only a part is shown


class OutputText:
    """The text of one turn: held back as long as it may turn out to be the beginning of a stop sequence.

    Held is exactly the longest suffix that some stop sequence begins with. The stop sequence that is completed first,
    reading character by character, ends the turn; of several completed by the same character it is the longest, which
    begins first. So the end depends on the text only, not on how it was cut into tokens, and it never takes another
    token to decide: of "a" and "ab", "a" stops at once.

    Stop sequences are matched in the text of this turn, not across its beginning. Raises ValueError for an empty one.
    """

    def __init__(self, detokenizer: Detokenizer, stop_sequences: Sequence[str], *, include_stop: bool) -> None:
        self._detokenizer = detokenizer
        self._matcher = _StopMatcher(stop_sequences)
        self._include_stop = include_stop
        self._held = ""
        self._decoded_chars = 0  # shown + held
        self._unfinished_tokens = 0  # the latest ones, which have not completed a character yet
        self._ends: deque[int] = deque()  # where the text of each token that is not shown in full ends, in characters

    def push(self, token_id: int) -> TextStep:
        """Add one sampled token. Nothing may follow a step with a stop."""
        piece = self._detokenizer.push(token_id)
        self._note_end(piece)
        for length, char in enumerate(piece, start=1):
            stop = self._matcher.feed(char)
            if stop is not None:
                return self._cut(piece, length, stop)
        return TextStep(self._release(piece))

    def finish(self) -> str:
        """Everything held back, for a turn that ends without a stop sequence."""
        text, self._held = self._held + self._detokenizer.flush(), ""
        return text

    def _note_end(self, piece: str) -> None:
        """Record where the new token ends; one that completes no character ends with the character it begins.

        A token that completes one character and begins another counts as ending with the first: which bytes wait in the
        detokenizer is not known here. A stop right between the two then reports one token of overhang less.
        """
        self._unfinished_tokens += 1
        self._decoded_chars += len(piece)
        if piece:
            self._ends.extend([self._decoded_chars] * self._unfinished_tokens)
            self._unfinished_tokens = 0

    def _cut(self, piece: str, length: int, stop: str) -> TextStep:
        """The last step: `stop` ends after `length` characters of the piece."""
        text = self._held + piece[:length]
        shown = text if self._include_stop else text.removesuffix(stop)
        shown_end = self._decoded_chars - len(piece) + length - (len(text) - len(shown))
        self._held = ""
        return TextStep(shown, stop, overhang_tokens=sum(end > shown_end for end in self._ends))

    def _release(self, piece: str) -> str:
        text = self._held + piece
        ready = len(text) - self._matcher.pending_chars
        self._held = text[ready:]
        shown_end = self._decoded_chars - len(self._held)
        while self._ends and self._ends[0] <= shown_end:
            self._ends.popleft()
        return text[:ready]


class _StopMatcher:
    """Aho and Corasick 1975: all stop sequences are followed at once, in constant amortised time per character.

    Node 0 is the root; a node stands for a prefix of some stop sequence, and the current one is the longest prefix that
    the text ends with.
    """

    def __init__(self, stop_sequences: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._stop: list[str | None] = [None]  # the longest stop sequence that ends here
        self._fallback = [0]  # the longest proper suffix that is a node too
        self._node = 0
        for index, stop in enumerate(stop_sequences):
            if not stop:
                raise ValueError(f"stop_sequences[{index}] must not be empty")
            self._insert(stop)
        self._link()

    @property
    def pending_chars(self) -> int:
        """Length of the longest suffix of the text that may still become a stop sequence."""
        return self._depth[self._node]

    def feed(self, char: str) -> str | None:
        """Read one character; the longest stop sequence that it completes."""
        self._node = self._next(self._node, char)
        return self._stop[self._node]

    def _next(self, node: int, char: str) -> int:
        while node and char not in self._children[node]:
            node = self._fallback[node]
        return self._children[node].get(char, 0)

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            child = self._children[node].setdefault(char, len(self._children))
            if child == len(self._children):
                self._add_node(self._depth[node] + 1)
            node = child
        self._stop[node] = stop

    def _add_node(self, depth: int) -> None:
        self._children.append({})
        self._depth.append(depth)
        self._stop.append(None)
        self._fallback.append(0)

    def _link(self) -> None:
        """Fallbacks breadth first, so that those of shorter prefixes are there when a longer one asks."""
        queue = deque([0])
        while queue:
            node = queue.popleft()
            for char, child in self._children[node].items():
                self._fallback[child] = self._next(self._fallback[node], char) if node else 0
                self._stop[child] = self._stop[child] or self._stop[self._fallback[child]]
                queue.append(child)
