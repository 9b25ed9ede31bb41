"""Every error this library raises for a call, one class per reason the server can give.

    SegueError
    ├── InvalidArgument          FIELD_INVALID: .violations names every bad field
    │   └── RequestIdReused      same request id, other content
    ├── NotFound
    │   ├── SessionNotFound
    │   ├── SessionExpired       .expire_time
    │   └── RequestNotFound
    ├── AlreadyExists
    │   └── SessionExists
    ├── Aborted
    │   ├── SessionBusy          .active_request_id
    │   ├── PositionMismatch     .actual_position
    │   └── EtagMismatch         .etag
    ├── FailedPrecondition
    │   ├── SnapshotIncompatible
    │   └── FeatureDisabled
    ├── OutOfRange
    │   ├── ContextExceeded      .max_context_tokens, .needed_tokens
    │   ├── PositionBeyondEnd
    │   └── EventHistoryLost     .oldest_sequence
    ├── ResourceExhausted        .retry_after
    │   ├── KvBudget             .needed_bytes
    │   ├── KvBudgetImpossible   would not fit into an empty pool: do not retry
    │   ├── SessionLimit
    │   ├── QueueFull
    │   ├── QueueTimeout
    │   └── TenantQuota
    ├── Unavailable              .retry_after; also: nobody answers at the address
    │   ├── Loading
    │   ├── Draining
    │   ├── LedgerUnavailable    the server cannot write its ledger; the turn or call left no trace
    │   └── ConnectionLost       the stream broke after it had begun; made here, not by the server
    ├── DeadlineExceeded
    ├── Cancelled
    ├── DataLoss
    │   └── SnapshotCorrupt
    ├── Unauthenticated
    ├── PermissionDenied
    ├── Unimplemented
    │   └── FeatureAbsent
    ├── Internal
    │   └── EngineError          a model step failed; the session stays, rolled back
    └── ProtocolError            the server broke the grammar of a stream; made here

A reason this version does not know becomes the class of its status code; a code without a class becomes `SegueError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, TypeVar

import grpc

T = TypeVar("T")


class FieldViolation(NamedTuple):
    """One refused field of a request."""

    field: str
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorDetails:
    """What the server attached to a failed call (google.rpc.ErrorInfo, BadRequest, RetryInfo, RequestInfo)."""

    reason: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    violations: Sequence[FieldViolation] = ()
    retry_after: float | None = None  # seconds
    request_id: str = ""


class SegueError(Exception):
    """A call failed.

    Attributes:
        message: the server's words.
        code: the gRPC status code.
        reason: the server's reason, for example "SESSION_BUSY"; empty when it gave none.
        metadata: the reason's machine-readable details.
        violations: the refused fields of the request, all of them.
        retry_after: seconds to wait before another try, when the server proposed a time.
        request_id: the turn concerned, when known.

    Example:
        >>> try:
        ...     session.generate(text="Hello")
        ... except PositionMismatch as error:
        ...     print("the server is at", error.actual_position)
    """

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN
    default_reason: ClassVar[str] = ""

    def __init__(self, message: str, details: ErrorDetails | None = None, code: grpc.StatusCode | None = None) -> None:
        super().__init__(message)
        details = details or ErrorDetails(reason=self.default_reason)
        self.message = message
        self.code = code or type(self).code
        self.reason = details.reason
        self.metadata = details.metadata
        self.violations = tuple(details.violations)
        self.retry_after = details.retry_after
        self.request_id = details.request_id

    def __str__(self) -> str:
        fields = "".join(f"\n  {violation.field}: {violation.description}" for violation in self.violations)
        return f"{self.reason or self.code.name}: {self.message}{fields}"

    def _metadata_as(self, convert: Callable[[str], T], key: str) -> T | None:
        try:
            return convert(self.metadata[key])
        except (KeyError, ValueError):
            return None


class InvalidArgument(SegueError):
    """The request is wrong in itself; `violations` names every bad field."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    default_reason = "FIELD_INVALID"


class RequestIdReused(InvalidArgument):
    """The request id was already used for a request with other content."""

    default_reason = "REQUEST_ID_REUSED"


class NotFound(SegueError):
    """The thing named in the request does not exist."""

    code = grpc.StatusCode.NOT_FOUND


class SessionNotFound(NotFound):
    """No session has this id."""

    default_reason = "SESSION_NOT_FOUND"


class SessionExpired(NotFound):
    """The session existed and was dropped after its idle time to live."""

    default_reason = "SESSION_EXPIRED"

    @property
    def expire_time(self) -> str | None:
        """When it expired (RFC 3339)."""
        return self.metadata.get("expireTime")


class RequestNotFound(NotFound):
    """No turn has this request id, or it ended too long ago."""

    default_reason = "REQUEST_NOT_FOUND"


class AlreadyExists(SegueError):
    """The thing to be made is there already."""

    code = grpc.StatusCode.ALREADY_EXISTS


class SessionExists(AlreadyExists):
    """The session id is taken."""

    default_reason = "SESSION_EXISTS"


class Aborted(SegueError):
    """Another caller was there first; look again before trying again."""

    code = grpc.StatusCode.ABORTED


class SessionBusy(Aborted):
    """A turn is in flight in this session."""

    default_reason = "SESSION_BUSY"

    @property
    def active_request_id(self) -> str | None:
        """The turn in flight."""
        return self.metadata.get("activeRequestId")


