"""What a caller knows of its sessions: plain lists of tokens, and what every event of a turn must say about them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from hypothesis import strategies as st
from tests.server.integer_engine import answer_to

from segue_server.events import Event, Failed, Finished, Started, Tokens, Usage
from segue_server.requests import CommitPolicy, FinishReason

T = TypeVar("T")
EOS = 0  # one answer in VOCAB ends with it


class Chance(Protocol):
    """Where a history takes its choices from: hypothesis, which shrinks them, or a seeded generator, which is fast."""

    def below(self, count: int) -> int:
        """0 .. count - 1."""
        ...


@dataclass(frozen=True)
class Drawn:
    """Choices of hypothesis."""

    data: st.DataObject

    def below(self, count: int) -> int:
        return self.data.draw(st.integers(0, count - 1))


def pick(chance: Chance, choices: Sequence[T]) -> T:
    return choices[chance.below(len(choices))]


@dataclass(eq=False)
class Talk:
    """A turn in flight, and its reader."""

    session: "Known"
    request_id: str
    start: int
    prompt_end: int
    most: int  # tokens it may generate; 0: it only appends
    deferred: bool
    policy: CommitPolicy
    full: bool = False  # the reader is behind
    started: Started | None = None
    ended: Finished | Failed | None = None
    cancelled: CommitPolicy | None = None  # what a cancel asked for
    generated: int = 0

    def deliver(self, event: Event) -> None:
        """See an event; raises AssertionError when it contradicts the list."""
        tokens = self.session.tokens
        match event:
            case Started():
                assert self.started is None
                assert (event.position, event.prompt_tokens) == (self.start, self.prompt_end - self.start)
                self.started = event
            case Tokens():
                assert self.started
                assert event.position == len(tokens)
                for token in event.token_ids:
                    right = self.session.forged or token == answer_to(tokens)
                    assert right, f"{self.session.name}: another answer at {len(tokens)}"
                    tokens.append(token)
                    self.generated += 1
            case Finished():
                self._finish(event)
                self._end(event)
            case Failed():
                self._fail(event)
                self._end(event)

    def _finish(self, event: Finished) -> None:
        match event.finish_reason:
            case FinishReason.CANCELLED:
                self._keep(self.cancelled or self.policy)
            case FinishReason.EOS:
                assert self.session.tokens[-1] == EOS
            case reason:
                assert reason is FinishReason.MAX_TOKENS
                assert self.generated == self.most
        if event.finish_reason is not FinishReason.CANCELLED and not self.deferred:
            self._check_usage(event.usage)

    def _check_usage(self, usage: Usage) -> None:
        """Each position of context and prompt was computed, or came from one place."""
        reused = usage.session_reused_tokens, usage.prefix_reused_tokens, usage.restored_tokens
        assert min(reused) >= 0
        assert usage.computed_tokens + sum(reused) == self.prompt_end
        assert (usage.context_tokens, usage.prompt_tokens) == (self.start, self.prompt_end - self.start)
        assert usage.generated_tokens == self.generated
        assert self.started
        assert self.started.to_compute_tokens == usage.computed_tokens
        assert usage.computed_tokens or not self.most, "the last token is always run"

    def _fail(self, event: Failed) -> None:
        """A turn that had no place yet leaves no trace; another one what its policy says."""
        if self.started is None and event.position == self.start:
            self._keep(CommitPolicy.ROLLBACK)
        else:
            self._keep(self.policy)

    def _keep(self, policy: CommitPolicy) -> None:
        if policy is not CommitPolicy.KEEP_PARTIAL:
            del self.session.tokens[self.start if policy is CommitPolicy.ROLLBACK else self.prompt_end :]

    def _end(self, event: Finished | Failed) -> None:
        assert self.ended is None
        assert event.position == len(self.session.tokens)
        self.ended, self.session.talk = event, None


@dataclass(eq=False)
class Known:
    """One session."""

    name: str
    tokens: list[int] = field(default_factory=list)
    salt: str | None = None
    pinned: bool = False
    talk: Talk | None = None
    guarded: bool = False  # it is being exported: the server lets it take no turn
    forged: bool = False  # it has come with KV that is not that of its tokens; so may its answers be

    @property
    def idle(self) -> bool:
        return self.talk is None and not self.guarded
