"""A turn in the engine: what was ordered, and what has been measured of it."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from segue_model.sampling import SampleRequest, Sampling
from segue_server.drafts import Pace
from segue_server.events import Event, Timings, Usage
from segue_server.requests import CommitPolicy
from segue_server.sequence import Sequence, Turn
from segue_server.text import OutputText

OPEN_ENDED_RESERVE = 256  # tokens admission reserves for a turn without max_tokens; preemption covers the rest


class Sink(Protocol):
    """Where the events of a turn go."""

    @property
    def full(self) -> bool:
        """The reader is too far behind; asked before each step, from the engine's thread."""
        ...

    def deliver(self, event: Event) -> None:
        """Called on the event loop."""
        ...


class NoSink:
    """Where nobody reads: for a turn that is only looked at."""

    full = False

    def deliver(self, event: Event) -> None:
        """Drop it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSpec:
    """A turn as the service orders it: everything validated, every default filled in."""

    request_id: str
    session_id: str
    prompt: Seq[int]
    arrival: float  # engine clock
    sink: Sink
    samples: bool = True  # False: compute only
    max_tokens: int  # >= 1 with samples
    max_context_tokens: int
    min_tokens: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    penalty_window: int | None = None  # ledger tokens the penalties look at; None = this turn's
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    text: OutputText | None = None  # None: neither text nor stop sequences are wanted
    top_logprobs: int | None = None
    prompt_logprobs: bool = False
    commit_policy: CommitPolicy = CommitPolicy.KEEP_PARTIAL
    priority: int = 0
    queue_timeout: float = float("inf")
    time_limit: float = float("inf")
    open_ended: bool = False  # max_tokens is only what is left of the context: do not reserve all of it
    keep_tokens: int | None = None  # CONTEXT_POLICY_SLIDE: the head that stays; None = REJECT
    reads_prefixes: bool = True  # False: bypass_prefix_cache
    defer_compute: bool = False  # with samples=False: the ledger only


@dataclass(slots=True)
class Job:
    """A turn in the engine, and what has been measured of it."""

    spec: TurnSpec
    sequence: Sequence
    turn: Turn
    usage: Usage = field(default_factory=Usage)
    context: str = "new"  # label of the TTFT histogram
    logprobs_from: int = 0  # prompt logprobs are due from this position on
    prefilled: int = 0  # prompt positions whose KV has been there, though a preemption may have taken it
    reached: int = 0  # positions whose KV has been there at some time of this turn
    started: float | None = None  # when Started was told: after admission and whatever had to be restored
    blocked_since: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    max_gap: float = 0.0
    dropped: int = 0  # tokens that a sliding context lost in this turn
    generated: int = 0  # sampled, whether the ledger kept them or not
    pace: Pace = field(default_factory=Pace)  # of drafting

    @property
    def phase(self) -> str:
        """Label of the cancellation counter."""
        if self.turn.admitted is None:
            return "queued"
        return "prefill" if self.first_token is None else "decode"

    def note_token(self, now: float) -> float | None:
        """A token came; returns the gap to the one before, None for the first."""
        gap = None if self.last_token is None else now - self.last_token
        self.first_token = now if self.first_token is None else self.first_token
        self.last_token = now
        self.max_gap = max(self.max_gap, gap or 0.0)
        return gap

    def timings(self, now: float) -> Timings:
        admitted = now if self.turn.admitted is None else self.turn.admitted
        started = admitted if self.started is None else self.started
        first = now if self.first_token is None else self.first_token
        return Timings(
            queue=admitted - self.turn.arrival,
            restore=started - admitted,
            prefill=first - started,
            decode=(self.last_token or first) - first,
            time_to_first_token=None if self.first_token is None else first - self.turn.arrival,
            max_inter_token=self.max_gap,
        )

    def sample_request(self) -> SampleRequest:
        """How to draw the token at the end of the ledger."""
        spec, tokens = self.spec, self.sequence.tokens
        since = self.turn.start if spec.penalty_window is None else max(0, len(tokens) - spec.penalty_window)
        return SampleRequest(
            sampling=spec.sampling,
            position=len(tokens) + self.dropped,  # a number is drawn once, wherever the context slides to
            history=tokens[since:] if spec.sampling.penalises else (),
            banned=spec.eos_token_ids | spec.stop_token_ids if self.generated < spec.min_tokens else frozenset(),
            top_logprobs=spec.top_logprobs,
        )


def new_turn(spec: TurnSpec, start: int) -> Turn:
    """The integers of a turn that begins at ledger length `start`."""
    prompt_end = start + len(spec.prompt)
    limit = min(prompt_end + spec.max_tokens, spec.max_context_tokens) if spec.samples else prompt_end
    if spec.samples and spec.keep_tokens is not None:
        limit = spec.max_context_tokens
    return Turn(
        request_id=spec.request_id,
        start=start,
        prompt_end=prompt_end,
        limit=limit,
        promise=min(limit, prompt_end + OPEN_ENDED_RESERVE) if spec.open_ended else limit,
        reuse_limit=_reuse_limit(spec, start, prompt_end),
        arrival=spec.arrival,
        priority=spec.priority,
        reads_prefixes=spec.reads_prefixes,
        queue_deadline=spec.arrival + spec.queue_timeout,
        time_limit=spec.time_limit,
    )


def excess(spec: TurnSpec, length: int, incoming: int) -> int:
    """Tokens that a sliding context drops before `incoming` more fit behind `length`; 0 when they fit as it is.

    It drops down to half of what may go, so that a long answer does not recompute its context at every token.
    """
    limit, keep = spec.max_context_tokens, spec.keep_tokens
    if keep is None or length + incoming <= limit:
        return 0
    half = keep + (limit - keep) // 2
    return min(length - keep, length + incoming - min(max(half, keep + incoming), limit))


def _reuse_limit(spec: TurnSpec, start: int, prompt_end: int) -> int:
    """KV says nothing about the next token, logits do: the position before the first one needed is always run."""
    if spec.prompt_logprobs:
        return max(0, start - 1)
    return prompt_end - 1 if spec.samples else prompt_end
