"""Turns as the event loop sees them: claiming a session, running, leaving.

claim ──▶ encode ──▶ submit ──▶ events ... ──▶ Finished or Failed
  │          │                                       │
  └──────────┴── error, cancel, disconnect ──▶ the claim is given back: once, here
"""

import asyncio
from collections.abc import Callable
from functools import partial

from segue_server.engine_thread import EngineThread
from segue_server.errors import QueueFull, QueueTimeout, Quota, RequestIdReused, SegueError, SessionBusy
from segue_server.events import Event, Failed, Finished, Started, Tokens
from segue_server.requests import BusyPolicy, CancelCause, CommitPolicy, FinishReason, OutputOptions
from segue_server.sessions import ActiveTurn, Session, TurnRecord
from segue_server.stats import ServiceStats
from segue_server.stream import TurnStream


class Turns:
    """All turns in flight, by request id. Event loop only."""

    def __init__(
        self,
        engine: EngineThread,
        stats: ServiceStats,
        *,
        max_running: int,
        max_queued: int,
        on_end: Callable[[Session], None],
    ) -> None:
        """`on_end` is told when a session has no turn any more."""
        self._engine = engine
        self._stats = stats
        self._max_running = max_running
        self._max_queued = max_queued
        self._on_end = on_end
        self._active: dict[str, ActiveTurn] = {}
        self.waiting_behind = 0  # turns that wait for another one of their session

    def __len__(self) -> int:
        return len(self._active)

    @property
    def queued(self) -> int:
        return sum(not turn.started for turn in self._active.values())

    @property
    def running(self) -> int:
        return sum(turn.started for turn in self._active.values())

    def find(self, request_id: str) -> ActiveTurn | None:
        return self._active.get(request_id)

    async def claim(
        self, session: Session, request_id: str, output: OutputOptions, policy: BusyPolicy, patience: float
    ) -> ActiveTurn:
        """Make `request_id` the session's turn in flight.

        Raises RequestIdReused, QueueFull, SessionBusy, or QueueTimeout after `patience` seconds behind another turn.
        """
        self._refuse_known(request_id)
        self._refuse_beyond_queue()
        if session.active is not None:
            await self._wait_behind(session, policy, patience)
            self._refuse_known(request_id)
        turn = ActiveTurn(request_id=request_id, session=session, start=session.position, prompt_end=session.position)
        turn.stream = TurnStream(output, on_event=partial(self._see, turn), on_room=self._poke)
        session.active = self._active[request_id] = turn
        return turn

    def _refuse_known(self, request_id: str) -> None:
        if request_id in self._active:
            raise RequestIdReused(f"a turn with request id {request_id!r} is in flight")

    def _refuse_beyond_queue(self) -> None:
        """Turns that have not started but find a free place at the next step are not waiting."""
        free = max(0, self._max_running - self.running)
        if self.queued + self.waiting_behind >= self._max_queued + free:
            self._stats.rejections.add("queue_full")
            message = f"{self._max_queued} turns are waiting, and that is the limit"
            raise QueueFull(message, quota=Quota("queued_requests", self._max_queued))

    async def _wait_behind(self, session: Session, policy: BusyPolicy, patience: float) -> None:
        self.waiting_behind += 1
        try:
            async with asyncio.timeout(patience):
                await self._wait_for(session, policy)
        except TimeoutError:
            self._stats.rejections.add("queue_timeout")
            message = f"another turn of session {session.session_id!r} ran for longer than {patience:g} s"
            raise QueueTimeout(message) from None
        finally:
            self.waiting_behind -= 1

    async def _wait_for(self, session: Session, policy: BusyPolicy) -> None:
        """Until the session has no turn in flight. One that is on its way out is waited for under every policy."""
        while (active := session.active) is not None:
            if policy is BusyPolicy.REPLACE:
                self.leave(active, CancelCause.REPLACED)
            elif policy is BusyPolicy.REJECT and not active.leaving:
                message = f"session {session.session_id!r} has a turn in flight"
                raise SessionBusy(message, activeRequestId=active.request_id)
            await active.ended.wait()

    def leave(
        self,
        turn: ActiveTurn,
        cause: CancelCause,
        *,
        policy: CommitPolicy | None = None,
        reason: FinishReason = FinishReason.CANCELLED,
    ) -> None:
        """Cancel a turn that may still run. It leaves before the engine's next step; `turn.ended` tells when it has."""
        if turn.ended.is_set() or turn.leaving:
            return
        turn.leaving = True
        if turn.submitted:
            self._engine.post(partial(self._engine.engine.cancel, turn.request_id, cause, policy=policy, reason=reason))
        else:  # the engine has not heard of it
            turn.stream.deliver(Finished(reason, turn.session.position))

    async def wait_idle(self) -> None:
        """Until no turn is in flight."""
        while self._active:
            await next(iter(self._active.values())).ended.wait()

    async def end_all(self, cause: CancelCause, reason: FinishReason) -> None:
        """Cancel every turn in flight, those too that waited behind one, and return when all have left."""
        while turns := list(self._active.values()):
            for turn in turns:
                self.leave(turn, cause, reason=reason)
            for turn in turns:
                await turn.ended.wait()
            await asyncio.sleep(0)  # whoever waited behind one of them claims its session now

    def fail_all(self, error: SegueError) -> None:
        """The engine is gone: end every turn in flight."""
        for turn in list(self._active.values()):
            turn.stream.deliver(Failed(error, turn.session.position))

    def _see(self, turn: ActiveTurn, event: Event) -> Event:
        """Keep the session's record true to what is put on the stream."""
        session = turn.session
        match event:
            case Started():
                turn.started = True
                turn.start, turn.prompt_end = event.position, event.position + event.prompt_tokens
                session.position = turn.prompt_end
            case Tokens():
                session.position = event.position + len(event.token_ids)
            case Finished():
                self._record(turn, event.position, event.finish_reason)
                event = turn.finished = event.with_etag(session.etag)
                self._end(turn)
            case Failed():
                self._record(turn, event.position, FinishReason.ERROR)
                if isinstance(event.error, QueueTimeout):
                    self._stats.rejections.add("queue_timeout")
                self._end(turn)
            case _:
                pass
        return event

    def _record(self, turn: ActiveTurn, position: int, reason: FinishReason) -> None:
        """Note where the turn lies in the ledger; one that was rolled back whole lies nowhere and changed nothing."""
        session = turn.session
        session.position = position
        if position > turn.start:
            generated_start = min(turn.prompt_end, position)
            session.turns.append(TurnRecord(turn.request_id, turn.start, generated_start, position, reason))
            session.changed()
        else:
            session.touch()

    def _end(self, turn: ActiveTurn) -> None:
        """The one place where a session becomes free again."""
        del self._active[turn.request_id]
        turn.session.active = None
        turn.ended.set()
        self._on_end(turn.session)

    def _poke(self) -> None:
        """A paused sequence may go on: wake the engine."""
        self._engine.post(_nothing)


def _nothing() -> None:
    pass
