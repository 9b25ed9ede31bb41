"""Between engine, file and event loop: no event before its records, one clear end for every turn when a write fails."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.server.fakes import FakeRunner, ListSink

from segue_server.engine import Engine
from segue_server.engine_thread import EngineThread
from segue_server.errors import EngineError, LedgerUnavailable
from segue_server.events import Failed, Finished, Tokens
from segue_server.ledger.gate import LedgerGate
from segue_server.ledger.journal import Journal, TurnRef
from segue_server.ledger.records import (
    Record,
    SessionCreated,
    SessionDeleted,
    SessionExpired,
    Slid,
    TokensAppended,
    TurnBegan,
    TurnEnded,
)
from segue_server.ledger.schema import LedgerError
from segue_server.ledger.store import LedgerStore
from segue_server.ledger.writer import LedgerWriter
from segue_server.requests import FinishReason, SessionSettings

STREAMS = 32
STEP = 0.030  # seconds of a decode step that the ledger may take 2 % of


def created(session_id: str) -> SessionCreated:
    return SessionCreated(session_id=session_id, settings=SessionSettings(), create_time=1.0, last_used_time=1.0)


class Store(LedgerStore):
    """Can be held up, and can fail."""

    def __init__(self, path: Path) -> None:
        self.batches: list[list[Record]] = []
        self.failure: Exception | None = None
        self.free = threading.Event()
        self.free.set()
        self.entered = threading.Event()
        super().__init__(path)
        self.batches.clear()
        self.entered.clear()

    def apply(self, records: Sequence[Record]) -> None:
        self.entered.set()
        self.free.wait(5.0)
        if self.failure:
            raise self.failure
        super().apply(records)
        self.batches.append(list(records))

    def full(self) -> None:
        self.failure = LedgerError(self.path, "database or disk is full")


def reopened(path: Path) -> dict[str, tuple[list[int], list[tuple[int, int, FinishReason]]]]:
    """Tokens and turns of each session, as the next server finds them."""
    store = LedgerStore(path)
    found = {
        s.session_id: (list(s.tokens), [(t.start, t.end, t.finish_reason) for t in s.turns]) for s in store.recover()
    }
    store.close()
    return found


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "ledger.db")


# The writer alone


class WriterBench:
    """A writer whose payloads are numbers."""

    def __init__(self, store: Store, **options: int) -> None:
        self.delivered: list[int] = []
        self.losses = threading.Semaphore(0)
        self.writer: LedgerWriter[int] = LedgerWriter(
            store, deliver=self.delivered.append, on_loss=self.losses.release, **options
        )
        self.writer.start()

    def put(self, payload: int, *records: Record) -> None:
        self.writer.put(records, payload)


def test_what_waits_is_written_in_one_transaction_and_nothing_is_delivered_before(store: Store) -> None:
    bench = WriterBench(store)
    store.free.clear()
    bench.put(0, created("s0"))
    store.entered.wait(5.0)
    for n in range(1, 10):
        bench.put(n, created(f"s{n}"))
    time.sleep(0.02)
    assert bench.delivered == []
    store.free.set()
    bench.writer.flush()
    assert bench.delivered == list(range(10))
    assert [len(batch) for batch in store.batches] == [1, 9]
    bench.writer.close()
    assert len(reopened(store.path)) == 10


def test_a_step_without_records_keeps_its_place_and_costs_no_transaction(store: Store) -> None:
    bench = WriterBench(store)
    bench.put(1)
    bench.writer.flush()
    assert (bench.delivered, store.batches) == ([1], [])
    store.free.clear()
    bench.put(2, created("s"))
    bench.put(3)
    time.sleep(0.02)
    assert bench.delivered == [1]
    store.free.set()
    bench.writer.flush()
    assert bench.delivered == [1, 2, 3]
    bench.writer.close()


def test_a_file_that_falls_behind_holds_the_engine_up(store: Store) -> None:
    """Back-pressure: at most `max_waiting` steps wait beside the one that is written."""
    bench = WriterBench(store, max_waiting=4)
    store.free.clear()
    bench.put(0, created("s"))
    store.entered.wait(5.0)
    for n in range(1, 5):
        bench.put(n)
    blocked = threading.Thread(target=bench.put, args=(5,))
    blocked.start()
    blocked.join(0.05)
    assert blocked.is_alive()
    store.free.set()
    blocked.join(5.0)
    bench.writer.flush()
    assert bench.delivered == [0, 1, 2, 3, 4, 5]
    bench.writer.close()


def test_after_a_failure_everything_comes_back_in_order_and_repairs_go_first(store: Store) -> None:
    """What came behind a failed write builds on what is missing; it is handed back with it."""
    bench = WriterBench(store)
    bench.put(0, created("s"))
    bench.writer.flush()
    store.full()
    bench.put(1, TokensAppended("s", 0, [1]))
    assert bench.losses.acquire(timeout=5.0)
    bench.put(2, TokensAppended("s", 1, [2]))
    lost = bench.writer.take_lost()
    assert lost is not None
    assert lost.payloads == [1, 2]
    assert "database or disk is full" in str(lost.error)
    assert str(store.path) not in str(lost.error), "callers learn the cause, not where the file lies"
    store.failure = None
    repair = created("repair")
    bench.writer.resume([repair])
    bench.put(3, TokensAppended("s", 0, [7]))
    bench.writer.flush()
    assert bench.delivered == [0, 3]
    assert store.batches[1][0] is repair
    assert bench.writer.take_lost() is None
    assert bench.writer.stats.failures == 1
    bench.writer.close()
    assert reopened(store.path)["s"][0] == [7]


@pytest.mark.parametrize("closes", [False, True], ids=["while idle", "at the end"])
def test_repairs_are_tried_until_they_are_written(store: Store, monkeypatch: pytest.MonkeyPatch, closes: bool) -> None:
    monkeypatch.setattr("segue_server.ledger.writer.RETRY_INTERVAL", 60.0 if closes else 0.01)
    bench = WriterBench(store)
    store.full()
    bench.put(0, created("s"))
    assert bench.losses.acquire(timeout=5.0)
    bench.writer.take_lost()
    bench.writer.resume([created("repair")])
    time.sleep(0.03)
    store.failure = None
    if not closes:
        deadline = time.monotonic() + 5.0
        while not store.batches and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(store.batches) == 1
    bench.writer.close()
    assert list(reopened(store.path)) == ["repair"]


def test_a_fault_of_the_store_itself_is_a_failed_write_and_not_a_dead_thread(store: Store) -> None:
    bench = WriterBench(store)
    store.failure = ZeroDivisionError("a bug")
    bench.put(0, created("s"))
    assert bench.losses.acquire(timeout=5.0)
    lost = bench.writer.take_lost()
    assert lost is not None
    assert str(lost.error) == "the server cannot write its ledger: internal error"
    store.failure = None
    bench.writer.resume([])
    bench.put(1, created("s"))
    bench.writer.close()
    assert bench.delivered == [1]


def test_an_idle_writer_takes_no_time(store: Store) -> None:
    bench = WriterBench(store)
    bench.put(0, created("s"))
    bench.writer.flush()
    time.sleep(0.02)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.02
    bench.writer.close()


def test_a_step_of_32_streams_costs_under_two_percent(tmp_path: Path) -> None:
    """The figure: processor time of one step in which 32 sequences append a token each, turns ending included."""
    store = LedgerStore(tmp_path / "ledger.db")
    store.apply([created(f"s{n}") for n in range(2000)])
    names = [f"s{n * 50}" for n in range(STREAMS)]
    lengths = dict.fromkeys(names, 0)
    began = dict.fromkeys(names, 0)
    store.apply([TurnBegan(name, "r", 0, []) for name in names])
    cpu: list[float] = []
    wall: list[float] = []
    for step in range(1500):
        records: list[Record] = [TokensAppended(name, length, [step]) for name, length in lengths.items()]
        lengths = {name: length + 1 for name, length in lengths.items()}
        for n, name in enumerate(names):
            if lengths[name] - began[name] >= 150 + 3 * n:
                began[name] = end = lengths[name]
                records += [TurnEnded(name, end, FinishReason.EOS, 1.0), TurnBegan(name, f"r{end}", end, [])]
        cpu_began, wall_began = time.thread_time(), time.perf_counter()
        store.apply(records)
        cpu.append(time.thread_time() - cpu_began)
        wall.append(time.perf_counter() - wall_began)
    store.close()
    mean, median = sum(cpu) / len(cpu), sorted(wall)[len(wall) // 2]
    print(
        f"\n{STREAMS} tokens a step: {mean * 1e6:.0f} us of processor time, {median * 1e6:.0f} us median on the clock"
    )
    print(f"= {mean / STEP:.2%} of a step of {STEP * 1e3:.0f} ms; the slowest took {max(wall) * 1e3:.1f} ms")
    assert mean < 0.02 * STEP


# Engine, writer and loop together


class ScriptedEngine(Engine):
    """Computes nothing; does what a test posts: notes records and emits events. Knows how long each ledger is."""

    def __init__(self, journal: Journal) -> None:
        super().__init__(FakeRunner(8), max_running=1, step_tokens=64)
        self.journal = journal
        self.lengths: dict[str, int] = {}
        self.revoked: list[tuple[str, int]] = []
        self.crash: BaseException | None = None

    def step(self) -> bool:
        if self.crash:
            raise self.crash
        return False

    def revoke(self, session_id: str, start: int) -> None:
        self.revoked.append((session_id, start))
        self.lengths[session_id] = start
        self.journal.append(TurnEnded(session_id, start, FinishReason.ERROR, 1.0))

    def begin(self, turn: TurnRef, prompt: list[int]) -> None:
        self.journal.append(TurnBegan(turn.session_id, "r", turn.start, prompt), turn)
        self.lengths[turn.session_id] = turn.start + len(prompt)

    def emit(self, turn: TurnRef, token: int, *, durable: bool = True) -> None:
        position = self.lengths.setdefault(turn.session_id, 0)
        self.lengths[turn.session_id] += 1
        if durable:
            self.journal.append(TokensAppended(turn.session_id, position, [token]), turn)
        self.jobs.emit(turn.sink, Tokens(position, (token,), ""))

    def end(self, turn: TurnRef) -> None:
        end = self.lengths[turn.session_id]
        self.journal.append(TurnEnded(turn.session_id, end, FinishReason.EOS, 2.0), turn)
        self.jobs.emit(turn.sink, Finished(FinishReason.EOS, end))


class Bench:
    def __init__(self, store: Store) -> None:
        journal = Journal()
        self.store = store
        self.engine = ScriptedEngine(journal)
        self.gate = LedgerGate(store, journal, revoke=self.engine.revoke)
        self.crashes: list[BaseException] = []
        self.thread = EngineThread(
            self.engine,
            on_crash=self.crashes.append,
            ledger=self.gate,
        )

    async def until(self, sink: ListSink, events: int) -> None:
        async with asyncio.timeout(5.0):
            while len(sink.events) < events:  # noqa: ASYNC110 - a sink has no event to wait for
                await asyncio.sleep(0.001)


@asynccontextmanager
async def running(store: Store) -> AsyncIterator[Bench]:
    bench = Bench(store)
    bench.thread.start()
    yield bench
    await bench.thread.stop()


async def test_no_event_reaches_the_loop_before_its_tokens_are_in_the_file(store: Store) -> None:
    async with running(store) as bench:
        await bench.thread.record(created("s"))
        turn = TurnRef("s", 0, sink := ListSink())
        store.free.clear()
        bench.thread.post(lambda: bench.engine.begin(turn, [1, 2]))
        bench.thread.post(lambda: bench.engine.emit(turn, 3))
        await asyncio.sleep(0.03)
        assert sink.events == []
        store.free.set()
        await bench.until(sink, 1)
        assert store.batches[-1][-1] == TokensAppended("s", 2, [3])
        bench.thread.post(lambda: bench.engine.end(turn))
        await bench.until(sink, 2)
    assert reopened(store.path) == {"s": ([1, 2, 3], [(0, 3, FinishReason.EOS)])}


@pytest.mark.parametrize("ended", [False, True], ids=["still running", "ended in the lost step"])
async def test_a_turn_that_cannot_be_written_fails_and_leaves_no_trace(store: Store, ended: bool) -> None:
    """Its client has a prefix and then one error; memory and file are where they were before it; the next turn works.
    A turn that is not recorded goes on."""
    async with running(store) as bench:
        await bench.thread.record(created("s"))
        first = TurnRef("s", 0, done := ListSink())
        bench.thread.post(lambda: bench.engine.begin(first, [1]))
        bench.thread.post(lambda: bench.engine.end(first))
        await bench.until(done, 1)
        turn, other = TurnRef("s", 1, sink := ListSink()), TurnRef("ephemeral", 0, unrecorded := ListSink())
        bench.thread.post(lambda: bench.engine.begin(turn, [2]))
        bench.thread.post(lambda: bench.engine.emit(turn, 3))
        await bench.until(sink, 1)
        store.full()
        bench.thread.post(lambda: bench.engine.emit(turn, 4))
        bench.thread.post(lambda: bench.engine.emit(other, 5, durable=False))
        if ended:
            bench.thread.post(lambda: bench.engine.end(turn))
        await bench.until(sink, 2)
        await bench.until(unrecorded, 1)
        last = sink.events[-1]
        assert isinstance(last, Failed)
        assert isinstance(last.error, LedgerUnavailable)
        assert (last.error.code, last.error.reason) == ("UNAVAILABLE", "LEDGER_FAILED")
        assert last.position == 1
        assert bench.engine.revoked == [("s", 1)]
        store.failure = None
        again = TurnRef("s", 1, retry := ListSink())
        bench.thread.post(lambda: bench.engine.begin(again, [6]))
        bench.thread.post(lambda: bench.engine.end(again))
        await bench.until(retry, 1)
        assert len(sink.events) == 2
    assert reopened(store.path) == {"s": ([1, 6], [(0, 1, FinishReason.EOS), (1, 2, FinishReason.EOS)])}


async def test_a_call_hears_whether_its_record_is_in_the_file(store: Store) -> None:
    async with running(store) as bench:
        store.full()
        with pytest.raises(LedgerUnavailable, match="database or disk is full"):
            await bench.thread.record(created("s"))
        store.failure = None
        await bench.thread.record(created("s"), created("t"))
        assert store.batches[-1] == [created("s"), created("t")]
    assert set(reopened(store.path)) == {"s", "t"}


async def test_a_call_whose_outcome_is_written_returns_it_when_it_is_in_the_file(store: Store) -> None:
    """As a fork needs it: where it cuts is known on the engine's thread only."""
    async with running(store) as bench:
        store.free.clear()
        call = asyncio.ensure_future(bench.thread.commit(lambda: (42, [created("s")])))
        await asyncio.sleep(0.02)
        assert not call.done()
        store.free.set()
        assert await call == 42
        store.full()
        with pytest.raises(LedgerUnavailable):
            await bench.thread.commit(lambda: (42, [created("t")]))

        def fail() -> tuple[int, list[Record]]:
            raise KeyError("nothing")

        with pytest.raises(KeyError, match="nothing"):
            await bench.thread.commit(fail)
        store.failure = None
    assert set(reopened(store.path)) == {"s"}


