"""What the ledger is told, in the order in which it happened. Positions count tokens; times are Unix seconds.

A session is known from SessionCreated or SessionForked on until SessionDeleted or SessionExpired. Records of a session
that is not known are ignored: an ephemeral session is never created here, and a turn may outlive its session by a step.
A turn is open from TurnBegan until TurnEnded or TurnRevoked; at most one per session.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from segue_server.requests import FinishReason, SessionSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCreated:
    """An empty session; a tombstone of the same id goes."""

    session_id: str
    settings: SessionSettings
    create_time: float
    last_used_time: float
    display_name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    version: int = 0
    model_fingerprint: str = ""  # tokens mean nothing to another model


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionUpdated:
    """Everything of a session that may change beside its tokens and turns. All fields overwrite.

    Counts as one change of the session's version: it may meet the end of a turn, and the order of the two is open.
    """

    session_id: str
    settings: SessionSettings
    last_used_time: float
    display_name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SessionForked:
    """A session that begins with the first `position` tokens of another one, and the turns that lie in them."""

    child: SessionCreated
    parent_id: str
    position: int


@dataclass(frozen=True, slots=True)
class SessionDeleted:
    session_id: str


@dataclass(frozen=True, slots=True)
class SessionExpired:
    """The session goes and leaves a tombstone."""

    session_id: str
    expired_at: float


@dataclass(frozen=True, slots=True)
class TombstonesForgotten:
    """Tombstones of sessions that expired before this time go."""

    before: float


@dataclass(frozen=True, slots=True)
class TurnBegan:
    """The prompt of a turn goes into the ledger at `start`, which is its length."""

    session_id: str
    request_id: str
    start: int
    prompt: Sequence[int]


@dataclass(frozen=True, slots=True)
class TokensAppended:
    """Tokens at `start`, which is the length of the ledger; they belong to the open turn if there is one."""

    session_id: str
    start: int
    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """The ledger is `end` tokens long, cut by the commit policy if need be, and the turn is over.

    Counts as one change of the session's version, unless `end` is where the turn began: then nothing of it stays.
    """

    session_id: str
    end: int
    finish_reason: FinishReason
    time: float


@dataclass(frozen=True, slots=True)
class TurnRevoked:
    """The open turn, if there is one, leaves no trace."""

    session_id: str


@dataclass(frozen=True, slots=True)
class Truncated:
    """A rewind of a session without an open turn. A turn that reaches beyond `position` is cut, a later one goes."""

    session_id: str
    position: int


@dataclass(frozen=True, slots=True)
class Slid:
    """The ledger lost up to `drop` tokens after its first `keep`; what followed them, turns included, moved down."""

    session_id: str
    keep: int
    drop: int


Record = (
    SessionCreated
    | SessionUpdated
    | SessionForked
    | SessionDeleted
    | SessionExpired
    | TombstonesForgotten
    | TurnBegan
    | TokensAppended
    | TurnEnded
    | TurnRevoked
    | Truncated
    | Slid
)
