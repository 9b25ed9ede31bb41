"""The experiments: what is varied, from point to point."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from segue_client.load.arrivals import Process, arrivals
from segue_client.load.bisection import Limits, RateSearch
from segue_client.load.driver import Driver, Phase, Slot, Span
from segue_client.load.results import ContextKind, Point, SelfCheck
from segue_client.load.summary import Objectives
from segue_client.load.target import Conversation, TargetError, Unsupported
from segue_client.load.workload import LONG, MAIN, STREAM, Plan, Prompt, Trace, Turn, Workload, plans

_NOT_YET = SelfCheck(cpu_share=0.0, loop_lag_p99=0.0, loop_lag_max=0.0, send_lag_p99=0.0, send_lag_max=0.0)


def template(
    label: str,
    *,
    history_tokens: int | None = None,
    context: ContextKind | None = None,
    streams: int | None = None,
    rate: float | None = None,
) -> Point:
    """A point that is not measured yet."""
    return Point(
        label=label,
        start=0.0,
        end=0.0,
        tester=_NOT_YET,
        history_tokens=history_tokens,
        context=context,
        streams=streams,
        rate=rate,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoop:
    """Arrivals from outside."""

    rate: float
    process: Process
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """So many users."""

    users: int


async def run(driver: Driver, workload: Workload, loop: OpenLoop | ClosedLoop, span: Span) -> None:
    """One point, of any workload in either loop."""
    made = plans(workload)
    if isinstance(loop, OpenLoop):
        async with driver.point(template(f"{loop.rate:g} arrivals/s", rate=loop.rate), span) as phase:
            await driver.open_loop(phase, arrivals(loop.process, loop.rate, loop.seed), made)
    else:
        async with driver.point(template(_streams(loop.users), streams=loop.users), span) as phase:
            await driver.closed_loop(phase, loop.users, made)


async def replay(driver: Driver, trace: Trace, span: Span) -> None:
    """One point, whose arrivals are those of the trace."""
    async with driver.point(template("trace"), span) as phase:
        await driver.open_loop(phase, trace.moments, plans(trace))


def _streams(count: int) -> str:
    return "1 stream" if count == 1 else f"{count} streams"


async def concurrency(driver: Driver, workload: Workload, streams: Sequence[int], span: Span) -> None:
    """One point for each number of streams that always run."""
    made = plans(workload)
    for count in streams:
        async with driver.point(template(_streams(count), streams=count), span) as phase:
            await driver.closed_loop(phase, count, made)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Streams that run all the time, and long prompts that come while they do."""

    streams: Workload
    users: int
    long: Workload
    arrivals: OpenLoop


async def mixed(driver: Driver, mix: Mix, span: Span) -> None:
    """Two points: the streams alone, and the same with long prompts among them."""
    streams = (replace(plan, group=STREAM) for plan in plans(mix.streams))
    long = (replace(plan, group=LONG) for plan in plans(mix.long))
    async with driver.point(template(f"{_streams(mix.users)} alone", streams=mix.users), span) as phase:
        await driver.closed_loop(phase, mix.users, streams)
    label = f"{_streams(mix.users)}, {mix.arrivals.rate:g} long prompts/s"
    point = template(label, streams=mix.users, rate=mix.arrivals.rate)
    async with driver.point(point, span) as phase, asyncio.TaskGroup() as group:
        due = arrivals(mix.arrivals.process, mix.arrivals.rate, mix.arrivals.seed)
        group.create_task(driver.closed_loop(phase, mix.users, streams))
        group.create_task(driver.open_loop(phase, due, long))


