"""What a turn's stream says, checked against its grammar and summed up. No I/O.

    stream = Queued? (Started (PrefillProgress | Heartbeat)* (Tokens | Heartbeat)*)? Finished

with the sequence numbers 1, 2, 3, ... Kinds of events that this version does not know are counted and skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from google.protobuf.duration_pb2 import Duration

from segue.v1 import types_pb2
from segue.v1.generation_pb2 import (
    Finished,
    GenerateEvent,
    GenerateResponse,
    Heartbeat,
    PrefillProgress,
    Queued,
    Started,
    Tokens,
)
from segue.v1.session_pb2 import ReadSessionTokensResponse, TurnSpan
from segue.v1.types_pb2 import TokenLogprob, Usage
from segue_client.errors import ErrorDetails, ProtocolError

Event = Queued | Started | PrefillProgress | Tokens | Heartbeat | Finished

_GRAMMAR: Mapping[str, Mapping[str, str]] = {  # state -> event -> next state
    "begin": {"queued": "queued", "started": "prefill", "finished": "end"},
    "queued": {"started": "prefill", "finished": "end"},  # cancelled while it waited
    "prefill": {"prefill": "prefill", "heartbeat": "prefill", "tokens": "decode", "finished": "end"},
    "decode": {"tokens": "decode", "heartbeat": "decode", "finished": "end"},
    "end": {},
}


class FinishReason(StrEnum):
    """Why a turn ended."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"  # noqa: S105  tokens of text, not a secret
    STOP_SEQUENCE = "stop_sequence"
    MAX_TOKENS = "max_tokens"
    CONTEXT_FULL = "context_full"
    TIME_LIMIT = "time_limit"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    DRAINING = "draining"
    ERROR = "error"
    UNKNOWN = "unknown"  # a reason of a later server

    @classmethod
    def from_finished(cls, finished: Finished) -> FinishReason:
        """The reason in a Finished event."""
        if finished.finish_reason not in types_pb2.FinishReason.values()[1:]:
            return cls.UNKNOWN
        return cls(types_pb2.FinishReason.Name(finished.finish_reason).removeprefix("FINISH_REASON_").lower())


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a turn's time went, in seconds; None where the server has not measured it."""

    queue: float | None
    restore: float | None
    prefill: float | None
    decode: float | None
    time_to_first_token: float | None  # from the arrival of the call
    max_inter_token: float | None

    @classmethod
    def from_finished(cls, finished: Finished) -> Timings:
        """The timings in a Finished event."""
        measured: Mapping[str, Duration] = {spec.name: value for spec, value in finished.timings.ListFields()}

        def seconds(name: str) -> float | None:
            return measured[name].ToTimedelta().total_seconds() if name in measured else None

        return cls(
            queue=seconds("queue"),
            restore=seconds("restore"),
            prefill=seconds("prefill"),
            decode=seconds("decode"),
            time_to_first_token=seconds("time_to_first_token"),
            max_inter_token=seconds("max_inter_token"),
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole turn.

    Attributes:
        text: the generated text.
        token_ids: the generated tokens; with a stop text or EOS, the ledger's, which may be more than the text shows.
        logprobs: of the generated tokens, when asked for.
        prompt_logprobs: of the appended prompt tokens, when asked for.
        finished: the server's closing event, with everything else it said (matched stop, etag, cache, ...).
    """

    request_id: str
    session_id: str
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob]
    prompt_logprobs: Sequence[TokenLogprob]
    finished: Finished

    @classmethod
    def from_response(cls, response: GenerateResponse) -> Completion:
        """The turn in the answer of a unary call."""
        return cls(
            request_id=response.request_id,
            session_id=response.session_id,
            text=response.text,
            token_ids=tuple(response.token_ids),
            logprobs=tuple(response.logprobs),
            prompt_logprobs=tuple(response.prompt_logprobs),
            finished=response.finished,
        )

    @property
    def finish_reason(self) -> FinishReason:
        """Why the turn ended."""
        return FinishReason.from_finished(self.finished)

    @property
    def usage(self) -> Usage:
        """Tokens: appended, generated, computed, reused."""
        return self.finished.usage

    @property
    def timings(self) -> Timings:
        """Seconds: queue, prefill, decode, time to first token."""
        return Timings.from_finished(self.finished)

    @property
    def position(self) -> int:
        """The ledger's length after the turn."""
        return self.finished.position


@dataclass(frozen=True, slots=True)
class SessionTokens:
    """A ledger, or a part of it.

    Attributes:
        start_position: of the first token here.
        text: of the tokens, control tokens included; empty unless asked for.
        turns: where the turns that reach into this part lie in the ledger.
    """

    start_position: int
    token_ids: Sequence[int]
    text: str
    turns: Sequence[TurnSpan]

    @classmethod
    def from_chunks(cls, chunks: Sequence[ReadSessionTokensResponse]) -> SessionTokens:
        """The part that these messages, all of one stream, are the pieces of."""
        return cls(
            start_position=chunks[0].start_position if chunks else 0,
            token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
            text="".join(chunk.text for chunk in chunks),
            turns=tuple(turn for chunk in chunks for turn in chunk.turns),
        )


@dataclass(slots=True)
class TurnRecord:
    """The events of one turn so far; `request_id` and `last_sequence` say where a broken stream is to be taken up."""

    request_id: str
    session_id: str = ""
    last_sequence: int = 0
    position: int | None = None  # ledger length as far as the events told; None before Started
    finished: Finished | None = None
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    _state: str = "begin"

    @property
    def begun(self) -> bool:
        """Whether an event has come."""
        return self.last_sequence > 0

    def accept(self, message: GenerateEvent) -> Event | None:
        """Takes the next message of the stream; returns its event, None for an unknown kind.

        Raises:
            ProtocolError: an event is missing or stands where the grammar has no place for it.
        """
        self._check_sequence(message.sequence)
        kind = message.WhichOneof("event")
        if kind is None:
            return None
        self._advance(kind)
        event: Event = getattr(message, kind)
        self._record(event)
        return event

    def end(self) -> None:
        """The stream ended without an error.

        Raises:
            ProtocolError: it did so before Finished.
        """
        if self.finished is None:
            raise self._error(f"the stream ended after event {self.last_sequence} without Finished")

    def completion(self) -> Completion:
        """The turn, once it has finished.

        Raises:
            ValueError: it has not.
        """
        if self.finished is None:
            raise ValueError("the turn has not finished")
        return Completion(
            request_id=self.request_id,
            session_id=self.session_id,
            text="".join(self.text),
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            prompt_logprobs=tuple(self.prompt_logprobs),
            finished=self.finished,
        )

    def _check_sequence(self, sequence: int) -> None:
        expected = self.last_sequence + 1
        if sequence != expected:
            raise self._error(f"event {expected} expected, {sequence} came: events were lost or repeated")
        self.last_sequence = sequence

    def _advance(self, kind: str) -> None:
        allowed = _GRAMMAR[self._state]
        if kind not in allowed:
            expected = " or ".join(allowed) or "the end of the stream"
            raise self._error(f"event {self.last_sequence} is {kind}; {expected} expected")
        self._state = allowed[kind]

    def _record(self, event: Event) -> None:
        match event:
            case Started():
                self.session_id = event.session_id
                self.position = event.position + event.prompt_tokens
            case PrefillProgress():
                self.prompt_logprobs.extend(event.prompt_logprobs)
            case Tokens():
                self.position = event.position + len(event.token_ids)
                self.text.append(event.text)
                self.token_ids.extend(event.token_ids)
                self.logprobs.extend(event.logprobs)
            case Finished():
                self.position = event.position
                self.finished = event

    def _error(self, message: str) -> ProtocolError:
        return ProtocolError(message, ErrorDetails(request_id=self.request_id))
