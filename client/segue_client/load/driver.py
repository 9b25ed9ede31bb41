"""Sends what a workload asks for, when it asks for it, and writes down what is seen.

Open loop: arrivals come from outside, whatever the server does. Closed loop: so many users, each waiting for its
answer. In both the latency of a turn counts from the moment it was due: a tester that is held up, by itself or by the
server, must not leave out those who would have waited (coordinated omission).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import Protocol, TypeVar

from segue_client.load.results import Outcome, Point, Request
from segue_client.load.self_check import SelfWatch
from segue_client.load.summary import Objectives, judge, summarize_requests
from segue_client.load.target import Clock, Conversation, Observation, Target, TargetError
from segue_client.load.workload import Plan, Turn

T = TypeVar("T")

AFTER_FAILURE = 0.25  # seconds a user of a closed loop waits: a server that refuses at once must not be hammered


class Listener(Protocol):
    """Is told what happens while it happens."""

    def point_started(self, label: str) -> None: ...
    def sent(self) -> None: ...
    def ended(self, request: Request) -> None: ...
    def point_ended(self, point: Point) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """How long a point lasts.

    Attributes:
        warm_up: seconds before requests count.
        duration: seconds in which they do; None = until `count` sessions have ended.
        count: sessions at most.
        drain: seconds that running requests get at the end before they are cut off.
    """

    warm_up: float
    duration: float | None
    count: int | None
    drain: float


@dataclass(frozen=True, slots=True)
class Phase:
    """A point while it is measured."""

    index: int
    span: Span
    start: float  # of the load

    @property
    def begins(self) -> float:
        """When requests begin to count."""
        return self.start + self.span.warm_up

    @property
    def until(self) -> float:
        """When no more are sent."""
        return math.inf if self.span.duration is None else self.begins + self.span.duration

    @property
    def cut(self) -> float:
        """When those that still run are cut off."""
        return self.until + self.span.drain


@dataclass(frozen=True, slots=True)
class Slot:
    """Whose turn it is, for the records."""

    phase: Phase
    group: str
    user: int
    session: str
    number: int = 0  # of the turn


class Driver:
    """Runs load against a target and keeps the records."""

    def __init__(self, target: Target, clock: Clock, timeout: float, listener: Listener) -> None:
        self.points: list[Point] = []
        self.requests: list[Request] = []
        self.notes: list[str] = []
        self.target = target
        self.clock = clock
        self._timeout = timeout
        self._listener = listener

    @asynccontextmanager
    async def point(self, template: Point, span: Span, objectives: Objectives | None = None) -> AsyncIterator[Phase]:
        """A point for as long as the block lasts.

        Left by an error, it leaves no trace. Cancelled, it is kept with what has come until then, unless it was to be
        judged: a verdict of half a point would be none.

        Args:
            template: says what is varied; the rest is filled in here.
            span: how long it lasts.
            objectives: what it is judged by, if it is.
        """
        self._listener.point_started(template.label)
        phase = Phase(len(self.points), span, self.clock.now())
        first, watch = len(self.requests), SelfWatch()
        try:
            async with watch:
                yield phase
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and objectives is None and _counted_ok(self.requests[first:]):
                self._finish(template, phase, first, watch, None)
                self.notes.append(f"{template.label}: cut short {self.clock.now() - phase.start:.1f} s after its start")
            else:
                del self.requests[first:]
            raise
        self._finish(template, phase, first, watch, objectives)

    def _finish(
        self, template: Point, phase: Phase, first: int, watch: SelfWatch, objectives: Objectives | None
    ) -> None:
        """Makes the point of the requests since `first`."""
        mine = self.requests[first:]
        point = replace(
            template,
            start=phase.begins,
            end=max(phase.begins, min(phase.until, self.clock.now())),
            tester=watch.check([request for request in mine if not request.warm_up]),
        )
        if objectives is not None:
            point = replace(point, verdict=judge(summarize_requests(mine, point), objectives))
        if all(request.warm_up for request in mine):
            due = f"all {len(mine)} were due within its warm-up of {phase.span.warm_up:g} s"
            self.notes.append(f"{template.label}: there is no request that counts; {due if mine else 'none was due'}")
        self.points.append(point)
        self._listener.point_ended(point)

    async def open_loop(self, phase: Phase, arrivals: Iterable[float], plans: Iterator[Plan]) -> None:
        """Begins a session at each moment, counted from the start of the phase, until the phase is over."""
        due_times = takewhile(lambda due: due < phase.until, (phase.start + moment for moment in arrivals))
        running: set[asyncio.Task[bool]] = set()
        async with asyncio.TaskGroup() as group:
            for user, due in enumerate(islice(due_times, phase.span.count)):
                await self._sleep_until(due)
                task = group.create_task(self.converse(phase, next(plans), user, due))
                running.add(task)
                task.add_done_callback(running.discard)
            await self._drain(running, phase)

    async def closed_loop(self, phase: Phase, users: int, plans: Iterator[Plan]) -> None:
        """So many users who begin a session when their last one has ended, until the phase is over."""
        taken = islice(plans, phase.span.count)
        async with asyncio.TaskGroup() as group:
            running = {group.create_task(self._user(phase, user, taken)) for user in range(users)}
            await self._drain(running, phase)

    async def _user(self, phase: Phase, user: int, plans: Iterator[Plan]) -> None:
        while (due := self.clock.now()) < phase.until and (plan := next(plans, None)) is not None:
            if not await self.converse(phase, plan, user, due):
                await asyncio.sleep(AFTER_FAILURE)

    async def _drain(self, running: Collection[asyncio.Task[T]], phase: Phase) -> None:
        timeout = None if math.isinf(phase.cut) else max(phase.cut - self.clock.now(), 0.0)
        if running:
            _, late = await asyncio.wait(running, timeout=timeout)
            for task in late:
                task.cancel()

    async def _sleep_until(self, due: float) -> None:
        await asyncio.sleep(max(due - self.clock.now(), 0.0))

    async def converse(self, phase: Phase, plan: Plan, user: int, due: float) -> bool:
        """Runs a session; it ends early with the phase, and with a turn that fails. Whether all went well."""
        conversation = self.target.conversation(plan)
        slot = Slot(phase, plan.group, user, f"{phase.index}-{plan.number}")
        try:
            for number, turn in enumerate(plan.turns):
                if number:
                    due = self.clock.now() + turn.think
                    if due >= phase.until:
                        return True
                    await self._sleep_until(due)
                branches = plan.fork if number == len(plan.turns) - 1 else 0
                if not await self._go_on(replace(slot, number=number), conversation, turn, due, branches):
                    return False
        finally:
            await conversation.close()
        return True

    async def _go_on(self, slot: Slot, conversation: Conversation, turn: Turn, due: float, branches: int) -> bool:
        if branches:
            return await self._branch_out(slot, conversation, turn, due, branches)
        return await self.turn(slot, conversation, turn, due)

    async def _branch_out(self, slot: Slot, conversation: Conversation, turn: Turn, due: float, count: int) -> bool:
        """Runs the turn in so many forks at once; the time of the fork is part of their latencies."""
        sent = self.clock.now()
        try:
            branches = await conversation.fork(count)
        except TargetError as error:
            self._record(slot, due, sent, Observation(), error)
            return False
        try:
            turns = (self._branch(slot, turn, due, index, branch) for index, branch in enumerate(branches))
            return all(await asyncio.gather(*turns))
        finally:
            for branch in branches:
                await branch.close()

    async def _branch(self, slot: Slot, turn: Turn, due: float, index: int, conversation: Conversation) -> bool:
        own = replace(turn, prompt=replace(turn.prompt, name=f"{turn.prompt.name}/{index}"))
        return await self.turn(replace(slot, session=f"{slot.session}-{index}"), conversation, own, due)

    async def turn(self, slot: Slot, conversation: Conversation, turn: Turn, due: float) -> bool:
        """Runs one turn and records it, however it ends. Whether it went well."""
        seen, sent = Observation(), self.clock.now()
        self._listener.sent()
        try:
            async with asyncio.timeout(self._timeout):
                await conversation.turn(turn, seen)
        except (TargetError, TimeoutError) as error:
            self._record(slot, due, sent, seen, error)
            return False
        except asyncio.CancelledError as error:
            self._record(slot, due, sent, seen, error)
            raise
        self._record(slot, due, sent, seen, None)
        return True

    def _record(self, slot: Slot, due: float, sent: float, seen: Observation, failure: BaseException | None) -> None:
        request = Request(
            point=slot.phase.index,
            group=slot.group,
            warm_up=due < slot.phase.begins,
            user=slot.user,
            session=slot.session,
            turn=slot.number,
            context=seen.context,
            history_tokens=seen.history_tokens,
            intended=due,
            sent=sent,
            token_times=tuple(seen.token_times),
            end=self.clock.now(),
            prompt_tokens=seen.prompt_tokens,
            generated_tokens=seen.generated_tokens,
            computed_tokens=seen.computed_tokens,
            reused_tokens=seen.reused_tokens,
            restored_tokens=seen.restored_tokens,
            outcome=_outcome(failure),
            finish_reason=seen.finish_reason,
            error=str(failure) if isinstance(failure, TargetError) else "",
        )
        self.requests.append(request)
        self._listener.ended(request)


def _counted_ok(requests: Iterable[Request]) -> bool:
    return any(request.outcome is Outcome.OK and not request.warm_up for request in requests)


def _outcome(failure: BaseException | None) -> Outcome:
    match failure:
        case None:
            return Outcome.OK
        case TargetError():
            return Outcome.REFUSED if failure.refused else Outcome.FAILED
        case TimeoutError():
            return Outcome.TIMEOUT
        case _:
            return Outcome.CUT