async def sweep(
    driver: Driver, workload: Workload, loop: OpenLoop, span: Span, limits: Limits, objectives: Objectives
) -> None:
    """Points at the rates that the search asks for, each with its verdict."""
    made, search = plans(workload), RateSearch(limits)
    while (rate := search.next_rate()) is not None:
        point = template(f"{rate:.3g} arrivals/s", rate=rate)
        async with driver.point(point, span, objectives) as phase:
            await driver.open_loop(phase, arrivals(loop.process, rate, loop.seed + phase.index), made)
        verdict = driver.points[-1].verdict
        search.tell(rate, held=verdict is not None and verdict.held)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextGrid:
    """Which histories are tried, and how.

    Attributes:
        histories: tokens.
        modes: where the next turn shall find the history's KV.
        turns: measured at each point, one after another.
        prompt_tokens: of each turn.
        output_tokens: of each turn.
        seed: of the prompts.
    """

    histories: Sequence[int]
    modes: Sequence[ContextKind]
    turns: int
    prompt_tokens: int
    output_tokens: int
    seed: int


async def context(driver: Driver, grid: ContextGrid) -> None:
    """One point for each history and mode: the same next turn, taken back after each time."""
    unsupported: dict[ContextKind, str] = {}
    await _warm_up(driver, grid)
    for history in grid.histories:
        modes = [mode for mode in _modes(grid, history) if mode not in unsupported]
        try:
            await _one_history(driver, grid, history, modes, unsupported)
        except TargetError as error:
            driver.notes.append(f"history {history:,} was left out: {error}")
    driver.notes.extend(unsupported.values())


async def _one_history(
    driver: Driver, grid: ContextGrid, history: int, modes: Sequence[ContextKind], unsupported: dict[ContextKind, str]
) -> None:
    async with _with_history(driver, grid, history) as conversation:
        for mode in modes:
            try:
                await _next_turns(driver, grid, conversation, history, mode)
            except Unsupported as error:
                unsupported[mode] = f"{mode} was left out: {error}"
            except TargetError as error:
                driver.notes.append(f"history {history:,}, {mode}, was left out: {error}")


def _modes(grid: ContextGrid, history: int) -> Sequence[ContextKind]:
    """Without a history there is nothing to bring back."""
    return grid.modes if history else [ContextKind.NEW]


def _plan(grid: ContextGrid, history: int) -> Plan:
    turn = Turn(Prompt(f"{grid.seed}/{history}/turn", grid.prompt_tokens), grid.output_tokens)
    return Plan(history, (turn, turn))  # two, so that the target opens a session


async def _warm_up(driver: Driver, grid: ContextGrid) -> None:
    """What only the first request pays, such as the connection, belongs to no point."""
    plan = _plan(grid, 0)
    async with _closing(driver.target.conversation(plan)) as conversation:
        phase = Phase(-1, _ONCE, driver.clock.now())
        await driver.turn(Slot(phase, MAIN, 0, ""), conversation, plan.turns[0], phase.start)
    del driver.requests[:]


_ONCE = Span(warm_up=0.0, duration=None, count=None, drain=0.0)


@asynccontextmanager
async def _with_history(driver: Driver, grid: ContextGrid, history: int) -> AsyncIterator[Conversation]:
    async with _closing(driver.target.conversation(_plan(grid, history))) as conversation:
        if history:
            await conversation.give_history(Prompt(f"{grid.seed}/{history}", history))
        yield conversation


@asynccontextmanager
async def _closing(conversation: Conversation) -> AsyncIterator[Conversation]:
    try:
        yield conversation
    finally:
        await conversation.close()


async def _next_turns(
    driver: Driver, grid: ContextGrid, conversation: Conversation, history: int, mode: ContextKind
) -> None:
    """Measures one point. Raises Unsupported before it has begun."""
    if history:
        await conversation.place(mode)
    label = f"history {history:,}, {mode}" if history else "no history"
    async with driver.point(template(label, history_tokens=history, context=mode), _ONCE) as phase:
        for number in range(grid.turns):
            if number and history:
                await conversation.place(mode)
            await _one_turn(driver, grid, conversation, phase, history, number)


async def _one_turn(
    driver: Driver, grid: ContextGrid, conversation: Conversation, phase: Phase, history: int, number: int
) -> None:
    name = f"{grid.seed}/{history}/{phase.index}/{number}"
    turn = Turn(Prompt(name, grid.prompt_tokens), grid.output_tokens)
    slot = Slot(phase, MAIN, 0, f"{phase.index}", number)
    if await driver.turn(slot, conversation, turn, driver.clock.now()):
        await conversation.take_back()
