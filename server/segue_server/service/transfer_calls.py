"""KV and whole sessions on the move: between tiers, out of this server, into it."""

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace

from segue_server import snapshots
from segue_server.errors import (
    FieldInvalid,
    RequestIdReused,
    SnapshotIncompatible,
    beyond_end,
)
from segue_server.kv_control import Guarded
from segue_server.ledger import records
from segue_server.requests import (
    MoveCacheRequest,
    SessionSettings,
)
from segue_server.service.base import CALLER, Imported
from segue_server.service.session_calls import SessionCalls
from segue_server.sessions import Session, new_session_id
from segue_server.snapshots import ImportRequest, Received, SnapshotPart
from segue_server.transfers import SegmentReader
from segue_server.views import (
    SessionView,
)
from segue_server.watch import EventType


class TransferCalls(SessionCalls):
    """Moves, exports and imports."""

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
            with self._limit_counted():
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
        with self._limit_counted():
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
