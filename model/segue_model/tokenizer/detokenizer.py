"""Token ids to text, one at a time, without cutting a character."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Lead = Literal["keep", "one space", "first token"]


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """What each token writes. Text is the UTF-8 reading of all written bytes together, bad bytes as U+FFFD."""

    of: Sequence[bytes]  # by token id; b"" where the vocabulary has a hole
    special_ids: frozenset[int]
    # What is taken off the front of a whole text: nothing; one space (SentencePiece writes one before the first word);
    # or every space of the first token (the Metaspace decoder).
    lead: Lead

    def without_lead(self, first: bytes) -> bytes:
        """`first`, the first bytes written, less what does not belong to the text."""
        if self.lead == "first token":
            return first.replace(b" ", b"")
        return first[1:] if self.lead == "one space" and first.startswith(b" ") else first


class Detokenizer:
    """Text of a token stream: the pieces that `push` and `flush` return join to `Tokenizer.decode` of all ids.

    One per stream; not shared between threads. A push costs a table look-up and an incremental UTF-8 step.
    """

    __slots__ = ("_at_start", "_skipped", "_table", "_utf8")

    def __init__(self, table: TokenBytes, *, skip_special: bool, continues: bool) -> None:
        self._table = table
        self._skipped = table.special_ids if skip_special else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = table.lead != "keep" and not continues

    def push(self, token_id: int) -> str:
        """The text that became complete with this token; "" while a character is still open.

        An id past the vocabulary writes nothing: the rows that pad an embedding matrix can be sampled.
        """
        if token_id in self._skipped or not 0 <= token_id < len(self._table.of):
            return ""
        data = self._table.of[token_id]
        if self._at_start and data:
            self._at_start = False
            data = self._table.without_lead(data)
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What was held back at the end: U+FFFD for a character that never became whole, else ""."""
        return self._utf8.decode(b"", True)
