"""Random histories of sessions on the integer layer: after each operation every page, every byte and every ledger is
looked at, and every answer is that of the same tokens without a cache.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from tests.server import session_machine as machine
from tests.server.fakes import EngineBench, greedy
from tests.server.session_machine import WEIGHTS, Operation, histories
from tests.server.session_model import Drawn
from tests.server.session_world import World

from segue_model.paging import PAGE_TOKENS
from segue_server.cache.segments import Tier
from segue_server.kv_control import KvControl, Progress
from segue_server.mover import Offload


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Steps that fail on purpose are logged with a traceback; thousands of them would be half of the time."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def drawn(operation: Operation) -> Callable[[RuleBasedStateMachine, st.DataObject], None]:
    """A rule that does one operation and looks at everything."""

    def act(state: "SessionMachine", data: st.DataObject) -> None:
        operation(state.world, Drawn(data))
        state.world.settle()

    act.__name__ = operation.__name__
    return rule(data=st.data())(act)


class SessionMachine(RuleBasedStateMachine):
    """Hypothesis chooses and shrinks."""

    open_session, generate, fill = map(drawn, (machine.open_session, machine.generate, machine.fill))
    append, cancel, pause = map(drawn, (machine.append, machine.cancel, machine.pause))
    fork, rewind, delete = map(drawn, (machine.fork, machine.rewind, machine.delete))
    export_begins, export_goes_on = map(drawn, (machine.export_begins, machine.export_goes_on))
    import_, move, flush = map(drawn, (machine.import_, machine.move, machine.flush))
    set_pool, set_tier = map(drawn, (machine.set_pool, machine.set_tier))
    borrow, give_back = map(drawn, (machine.borrow, machine.give_back))
    step, wait, come_to_rest = map(drawn, (machine.step, machine.wait, machine.come_to_rest))
    disk_is_slow, disk_fails, step_fails = map(drawn, (machine.disk_is_slow, machine.disk_fails, machine.step_fails))
    crash = drawn(machine.crash)

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.world = World(Path(self.folder.name))

    def teardown(self) -> None:
        try:
            self.world.drain()
        finally:
            self.world.close()
            self.folder.cleanup()


def test_the_rules_are_the_operations() -> None:
    """What the seeded driver does and what hypothesis does is the same."""
    names = {operation.__name__ for operation in WEIGHTS}
    assert {name for name, rule in vars(SessionMachine).items() if hasattr(rule, "hypothesis_stateful_rule")} == names


def test_histories_that_hypothesis_chooses() -> None:
    run_state_machine_as_test(
        SessionMachine,
        settings=settings(
            max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def drive(world: World, seed: int, steps: int) -> None:
    began, busy = time.perf_counter(), time.process_time()
    done = Counter(operation.__name__ for operation in histories(world, seed, steps))
    world.drain()
    took, busy = time.perf_counter() - began, time.process_time() - busy
    print(f"\nseed {seed}: {steps} operations, all looked at after each, in {took:.1f} s, {busy:.1f} s of one core")
    print(", ".join(f"{count} {name}" for name, count in done.most_common()))
    assert done.keys() == {operation.__name__ for operation in WEIGHTS}


@pytest.mark.parametrize("seed", [1, 2])
def test_five_thousand_operations(world: World, seed: int) -> None:
    drive(world, seed, 5_000)


@pytest.mark.soak
def test_a_hundred_thousand_operations(world: World) -> None:
    """With the figure: under a minute on one core of its own."""
    drive(world, int(time.time()), 100_000)


# What histories have found, by hand


@pytest.mark.parametrize("shared_with", ["fork", "index"])
def test_a_turn_for_the_whole_pool_starts_though_its_last_page_is_shared(shared_with: str) -> None:
    """There is no page for the copy: the part of the shared page is computed again."""
    bench = EngineBench(8)
    bench.open("a", salt="x")
    bench.run(bench.submit([1] * 3 * PAGE_TOKENS, "a", max_tokens=0, samples=False))
    bench.engine.rewind("a", 40)
    if shared_with == "fork":
        bench.holdings.prefixes.flush()
        bench.engine.fork("a", ["b"], None)
    bench.run(bench.submit([2], "a", max_tokens=8 * PAGE_TOKENS - 41))
    assert len(bench.ledger("a")) == 8 * PAGE_TOKENS


def test_what_makes_room_for_kv_that_moves_up_is_copied_down_before_it_is_written_over() -> None:
    bench = EngineBench(12, offload=Offload(host_bytes=1 << 20, segment_tokens=2 * PAGE_TOKENS))
    control = KvControl(bench.engine)
    for name in ("a", "b"):
        bench.open(name)
        bench.run(bench.submit(list(range(40)) * 2 + [7] * 40, name, max_tokens=1))
    while control.move("a", Tier.DEVICE, 0) is not Progress.DONE:
        pass
    expected = greedy([*bench.ledger("b"), 1], 4, 50)
    answer = bench.submit([1], "b", max_tokens=4)
    bench.run(answer)
    assert answer.tokens == expected


def test_pages_of_a_prefix_are_evicted_also_when_a_fork_of_another_salt_was_their_last_owner() -> None:
    bench = EngineBench(12)
    bench.open("a", salt="x")
    bench.run(bench.submit([1] * 3 * PAGE_TOKENS, "a", max_tokens=0, samples=False))
    bench.engine.fork("a", ["b"], None, salt="y")
    bench.engine.close("a")
    assert bench.holdings.prefixes.oldest() is None, "the fork holds them too"
    bench.engine.close("b")
    assert bench.holdings.prefixes.oldest() is not None
