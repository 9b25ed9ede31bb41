"""The engine's thread: calls in, events out, asleep when there is nothing to do."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from tests.server.fakes import GREEDY, FakeRunner, ListSink, greedy

from segue_server.engine import Engine
from segue_server.engine_thread import EngineThread
from segue_server.errors import EngineError, SegueError
from segue_server.events import Finished, Tokens
from segue_server.jobs import TurnSpec


class LoopSink(ListSink):
    """Sets `ended` with the last event; remembers the threads that delivered."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = asyncio.Event()
        self.threads: set[int] = set()

    def deliver(self, event: object) -> None:
        self.threads.add(threading.get_ident())
        super().deliver(event)  # type: ignore[arg-type]
        if self.done:
            self.ended.set()


class Bench:
    def __init__(self) -> None:
        self.runner = FakeRunner(64)
        self.engine = Engine(self.runner, max_running=4, step_tokens=64)
        self.crashes: list[BaseException] = []
        self.thread = EngineThread(self.engine, on_crash=self.crashes.append)
        self._steps = 0
        self._count = 0
        step = self.engine.step
        self.engine.step = self._counted(step)  # type: ignore[method-assign]

    def _counted(self, step: Callable[[], bool]) -> Callable[[], bool]:
        def counted() -> bool:
            self._steps += 1
            return step()

        return counted

    @property
    def steps(self) -> int:
        return self._steps

    def spec(self, sink: ListSink, *, max_tokens: int = 5, queue_timeout: float = float("inf")) -> TurnSpec:
        self._count += 1
        self.engine.open(f"s{self._count}", priority=0, pinned=False)
        return TurnSpec(
            request_id=f"r{self._count}",
            session_id=f"s{self._count}",
            prompt=list(range(9)),
            arrival=self.engine.clock(),
            sink=sink,
            max_tokens=max_tokens,
            max_context_tokens=900,
            sampling=GREEDY,
            queue_timeout=queue_timeout,
        )

    async def submit(self, sink: ListSink, **options: float) -> None:
        await self.thread.call(lambda: self.engine.jobs.submit(self.spec(sink, **options)))  # type: ignore[arg-type]


@asynccontextmanager
async def running() -> AsyncIterator[Bench]:
    bench = Bench()
    bench.thread.start()
    yield bench
    await bench.thread.stop()
    assert not bench.runner.faults


async def test_a_call_runs_on_the_engine_thread_and_returns_what_it_does() -> None:
    async with running() as bench:
        there = await bench.thread.call(threading.get_ident)
        assert there != threading.get_ident()
        assert await bench.thread.call(lambda: 41 + 1) == 42


async def test_a_call_that_raises_raises_here_and_a_post_that_raises_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise KeyError("nothing")

    async with running() as bench:
        with pytest.raises(KeyError, match="nothing"):
            await bench.thread.call(fail)
        bench.thread.post(fail)
        assert await bench.thread.call(lambda: 1) == 1, "the thread lives on"
    assert "a call that nobody waits for failed" in caplog.text


async def test_calls_keep_their_order() -> None:
    async with running() as bench:
        seen: list[int] = []
        for n in range(50):
            bench.thread.post(lambda n=n: seen.append(n))  # type: ignore[misc]
        await bench.thread.call(lambda: None)
        assert seen == list(range(50))


async def test_a_caller_that_gives_up_disturbs_nobody() -> None:
    async with running() as bench:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(bench.thread.call(lambda: time.sleep(0.05)), 0.01)
        assert await bench.thread.call(lambda: 2) == 2


async def test_events_arrive_on_the_loop_in_order() -> None:
    async with running() as bench:
        sink = LoopSink()
        await bench.submit(sink, max_tokens=20)
        await sink.ended.wait()
        assert sink.threads == {threading.get_ident()}
        assert sink.tokens == greedy(range(9), 20, 50)


