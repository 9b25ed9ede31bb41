"""Turns as the event loop sees them: holding a session, running, being read, leaving. waiting_room.py comes before.

begin ──▶ encode ──▶ submit ──▶ events ... ──▶ Finished or Failed ──▶ remembered for ten minutes
              │                                       │
              └── error, cancel, left alone ──▶ the session is given back: once, here

A turn belongs to the server, not to the call that brought it. Calls read it: the first one, a repeated one, one that
attaches. When the last reader has left before the end, the turn goes on for its `detach_grace`, but not beyond that
reader's deadline; if nobody has come by then, it is cancelled.

The same request id again, with the same content, is the same turn: running it is read from its first event, ended it
is replayed. Not remembered, so that the same request runs again, is a turn that has left nothing in the ledger and
either failed or was cancelled because nobody read it. Whatever changed the ledger is replayed, cut short as it may be:
running it again would append its prompt twice. A server that has been started anew knows no request ids; there
`expected_position` tells a caller whether its turn went in.
"""

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from segue_server.engine_thread import EngineThread, void
from segue_server.errors import KvBudgetImpossible, QueueTimeout, RequestIdReused, SegueError
from segue_server.events import Event, Failed, Finished, Started, Tokens
from segue_server.recent import RecentTurns
from segue_server.reports import TurnObserver, report_of
from segue_server.requests import AppendRequest, CancelCause, CommitPolicy, FinishReason, GenerateRequest
from segue_server.sessions import ActiveTurn, Claim, Session, TurnRecord, turns_slid
from segue_server.stats import ServiceStats
from segue_server.stream import Reader, TurnStream
from segue_server.waste import reason_of, wasted_tokens


def content_of(request: GenerateRequest | AppendRequest) -> bytes:
    """A digest that is equal for equal requests, so that remembering one does not take the room of its prompt."""
    return hashlib.sha256(repr(request).encode()).digest()


