"""What can go wrong between a caller and the server, each with its wire code and reason.

    SegueError
    ├── FieldInvalid            INVALID_ARGUMENT     every violation of a request at once
    ├── RequestIdReused         INVALID_ARGUMENT
    ├── SessionNotFound         NOT_FOUND
    ├── SessionExpired          NOT_FOUND            a tombstone is left
    ├── RequestNotFound         NOT_FOUND
    ├── SessionExists           ALREADY_EXISTS
    ├── SessionBusy             ABORTED              a turn is in flight
    ├── PositionMismatch        ABORTED              the caller believes in another ledger length
    ├── EtagMismatch            ABORTED
    ├── SnapshotIncompatible    FAILED_PRECONDITION  of another model, KV dtype or shape
    ├── FeatureDisabled         FAILED_PRECONDITION  this server was started without it
    ├── ContextExceeded         OUT_OF_RANGE
    ├── PositionBeyondEnd       OUT_OF_RANGE
    ├── EventHistoryLost        OUT_OF_RANGE         events asked for are no longer kept; metadata oldestSequence
    ├── KvBudget                RESOURCE_EXHAUSTED   retry later
    ├── KvBudgetImpossible      RESOURCE_EXHAUSTED   would not fit into an empty pool: do not retry
    ├── SessionLimit            RESOURCE_EXHAUSTED   retry later
    ├── QueueFull               RESOURCE_EXHAUSTED   retry later
    ├── QueueTimeout            RESOURCE_EXHAUSTED   retry later
    ├── Draining                UNAVAILABLE          retry elsewhere
    ├── LedgerUnavailable       UNAVAILABLE          the file cannot be written; the turn or call left no trace
    ├── SnapshotCorrupt         DATA_LOSS            nothing was changed
    ├── FeatureAbsent           UNIMPLEMENTED
    └── EngineError             INTERNAL             the step raised; the session stays

The transport maps this tree once (grpc_api/status.py). The client raises the same names.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

NEVER_RETRY = -1.0


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One thing wrong with a request: the path of the field and what it must be."""

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class Quota:
    """What ran out, and how much there is of it."""

    metric: str
    value: int


class SegueError(Exception):
    """The base of every error a caller may see."""

    code: ClassVar[str]  # name of a google.rpc.Code
    reason: ClassVar[str]  # ErrorInfo.reason, UPPER_SNAKE
    retry_after: ClassVar[float | None] = None  # seconds; NEVER_RETRY tells a client not to; None says nothing

    def __init__(self, message: str, *, quota: Quota | None = None, **metadata: str) -> None:
        super().__init__(message)
        self.metadata = metadata
        self.quota = quota

    @property
    def violations(self) -> Sequence[FieldViolation]:
        """What is wrong with which field; empty unless the request itself was at fault."""
        return ()

    @property
    def resource(self) -> tuple[str, str] | None:
        """(type, name) of the thing that was not found or already there."""
        return None


class FieldInvalid(SegueError):
    code = "INVALID_ARGUMENT"
    reason = "FIELD_INVALID"

    def __init__(self, violations: Sequence[FieldViolation]) -> None:
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations))
        self._violations = tuple(violations)

    @classmethod
    def one(cls, field: str, description: str) -> "FieldInvalid":
        return cls([FieldViolation(field, description)])

    @property
    def violations(self) -> Sequence[FieldViolation]:
        return self._violations


class RequestIdReused(SegueError):
    code = "INVALID_ARGUMENT"
    reason = "REQUEST_ID_REUSED"


class _AboutSession(SegueError):
    def __init__(self, session_id: str, message: str, *, quota: Quota | None = None, **metadata: str) -> None:
        super().__init__(message, quota=quota, **metadata)
        self._session_id = session_id

    @property
    def resource(self) -> tuple[str, str] | None:
        return "segue.v1.Session", self._session_id


class SessionNotFound(_AboutSession):
    code = "NOT_FOUND"
    reason = "SESSION_NOT_FOUND"


class SessionExpired(_AboutSession):
    code = "NOT_FOUND"
    reason = "SESSION_EXPIRED"


class SessionExists(_AboutSession):
    code = "ALREADY_EXISTS"
    reason = "SESSION_EXISTS"


class RequestNotFound(SegueError):
    code = "NOT_FOUND"
    reason = "REQUEST_NOT_FOUND"


class SessionBusy(SegueError):
    code = "ABORTED"
    reason = "SESSION_BUSY"


class PositionMismatch(SegueError):
    code = "ABORTED"
    reason = "POSITION_MISMATCH"


class EtagMismatch(SegueError):
    code = "ABORTED"
    reason = "ETAG_MISMATCH"


class SnapshotIncompatible(SegueError):
    code = "FAILED_PRECONDITION"
    reason = "SNAPSHOT_INCOMPATIBLE"


class FeatureDisabled(SegueError):
    code = "FAILED_PRECONDITION"
    reason = "FEATURE_DISABLED"


class SnapshotCorrupt(SegueError):
    code = "DATA_LOSS"
    reason = "SNAPSHOT_CORRUPT"


class ContextExceeded(SegueError):
    code = "OUT_OF_RANGE"
    reason = "CONTEXT_EXCEEDED"


class PositionBeyondEnd(SegueError):
    code = "OUT_OF_RANGE"
    reason = "POSITION_BEYOND_END"


def beyond_end(position: int, length: int) -> PositionBeyondEnd:
    """The one text for a position that the ledger does not reach."""
    return PositionBeyondEnd(f"position {position} is beyond the ledger's end, {length}", actualPosition=str(length))


class EventHistoryLost(SegueError):
    code = "OUT_OF_RANGE"
    reason = "EVENT_HISTORY_LOST"


class KvBudget(SegueError):
    code = "RESOURCE_EXHAUSTED"
    reason = "KV_BUDGET"
    retry_after = 1.0


class KvBudgetImpossible(SegueError):
    code = "RESOURCE_EXHAUSTED"
    reason = "KV_BUDGET_IMPOSSIBLE"
    retry_after = NEVER_RETRY


class SessionLimit(SegueError):
    code = "RESOURCE_EXHAUSTED"
    reason = "SESSION_LIMIT"
    retry_after = 5.0


class QueueFull(SegueError):
    code = "RESOURCE_EXHAUSTED"
    reason = "QUEUE_FULL"
    retry_after = 1.0


class QueueTimeout(SegueError):
    code = "RESOURCE_EXHAUSTED"
    reason = "QUEUE_TIMEOUT"
    retry_after = 1.0


class Draining(SegueError):
    code = "UNAVAILABLE"
    reason = "DRAINING"
    retry_after = 2.0


class LedgerUnavailable(SegueError):
    code = "UNAVAILABLE"
    reason = "LEDGER_FAILED"
    retry_after = 5.0


class FeatureAbsent(SegueError):
    code = "UNIMPLEMENTED"
    reason = "FEATURE_ABSENT"


class EngineError(SegueError):
    code = "INTERNAL"
    reason = "ENGINE_ERROR"