async def test_a_sink_that_raises_costs_the_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ListSink):
        def deliver(self, event: object) -> None:
            raise ValueError(f"broken sink, lost {event}")

    async with running() as bench:
        sink = LoopSink()
        await bench.submit(Broken(), max_tokens=20)
        await bench.submit(sink, max_tokens=20)
        await sink.ended.wait()
        assert sink.tokens == greedy(range(9), 20, 50)
    assert "broken sink" in caplog.text


async def test_an_idle_engine_sleeps() -> None:
    async with running() as bench:
        sink = LoopSink()
        await bench.submit(sink)
        await sink.ended.wait()
        await asyncio.sleep(0.05)
        before, cpu = bench.steps, time.process_time()
        await asyncio.sleep(0.4)
        used = time.process_time() - cpu
        print(f"idle for 0.4 s: {bench.steps - before} wake-ups, {used * 1000:.1f} ms of CPU")
        assert bench.steps - before <= 1
        assert used < 0.1


async def test_a_paused_turn_sleeps_and_goes_on_as_soon_as_its_reader_has_room() -> None:
    async with running() as bench:
        sink = LoopSink()
        sink.full = True
        await bench.submit(sink, max_tokens=20)
        await asyncio.sleep(0.05)
        before = bench.steps
        await asyncio.sleep(0.2)
        assert bench.steps - before <= 1, "no busy waiting for a reader"
        sink.full = False
        began = time.monotonic()
        bench.thread.post(lambda: None)  # what TurnStream's on_room does
        await sink.ended.wait()
        assert time.monotonic() - began < 0.5
        assert sink.tokens == greedy(range(9), 20, 50)


async def test_a_deadline_is_met_though_nothing_can_be_computed() -> None:
    async with running() as bench:
        blockers = [LoopSink() for _ in range(4)]
        for blocker in blockers:
            blocker.full = True
            await bench.submit(blocker, max_tokens=5)
        late = LoopSink()
        began = time.monotonic()
        await bench.submit(late, queue_timeout=0.1)
        await late.ended.wait()
        assert 0.09 < time.monotonic() - began < 0.6


async def test_a_step_that_raises_is_not_a_crash() -> None:
    async with running() as bench:
        bench.runner.failures.append(RuntimeError("no memory"))
        sink = LoopSink()
        await bench.submit(sink)
        await sink.ended.wait()
        again = LoopSink()
        await bench.submit(again)
        await again.ended.wait()
        assert again.all(Tokens)
        assert bench.crashes == []


async def test_a_crash_ends_every_wait_and_is_told() -> None:
    """If the engine itself fails nothing must hang: neither calls, nor turns, nor stop()."""
    async with running() as bench:
        told: list[SegueError] = []
        bench.thread.on_failure(told.append)

        def crash() -> bool:
            time.sleep(0.02)  # so that the call below is in the inbox
            raise MemoryError("gone")

        bench.engine.step = crash  # type: ignore[method-assign]
        first = asyncio.ensure_future(bench.thread.call(lambda: 1))
        await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match="the engine has failed"):
            await asyncio.wait_for(bench.thread.call(lambda: 2), 2.0)
        assert await first == 1
        assert [type(error) for error in bench.crashes] == [MemoryError]
        assert [error.reason for error in told] == ["ENGINE_ERROR"]
        with pytest.raises(EngineError):
            await bench.thread.call(lambda: 3)
        bench.thread.post(lambda: None)


async def test_stop_lets_the_step_in_progress_end() -> None:
    bench = Bench()
    bench.thread.start()
    in_step, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        in_step.set()
        go_on.wait(2.0)

    bench.runner.before_step = hold
    sink = LoopSink()
    await bench.submit(sink, max_tokens=1)
    await asyncio.to_thread(in_step.wait, 2.0)
    stopping = asyncio.ensure_future(bench.thread.stop())
    await asyncio.sleep(0.02)
    assert not stopping.done()
    go_on.set()
    await stopping
    await asyncio.sleep(0)
    assert sink.all(Finished)
