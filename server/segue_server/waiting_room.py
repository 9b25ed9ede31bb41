"""Where a claim waits until its session is free: the bounds of the queue, and the busy policies. Event loop only."""

import asyncio

from segue_server.errors import QueueFull, QueueTimeout, Quota, SessionBusy
from segue_server.requests import BusyPolicy, CancelCause
from segue_server.sessions import ActiveTurn, Claim, Session
from segue_server.stats import ServiceStats
from segue_server.turns import Turns


class WaitingRoom:
    """Decides who may wait for a session with a turn in flight, and lets them wait."""

    def __init__(self, turns: Turns, stats: ServiceStats, *, max_running: int, max_queued: int) -> None:
        self._turns = turns
        self._stats = stats
        self._max_running = max_running
        self._max_queued = max_queued
        self.waiting = 0  # turns that wait for another one of their session

    async def wait_free(self, session: Session, claim: Claim) -> None:
        """Until the session has no turn in flight, or has begun this one for another call of the same request.

        Raises QueueFull, SessionBusy, or QueueTimeout after the claim's patience.
        """
        self._refuse_beyond_queue()
        if session.active is not None or session.moving is not None:
            await self._wait_behind(session, claim)

    def check_wait(self, session: Session, claim: Claim) -> None:
        """Would a claim be let in now, be it to wait? Raises QueueFull or SessionBusy, and counts nothing."""
        self._check_queue()
        if session.active:
            self._check_policy(session.active, claim)

    def _refuse_beyond_queue(self) -> None:
        try:
            self._check_queue()
        except QueueFull:
            self._stats.rejections.add("queue_full")
            raise

    def _check_queue(self) -> None:
        """Turns that have not started but find a free place at the next step are not waiting."""
        free = max(0, self._max_running - self._turns.running)
        if self._turns.queued + self.waiting >= self._max_queued + free:
            message = f"{self._max_queued} turns are waiting, and that is the limit"
            raise QueueFull(message, quota=Quota("queued_requests", self._max_queued))

    def _check_policy(self, active: ActiveTurn, claim: Claim) -> None:
        """Does the claim wait for this turn? One on its way out is waited for under every policy."""
        if claim.policy is BusyPolicy.REJECT and not active.leaving:
            message = f"session {active.session.session_id!r} has a turn in flight"
            raise SessionBusy(message, activeRequestId=active.request_id)

    async def _wait_behind(self, session: Session, claim: Claim) -> None:
        self.waiting += 1
        try:
            async with asyncio.timeout(claim.patience):
                await self._wait_for(session, claim)
        except TimeoutError:
            self._stats.rejections.add("queue_timeout")
            message = f"another turn of session {session.session_id!r} ran for longer than {claim.patience:g} s"
            raise QueueTimeout(message) from None
        finally:
            self.waiting -= 1

    async def _wait_for(self, session: Session, claim: Claim) -> None:
        """Until the session has no other turn in flight."""
        while session.moving is not None:
            if claim.policy is BusyPolicy.REJECT:
                raise SessionBusy(f"the KV of session {session.session_id!r} is being moved")
            await session.moving.wait()
        while (active := session.active) is not None and active.request_id != claim.request_id:
            if claim.policy is BusyPolicy.REPLACE:
                self._turns.leave(active, CancelCause.REPLACED)
            self._check_policy(active, claim)
            await active.ended.wait()
