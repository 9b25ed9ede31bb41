"""Sessions: create, look at, fork, update, rewind, read, watch, delete."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import partial

from segue_server.errors import (
    LedgerUnavailable,
    RequestIdReused,
    SessionNotFound,
    beyond_end,
)
from segue_server.ledger import records
from segue_server.origin import UNKNOWN, Origin
from segue_server.reading import chunks
from segue_server.recording import created, forked, updated
from segue_server.requests import (
    AppendRequest,
    CancelCause,
    ChatTurn,
    CreateSessionRequest,
    ForkSessionRequest,
    Input,
    ListSessionsRequest,
    ReadTokensRequest,
    RewindSessionRequest,
    SessionSettings,
    UpdateSessionRequest,
    WatchSessionsRequest,
)
from segue_server.service.base import CALLER, Creation, Forked
from segue_server.service.turn_calls import TurnCalls
from segue_server.sessions import Session, turns_until
from segue_server.updates import check_length, check_paths, update_of
from segue_server.validation import fork_ids
from segue_server.views import (
    SessionPage,
    SessionView,
    TokenChunk,
)
from segue_server.watch import EventType, SessionEvent


class SessionCalls(TurnCalls):
    """Calls of SessionService."""

    async def create_session(
        self, request: CreateSessionRequest, *, caller: str, origin: Origin = UNKNOWN
    ) -> SessionView:
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
                await self._append_prefix(session, request.prefix, origin)
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
        used = {s.session_id: self._engine.engine.figures.cache_usage(s.session_id).used_bytes for s in self._sessions}
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
        with self._limit_counted(), self._sessions.reserved(ids):
            settings = self._clamped(request.settings.over(parent.settings))
            self._check_pins(settings, count=len(ids))
            children = await self._make_forks(parent, ids, settings, request.position)
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

    def _forked_before(self, request: ForkSessionRequest, known: Forked) -> tuple[SessionView, ...]:
        if known.request != request:
            raise RequestIdReused(f"request id {request.request_id!r} came before with other content")
        return tuple(self._view(self._sessions.get(child)) for child in known.children)

    async def _make_forks(
        self, parent: Session, ids: Sequence[str], settings: SessionSettings, position: int | None
    ) -> list[Session]:
        """In the engine and in the ledger; in neither when the ledger fails or the caller goes."""
        fork = partial(
            self._engine.engine.fork,
            *(parent.session_id, ids, position),
            priority=settings.priority or 0,
            pinned=bool(settings.pinned),
            salt=settings.cache_salt,
        )
        try:
            return await self._engine.commit(lambda: self._forked_at(parent, ids, settings, fork()))
        except (LedgerUnavailable, asyncio.CancelledError):
            for unborn in ids:
                self._engine.post(partial(self._engine.engine.close, unborn))
            self._engine.note(*(records.SessionDeleted(unborn) for unborn in ids))
            raise

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

    async def _append_prefix(self, session: Session, prefix: Input, origin: Origin) -> None:
        if isinstance(prefix, ChatTurn):
            prefix = replace(prefix, add_generation_prompt=False)  # a prefix ends before the first reply
        request = AppendRequest(session_id=session.session_id, input=prefix)
        async with self.append(request, caller="", time_remaining=lambda: None, origin=origin) as turn:
            async for _ in turn:
                pass
