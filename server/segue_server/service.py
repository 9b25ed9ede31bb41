"""What each call means. The transport translates to and from it, and the engine does what it orders.

Runs on the event loop; nothing here waits for anything but the engine's answers and the reader of a stream. A turn is
read by `async with`: however the block is left, the turn is cancelled if it still runs, nobody else reads it and its
`detach_grace` passes without a new reader. Its session is freed by the event that ends it, on every path, queued or
running, and nowhere else (turns.py).
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from segue_model.sampling import TokenLogprob
from segue_server import snapshots
from segue_server.engine_thread import EngineThread
from segue_server.errors import (
    Draining,
    EngineError,
    EtagMismatch,
    FieldInvalid,
    LedgerUnavailable,
    PositionMismatch,
    QueueTimeout,
    RequestIdReused,
    RequestNotFound,
    SegueError,
    SessionBusy,
    SessionNotFound,
    SnapshotIncompatible,
    beyond_end,
)
from segue_server.events import Event, Failed, Finished, Prefill
from segue_server.jobs import NoSink, TurnSpec
from segue_server.kv_control import Guarded
from segue_server.ledger import records
from segue_server.ledger.store import RecoveredSession
from segue_server.orders import Orders, Pool
from segue_server.pins import PinBudget
from segue_server.reading import chunks
from segue_server.recording import ModelChanged, created, forked, restored, updated
from segue_server.requests import (
    AppendRequest,
    BusyPolicy,
    CancelCause,
    ChatTurn,
    CommitPolicy,
    ContextPolicy,
    CreateSessionRequest,
    FinishReason,
    ForkSessionRequest,
    GenerateRequest,
    Input,
    ListSessionsRequest,
    MoveCacheRequest,
    OutputOptions,
    ReadTokensRequest,
    RewindSessionRequest,
    SamplingParams,
    ScoreTokensRequest,
    SessionSettings,
    TextInput,
    TokenInput,
    UpdateSessionRequest,
    WatchSessionsRequest,
)
from segue_server.served import ServedModel
from segue_server.sessions import ActiveTurn, Claim, Session, SessionRegistry, new_session_id, turns_until
from segue_server.snapshots import ImportRequest, Received, SnapshotPart
from segue_server.stats import ServiceStats
from segue_server.transfers import SegmentReader, Transfers
from segue_server.turns import Turns, content_of
from segue_server.updates import check_length, check_paths, update_of
from segue_server.validation import Checker, fork_ids
from segue_server.views import (
    Estimate,
    Limits,
    Load,
    ModelInfo,
    Scores,
    ServerInfo,
    SessionPage,
    SessionState,
    SessionView,
    TokenChunk,
)
from segue_server.watch import EventHub, EventType, SessionEvent

log = logging.getLogger(__name__)

REAP_INTERVAL = 0.5  # seconds between two looks for expired sessions
REPLAY_WINDOW = 600.0  # seconds a CreateSession request id is remembered
LONG_TEXT = 8192  # characters from which tokenizing leaves the event loop
CALLER = "CALLER"  # reason of an event
MAX_IMPORTS = 2  # snapshots that are taken in at once; more wait
RATE_WINDOW = 20  # looks (of REAP_INTERVAL) that the token rate of GetLoad is taken over

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
class Turn:
    """A turn that a caller is reading."""

    request_id: str
    session_id: str
    output: OutputOptions
    events: AsyncIterator[tuple[int, Event]]

    def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        """(sequence, event) until Finished. Raises the SegueError of a turn that failed."""
        return self.events


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


class Service:
    """Sessions, turns and descriptions. One per server, on its event loop."""

    def __init__(
        self,
        model: ServedModel,
        engine: EngineThread,
        limits: Limits,
        *,
        version: str,
        build: str,
        queue_timeout: float,
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
            max_running=limits.max_running_requests,
            max_queued=limits.max_queued_requests,
            on_start=self._turn_started,
            on_end=self._turn_ended,
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
        self._rate: deque[tuple[float, int]] = deque(maxlen=RATE_WINDOW)

    # Sessions

    async def create_session(self, request: CreateSessionRequest, *, caller: str) -> SessionView:
        """Open a session and compute its prefix. The same request id within ten minutes gives the same session."""
        self._refuse_when_draining()
        checker = self._checker()
        checker.create_session(request, self._model.kv_dtype)
        checker.done()
        if (known := await self._created_before(request)) is not None:
            return self._view(known)
        session = await self._open(request, caller)
        creation = Creation(request, session, time.monotonic())
        if request.request_id:
            self._created[request.request_id] = creation
        try:
            await self._engine.record(created(session, self._model.fingerprint))
            if request.prefix is not None:
                await self._append_prefix(session, request.prefix)
        except BaseException:
            self._created.pop(request.request_id, None)
            self._forget(session)
            self._engine.note(records.SessionDeleted(session.session_id))
            self._tell_deleted(session, "CREATE_FAILED")
            raise
        finally:
            creation.done.set()
        self.stats.sessions_opened.add("create")
        return self._view(session)

    async def get_session(self, session_id: str) -> SessionView:
        return self._view(self._sessions.get(session_id))

    async def list_sessions(self, request: ListSessionsRequest) -> SessionPage:
        checker = self._checker()
        checker.list_sessions(request)
        checker.done()
        used = {s.session_id: self._engine.engine.cache_usage(s.session_id).used_bytes for s in self._sessions}
        sessions, token = self._sessions.page(request, used)
        return SessionPage(tuple(self._view(session) for session in sessions), token)

    async def delete_session(
        self, session_id: str, *, etag: str = "", force: bool = False, allow_missing: bool = False
    ) -> int:
        """Forget a session; returns the KV bytes that became free. With `force` a turn in flight is cancelled first."""
        try:
            session = self._sessions.get(session_id)
        except SessionNotFound:
            if allow_missing:
                return 0
            raise
        self._refuse_if_changed(session, etag)
        if not force:
            self._refuse_if_busy(session)
        self._sessions.remove(session)
        self._turns.forget(session)
        self._count_end(session, "deleted")
        self._tell_deleted(session, CALLER)
        if session.active:
            self._turns.leave(session.active, CancelCause.RPC)  # the engine is told of this first, then of the end
        close = partial(self._engine.engine.close, session_id)
        return await self._engine.commit(lambda: (close(), [records.SessionDeleted(session_id)]), lasting=True)

    async def fork_session(self, request: ForkSessionRequest) -> tuple[SessionView, ...]:
        """New sessions that share the beginning of one and its KV; the session may be running.

        The same request id within ten minutes gives the same children.
        """
        self._refuse_when_draining()
        checker = self._checker()
        checker.fork(request, self._model.kv_dtype)
        checker.done()
        if (known := self._forked.get(request.request_id)) is not None:
            return self._forked_before(request, known)
        parent = self._sessions.get(request.session_id)
        ids = fork_ids(request)
        self._sessions.check_room(ids)
        settings = self._clamped(request.settings.over(parent.settings))
        self._check_pins(settings, count=len(ids))
        fork = partial(
            self._engine.engine.fork,
            *(parent.session_id, ids, request.position),
            priority=settings.priority or 0,
            pinned=bool(settings.pinned),
            salt=settings.cache_salt,
        )
        try:
            children = await self._engine.commit(lambda: self._forked_at(parent, ids, settings, fork()))
        except LedgerUnavailable:
            for unborn in ids:
                self._engine.post(partial(self._engine.engine.close, unborn))
            raise
        for child in children:
            self._sessions.open(child)
            self.stats.sessions_opened.add("fork")
        if request.request_id:
            self._forked[request.request_id] = Forked(request, tuple(ids), time.monotonic())
        for child in children:
            self._tell(EventType.CREATED, child, "FORK")
        return tuple(self._view(child) for child in children)

    async def update_session(self, request: UpdateSessionRequest) -> SessionView:
        """Change settings, name or labels; no use of the session, whose time to live runs on. It may be running."""
        checker = self._checker()
        checker.session_id("session_id", request.session_id)
        check_paths(checker, request.paths)
        checker.done()
        session = self._sessions.get(request.session_id)
        self._refuse_if_changed(session, request.etag)
        update = update_of(session, request, self._default_settings(session.settings.cache_salt or ""))
        checker.labels(update.display_name, update.labels)
        checker.settings(update.settings, self._model.kv_dtype)
        checker.done()
        update = replace(update, settings=self._clamped(update.settings))
        check_length(session, update.settings)
        self._check_pins(update.settings, instead_of=session)
        update.apply(session)
        priority, pinned = update.settings.priority or 0, bool(update.settings.pinned)
        adjust = partial(self._engine.engine.adjust, session.session_id, priority=priority, pinned=pinned)
        changed = updated(session)
        await self._engine.commit(lambda: (adjust(), [changed]), lasting=True)
        return self._view(session)

    async def rewind_session(self, request: RewindSessionRequest) -> SessionView:
        """Cut a session without a turn in flight back to an earlier position."""
        checker = self._checker()
        checker.rewind(request)
        checker.done()
        session = self._sessions.get(request.session_id)
        self._refuse_if_changed(session, request.etag)
        self._refuse_if_busy(session)
        position = session.start_of(request.turn) if request.turn is not None else request.position or 0
        if position > session.position:
            raise beyond_end(position, session.position)
        session.turns = turns_until(session.turns, position)
        session.position = position
        session.changed()
        rewind = partial(self._engine.engine.rewind, session.session_id, position)
        cut = records.Truncated(session.session_id, position)
        await self._engine.commit(lambda: (rewind(), [cut, updated(session)]), lasting=True)
        self._tell(EventType.REWOUND, session, CALLER)
        return self._view(session)

    async def read_tokens(self, request: ReadTokensRequest) -> AsyncGenerator[TokenChunk, None]:
        """The ledger as it is when asked for, as far as it has been put on a stream; no use of the session."""
        checker = self._checker()
        checker.read_tokens(request)
        checker.done()
        session = self._sessions.get(request.session_id)
        tokens = await self._engine.call(lambda: self._engine.engine.tokens(request.session_id)[:])
        self._check_open(session)
        length = min(len(tokens), session.position)
        start, end = request.start_position, length if request.end_position is None else request.end_position
        for position in (start, end):
            if position > length:
                raise beyond_end(position, length)
        spans = tuple(span for span in session.spans(length) if span.end > start and span.start < end)
        detokenizer = self._model.prompts.need_tokenizer("return_text").detokenizer if request.return_text else None
        text = detokenizer(skip_special=False, continues=start > 0) if detokenizer else None
        for chunk in chunks(tokens[start:end], start, spans, text):
            yield chunk

    def watch_sessions(self, request: WatchSessionsRequest) -> AsyncGenerator[SessionEvent, None]:
        """What happens from now on, or after the event that the caller has; the watch of one session ends with it.

        Raises SessionNotFound or SessionExpired when no event is kept of it either, and EventHistoryLost.
        """
        checker = self._checker()
        checker.watch(request)
        checker.done()
        after = self.events.place(request.after_sequence)
        if request.session_id and not self.events.knows(request.session_id, after):
            self._sessions.get(request.session_id)
        return self.events.watch(after, request.session_id)

    # Transfers

    async def move_cache(self, request: MoveCacheRequest) -> SessionView:
        """Bring the KV of a session without a turn into a tier; returns when it is there."""
        checker = self._checker()
        checker.move_cache(request)
        checker.done()
        session = self._sessions.get(request.session_id)
        self._refuse_if_busy(session)
        if request.from_position > session.position:
            raise beyond_end(request.from_position, session.position)
        with self._transfers.moving(session):
            await self._transfers.move(session, request.tier, request.from_position)
        self._tell(EventType.CACHE_MOVED, session, CALLER)
        return self._view(session)

    async def export_session(
        self, session_id: str, *, tokens_only: bool = False, etag: str = ""
    ) -> AsyncGenerator[SnapshotPart, None]:
        """Header, chunks and trailer of a session without a turn in flight, which takes none meanwhile."""
        session = self._sessions.get(session_id)
        self._refuse_if_changed(session, etag)
        self._refuse_if_busy(session)
        with self._transfers.moving(session):
            async with contextlib.aclosing(self._transfers.export(session, tokens_only=tokens_only)) as parts:
                async for part in parts:
                    yield part

    async def import_session(
        self, request: ImportRequest, parts: AsyncIterator[SnapshotPart | ImportRequest], *, caller: str
    ) -> SessionView:
        """A session from a snapshot, `parts` being the rest of its stream. Nothing of it is seen before it is whole."""
        self._refuse_when_draining()
        incompatible = self._check_import(request, caller)
        async with self._importing:
            received = snapshots.receive(
                request.header, parts, vocab_size=self._model.config.vocab_size, keep_kv=incompatible is None
            )
            async with received as snapshot:
                if known := self._imported_before(request, snapshot.sha256):
                    return self._view(known)
                session = self._imported_session(request, caller)
                with self._transfers.moving(session):
                    await self._take_in(session, snapshot, mismatch=incompatible is not None)
        if request.request_id:
            entry = Imported(request, snapshot.sha256, session, time.monotonic())
            self._imported[request.request_id] = entry
        return self._view(session)

    @contextlib.asynccontextmanager
    async def guarded(self, session_id: str) -> AsyncIterator[tuple[Guarded, SegmentReader]]:
        """The KV of a session without a turn in flight, which takes none and loses nothing meanwhile."""
        checker = self._checker()
        checker.session_id("session_id", session_id)
        checker.done()
        session = self._sessions.get(session_id)
        self._refuse_if_busy(session)
        with self._transfers.moving(session):
            async with self._transfers.guarded(session) as found:
                yield found

    def pool_resized(self, num_pages: int) -> None:
        """The pool hands out more or fewer pages from now on."""
        self._orders.pool_resized(num_pages)

    # Turns

    @contextlib.asynccontextmanager
    async def generate(
        self, request: GenerateRequest, *, caller: str, time_remaining: Callable[[], float | None]
    ) -> AsyncIterator[Turn]:
        """One turn; the same request again reads the same turn. Leaving the block early leaves the turn to itself."""
        arrival = self._engine.engine.clock()
        checker = self._checker()
        checker.generate(request)
        checker.done()
        request = replace(request, request_id=request.request_id or str(uuid.uuid4()))
        claim = self._claim(request, caller)

        def order(prompt: list[int], turn: ActiveTurn) -> TurnSpec:
            patience = claim.patience
            return self._orders.generate(
                turn.session, request, prompt, arrival=arrival, patience=patience, sink=turn.stream
            )

        turn = self._turns.known(claim) or await self._begin(request, claim, order)
        with self._reading(turn, 0, time_remaining) as reading:
            yield reading

    @contextlib.asynccontextmanager
    async def append(
        self, request: AppendRequest, *, caller: str, time_remaining: Callable[[], float | None]
    ) -> AsyncIterator[Turn]:
        """Append tokens and compute them without sampling; the same request again reads the same turn."""
        arrival = self._engine.engine.clock()
        checker = self._checker()
        checker.append(request)
        checker.done()
        request = replace(request, request_id=request.request_id or str(uuid.uuid4()))
        claim = Claim(
            request_id=request.request_id,
            caller=caller,
            content=content_of(request),
            output=request.output,
            policy=BusyPolicy.REJECT,
            patience=self._queue_timeout,
            detach_grace=0.0,
        )

        def order(prompt: list[int], turn: ActiveTurn) -> TurnSpec:
            return self._orders.append(
                turn.session,
                turn.request_id,
                prompt,
                request.output,
                defer_compute=request.defer_compute,
                arrival=arrival,
                patience=claim.patience,
                sink=turn.stream,
            )

        turn = self._turns.known(claim) or await self._begin(request, claim, order)
        with self._reading(turn, 0, time_remaining) as reading:
            yield reading

    @contextlib.asynccontextmanager
    async def attach(
        self, request_id: str, after_sequence: int, *, caller: str, time_remaining: Callable[[], float | None]
    ) -> AsyncIterator[Turn]:
        """The events of a turn from `after_sequence + 1` on, while it runs and for ten minutes after its end.

        Raises RequestNotFound, of another caller's turn too, or PositionBeyondEnd.
        """
        turn = self._turns.find(request_id)
        if turn is None or turn.claim.caller != caller:
            raise RequestNotFound(f"there is no turn with request id {request_id!r}, or it ended too long ago")
        with self._reading(turn, after_sequence, time_remaining) as reading:
            yield reading

    async def score_tokens(
        self, request: ScoreTokensRequest, *, caller: str, time_remaining: Callable[[], float | None]
    ) -> Scores:
        """Logprobs of tokens as if they came next, after the turns that have ended; the session stays as it is.

        A fork that nobody sees takes them as a turn of its own, on the session's pages, and goes.
        """
        self._refuse_when_draining()
        checker = self._checker()
        checker.score(request)
        checker.done()
        child = await self._fork_unseen(self._sessions.get(request.session_id))
        output = OutputOptions(
            prompt_logprobs=True, top_logprobs=request.top_logprobs, return_text=False, heartbeat_interval=0.0
        )
        tokens = TokenInput(request.token_ids)
        turn = AppendRequest(session_id=child.session_id, input=tokens, output=output)
        logprobs: list[TokenLogprob] = []
        position = child.position
        async with self.append(turn, caller=caller, time_remaining=time_remaining) as events:
            async for _, event in events:
                logprobs += event.prompt_logprobs if isinstance(event, Prefill) else ()
        return Scores(tuple(logprobs), position)

    async def estimate(self, request: GenerateRequest, *, caller: str) -> Estimate:
        """What `generate` would meet now. Changes nothing. Raises FieldInvalid; other errors are its answer."""
        checker = self._checker()
        checker.generate(request)
        checker.done()
        try:
            return await self._estimate(request, caller)
        except FieldInvalid:
            raise
        except SegueError as error:
            return Estimate(refusal_reason=error.reason)

    async def cancel(
        self, *, request_id: str = "", session_id: str = "", commit_policy: CommitPolicy | None = None
    ) -> tuple[bool, Finished | None]:
        """Cancel a turn and wait until it has left the batch.

        (False, how it ended) when it had ended before; (False, None) when that is not known any more.
        """
        turn = self._turns.find(request_id) if request_id else self._sessions.get(session_id).active
        if turn is None:
            return False, None
        if turn.ended.is_set():
            return False, turn.finished
        self._turns.leave(turn, CancelCause.RPC, policy=commit_policy)
        await turn.ended.wait()
        return True, turn.finished

    # Descriptions

    def model_info(self) -> ModelInfo:
        return self._model.info()

    def server_info(self) -> ServerInfo:
        return ServerInfo(
            version=self._version,
            build=self._build,
            capabilities=(*CAPABILITIES, *self._engine.engine.lower_tiers),
            limits=self._limits,
            uptime=time.monotonic() - self._began,
        )

    def load(self) -> Load:
        engine, kv = self._engine.engine, self._engine.engine.kv_bytes()
        used = kv.active + kv.pinned
        last_step = engine.stats.last_step_time
        return Load(
            running_requests=self._turns.running,
            queued_requests=self._turns.queued,
            kv_used_bytes=used,
            kv_evictable_bytes=kv.idle + kv.prefix,
            kv_free_bytes=kv.capacity - kv.held,
            sessions=len(self._sessions),
            generated_tokens_per_second=self._token_rate(),
            since_last_step=time.time() - last_step if last_step else time.monotonic() - self._began,
            draining=self.draining,
        )

    def tokenize(self, given: Input, *, add_special_tokens: bool) -> tuple[list[int], list[str]]:
        """Ids and pieces of a text, or of a chat as the first turn of a session would append it."""
        checker = self._checker()
        checker.input("input", given)
        checker.done()
        tokenizer = self._model.prompts.need_tokenizer("input")
        if isinstance(given, TextInput):
            ids = tokenizer.encode(given.text, add_special_tokens=add_special_tokens)
        elif isinstance(given, ChatTurn):
            ids = self._model.prompts.encode(given, ledger=(), reply_open=False)
        else:
            raise FieldInvalid.one("input", "must be text or chat")
        return ids, [tokenizer.piece(token) for token in ids]

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        checker = self._checker()
        checker.token_ids("token_ids", ids)
        checker.done()
        return self._model.prompts.need_tokenizer("token_ids").decode(ids, skip_special=skip_special_tokens)

    @property
    def limits(self) -> Limits:
        return self._limits

    def session_states(self) -> dict[str, int]:
        """How many sessions are in which state, for the metrics."""
        counts = dict.fromkeys(("idle", "queued", "running", "moving"), 0)
        for session in self._sessions:
            counts[session.state.name.lower()] += 1
        return counts

    @property
    def waiting_behind(self) -> int:
        """Turns that wait for another one of their own session."""
        return self._turns.waiting_behind

    # Life

    def restore(self, found: Iterable[RecoveredSession], tombstones: Mapping[str, float]) -> int:
        """Take over the sessions of an earlier process, before the engine's thread starts; returns how many.

        Raises ModelChanged when they were made with another model, SessionLimit when there are too many.
        """
        for recovered in found:
            if recovered.model_fingerprint != self._model.fingerprint:
                raise ModelChanged(recovered.session_id, recovered.model_fingerprint, self._model.fingerprint)
            session = restored(recovered)
            self._sessions.open(session)
            settings = session.settings
            priority, pinned = settings.priority or 0, bool(settings.pinned)
            self._engine.engine.restore(
                session.session_id, recovered.tokens, priority=priority, pinned=pinned, salt=settings.cache_salt
            )
        self._sessions.restore_tombstones(tombstones)
        return len(self._sessions)

    async def reap(self) -> None:
        """Expire idle sessions, for ever; run as a task."""
        while True:
            await asyncio.sleep(REAP_INTERVAL)
            self._rate.append((time.monotonic(), self._engine.engine.stats.generated_tokens))
            self._tell_expiring()
            for session in self._sessions.expired(time.time()):
                self._sessions.bury(session)
                self._count_end(session, "expired")
                self._tell(EventType.EXPIRED, session, "TTL")
                self._engine.note(records.SessionExpired(session.session_id, session.expire_time))
                self._engine.post(partial(self._engine.engine.close, session.session_id, "ttl"))
            if self._sessions.forget_tombstones(now := time.time()):
                self._engine.note(records.TombstonesForgotten(now - self._limits.tombstone_ttl))
            horizon = time.monotonic() - REPLAY_WINDOW
            self._created = {i: entry for i, entry in self._created.items() if entry.time >= horizon}
            self._forked = {i: entry for i, entry in self._forked.items() if entry.time >= horizon}
            self._imported = {i: entry for i, entry in self._imported.items() if entry.time >= horizon}

    async def drain(self, grace: float) -> None:
        """Take no new turns, give running ones `grace` seconds, then end them with Finished{DRAINING}."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self._turns.wait_idle()
        await self._turns.end_all(CancelCause.DRAIN, FinishReason.DRAINING)
        self.events.close(Draining("the server is shutting down"))

    # Helpers

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

    def _check_import(self, request: ImportRequest, caller: str) -> SnapshotIncompatible | None:
        """Everything that can be said before a byte has come; why its KV is not this model's, if that is accepted."""
        checker = self._checker()
        if request.session_id:
            checker.session_id("session_id", request.session_id)
        checker.request_id(request.request_id)
        header, served = request.header, self._model.kv_dtype
        checker.settings(replace(header.settings, kv_dtype=None), served)
        checker.done()
        snapshots.check(header, max_context_tokens=self._model.max_context_tokens)
        incompatible = snapshots.mismatch(
            header, fingerprint=self._model.fingerprint, kv=self._transfers.shape, kv_dtype=served
        )
        if incompatible and not request.recompute_on_mismatch:
            raise incompatible
        if request.session_id and request.request_id not in self._imported:
            self._sessions.check_room([request.session_id])
        self._check_pins(self._import_settings(request, caller))
        return incompatible

    def _import_settings(self, request: ImportRequest, caller: str) -> SessionSettings:
        given = replace(request.header.settings, kv_dtype=None)
        settings = self._clamped(given.over(self._default_settings(caller)))
        if request.header.position > (settings.max_context_tokens or 0):
            raise FieldInvalid.one("snapshot.position", f"is beyond the session's limit, {settings.max_context_tokens}")
        return settings

    def _imported_session(self, request: ImportRequest, caller: str) -> Session:
        """Its record, before the engine knows it. Raises SessionExists or SessionLimit."""
        session = Session(
            session_id=request.session_id or new_session_id(),
            settings=self._import_settings(request, caller),
            position=request.header.position,
            turns=snapshots.turns_of(request.header),
        )
        self._sessions.open(session)
        return session

    async def _take_in(self, session: Session, snapshot: Received, *, mismatch: bool) -> None:
        try:
            await self._transfers.take_in(session, snapshot, mismatch=mismatch)
        except BaseException:
            self._forget(session)
            self._engine.note(records.SessionDeleted(session.session_id))
            raise
        self.stats.sessions_opened.add("import")
        self._tell(EventType.CREATED, session, "IMPORT")

    def _imported_before(self, request: ImportRequest, sha256: bytes) -> Session | None:
        known = self._imported.get(request.request_id)
        if known and (known.request, known.sha256) != (request, sha256):
            raise RequestIdReused(f"request id {request.request_id!r} came before with other content")
        return self._sessions.get(known.session.session_id) if known else None

    def _check_pins(self, settings: SessionSettings, *, count: int = 1, instead_of: Session | None = None) -> None:
        """Is there room for as many more pinned sessions, or for one in its place? Raises KvBudget."""
        pinned = [s.settings for s in self._sessions if s.settings.pinned and s is not instead_of]
        try:
            self._pins.check(settings, pinned, count=count)
        except SegueError:
            self.stats.rejections.add("kv_budget")
            raise

    def _forked_before(self, request: ForkSessionRequest, known: Forked) -> tuple[SessionView, ...]:
        if known.request != request:
            raise RequestIdReused(f"request id {request.request_id!r} came before with other content")
        return tuple(self._view(self._sessions.get(child)) for child in known.children)

    def _forked_at(
        self, parent: Session, ids: Sequence[str], settings: SessionSettings, position: int
    ) -> tuple[list[Session], list[records.Record]]:
        """The sessions of a fork that the engine has made, and what the ledger keeps of them."""
        children = [
            Session(
                session_id=child,
                settings=settings,
                labels=parent.labels,
                position=position,
                turns=parent.history(position),
                forked_from=(parent.session_id, position),
            )
            for child in ids
        ]
        return children, [forked(child, self._model.fingerprint) for child in children]

    async def _created_before(self, request: CreateSessionRequest) -> Session | None:
        """The session that this request has opened already, its prefix computed."""
        while known := self._created.get(request.request_id):
            if known.request != request:
                raise RequestIdReused(f"request id {request.request_id!r} came before with other content")
            if known.done.is_set():
                return self._sessions.get(known.session.session_id)
            await known.done.wait()  # the first call still computes the prefix, and may fail
        return None

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

    async def _fork_unseen(self, parent: Session) -> Session:
        """A session that nobody is told of, with the ledger of another up to its turn in flight; gone after a turn."""
        settings = replace(parent.settings, pinned=False, context_policy=ContextPolicy.REJECT)
        if parent.settings.context_policy is ContextPolicy.SLIDE:
            self._refuse_if_busy(parent)  # its turn may have moved what came before
        position = parent.active.start if parent.active else parent.position
        if not position:
            raise FieldInvalid.one("session_id", "the session's ledger is empty: the first token follows nothing")
        child = Session(session_id=new_session_id(), settings=settings, position=position, ephemeral=True)
        self._sessions.open(child)
        fork = partial(
            self._engine.engine.fork,
            *(parent.session_id, [child.session_id], position),
            priority=settings.priority or 0,
            salt=settings.cache_salt,
        )
        try:
            await self._engine.call(fork)
        except BaseException:
            self._forget(child)
            raise
        return child

    async def _register(self, session: Session) -> None:
        try:
            self._sessions.open(session)
        except SegueError as error:
            if error.reason == "SESSION_LIMIT":
                self.stats.rejections.add("session_limit")
            raise
        priority, pinned = session.settings.priority or 0, bool(session.settings.pinned)
        salt = session.settings.cache_salt
        opened = partial(self._engine.engine.open, session.session_id, priority=priority, pinned=pinned, salt=salt)
        self._engine.post(opened)

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

    async def _append_prefix(self, session: Session, prefix: Input) -> None:
        if isinstance(prefix, ChatTurn):
            prefix = replace(prefix, add_generation_prompt=False)  # a prefix ends before the first reply
        request = AppendRequest(session_id=session.session_id, input=prefix)
        async with self.append(request, caller="", time_remaining=lambda: None) as turn:
            async for _ in turn:
                pass

    def _claim(self, request: GenerateRequest, caller: str) -> Claim:
        return Claim(
            request_id=request.request_id,
            caller=caller,
            content=content_of(request),
            output=request.output,
            policy=request.busy_policy,
            patience=self._queue_timeout if request.queue_timeout is None else request.queue_timeout,
            detach_grace=request.detach_grace,
        )

    async def _estimate(self, request: GenerateRequest, caller: str) -> Estimate:
        """The path of a turn up to the engine's queue, in the same order. Raises what the turn would."""
        claim = self._claim(request, caller)
        if request.request_id and self._turns.known(claim):
            return Estimate(admissible=True)  # that very turn runs or has run: it is read
        self._refuse_when_draining()
        session = self._sessions.get(request.session_id) if request.session_id else self._ephemeral(caller)
        if session.ephemeral:
            self._sessions.check_room([session.session_id])
        self._turns.check_wait(session, claim)
        self._check_position(session, request.expected_position)
        prompt = await self._encode(session, request.input)
        spec = self._orders.generate(
            *(session, request, prompt), arrival=self._engine.engine.clock(), patience=claim.patience, sink=NoSink()
        )
        foresee = partial(self._engine.engine.foresee, spec, session.position, session.settings.cache_salt)
        seen = await self._engine.call(foresee)
        starts = seen.starts and not session.active
        return Estimate(
            admissible=starts,
            refusal_reason="" if starts or claim.patience else QueueTimeout.reason,
            to_compute_tokens=seen.to_compute,
            needed_bytes=seen.claimed_pages * self._engine.engine.runner.page_bytes,
            would_evict_bytes=seen.evicted_pages * self._engine.engine.runner.page_bytes,
            time_to_first_token=seen.time_to_first_token,
        )

    async def _begin(
        self,
        request: GenerateRequest | AppendRequest,
        claim: Claim,
        order: Callable[[list[int], ActiveTurn], TurnSpec],
    ) -> ActiveTurn:
        """A new turn, once its session is free; or the one that a twin of this call has begun meanwhile."""
        self._refuse_when_draining()
        known = request.session_id
        session = self._sessions.get(known) if known else await self._open_ephemeral(claim.caller)
        try:
            await self._turns.wait_free(session, claim)
            if twin := self._turns.known(claim):
                return twin
            self._check_open(session)
            self._check_position(session, request.expected_position)
        except BaseException:
            if session.ephemeral:
                self._forget(session)
            raise
        turn = self._turns.begin(session, claim)
        preparing = self._prepare(turn, request.input, order)
        if _is_long(request.input):
            turn.preparing = asyncio.create_task(preparing)  # not cancelled with the call: a twin may read the turn
        else:
            await preparing
        return turn

    @contextlib.contextmanager
    def _reading(self, turn: ActiveTurn, after: int, time_remaining: Callable[[], float | None]) -> Iterator[Turn]:
        with self._turns.reading(turn, after, time_remaining) as events:
            yield Turn(turn.request_id, turn.session.session_id, turn.claim.output, events)

    def _check_open(self, session: Session) -> None:
        """A turn that had to wait may find its session deleted or expired."""
        if self._sessions.get(session.session_id) is not session:
            raise SessionNotFound(session.session_id, f"session {session.session_id!r} was deleted meanwhile")

    def _check_position(self, session: Session, expected: int | None) -> None:
        if expected is not None and expected != session.position:
            message = f"the ledger holds {session.position} tokens, not {expected}"
            raise PositionMismatch(message, actualPosition=str(session.position))

    async def _prepare(
        self, turn: ActiveTurn, given: Input, order: Callable[[list[int], ActiveTurn], TurnSpec]
    ) -> None:
        """Submit the turn; what goes wrong is its end, for everybody who reads it."""
        try:
            await self._submit(turn, given, order)
        except SegueError as error:
            turn.stream.deliver(Failed(error, turn.start))
        except Exception:
            log.exception("turn %s could not be submitted", turn.request_id)
            turn.stream.deliver(Failed(EngineError("the server failed; its log tells why"), turn.start))

    async def _submit(self, turn: ActiveTurn, given: Input, order: Callable[[list[int], ActiveTurn], TurnSpec]) -> None:
        """Encode the input and hand the turn to the engine."""
        session = turn.session
        prompt = await self._encode(session, given)
        if turn.ended.is_set():
            return  # cancelled while it was encoded; its stream says so
        spec = order(prompt, turn)
        self._engine.check()
        if session.turns:
            self.stats.session_idle.observe(time.time() - session.last_used_time)
        session.touch()
        turn.prompt_end = turn.start + len(prompt)
        turn.submitted = True
        self._engine.post(partial(self._engine.engine.submit, spec))

    async def _encode(self, session: Session, given: Input) -> list[int]:
        """What an input adds to a session's ledger; a long text is tokenized beside the event loop."""
        encode = partial(
            self._model.prompts.encode,
            given,
            ledger=self._engine.engine.tokens(session.session_id)[: session.position],
            reply_open=session.reply_open,
        )
        return await asyncio.to_thread(encode) if _is_long(given) else encode()

    # What watchers are told

    def _turn_started(self, session: Session) -> None:
        self._tell(EventType.TURN_STARTED, session, CALLER)

    def _turn_ended(self, session: Session, reason: FinishReason | None) -> None:
        """`reason` is None of a turn that never started: then nothing has happened."""
        if reason:
            self._tell(EventType.TURN_FINISHED, session, reason.name)
        if session.leaving:
            self._tell(EventType.DELETED, session, session.leaving)
        if session.ephemeral:
            self._forget(session)

    def _cache_shrunk(self, session_ids: Iterable[str]) -> None:
        for session in self._sessions:
            if session.session_id in session_ids:
                self._tell(EventType.CACHE_MOVED, session, "KV_PRESSURE")

    def _tell_expiring(self) -> None:
        for session in self._sessions.expiring(time.time(), self._limits.expiry_notice):
            session.noticed = session.expire_time
            self._tell(EventType.EXPIRING, session, "TTL")

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
            cache=self._engine.engine.cache_usage(session.session_id),
            settings=session.settings,
            create_time=session.create_time,
            last_used_time=session.last_used_time,
            expire_time=session.expire_time,
            model_fingerprint=self._model.fingerprint,
            forked_from=session.forked_from,
        )

    def _token_rate(self) -> float:
        if len(self._rate) < 2:
            return 0.0
        (since, before), (until, after) = self._rate[0], self._rate[-1]
        return (after - before) / max(until - since, 1e-9)


def _is_long(given: Input) -> bool:
    match given:
        case TextInput(text):
            return len(text) >= LONG_TEXT
        case ChatTurn(messages):
            return sum(len(message.content) for message in messages) >= LONG_TEXT
        case _:
            return False
