"""The engine's turns as the ledger's file has them: any mixture of turns, ends, policies, slides and lost writes."""

import asyncio
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.server.fakes import GREEDY, FakeRunner, ListSink

from segue_server.engine import Engine
from segue_server.engine_thread import EngineThread
from segue_server.errors import LedgerUnavailable
from segue_server.events import Failed, Finished, Started
from segue_server.jobs import TurnSpec
from segue_server.ledger.gate import LedgerGate
from segue_server.ledger.journal import Journal
from segue_server.ledger.records import Record, SessionCreated
from segue_server.ledger.schema import LedgerError
from segue_server.ledger.store import LedgerStore
from segue_server.requests import CancelCause, CommitPolicy, SessionSettings

SESSIONS = ("a", "b", "c")


class FlakyStore(LedgerStore):
    """Fails a share of its writes: one of any ten when that is a tenth. The seed says which of the first ones."""

    def __init__(self, path: Path, share: float, seed: int) -> None:
        self.share = 0.0
        self._due = random.Random(seed).random()
        super().__init__(path)
        self.share = share

    def apply(self, records: Sequence[Record]) -> None:
        self._due += self.share
        if self._due >= 1:
            self._due -= 1
            raise LedgerError(self.path, "database or disk is full")
        super().apply(records)


class Driver:
    """Turns on three sessions, one after the other each; says what its clients have been told."""

    def __init__(self, engine: Engine, thread: EngineThread, seed: int) -> None:
        self.engine, self.thread = engine, thread
        self.random = random.Random(seed)
        self.told: dict[str, int] = dict.fromkeys(SESSIONS, 0)  # the ledger's length after the last turn
        self.turns: dict[str, list[str]] = {name: [] for name in SESSIONS}
        self.lost = 0
        self._numbers = itertools.count()

    async def converse(self, name: str, turns: int) -> None:
        for _ in range(turns):
            sink = ListSink()
            request_id = f"{name}{next(self._numbers)}"
            self.thread.post(lambda s=sink, r=request_id: self.engine.jobs.submit(self.spec(name, r, s)))  # type: ignore[misc]
            if self.random.random() < 0.4:
                await asyncio.sleep(self.random.uniform(0, 0.01))
                self.thread.post(lambda r=request_id: self.engine.jobs.cancel(r, CancelCause.RPC))  # type: ignore[misc]
            async with asyncio.timeout(10.0):
                while not sink.done:  # noqa: ASYNC110 - a sink has no event to wait for
                    await asyncio.sleep(0.001)
            end = sink.events[-1]
            assert isinstance(end, Finished | Failed)
            if isinstance(end, Failed):
                assert isinstance(end.error, LedgerUnavailable)
                self.lost += 1
            elif end.position > (self.told[name] if not end.dropped_tokens else -1):
                self.turns[name].append(request_id)
            self.told[name] = end.position
            assert len(sink.all(Started)) <= 1

    def spec(self, name: str, request_id: str, sink: ListSink) -> TurnSpec:
        pick = self.random
        return TurnSpec(
            request_id=request_id,
            session_id=name,
            prompt=[pick.randrange(50) for _ in range(pick.randrange(1, 12))],
            arrival=self.engine.clock(),
            sink=sink,
            max_tokens=pick.randrange(1, 30),
            max_context_tokens=80 if name == "c" else 4000,
            keep_tokens=5 if name == "c" else None,
            sampling=GREEDY,
            commit_policy=pick.choice(list(CommitPolicy)),
        )


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("share", [0.0, 0.1], ids=["sound disk", "one write in ten fails"])
async def test_the_file_is_the_engines_ledger(tmp_path: Path, seed: int, share: float) -> None:
    """After any turns on three sessions, one of them sliding, the next server finds each ledger token for token."""
    journal, runner = Journal(), FakeRunner(200)
    store = FlakyStore(tmp_path / "ledger.db", 0.0, seed)
    engine = Engine(runner, max_running=2, step_tokens=16, journal=journal)
    thread = EngineThread(engine, on_crash=lambda _: None, ledger=LedgerGate(store, journal, revoke=engine.jobs.revoke))
    thread.start()
    for name in SESSIONS:
        await thread.record(
            SessionCreated(session_id=name, settings=SessionSettings(), create_time=1.0, last_used_time=1.0)
        )
        await thread.call(lambda n=name: engine.open(n, priority=0, pinned=False))  # type: ignore[misc]
    store.share = share
    driver = Driver(engine, thread, seed)
    await asyncio.gather(*(driver.converse(name, 12) for name in SESSIONS))
    store.share = 0.0
    ledgers = await thread.call(lambda: {name: list(engine.tokens(name)) for name in SESSIONS})
    await thread.stop()
    assert not runner.faults
    assert (driver.lost > 0) == (share > 0)
    found = {s.session_id: s for s in LedgerStore(tmp_path / "ledger.db").recover()}
    for name in SESSIONS:
        assert list(found[name].tokens) == ledgers[name]
        assert len(ledgers[name]) == driver.told[name]
        if name != "c":
            assert [turn.request_id for turn in found[name].turns] == driver.turns[name]
            assert found[name].version == len(driver.turns[name])
