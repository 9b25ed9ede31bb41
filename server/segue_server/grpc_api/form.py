"""The form of a request, apart from its meaning: known enum values, well-formed durations, matching metadata."""

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from segue_server.errors import FieldInvalid, FieldViolation
from segue_server.origin import TRACE_HEADERS, Origin

SESSION_HEADER = "x-session-id"
_MAX_DURATION_SECONDS = 315_576_000_000  # google/protobuf/duration.proto
_NANOS = 1_000_000_000

M = TypeVar("M", bound=Message)
D = TypeVar("D")
T = TypeVar("T")


class CallContext(Protocol):
    """The part of grpc.aio.ServicerContext that handlers use."""

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]: ...
    def peer(self) -> str: ...
    def peer_identities(self) -> tuple[bytes, ...] | None: ...
    def time_remaining(self) -> float | None: ...
    async def send_initial_metadata(self, initial_metadata: tuple[tuple[str, str | bytes], ...], /) -> None: ...


class Form:
    """Collects everything wrong with one request, so that a caller learns all of it at once."""

    def __init__(self) -> None:
        self._violations: list[FieldViolation] = []

    def refuse(self, field: str, description: str) -> None:
        self._violations.append(FieldViolation(field, description))

    def choice(self, field: str, value: int, choices: Mapping[int, T]) -> T | None:
        """The domain's word for an enum value; None for *_UNSPECIFIED. Proto3 enums are open, so any int may come."""
        if value and value not in choices:
            self.refuse(field, f"unknown enum value {value}")
        return choices.get(value)

    def seconds(self, field: str, duration: Duration) -> float:
        """A duration as seconds; it must be well-formed and not negative."""
        seconds, nanos = duration.seconds, duration.nanos
        if abs(nanos) >= _NANOS or abs(seconds) > _MAX_DURATION_SECONDS or seconds * nanos < 0:
            self.refuse(field, f"malformed duration: seconds={seconds}, nanos={nanos}")
        elif seconds < 0 or nanos < 0:
            self.refuse(field, f"must not be negative, is {seconds + nanos / _NANOS:g} s")
        return seconds + nanos / _NANOS

    def same_session(self, message: Message, metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        """Refuse metadata that names another session than the body: a proxy would have routed by the wrong one."""
        if (inner := message.DESCRIPTOR.fields_by_name.get("session")) and inner.message_type:
            message = getattr(message, inner.name)  # UpdateSession names it in the session itself
        field = message.DESCRIPTOR.fields_by_name.get("session_id")
        # In a oneof (CancelGeneration) the other member may name the target instead.
        if field is None or (field.containing_oneof and not message.HasField("session_id")):
            return
        body = str(getattr(message, "session_id"))  # noqa: B009 - not every Message has it, those here do
        for key, value in metadata:
            if key == SESSION_HEADER and value != body:
                self.refuse("session_id", f"is {body!r}, but the metadata {SESSION_HEADER} says {value!r}")

    def close(self) -> None:
        """Raises FieldInvalid with every violation found."""
        if self._violations:
            raise FieldInvalid(self._violations)


def read(message: M, context: CallContext, convert: Callable[[Form, M], D]) -> D:
    """The request in the domain's words. Raises FieldInvalid with all violations of form."""
    form = Form()
    form.same_session(message, context.invocation_metadata())
    request = convert(form, message)
    form.close()
    return request


def check(message: Message, context: CallContext) -> None:
    """The form of a request that is used as it is."""
    read(message, context, lambda _form, request: request)


def caller_of(context: CallContext) -> str:
    """Who calls: the first identity of the peer's certificate, "" without one."""
    identities = context.peer_identities()
    return next(iter(identities)).decode(errors="replace") if identities else ""


def origin_of(context: CallContext) -> Origin:
    """Where the call came from."""
    trace = {key: value for key, value in context.invocation_metadata() if key in TRACE_HEADERS}
    return Origin(context.peer(), {key: value for key, value in trace.items() if isinstance(value, str)})