class PositionMismatch(Aborted):
    """The ledger is not as long as the caller believed: someone else wrote, or an answer was lost."""

    default_reason = "POSITION_MISMATCH"

    @property
    def actual_position(self) -> int | None:
        """The ledger's length now."""
        return self._metadata_as(int, "actualPosition")


class EtagMismatch(Aborted):
    """The session has changed since the etag was read."""

    default_reason = "ETAG_MISMATCH"

    @property
    def etag(self) -> str | None:
        """The session's etag now."""
        return self.metadata.get("etag")


class FailedPrecondition(SegueError):
    """The server is not in the state the request needs."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class SnapshotIncompatible(FailedPrecondition):
    """The snapshot belongs to another model, dtype or shape."""

    default_reason = "SNAPSHOT_INCOMPATIBLE"


class FeatureDisabled(FailedPrecondition):
    """The server knows the feature and has it switched off."""

    default_reason = "FEATURE_DISABLED"


class OutOfRange(SegueError):
    """A position, length or sequence number lies outside what exists."""

    code = grpc.StatusCode.OUT_OF_RANGE


class ContextExceeded(OutOfRange):
    """The prompt does not fit into the session's context."""

    default_reason = "CONTEXT_EXCEEDED"

    @property
    def max_context_tokens(self) -> int | None:
        """The session's limit."""
        return self._metadata_as(int, "maxContextTokens")

    @property
    def needed_tokens(self) -> int | None:
        """What the request would have needed."""
        return self._metadata_as(int, "neededTokens")


class PositionBeyondEnd(OutOfRange):
    """Rewind or fork past the end of the ledger."""

    default_reason = "POSITION_BEYOND_END"


class EventHistoryLost(OutOfRange):
    """The events asked for are no longer buffered."""

    default_reason = "EVENT_HISTORY_LOST"

    @property
    def oldest_sequence(self) -> int | None:
        """The oldest event still there."""
        return self._metadata_as(int, "oldestSequence")


class ResourceExhausted(SegueError):
    """The server has no room now; `retry_after` says when to come back, if it makes sense."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class KvBudget(ResourceExhausted):
    """No KV memory is left and nothing more can be evicted."""

    default_reason = "KV_BUDGET"

    @property
    def needed_bytes(self) -> int | None:
        """KV bytes the request would have needed."""
        return self._metadata_as(int, "neededBytes")


class KvBudgetImpossible(ResourceExhausted):
    """The request would not fit into an empty KV pool; trying again cannot help."""

    default_reason = "KV_BUDGET_IMPOSSIBLE"


class SessionLimit(ResourceExhausted):
    """The server holds as many sessions as it may."""

    default_reason = "SESSION_LIMIT"


class QueueFull(ResourceExhausted):
    """The queue of waiting turns is full."""

    default_reason = "QUEUE_FULL"


class QueueTimeout(ResourceExhausted):
    """The turn waited longer than its queue_timeout."""

    default_reason = "QUEUE_TIMEOUT"


class TenantQuota(ResourceExhausted):
    """The caller's own quota is used up."""

    default_reason = "TENANT_QUOTA"


class Unavailable(SegueError):
    """Nobody answers at the address, or the server takes no calls now."""

    code = grpc.StatusCode.UNAVAILABLE


class Loading(Unavailable):
    """The server is still loading its model."""

    default_reason = "LOADING"


class Draining(Unavailable):
    """The server is shutting down."""

    default_reason = "DRAINING"


class LedgerUnavailable(Unavailable):
    """The server cannot write its ledger, for example on a full disk; the turn or call left no trace."""

    default_reason = "LEDGER_FAILED"


class ConnectionLost(Unavailable):
    """A stream broke after it had begun. What became of the turn is unknown until the session is read again."""


class DeadlineExceeded(SegueError):
    """The call's deadline passed; what is kept of a turn follows its commit policy."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(SegueError):
    """The call was cancelled."""

    code = grpc.StatusCode.CANCELLED


class DataLoss(SegueError):
    """Stored data is damaged."""

    code = grpc.StatusCode.DATA_LOSS


class SnapshotCorrupt(DataLoss):
    """The snapshot's checksum differs; nothing was changed."""

    default_reason = "SNAPSHOT_CORRUPT"


class Unauthenticated(SegueError):
    """The call carries no valid credentials."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(SegueError):
    """The caller may not do this."""

    code = grpc.StatusCode.PERMISSION_DENIED


class Unimplemented(SegueError):
    """The server does not have this call."""

    code = grpc.StatusCode.UNIMPLEMENTED


class FeatureAbsent(Unimplemented):
    """The server does not have this feature."""

    default_reason = "FEATURE_ABSENT"


class Internal(SegueError):
    """A fault of the server."""

    code = grpc.StatusCode.INTERNAL


class EngineError(Internal):
    """A model step failed; the session stays, rolled back to before the turn."""

    default_reason = "ENGINE_ERROR"


class ProtocolError(SegueError):
    """The server broke the contract of a stream: an event out of order or lost, or no end."""


def may_have_run(error: SegueError) -> bool:
    """Whether the server may have changed the session although the call failed."""
    return isinstance(error, Unavailable | DeadlineExceeded | Cancelled | Internal | ProtocolError) or (
        error.code is grpc.StatusCode.UNKNOWN
    )
