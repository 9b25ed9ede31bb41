"""The sessions the server knows, as the event loop sees them: settings, times, turns. The tokens live in the engine."""

import asyncio
import base64
import binascii
import heapq
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from segue_server.errors import (
    FieldInvalid,
    PositionBeyondEnd,
    SessionExists,
    SessionExpired,
    SessionLimit,
    SessionNotFound,
)
from segue_server.events import Finished
from segue_server.origin import UNKNOWN, Origin
from segue_server.requests import (
    BusyPolicy,
    CancelCause,
    FinishReason,
    Input,
    ListSessionsRequest,
    OutputOptions,
    SessionSettings,
)
from segue_server.stream import TurnStream
from segue_server.views import SessionState, TurnSpan

DEFAULT_PAGE_SIZE = 50
MAX_PAGE_SIZE = 1000
ORDERS = ("create_time", "last_used_time", "cache.used_bytes")


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """A turn that has ended: where it lies in the ledger."""

    request_id: str
    start: int
    generated_start: int
    end: int
    finish_reason: FinishReason

    @property
    def sampled(self) -> bool:
        return self.end > self.generated_start


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A turn that wants its session: who asks, what tells it from another, and how it behaves toward others."""

    request_id: str
    caller: str
    content: bytes  # digest of the request: a request id stands for one content
    output: OutputOptions
    policy: BusyPolicy
    patience: float  # seconds behind another turn of the session
    detach_grace: float  # seconds the turn goes on without a reader
    arrival: float = 0.0  # of the call, on the engine's clock
    origin: Origin = UNKNOWN


def turns_slid(turns: Sequence[TurnRecord], keep: int, dropped: int) -> list[TurnRecord]:
    """The turns of a ledger that has lost `dropped` tokens after its first `keep`; empty ones are left out."""

    def moved(position: int) -> int:
        return position if position <= keep else max(keep, position - dropped)

    shifted = [
        replace(t, start=moved(t.start), generated_start=moved(t.generated_start), end=moved(t.end)) for t in turns
    ]
    return [turn for turn in shifted if turn.end > turn.start]


def turns_until(turns: Sequence[TurnRecord], position: int) -> list[TurnRecord]:
    """The turns of a ledger that is cut at `position`; one that is cut through keeps its first part."""
    kept = [turn for turn in turns if turn.start < position]
    if kept and kept[-1].end > position:
        last = kept.pop()
        kept.append(replace(last, generated_start=min(last.generated_start, position), end=position))
    return kept


@dataclass(slots=True, eq=False)
class ActiveTurn:
    """A turn that holds its session, or has held it and is remembered."""

    claim: Claim
    session: "Session"
    stream: TurnStream = field(init=False)
    start: int = 0
    prompt_end: int = 0
    number: int = 0  # in its session
    preparing: asyncio.Task[None] | None = None  # encodes its input; owned by the turn, not by the call that brought it
    submitted: bool = False  # the engine has it
    started: bool = False
    cause: CancelCause | None = None  # it has been cancelled, and leaves the batch before the next step
    grace: asyncio.TimerHandle | None = None  # runs while nobody reads it
    forgotten: bool = False  # its session is deleted: nothing of it is repeated
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    finished: Finished | None = None
    waste_counted: bool = False
    given: Input = None  # what the caller sent, for as long as the turn is in flight

    @property
    def request_id(self) -> str:
        return self.claim.request_id

    @property
    def leaving(self) -> bool:
        return self.cause is not None


@dataclass(slots=True, eq=False)
class Session:
    """One conversation. Times are Unix seconds."""

    session_id: str
    settings: SessionSettings
    display_name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    position: int = 0  # ledger length as far as it has been put on a stream
    version: int = 0  # counts changes of ledger and settings
    turns: list[TurnRecord] = field(default_factory=list)
    active: ActiveTurn | None = None
    moving: asyncio.Event | None = None  # its KV is being moved, exported or taken in; set when that is over
    ephemeral: bool = False
    hidden: bool = False  # made by the server for a moment: nobody's session, and counted nowhere
    ended: bool = False  # counted as such
    forked_from: tuple[str, int] | None = None  # (session id, position)
    create_time: float = field(default_factory=time.time)
    last_used_time: float = field(default_factory=time.time)
    leaving: str = ""  # why it has been deleted, while its turn is still on its way out
    noticed: float | None = None  # the expire_time that watchers have been told of

    @property
    def etag(self) -> str:
        """Changes with every change of ledger or settings, and differs between two sessions of one name."""
        return f"{int(self.create_time * 1e6):x}-{self.version:x}"

    @property
    def state(self) -> SessionState:
        if self.active is None:
            return SessionState.IDLE if self.moving is None else SessionState.MOVING
        return SessionState.RUNNING if self.active.started else SessionState.QUEUED

    @property
    def ttl(self) -> float:
        return self.settings.ttl or 0.0

    @property
    def expire_time(self) -> float:
        return self.last_used_time + self.ttl

    @property
    def reply_open(self) -> bool:
        """The ledger ends with sampled tokens."""
        return bool(self.turns) and self.turns[-1].sampled and self.turns[-1].end == self.position

    def start_of(self, turn: int) -> int:
        """Where a turn begins, counted from 0; -1 = the last one. Raises PositionBeyondEnd."""
        if not -1 <= turn < len(self.turns) or not self.turns:
            raise PositionBeyondEnd(f"turn {turn} is beyond the last one; there are {len(self.turns)}")
        return self.turns[turn].start

    def history(self, position: int) -> list[TurnRecord]:
        """Turns up to `position`, the one in flight included as far as it has come."""
        turns = list(self.turns)
        if self.active and self.active.started:
            active = self.active
            end = max(active.prompt_end, position)
            turns.append(TurnRecord(active.request_id, active.start, active.prompt_end, end, FinishReason.CANCELLED))
        return turns_until(turns, position)

    def spans(self, position: int) -> tuple[TurnSpan, ...]:
        """The turns up to `position`; the last one without a finish reason if it is in flight."""
        turns = self.history(position)
        in_flight = len(turns) - 1 if self.active and len(turns) > len(self.turns) else -1
        return tuple(
            TurnSpan(
                turn=number,
                request_id=turn.request_id,
                start=turn.start,
                generated_start=turn.generated_start,
                end=turn.end,
                finish_reason=None if number == in_flight else turn.finish_reason,
            )
            for number, turn in enumerate(turns)
        )

    def touch(self) -> None:
        self.last_used_time = time.time()

    def changed(self) -> None:
        """The ledger or the settings are not what they were."""
        self.version += 1
        self.touch()


class SessionRegistry:
    """All sessions by id, and the tombstones of those that expired. Event loop only."""

    def __init__(self, *, max_sessions: int, tombstone_ttl: float) -> None:
        self._sessions: dict[str, Session] = {}
        self._reserved: set[str] = set()  # ids of sessions that are being made
        self._tombstones: dict[str, float] = {}  # session id -> when it expired
        self._max_sessions = max_sessions
        self._tombstone_ttl = tombstone_ttl

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def open(self, session: Session) -> None:
        """Raises SessionExists or SessionLimit."""
        self._check_id(session.session_id)
        if len(self._sessions) + len(self._reserved) >= self._max_sessions:
            raise SessionLimit(f"{self._max_sessions} sessions are open, and that is the limit")
        self._tombstones.pop(session.session_id, None)
        self._sessions[session.session_id] = session

    def check_room(self, session_ids: Sequence[str]) -> None:
        """Could these sessions be opened now? Raises SessionExists or SessionLimit."""
        for session_id in session_ids:
            self._check_id(session_id)
        if len(self._sessions) + len(self._reserved) + len(session_ids) > self._max_sessions:
            raise SessionLimit(f"{self._max_sessions} sessions at most, {len(self._sessions)} are open")

    @contextmanager
    def reserved(self, session_ids: Sequence[str]) -> Iterator[None]:
        """Nobody else opens these sessions while they are being made. Raises SessionExists or SessionLimit."""
        self.check_room(session_ids)
        self._reserved.update(session_ids)
        try:
            yield
        finally:
            self._reserved.difference_update(session_ids)

    def _check_id(self, session_id: str) -> None:
        if session_id in self._sessions or session_id in self._reserved:
            raise SessionExists(session_id, f"session {session_id!r} exists already")

    def get(self, session_id: str) -> Session:
        """Raises SessionNotFound, or SessionExpired while the tombstone stands."""
        if session := self._sessions.get(session_id):
            return session
        if (expired := self._tombstones.get(session_id)) is not None:
            when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(expired))
            raise SessionExpired(session_id, f"session {session_id!r} expired at {when}", expireTime=when)
        raise SessionNotFound(session_id, f"there is no session {session_id!r}")

    def remove(self, session: Session) -> None:
        self._sessions.pop(session.session_id, None)

    def expired(self, now: float) -> list[Session]:
        """Idle sessions whose time to live is over."""
        return [s for s in self._sessions.values() if not (s.active or s.moving) and now >= s.expire_time]

    def expiring(self, now: float, notice: float) -> list[Session]:
        """Idle sessions that expire within `notice` seconds and of which nobody has been told yet."""
        return [
            s
            for s in self._sessions.values()
            if s.active is None and not s.ephemeral and s.noticed != s.expire_time and now >= s.expire_time - notice
        ]

    def bury(self, session: Session) -> None:
        """Replace an expired session by a tombstone."""
        self.remove(session)
        self._tombstones[session.session_id] = session.expire_time

    def forget_tombstones(self, now: float) -> bool:
        """Drop those that have stood long enough. True: there were some."""
        before = len(self._tombstones)
        self._tombstones = {s: t for s, t in self._tombstones.items() if now - t < self._tombstone_ttl}
        return len(self._tombstones) < before

    def restore_tombstones(self, tombstones: Mapping[str, float]) -> None:
        """Those of an earlier process."""
        self._tombstones.update(tombstones)

    def page(self, request: ListSessionsRequest, used_bytes: Mapping[str, int]) -> tuple[list[Session], str]:
        """One page in the order asked for, and the token of the next. Raises FieldInvalid."""
        name, descending = _order(request.order_by)
        size = min(request.page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)

        def key(session: Session) -> tuple[float, str]:
            value = {
                "create_time": session.create_time,
                "last_used_time": session.last_used_time,
                "cache.used_bytes": float(used_bytes.get(session.session_id, 0)),
            }[name]
            return (-value if descending else value), session.session_id

        after = _decode_page_token(request.page_token)
        matching = [s for s in self._sessions.values() if _matches(s, request) and (after is None or key(s) > after)]
        page = heapq.nsmallest(size, matching, key=key)
        more = len(matching) > len(page)
        return page, _encode_page_token(key(page[-1])) if more else ""


def new_session_id() -> str:
    return str(uuid.uuid4())


def _matches(session: Session, request: ListSessionsRequest) -> bool:
    if session.ephemeral or (request.states and session.state.name not in request.states):
        return False
    return all(session.labels.get(key) == value for key, value in request.labels.items())


def _order(order_by: str) -> tuple[str, bool]:
    name, _, direction = (order_by or ORDERS[0]).strip().partition(" ")
    if name not in ORDERS or direction.strip() not in ("", "asc", "desc"):
        raise FieldInvalid.one("order_by", f'one of {", ".join(ORDERS)}, with " desc" if wanted; got {order_by[:80]!r}')
    return name, direction.strip() == "desc"


def _encode_page_token(key: tuple[float, str]) -> str:
    return base64.urlsafe_b64encode(f"{key[0]!r} {key[1]}".encode()).decode()


def _decode_page_token(token: str) -> tuple[float, str] | None:
    """The last key of the page before. Raises FieldInvalid on a token this server did not make."""
    if not token:
        return None
    try:
        value, _, session_id = base64.b64decode(token.encode(), altchars=b"-_", validate=True).decode().partition(" ")
        return float(value), session_id
    except (ValueError, binascii.Error):
        raise FieldInvalid.one("page_token", "is not a token of an earlier answer") from None