async def test_a_slide_that_was_lost_with_its_turn_still_reaches_the_file(store: Store) -> None:
    """The engine's memory has lost those tokens for good; the next turn begins where both agree."""
    async with running(store) as bench:
        await bench.thread.record(created("s"), TokensAppended("s", 0, [1, 2, 3, 4]))
        store.full()
        turn = TurnRef("s", 2, sink := ListSink())

        def slide() -> None:
            bench.engine.journal.append(Slid("s", 1, 2), turn)
            bench.engine.begin(turn, [5])
            bench.engine.emit(turn, 6)

        bench.thread.post(slide)
        await bench.until(sink, 1)
        store.failure = None
        again = TurnRef("s", 2, retry := ListSink())
        bench.thread.post(lambda: bench.engine.begin(again, [7]))
        bench.thread.post(lambda: bench.engine.end(again))
        await bench.until(retry, 1)
    assert reopened(store.path) == {"s": ([1, 4, 7], [(2, 3, FinishReason.EOS)])}


async def test_what_has_changed_for_good_is_written_later(store: Store) -> None:
    """A session that has expired in memory is not back after the next start because the disk was full once."""
    async with running(store) as bench:
        await bench.thread.record(created("s"), created("t"))
        store.full()
        lost = asyncio.Event()
        loop = asyncio.get_running_loop()

        def answer(error: LedgerUnavailable | None) -> None:
            assert error
            loop.call_soon_threadsafe(lost.set)

        bench.thread.post(lambda: bench.gate.record([SessionExpired("s", 9.0)], answer, lasting=True))
        await asyncio.wait_for(lost.wait(), 5.0)
        with pytest.raises(LedgerUnavailable):
            await bench.thread.record(SessionDeleted("t"))
        store.failure = None
        await bench.thread.record(created("s"))
    assert set(reopened(store.path)) == {"s", "t"}


