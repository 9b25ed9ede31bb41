"""KV below the pool, through the engine: what comes back is what went, in small portions, and damage is recomputed."""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.fakes import EngineBench, ListSink, greedy

from segue_model.paging import PAGE_TOKENS
from segue_server.cache.segments import Tier
from segue_server.events import Finished, Started
from segue_server.mover import Offload
from segue_server.requests import CancelCause

SEGMENT = 2 * PAGE_TOKENS
TOKEN_BYTES = 64  # of the fake runner's canonical layout
MANY = 10_000 * TOKEN_BYTES


class OffloadBench(EngineBench):
    """An engine with tiers, whose disk is waited for after each step."""

    def __init__(self, pages: int, *, host: int = 0, disk: int = 0, folder: Path | None = None, **more: int) -> None:
        offload = Offload(
            host_bytes=host * TOKEN_BYTES, disk_bytes=disk * TOKEN_BYTES, disk_dir=folder, segment_tokens=SEGMENT
        )
        super().__init__(pages, offload=offload, **more)  # type: ignore[arg-type]
        self.store = self.engine.mover.store
        self.tiers = self.holdings.tiers

    def step(self, seconds: float = 0.01) -> bool:
        busy = super().step(seconds)
        self.store.settle()
        return busy

    def turn(self, session_id: str, prompt: list[int], new: int = 4) -> ListSink:
        sink = self.submit(prompt, session_id, max_tokens=new)
        self.run(sink)
        return sink

    def check_bytes(self) -> None:
        """The store holds what the integers say, and no byte more."""
        self.step()
        self.engine.mover.take_news()
        self.engine.mover.carry_out()
        self.store.settle()
        assert self.store.keys() == {s.key for tier in (Tier.HOST, Tier.DISK) for s in self.tiers.segments(tier)}
        assert self.store.host_bytes == self.tiers.use[Tier.HOST].used
        assert self.store.disk_bytes == self.tiers.use[Tier.DISK].used


@pytest.fixture
def benches(tmp_path: Path) -> Iterator[list[OffloadBench]]:
    made: list[OffloadBench] = []
    yield made
    for bench in made:
        bench.check()
        bench.check_bytes()
        bench.engine.shut_down()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "files outlive the server"


def offloaded(benches: list[OffloadBench], tmp_path: Path, *, host: int = 0, disk: int = 0) -> OffloadBench:
    """A pool of 12 pages in which session "a" (100 tokens) has had to make room for "b"."""
    bench = OffloadBench(12, host=host, disk=disk, folder=tmp_path)
    benches.append(bench)
    bench.open("a")
    bench.open("b")
    bench.turn("a", list(range(40)) + list(range(50)) + list(range(6)))
    assert len(bench.ledger("a")) == 100
    bench.turn("b", [7] * 150)
    return bench


@pytest.mark.parametrize(("host", "disk", "tier"), [(500, 0, Tier.HOST), (0, 500, Tier.DISK), (40, 500, Tier.DISK)])
def test_evicted_kv_comes_back_and_only_the_new_is_computed(
    benches: list[OffloadBench], tmp_path: Path, host: int, disk: int, tier: Tier
) -> None:
    bench = offloaded(benches, tmp_path, host=host, disk=disk)
    usage = bench.engine.figures.cache_usage("a")
    assert (usage.cached_tokens, usage.tier) == (99, tier)
    computed = sum(count for step in bench.runner.steps for _, count in step)
    ledger = bench.ledger("a")
    sink = bench.turn("a", [1, 2])
    started, finished = sink.one(Started), sink.one(Finished)
    assert sink.tokens == greedy([*ledger, 1, 2], 4, 50)
    assert started.restored_from is tier
    assert started.to_compute_tokens == 3
    used = finished.usage
    assert used.restored_tokens + used.session_reused_tokens + used.prefix_reused_tokens == 99
    assert used.restored_tokens >= SEGMENT
    assert used.context_tokens + used.prompt_tokens == 99 + used.computed_tokens
    assert finished.timings.restore > 0
    assert sum(c for step in bench.runner.steps for _, c in step) == computed + 3 + 3
    stats = bench.engine.stats
    assert stats.prompt_tokens.values["restored",] == used.restored_tokens
    assert sum(stats.time_to_first_token["restored"].counts) == 1
    assert stats.recomputed_tokens.values["evicted",] == 0
    assert bench.scheduler.evictor.cost.tokens == 0, "nothing was dropped"


