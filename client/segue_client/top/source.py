"""Asks a server what there is to show. Nothing here changes anything, and no turn is ever read while it runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol, Self

from segue.v1 import cache_pb2, model_pb2
from segue.v1.generation_pb2 import Finished
from segue.v1.session_pb2 import Session as SessionInfo
from segue.v1.session_pb2 import TurnSpan
from segue_client import admin, calls
from segue_client.calls import Call
from segue_client.connection import AsyncConnection
from segue_client.errors import PositionBeyondEnd, RequestNotFound, SegueError, Unavailable
from segue_client.options import ConnectionOptions
from segue_client.top.snapshot import Load, Server, SessionRow, SessionTurns, Snapshot, Tier, TurnRow

TIMEOUT = 5.0  # seconds of each call
PAGE = 1000  # sessions asked for at once
TIMED_TURNS = 24  # of a session, its last ones; of these the timings are asked for
_BEYOND = 2**62  # more events than any turn has

# A view is looked at: it should show soon that the server is back.
_CHANNEL = (("grpc.max_reconnect_backoff_ms", 1000),)


class Source(Protocol):
    """Where the view gets what it shows. Both methods raise SegueError when the server does not answer."""

    async def snapshot(self) -> Snapshot:
        """The server now."""

    async def turns(self, session_id: str) -> SessionTurns:
        """A session and its turns now; raises NotFound when it is gone."""


class ServerSource:
    """A server at its address, and at its admin port if there is one to ask.

    Made inside the running loop; `async with` closes the connections.
    """

    def __init__(self, target: str, admin_target: str | None = None) -> None:
        options: ConnectionOptions = {"channel_options": _CHANNEL}
        self._target, self._admin_target = target, admin_target
        self._server = AsyncConnection(target, options)
        self._admin = AsyncConnection(admin_target, options) if admin_target else None
        self._model: model_pb2.ModelInfo | None = None
        self._ledgers: dict[str, tuple[tuple[str, int, str], Sequence[TurnSpan]]] = {}  # by session, with its version
        self._ends: dict[str, Finished | None] = {}  # by request id; None: not kept any more

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._server.close()
        if self._admin is not None:
            await self._admin.close()

    async def snapshot(self) -> Snapshot:
        """See `Source.snapshot`."""
        try:
            return await self._ask()
        except SegueError:
            self._model = None  # another one may come back at this address
            raise

    async def _ask(self) -> Snapshot:
        if self._model is None:
            self._model = await self._server.send(calls.model_info(TIMEOUT))
        info, load, sessions, (stats, note) = await asyncio.gather(
            self._server.send(calls.server_info(TIMEOUT)),
            self._server.send(calls.load(TIMEOUT)),
            self._sessions(),
            self._cache(),
        )
        now = time.time()
        return Snapshot(
            time=time.monotonic(),
            server=Server.of(self._target, self._model, info),
            load=Load.of(load),
            tiers=tuple(map(Tier.of, stats.tiers)) if stats else (Tier.rough(load, info.limits),),
            sessions=tuple(SessionRow.of(session, now) for session in sessions),
            note=note,
        )

    async def _sessions(self) -> list[SessionInfo]:
        call, found = calls.list_sessions({"page_size": PAGE, "timeout": TIMEOUT}), list[SessionInfo]()
        while True:
            page = await self._server.send(call)
            found += page.sessions
            following = calls.next_page(call, page)
            if following is None:
                return found
            call = following

    async def _cache(self) -> tuple[cache_pb2.CacheStats | None, str]:
        """What the admin port says, or else why there is less to show."""
        if self._admin is None:
            return None, "device tier only, in three classes; --admin-target tells more"
        try:
            asked = Call(admin.GET_CACHE_STATS, cache_pb2.GetCacheStatsRequest(), timeout=TIMEOUT)
            return await self._admin.send(asked), ""
        except SegueError as error:
            why = "does not answer" if isinstance(error, Unavailable) else f"says {error.code.name}"
            return None, f"device tier only, in three classes: admin port {self._admin_target} {why}"

    async def turns(self, session_id: str) -> SessionTurns:
        """See `Source.turns`."""
        info = await self._server.send(calls.get_session(session_id, TIMEOUT))
        spans = await self._spans(info)
        ended = [span.request_id for span in spans[-TIMED_TURNS:] if span.finish_reason and span.request_id]
        await asyncio.gather(*(self._learn_end(each, session_id) for each in ended if each not in self._ends))
        turns = tuple(TurnRow.of(span, self._ends.get(span.request_id)) for span in spans)
        return SessionTurns(SessionRow.of(info, time.time()), turns)

    async def _spans(self, info: SessionInfo) -> Sequence[TurnSpan]:
        """The turns of a ledger, which has to be read for them; once for each state of it."""
        version = (info.etag, info.position, info.active_request_id)
        known = self._ledgers.get(info.session_id)
        if known is None or known[0] != version:
            parts = await self._server.gather(calls.read_tokens(info.session_id, 0, None, False, TIMEOUT))
            known = version, parts[-1].turns if parts else ()
            self._ledgers = {info.session_id: known}  # of the one that is looked at
        return known[1]

    async def _learn_end(self, request_id: str, session_id: str) -> None:
        """The last event of a turn that has ended, which the server keeps for some minutes.

        Asked for more events than there are, it says how many there are; so only the last one has to travel.
        """
        try:
            await self._server.gather(calls.attach(request_id, _BEYOND, session_id, TIMEOUT))
        except PositionBeyondEnd as error:
            self._ends[request_id] = await self._last_event(request_id, session_id, error.metadata.get("lastSequence"))
        except RequestNotFound:
            self._ends[request_id] = None

    async def _last_event(self, request_id: str, session_id: str, last: str | None) -> Finished | None:
        if not last or int(last) < 1:
            return None
        try:
            events = await self._server.gather(calls.attach(request_id, int(last) - 1, session_id, TIMEOUT))
        except SegueError:  # it failed, or has just been forgotten
            return None
        return events[-1].finished if events and events[-1].HasField("finished") else None