async def test_without_a_ledger_a_record_is_nothing() -> None:
    thread = EngineThread(ScriptedEngine(Journal()), on_crash=lambda _: None)
    thread.start()
    await thread.record(created("s"))
    assert await thread.commit(lambda: (42, [created("s")])) == 42
    await thread.stop()


async def test_what_was_published_before_a_crash_comes_before_the_news_of_it(store: Store) -> None:
    async with running(store) as bench:
        sink = ListSink()
        seen: list[int] = []
        bench.thread.on_failure(lambda _: seen.append(len(sink.events)))
        await bench.thread.record(created("s"))
        turn = TurnRef("s", 0, sink)
        store.free.clear()
        store.entered.clear()

        def last_words() -> None:
            bench.engine.begin(turn, [1])
            bench.engine.emit(turn, 2)

        bench.thread.post(last_words)
        await asyncio.to_thread(store.entered.wait, 5.0)
        bench.thread.post(lambda: setattr(bench.engine, "crash", MemoryError("gone")))
        waiting = asyncio.ensure_future(bench.thread.record(created("t")))
        await asyncio.sleep(0.02)
        store.free.set()
        with pytest.raises(EngineError):
            await waiting
        assert seen == [1]
        assert [type(crash) for crash in bench.crashes] == [MemoryError]