def test_without_a_tier_below_it_vanishes(benches: list[OffloadBench], tmp_path: Path) -> None:
    bench = offloaded(benches, tmp_path)
    assert bench.turn("a", [1]).one(Started).restored_from is Tier.NONE
    assert bench.scheduler.evictor.cost.tokens > 0


@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_a_damaged_file_is_computed_again(benches: list[OffloadBench], tmp_path: Path, damage: str) -> None:
    bench = offloaded(benches, tmp_path, disk=500)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock")
    for path in files:
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 1
        path.write_bytes(data) if damage == "flip" else path.unlink()
    ledger = bench.ledger("a")
    sink = bench.turn("a", [1, 2])
    assert sink.tokens == greedy([*ledger, 1, 2], 4, 50)
    assert sink.one(Started).restored_from is Tier.NONE
    assert sink.one(Finished).usage.restored_tokens == 0
    assert bench.engine.stats.recomputed_tokens.values["evicted",] > 0
    assert bench.tiers.use[Tier.DISK].used == 0 or bench.tiers.slots.reach("a", 0) == 0


@pytest.mark.parametrize("position", [5, 31, 32, 33, 64, 90])
def test_a_rewound_session_restores_what_is_left_of_its_ledger(
    benches: list[OffloadBench], tmp_path: Path, position: int
) -> None:
    bench = offloaded(benches, tmp_path, host=500)
    bench.engine.rewind("a", position)
    ledger = bench.ledger("a")
    sink = bench.turn("a", [3, 3])
    assert sink.tokens == greedy([*ledger, 3, 3], 4, 50)
    assert sink.one(Started).to_compute_tokens == 2


def test_a_fork_restores_from_its_parents_copies(benches: list[OffloadBench], tmp_path: Path) -> None:
    bench = offloaded(benches, tmp_path, host=500)
    bench.engine.fork("a", ["c"], 70)
    held = bench.tiers.use[Tier.HOST].used
    bench.engine.close("a")
    assert bench.tiers.use[Tier.HOST].used < held, "what was the parent's alone is gone"
    sink = bench.turn("c", [3, 3])
    assert sink.tokens == greedy([*bench.ledger("c")[:70], 3, 3], 4, 50)
    assert sink.one(Started).to_compute_tokens == 2


def test_a_cancelled_restore_gives_everything_back(benches: list[OffloadBench], tmp_path: Path) -> None:
    bench = offloaded(benches, tmp_path, disk=500)
    bench.submit([1], "a")
    EngineBench.step(bench)
    bench.engine.jobs.cancel(bench.last_id, CancelCause.RPC)
    bench.step()
    bench.check_bytes()
    assert not any(s.asked for s in bench.tiers.segments(Tier.DISK))


def test_reading_from_disk_overlaps_with_the_queue(benches: list[OffloadBench], tmp_path: Path) -> None:
    bench = OffloadBench(12, disk=500, folder=tmp_path, max_running=1)
    benches.append(bench)
    bench.open("a")
    bench.open("b")
    bench.turn("a", [5] * 90)
    first = bench.submit([7] * 100, "b", max_tokens=30)
    while not first.tokens:
        bench.step()
    waiting = bench.submit([1], "a")
    bench.step()
    bench.step()
    assert not waiting.all(Started)
    kept = bench.holdings.sequences["a"].cache.computed
    assert bench.tiers.slots.reach("a", kept) == 93, "it has not made room"
    assert all(s.ready for s in bench.tiers.segments(Tier.DISK)), "what it waits for is not in memory yet"
    bench.run(first, waiting)


