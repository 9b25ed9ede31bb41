"""Client library of Segue: sessions that stay on the server, and turns that stream.

    from segue_client import Client

    with Client("127.0.0.1:50051") as client:
        session = client.create_session(system="You are terse.")
        with session.chat("Hello") as turn:
            for piece in turn:
                print(piece, end="", flush=True)
        print(turn.usage, turn.timings, turn.finish_reason, session.position)

`AsyncClient` is the same for asyncio. Answers that are plain data (model info, load, events, ...) are the messages of
`segue.v1`. Needs grpcio, grpcio-status and protobuf; no torch, no numpy.
"""

from segue.v1.generation_pb2 import Finished, Heartbeat, PrefillProgress, Queued, Started, Tokens
from segue.v1.session_pb2 import Session as SessionInfo
from segue.v1.session_pb2 import SessionEvent, TurnSpan
from segue.v1.types_pb2 import Usage
from segue_client.admin import AdminClient
from segue_client.channel import Timeouts
from segue_client.client import AsyncClient, Client
from segue_client.errors import (
    Aborted,
    AlreadyExists,
    Cancelled,
    ConnectionLost,
    ContextExceeded,
    DataLoss,
    DeadlineExceeded,
    Draining,
    EngineError,
    EtagMismatch,
    EventHistoryLost,
    FailedPrecondition,
    FeatureAbsent,
    FeatureDisabled,
    FieldViolation,
    Internal,
    InvalidArgument,
    KvBudget,
    KvBudgetImpossible,
    LedgerUnavailable,
    Loading,
    NotFound,
    OutOfRange,
    PermissionDenied,
    PositionBeyondEnd,
    PositionMismatch,
    ProtocolError,
    QueueFull,
    QueueTimeout,
    RequestIdReused,
    RequestNotFound,
    ResourceExhausted,
    SegueError,
    SessionBusy,
    SessionExists,
    SessionExpired,
    SessionLimit,
    SessionNotFound,
    SnapshotCorrupt,
    SnapshotIncompatible,
    TenantQuota,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from segue_client.events import Completion, Event, FinishReason, SessionTokens, Timings
from segue_client.options import (
    AppendOptions,
    ConnectionOptions,
    ForkOptions,
    ImportOptions,
    ListOptions,
    Message,
    SessionOptions,
    TurnOptions,
    UpdateOptions,
)
from segue_client.session import AsyncSession, Session
from segue_client.turn import AsyncTurn, Turn
from segue_client.watch import AsyncWatch, Watch

__all__ = [
    "Aborted",
    "AdminClient",
    "AlreadyExists",
    "AppendOptions",
    "AsyncClient",
    "AsyncSession",
    "AsyncTurn",
    "AsyncWatch",
    "Cancelled",
    "Client",
    "Completion",
    "ConnectionLost",
    "ConnectionOptions",
    "ContextExceeded",
    "DataLoss",
    "DeadlineExceeded",
    "Draining",
    "EngineError",
    "EtagMismatch",
    "Event",
    "EventHistoryLost",
    "FailedPrecondition",
    "FeatureAbsent",
    "FeatureDisabled",
    "FieldViolation",
    "FinishReason",
    "Finished",
    "ForkOptions",
    "Heartbeat",
    "ImportOptions",
    "Internal",
    "InvalidArgument",
    "KvBudget",
    "KvBudgetImpossible",
    "LedgerUnavailable",
    "ListOptions",
    "Loading",
    "Message",
    "NotFound",
    "OutOfRange",
    "PermissionDenied",
    "PositionBeyondEnd",
    "PositionMismatch",
    "PrefillProgress",
    "ProtocolError",
    "QueueFull",
    "QueueTimeout",
    "Queued",
    "RequestIdReused",
    "RequestNotFound",
    "ResourceExhausted",
    "SegueError",
    "Session",
    "SessionBusy",
    "SessionEvent",
    "SessionExists",
    "SessionExpired",
    "SessionInfo",
    "SessionLimit",
    "SessionNotFound",
    "SessionOptions",
    "SessionTokens",
    "SnapshotCorrupt",
    "SnapshotIncompatible",
    "Started",
    "TenantQuota",
    "Timeouts",
    "Timings",
    "Tokens",
    "Turn",
    "TurnOptions",
    "TurnSpan",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "UpdateOptions",
    "Usage",
    "Watch",
]
