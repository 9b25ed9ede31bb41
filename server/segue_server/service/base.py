"""What all calls share."""

import asyncio
import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from segue_server.engine_thread import EngineThread
from segue_server.errors import (
    Draining,
    EtagMismatch,
    SegueError,
    SessionBusy,
    SessionLimit,
    SessionNotFound,
)
from segue_server.lately import Lately
from segue_server.orders import Orders, Pool
from segue_server.pins import PinBudget
from segue_server.reports import TurnObserver
from segue_server.requests import (
    CommitPolicy,
    ContextPolicy,
    CreateSessionRequest,
    FinishReason,
    ForkSessionRequest,
    SamplingParams,
    SessionSettings,
)
from segue_server.served import ServedModel
from segue_server.sessions import Session, SessionRegistry, new_session_id
from segue_server.snapshots import ImportRequest
from segue_server.stats import ServiceStats
from segue_server.transfers import Transfers
from segue_server.turns import Turns
from segue_server.validation import Checker
from segue_server.views import (
    Limits,
    SessionState,
    SessionView,
)
from segue_server.waiting_room import WaitingRoom
from segue_server.watch import EventHub, EventType

REAP_INTERVAL = 0.5  # seconds between two looks for expired sessions
REPLAY_WINDOW = 600.0  # seconds a CreateSession request id is remembered
LONG_TEXT = 8192  # characters from which tokenizing leaves the event loop
CALLER = "CALLER"  # reason of an event
MAX_IMPORTS = 2  # snapshots that are taken in at once; more wait

CAPABILITIES = (
    "fork",
    "rewind",
    "slide",
    "prefix",
    "busy:queue",
    "busy:replace",
    "logprobs",
    "prompt_logprobs",
    "append",
    "attach",
    "score",
    "estimate",
    "update",
    "pin",
    "read_tokens",
    "watch",
    "move",
    "export",
    "import",
    "tier:device",
)


@dataclass(frozen=True, slots=True)
class Creation:
    """A session that a request has opened, kept for a repetition of the request."""

    request: CreateSessionRequest
    session: Session
    time: float  # monotonic
    done: asyncio.Event = field(default_factory=asyncio.Event)  # its prefix is computed, or it has failed


@dataclass(frozen=True, slots=True)
class Forked:
    """The answer to a fork, kept for a repetition of the request."""

    request: ForkSessionRequest
    children: tuple[str, ...]
    time: float  # monotonic


@dataclass(frozen=True, slots=True)
class Imported:
    """The answer to an import, kept for a repetition of the request."""

    request: ImportRequest
    sha256: bytes
    session: Session
    time: float  # monotonic