def test_between_the_watermarks_idle_kv_goes_down_before_anybody_needs_its_pages(benches: list[OffloadBench]) -> None:
    bench = OffloadBench(40, host=2000)
    benches.append(bench)
    for name in "abcd":
        bench.open(name, salt="one")
        bench.turn(name, [ord(name) % 50] * 140)
    while bench.step():
        pass
    assert bench.holdings.pool.held <= 0.9 * 40
    before = bench.runner.steps.copy()
    assert not bench.step()
    assert bench.runner.steps == before


def test_offload_goes_in_portions_so_that_a_running_stream_does_not_stall(benches: list[OffloadBench]) -> None:
    """The most positions that one step moves, printed: bounded, whatever is idle."""
    bench = OffloadBench(64, host=5000)
    benches.append(bench)
    for name in "abcd":
        bench.open(name)
        bench.turn(name, [ord(name) % 50] * 200)
    moved: list[int] = []
    export = bench.runner.export_pages
    bench.runner.export_pages = lambda pages, tokens: (moved.append(tokens), export(pages, tokens))[1]  # type: ignore[method-assign]
    bench.open("s")
    sink = bench.submit([1] * 300, "s", max_tokens=60)
    worst = 0
    while not sink.done:
        moved.clear()
        bench.step()
        worst = max(worst, sum(moved))
    print(f"\nmost positions moved in one step of at most 64 tokens: {worst}")
    assert 0 < worst <= 64 + 3 * SEGMENT


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), host=st.integers(0, 300), disk=st.integers(0, 300), salted=st.booleans())
def test_sessions_taking_turns_in_a_small_pool_answer_as_without_a_cache(
    tmp_path_factory: pytest.TempPathFactory, seed: int, host: int, disk: int, salted: bool
) -> None:
    """Random turns, rewinds, forks, cancels and damage: every answer is that of the model without cache or tiers."""
    chance = random.Random(seed)
    bench = OffloadBench(14, host=host, disk=disk, folder=tmp_path_factory.mktemp("kv"), max_running=3)
    names = list("abcdefgh")
    for name in names:
        bench.open(name, salt="one" if salted else None)
    for number in range(25):
        batch: list[tuple[ListSink, list[int], list[int]]] = []
        for name in chance.sample(names, chance.randint(1, 3)):
            ledger = bench.ledger(name)
            if len(ledger) > 130:
                bench.engine.rewind(name, chance.randint(0, 100))
                ledger = bench.ledger(name)
            prompt = [chance.randrange(50) for _ in range(chance.randint(1, 40))]
            batch.append((bench.submit(prompt, name, max_tokens=5), ledger, prompt))
        bench.run(*(sink for sink, _, _ in batch))
        for sink, ledger, prompt in batch:
            assert sink.tokens == greedy([*ledger, *prompt], 5, 50)
        if chance.random() < 0.2:
            parent = chance.choice(names)
            child = f"f{number}"
            bench.engine.fork(parent, [child], None, salt="one" if salted else None)
            bench.engine.close(parent)
            names[names.index(parent)] = child
        bench.check_bytes()
    for name in names:
        bench.engine.close(name)
    bench.check_bytes()
    assert not bench.store.keys()
    bench.engine.shut_down()


def test_moving_a_segment_costs_little_beside_a_step() -> None:
    """Bookkeeping of one schedule with 200 idle offloaded sessions, printed."""
    bench = OffloadBench(64, host=100_000)
    for number in range(200):
        bench.open(f"s{number}")
        bench.turn(f"s{number}", [number % 50] * 60, 1)
    began = time.perf_counter()
    for _ in range(100):
        bench.scheduler.schedule(bench.clock())
    each = (time.perf_counter() - began) / 100
    print(f"\none schedule beside {len(bench.tiers.segments(Tier.HOST))} segments: {each * 1e6:.0f} µs")
    assert each < 0.005
    bench.engine.shut_down()