class Turns:
    """All turns in flight, and those that ended lately, by request id. Event loop only."""

    def __init__(
        self,
        engine: EngineThread,
        stats: ServiceStats,
        *,
        on_start: Callable[[Session], None],
        on_end: Callable[[Session, FinishReason | None], None],
        observers: Sequence[TurnObserver] = (),
    ) -> None:
        """`on_end` is told when a session has no turn any more, and why; None when the turn never started.

        `observers` are told of every turn that has ended; what they do wrong is logged, and harms nobody.
        """
        self._engine = engine
        self._stats = stats
        self._on_start = on_start
        self._on_end = on_end
        self._observers = observers
        self._active: dict[str, ActiveTurn] = {}
        self._recent = RecentTurns()

    def __len__(self) -> int:
        return len(self._active)

    @property
    def queued(self) -> int:
        return sum(not turn.started for turn in self._active.values())

    @property
    def running(self) -> int:
        return sum(turn.started for turn in self._active.values())

    def find(self, request_id: str) -> ActiveTurn | None:
        """The turn, in flight or ended lately."""
        return self._active.get(request_id) or self._recent.find(request_id)

    def known(self, claim: Claim) -> ActiveTurn | None:
        """The turn that this very request has begun before. Raises RequestIdReused when it was another request."""
        turn = self.find(claim.request_id)
        if turn and (turn.claim.caller, turn.claim.content) != (claim.caller, claim.content):
            raise RequestIdReused(f"request id {claim.request_id!r} came before with other content")
        return turn

    def begin(self, session: Session, claim: Claim) -> ActiveTurn:
        """Make this the turn in flight of a session that has none."""
        turn = ActiveTurn(
            claim, session, start=session.position, prompt_end=session.position, number=len(session.turns)
        )
        turn.stream = TurnStream(claim.output, on_event=partial(self._see, turn), on_room=self._poke)
        session.active = self._active[claim.request_id] = turn
        return turn

    @contextmanager
    def reading(self, turn: ActiveTurn, after: int, time_remaining: Callable[[], float | None]) -> Iterator[Reader]:
        """The events from `after + 1` on. Whoever leaves last leaves the turn to itself, for as long as it may be.

        Raises PositionBeyondEnd.
        """
        reader = turn.stream.read(after)
        if turn.grace:
            turn.grace.cancel()
        try:
            yield reader
        finally:
            reader.close()
            if not turn.stream.has_readers:
                self._leave_alone(turn, time_remaining())
                self._count_waste(turn)

    def _leave_alone(self, turn: ActiveTurn, time_remaining: float | None) -> None:
        """Nobody reads the turn; whoever comes back for it comes before the deadline of the call that has gone."""
        wait, cause = turn.claim.detach_grace, CancelCause.DISCONNECT
        if time_remaining is not None and time_remaining <= wait:
            wait, cause = max(time_remaining, 0.0), CancelCause.DEADLINE
        if wait and not turn.ended.is_set():
            turn.grace = asyncio.get_running_loop().call_later(wait, self.leave, turn, cause)
        else:
            self.leave(turn, cause)

    def forget(self, session: Session) -> None:
        """The session is deleted: nothing that was said in it is repeated to anybody."""
        self._recent.forget(session)
        if session.active:
            session.active.forgotten = True

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
        turn.cause = cause
        if turn.submitted:
            cancel = self._engine.engine.jobs.cancel
            self._engine.post(partial(cancel, turn.request_id, cause, policy=policy, reason=reason))
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
                turn.start, turn.prompt_end = session.position, session.position + event.prompt_tokens
                session.position = event.position + event.prompt_tokens
                self._on_start(session)
            case Tokens():
                session.position = event.position + len(event.token_ids)
            case Finished():
                self._record(turn, event.position, event.finish_reason, dropped=event.dropped_tokens)
                event = turn.finished = event.with_etag(session.etag)
                self._end(turn, event)
            case Failed():
                self._record(turn, event.position, FinishReason.ERROR)
                if isinstance(event.error, QueueTimeout):
                    self._stats.rejections.add("queue_timeout")
                elif isinstance(event.error, KvBudgetImpossible):
                    self._stats.rejections.add("kv_budget")
                self._end(turn, event)
            case _:
                pass
        return event

    def _record(self, turn: ActiveTurn, position: int, reason: FinishReason, *, dropped: int = 0) -> None:
        """Note where the turn lies in the ledger; one that was rolled back whole lies nowhere and changed nothing."""
        session = turn.session
        session.position = position
        end = position + dropped
        if end > turn.start:
            generated_start = min(turn.prompt_end, end)
            session.turns.append(TurnRecord(turn.request_id, turn.start, generated_start, end, reason))
        if dropped:
            session.turns = turns_slid(session.turns, session.settings.keep_tokens or 0, dropped)
        if dropped or end > turn.start:
            session.changed()
        else:
            session.touch()

    def _end(self, turn: ActiveTurn, event: Finished | Failed) -> None:
        """The one place where a session becomes free again."""
        del self._active[turn.request_id]
        turn.session.active = None
        if turn.grace:
            turn.grace.cancel()
        if _is_repeatable(turn, event):
            self._recent.add(turn)
        turn.ended.set()
        if not turn.stream.has_readers:
            self._count_waste(turn)
        self._report(turn, event)
        self._on_end(turn.session, _reason(event) if turn.started else None)

    def _report(self, turn: ActiveTurn, end: Finished | Failed) -> None:
        if self._observers:
            report = report_of(turn, end, now=self._engine.engine.clock())
            for observer in self._observers:
                void(partial(observer, report))
        turn.given = None

    def _count_waste(self, turn: ActiveTurn) -> None:
        """Once, when the turn has ended and nobody reads it."""
        if turn.finished and not turn.waste_counted:
            turn.waste_counted = True
            self._stats.wasted_tokens.add(reason_of(turn), amount=wasted_tokens(turn, turn.finished))

    def _poke(self) -> None:
        """A paused sequence may go on: wake the engine."""
        self._engine.post(_nothing)


def _reason(event: Finished | Failed) -> FinishReason:
    return event.finish_reason if isinstance(event, Finished) else FinishReason.ERROR


def _is_repeatable(turn: ActiveTurn, event: Finished | Failed) -> bool:
    """Is the turn to be remembered? One that came to nothing by no will of its caller is better run again."""
    if turn.forgotten:
        return False
    came_to_nothing = isinstance(event, Failed) or turn.cause in (CancelCause.DISCONNECT, CancelCause.DEADLINE)
    return event.position > turn.start or not came_to_nothing


def _nothing() -> None:
    pass