class ServiceBase:
    """What all calls share: the sessions, the turns, the engine, and what is checked and told everywhere."""

    def __init__(
        self,
        model: ServedModel,
        engine: EngineThread,
        limits: Limits,
        *,
        version: str,
        build: str,
        queue_timeout: float,
        observers: Sequence[TurnObserver] = (),
    ) -> None:
        runner = engine.engine.runner
        self.stats = ServiceStats()
        self.draining = False
        self._model = model
        self._engine = engine
        self._limits = limits
        self._version, self._build = version, build
        self._queue_timeout = queue_timeout
        self._orders = Orders(model, Pool(runner.num_pages, runner.page_bytes))
        self._sessions = SessionRegistry(max_sessions=limits.max_sessions, tombstone_ttl=limits.tombstone_ttl)
        self._turns = Turns(
            engine,
            self.stats,
            on_start=self._turn_started,
            on_end=self._turn_ended,
            observers=observers,
        )
        self._waiting_room = WaitingRoom(
            self._turns,
            self.stats,
            max_running=limits.max_running_requests,
            max_queued=limits.max_queued_requests,
        )
        self._transfers = Transfers(engine, model)
        self._importing = asyncio.Semaphore(MAX_IMPORTS)
        self._pins = PinBudget(limits.max_pinned_bytes, model.kv_bytes_per_token)
        self.events = EventHub()
        engine.on_failure(self._turns.fail_all)
        engine.on_shrunk(self._cache_shrunk)
        self._created: dict[str, Creation] = {}  # by request id: AIP-155
        self._forked: dict[str, Forked] = {}  # by request id
        self._imported: dict[str, Imported] = {}  # by request id
        self._began = time.monotonic()
        self._lately = Lately(engine.engine.stats)

    @property
    def limits(self) -> Limits:
        return self._limits

    def _checker(self) -> Checker:
        return Checker(self._limits, self._model.config.vocab_size)

    def _refuse_when_draining(self) -> None:
        if self.draining:
            self.stats.rejections.add("draining")
            raise Draining("the server is shutting down and takes no new work")

    def _refuse_if_changed(self, session: Session, etag: str) -> None:
        if etag and etag != session.etag:
            raise EtagMismatch(f"session {session.session_id!r} has changed", etag=session.etag)

    def _refuse_if_busy(self, session: Session) -> None:
        if session.moving:
            raise SessionBusy(f"the KV of session {session.session_id!r} is being moved")
        if session.active:
            message = f"session {session.session_id!r} has a turn in flight"
            raise SessionBusy(message, activeRequestId=session.active.request_id)

    def _check_pins(self, settings: SessionSettings, *, count: int = 1, instead_of: Session | None = None) -> None:
        """Is there room for as many more pinned sessions, or for one in its place? Raises KvBudget."""
        pinned = [s.settings for s in self._sessions if s.settings.pinned and s is not instead_of]
        try:
            self._pins.check(settings, pinned, count=count)
        except SegueError:
            self.stats.rejections.add("kv_budget")
            raise

    async def _open(self, request: CreateSessionRequest, caller: str) -> Session:
        settings = self._clamped(request.settings.over(self._default_settings(caller)))
        self._check_pins(settings)
        session = Session(
            session_id=request.session_id or new_session_id(),
            settings=settings,
            display_name=request.display_name,
            labels=dict(request.labels),
        )
        await self._register(session)
        self._tell(EventType.CREATED, session, CALLER)
        return session

    def _ephemeral(self, caller: str) -> Session:
        return Session(session_id=new_session_id(), settings=self._default_settings(caller), ephemeral=True)

    async def _open_ephemeral(self, caller: str) -> Session:
        session = self._ephemeral(caller)
        await self._register(session)
        self.stats.sessions_opened.add("ephemeral")
        return session

    async def _register(self, session: Session) -> None:
        with self._limit_counted():
            self._sessions.open(session)
        priority, pinned = session.settings.priority or 0, bool(session.settings.pinned)
        salt = session.settings.cache_salt
        opened = partial(self._engine.engine.open, session.session_id, priority=priority, pinned=pinned, salt=salt)
        self._engine.post(opened)

    @contextlib.contextmanager
    def _limit_counted(self) -> Iterator[None]:
        """Count a request that finds no room for one more session."""
        try:
            yield
        except SessionLimit:
            self.stats.rejections.add("session_limit")
            raise

    def _end_ephemeral(self, session: Session) -> None:
        """Its only turn has ended, or never began."""
        self._count_end(session, "deleted")
        self._forget(session)

    def _forget(self, session: Session) -> None:
        """Take back a session that never came to be; its turn, if any, has been told to leave."""
        self._sessions.remove(session)
        self._engine.post(partial(self._engine.engine.close, session.session_id))

    def _default_settings(self, caller: str) -> SessionSettings:
        return SessionSettings(
            ttl=self._limits.default_ttl,
            max_context_tokens=self._model.max_context_tokens,
            kv_dtype=self._model.kv_dtype,
            context_policy=ContextPolicy.REJECT,
            keep_tokens=0,
            commit_policy=CommitPolicy.KEEP_PARTIAL,
            priority=0,
            pinned=False,
            cache_salt=caller,
            default_sampling=SamplingParams(),
        )

    def _clamped(self, settings: SessionSettings) -> SessionSettings:
        return replace(
            settings,
            ttl=min(settings.ttl or self._limits.default_ttl, self._limits.max_ttl),
            max_context_tokens=min(
                settings.max_context_tokens or self._model.max_context_tokens, self._model.max_context_tokens
            ),
        )

    def _check_open(self, session: Session) -> None:
        """A turn that had to wait may find its session deleted or expired."""
        if self._sessions.get(session.session_id) is not session:
            raise SessionNotFound(session.session_id, f"session {session.session_id!r} was deleted meanwhile")

    def _turn_started(self, session: Session) -> None:
        self._tell(EventType.TURN_STARTED, session, CALLER)

    def _turn_ended(self, session: Session, reason: FinishReason | None) -> None:
        """`reason` is None of a turn that never started: then nothing has happened."""
        if reason:
            self._tell(EventType.TURN_FINISHED, session, reason.name)
        if session.leaving:
            self._tell(EventType.DELETED, session, session.leaving)
        if session.ephemeral:
            self._end_ephemeral(session)

    def _cache_shrunk(self, session_ids: Iterable[str]) -> None:
        for session in self._sessions:
            if session.session_id in session_ids:
                self._tell(EventType.CACHE_MOVED, session, "KV_PRESSURE")

    def _tell_deleted(self, session: Session, reason: str) -> None:
        """At once, or after the end of its turn."""
        if session.active:
            session.leaving = reason
        else:
            self._tell(EventType.DELETED, session, reason)

    def _tell(self, kind: EventType, session: Session, reason: str) -> None:
        if session.ephemeral:
            return
        view = self._view(session)
        if kind is EventType.EXPIRED:
            view = replace(view, state=SessionState.EXPIRED)
        self.events.publish(kind, view, reason)

    def _count_end(self, session: Session, reason: str) -> None:
        """Once per session, whoever ends it again."""
        if session.hidden or session.ended:
            return
        session.ended = True
        self.stats.sessions_ended.add(reason)
        self.stats.session_lifetime.observe(time.time() - session.create_time)

    def _view(self, session: Session) -> SessionView:
        return SessionView(
            session_id=session.session_id,
            display_name=session.display_name,
            labels=session.labels,
            state=session.state,
            position=session.position,
            etag=session.etag,
            turn_count=len(session.turns),
            active_request_id=session.active.request_id if session.active else "",
            cache=self._engine.engine.figures.cache_usage(session.session_id),
            settings=session.settings,
            create_time=session.create_time,
            last_used_time=session.last_used_time,
            expire_time=session.expire_time,
            model_fingerprint=self._model.fingerprint,
            forked_from=session.forked_from,
        )
