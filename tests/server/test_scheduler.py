"""The scheduler under random use of tiny pools. Integers only: a "step" is schedule, advance, and one token sampled."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from segue_model.paging import PAGE_TOKENS
from segue_server.cache.pages import PagePool
from segue_server.cache.session import pages_for
from segue_server.holdings import Holdings
from segue_server.plan import Plan
from segue_server.scheduler import Scheduler
from segue_server.sequence import Sequence, Turn


def make_turn(sequence: Sequence, prompt: int, new: int, arrival: float, *, priority: int = 0, ahead: int = 0) -> Turn:
    """A turn of `prompt` and `new` tokens whose prompt is in the ledger already; `ahead` < new: open-ended."""
    end = len(sequence.tokens)
    return Turn(
        request_id=f"r{arrival}",
        start=end - prompt,
        prompt_end=end,
        limit=end + new,
        promise=end + (ahead or new),
        reuse_limit=max(0, end - 1) if new else end,
        arrival=arrival,
        priority=priority,
    )


class World:
    """A scheduler, and the part of the engine that matters to it: tokens come, turns end at their limit."""

    def __init__(self, pages: int, *, max_running: int, step_tokens: int) -> None:
        self.holdings = Holdings(PagePool(pages))
        self.scheduler = Scheduler(self.holdings, max_running=max_running, step_tokens=step_tokens)
        self.pages = pages
        self.step_tokens = step_tokens
        self.now = 0.0
        self.ended: set[str] = set()

    def open(self, name: str, *, priority: int = 0, pinned: bool = False, salt: str | None = None) -> Sequence:
        return self.holdings.open(name, priority=priority, pinned=pinned, salt=salt, now=self.now)

    def submit(self, sequence: Sequence, prompt: int, new: int, *, priority: int = 0, ahead: int = 0) -> Turn:
        self.now += 1
        sequence.tokens.extend(range(prompt))
        turn = make_turn(sequence, prompt, new, self.now, priority=priority, ahead=ahead)
        self.scheduler.submit(sequence, turn)
        return turn

    def step(self) -> Plan:
        self.now += 1
        lengths = {s.session_id: len(s.tokens) for s in self.holdings.sequences.values()}
        plan = self.scheduler.schedule(self.now)
        self._check(plan, lengths)
        for work in plan.work:
            sequence, ends = work.sequence, work.reaches_end
            sequence.advance(work.count)
            turn = sequence.turn
            assert turn is not None
            if ends and len(sequence.tokens) < turn.limit:
                sequence.tokens.append(0)
            if ends and len(sequence.tokens) >= turn.limit:
                self.scheduler.leave(sequence, self.now)
                self.ended.add(turn.request_id)
        self.scheduler.check_integrity()
        return plan

    def _check(self, plan: Plan, lengths: dict[str, int]) -> None:
        """What must be true of every plan."""
        self.scheduler.check_integrity()
        prompts = sum(work.count for work in plan.work if work.count > 1)
        decodes = sum(work.count == 1 for work in plan.work)
        end_of_a_prompt = PAGE_TOKENS - 1
        assert prompts + decodes <= max(self.step_tokens, decodes + PAGE_TOKENS) + end_of_a_prompt, "over budget"
        assert len(self.scheduler.running) <= self.scheduler.max_running
        for work in plan.work:
            assert work.sequence.running
            assert work.start == work.sequence.cache.computed
            assert pages_for(work.start + work.count) <= len(work.sequence.cache.pages), "pages do not cover the work"
            assert work.start + work.count <= len(work.sequence.tokens)
        for work in plan.work:
            written = work.sequence.cache.pages[work.start // PAGE_TOKENS : pages_for(work.start + work.count)]
            assert all(self.holdings.pool.references(page) == 1 for page in written), "a page of others is written"
        for sequence in self.holdings.sequences.values():
            assert len(sequence.tokens) == lengths[sequence.session_id], "planning changed a ledger"
        for sequence in plan.preempted:
            assert sequence in self.scheduler.waiting
        turns = [s.turn for s in self.holdings.sequences.values() if s.turn]
        assert plan.work or not turns or any(turn.paused for turn in turns), "stuck"

    def run(self, limit: int) -> None:
        """Step until no turn is left."""
        for _ in range(limit):
            if not (self.scheduler.waiting or self.scheduler.running):
                return
            self.step()
        raise AssertionError(f"turns are left after {limit} steps")


class Random(RuleBasedStateMachine):
    """Sessions come and go, turns are cancelled, the pool is far too small for all of them."""

    @initialize(pages=st.integers(4, 40), running=st.integers(1, 6), budget=st.integers(16, 80))
    def begin(self, pages: int, running: int, budget: int) -> None:
        self.world = World(pages, max_running=running, step_tokens=budget)
        self.scheduler, self.holdings = self.world.scheduler, self.world.holdings
        self.pinned = 0
        self.count = 0

    def _room(self, sequence: Sequence) -> int:
        """Tokens the ledger may still get so that it fits beside all pinned sessions."""
        return (self.world.pages - 1) * PAGE_TOKENS - len(sequence.tokens)

    @rule(priority=st.integers(-1, 1), salt=st.sampled_from([None, "a", "a", "b"]))
    def open(self, priority: int, salt: str | None) -> None:
        self.count += 1
        self.world.open(f"s{self.count}", priority=priority, salt=salt)

    @precondition(lambda self: self.holdings.sequences)
    @rule(data=st.data(), part=st.floats(0, 1))
    def fork(self, data: st.DataObject, part: float) -> None:
        names = sorted(name for name, s in self.holdings.sequences.items() if not s.pinned)
        if names:
            parent = self.holdings.sequences[data.draw(st.sampled_from(names))]
            position = int(part * (parent.turn.start if parent.turn else len(parent.tokens)))
            self.count += 1
            child = self.holdings.fork(parent, f"s{self.count}", position, self.world.now)
            assert child.tokens == parent.tokens[:position]

    @precondition(lambda self: self._idle())
    @rule(data=st.data(), part=st.floats(0, 1))
    def rewind(self, data: st.DataObject, part: float) -> None:
        sequence = data.draw(st.sampled_from(self._idle()))
        self.holdings.rewind(sequence, int(part * len(sequence.tokens)))

    @rule()
    def open_pinned(self) -> None:
        """At most one, and it gets one page at most, so that everybody else still fits."""
        if not self.pinned:
            self.pinned = 1
            self.world.open("pinned", pinned=True)

    def _idle(self) -> list[Sequence]:
        return [s for s in self.holdings.sequences.values() if s.turn is None]

    @precondition(lambda self: self._idle())
    @rule(data=st.data(), prompt=st.integers(0, 120), new=st.integers(0, 40), priority=st.integers(-1, 1))
    def submit(self, data: st.DataObject, prompt: int, new: int, priority: int) -> None:
        sequence = data.draw(st.sampled_from(self._idle()))
        room = PAGE_TOKENS - len(sequence.tokens) if sequence.pinned else self._room(sequence)
        prompt = min(prompt, room)
        new = min(new, room - prompt)
        if prompt < 0 or prompt + new < 1 or not len(sequence.tokens) + prompt:
            return
        if not new and not prompt:
            return
        ahead = data.draw(st.integers(0, new))
        self.world.submit(sequence, prompt, new, priority=priority, ahead=ahead)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step()

    @precondition(lambda self: self.scheduler.running)
    @rule()
    def the_first_of_the_batch_moves_on(self) -> None:
        first = self.scheduler.running[0]
        assert first.turn
        if first.turn.order > min(s.turn.order for s in self._busy() if s.turn):
            return  # one that comes before it may be admitted in this step
        request, before = first.turn.request_id, first.cache.computed
        self.world.step()
        assert request in self.world.ended or first.cache.computed > before

    def _busy(self) -> list[Sequence]:
        return [s for s in self.holdings.sequences.values() if s.turn]

    @precondition(lambda self: self._busy())
    @rule(data=st.data(), keep=st.booleans())
    def cancel(self, data: st.DataObject, keep: bool) -> None:
        sequence = data.draw(st.sampled_from(self._busy()))
        assert sequence.turn
        if not keep:
            sequence.truncate(sequence.turn.start)
        self.scheduler.leave(sequence, self.world.now)
        assert sequence.cache.slack_tokens < PAGE_TOKENS

    @precondition(lambda self: self.holdings.sequences)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.holdings.sequences)))
        sequence = self.holdings.sequences[name]
        if sequence.turn:
            with pytest.raises(ValueError, match="turn in flight"):
                self.holdings.close(name)
            return
        mine = sum(self.holdings.pool.references(page) == 1 for page in sequence.cache.pages)
        free = self.holdings.pool.free
        assert self.holdings.close(name) == mine
        assert self.holdings.pool.free == free + mine
        if sequence.pinned:
            self.pinned = 0

    @precondition(lambda self: self._busy())
    @rule(data=st.data(), paused=st.booleans())
    def pause_and_resume_for_a_step(self, data: st.DataObject, paused: bool) -> None:
        turn = data.draw(st.sampled_from(self._busy())).turn
        assert turn
        turn.paused = paused
        self.world.step()
        turn.paused = False

    @invariant()
    def whole(self) -> None:
        if not hasattr(self, "world"):
            return
        self.scheduler.check_integrity()
        orders = [s.turn.order for s in self.scheduler.waiting if s.turn]
        assert orders == sorted(orders)

    def teardown(self) -> None:
        """No starvation: whatever state this got into, every turn ends, and then only idle sessions hold pages."""
        if not hasattr(self, "world"):
            return
        work = sum(len(s.tokens) + 40 for s in self._busy())
        self.world.run(limit=20 * work + 20)
        self.holdings.prefixes.flush()
        held = {page for s in self.holdings.sequences.values() for page in s.cache.pages}
        assert self.holdings.pool.held == len(held)


TestRandom = Random.TestCase
TestRandom.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_streams_get_their_token_in_every_step_beside_a_long_prompt() -> None:
    world = World(200, max_running=8, step_tokens=32)
    streams = [world.open(f"s{n}") for n in range(4)]
    for stream in streams:
        world.submit(stream, 4, 40)
    world.step()
    long = world.open("long")
    world.submit(long, 600, 4)
    while long.remaining > 1:
        work = {w.sequence.session_id: w.count for w in world.step().work}
        assert all(work.get(s.session_id) == 1 for s in streams if s.turn)
        assert work["long"] <= 28 or long.remaining <= 1


@pytest.mark.parametrize(("prompt", "steps"), [(64, 1), (65, 1), (79, 1), (80, 2), (143, 2), (144, 3)])
def test_the_last_few_tokens_of_a_prompt_take_no_step_of_their_own(prompt: int, steps: int) -> None:
    """As after every answer, whose last token is computed with the next prompt."""
    world = World(200, max_running=8, step_tokens=64)
    world.submit(sequence := world.open("s"), prompt, 1)
    for _ in range(steps):
        assert sequence.turn is not None
        world.step()
    assert sequence.turn is None


def test_a_short_prompt_does_not_wait_for_a_long_one_that_came_before() -> None:
    world = World(200, max_running=8, step_tokens=64)
    world.submit(long := world.open("long"), 1000, 4)
    world.submit(short := world.open("short"), 20, 4)
    world.step()
    assert len(short.tokens) == 21, "its first token came in the first step"
    assert long.cache.computed >= 32, "and the oldest kept half the budget"


def test_the_oldest_prompt_keeps_half_the_pace_under_a_flood_of_short_ones() -> None:
    world = World(400, max_running=64, step_tokens=64)
    world.submit(old := world.open("old"), 640, 1)
    for step in range(20):
        for n in range(4):
            world.submit(world.open(f"{step}-{n}"), 60, 1)
        world.step()
    assert old.turn is None


def test_strict_order_a_small_turn_does_not_overtake_one_that_waits_for_room() -> None:
    world = World(8, max_running=8, step_tokens=64)
    world.submit(world.open("first"), 60, 4)
    world.step()
    world.submit(big := world.open("big"), 100, 4)
    world.submit(small := world.open("small"), 10, 4)
    world.step()
    assert not big.running
    assert not small.running
    world.run(100)


def test_a_waiting_turn_holds_no_claim_its_kv_is_evicted_and_its_tokens_stay() -> None:
    """Hold-and-wait would be a deadlock here: the idle KV of the waiting session is what the running turn needs."""
    world = World(8, max_running=1, step_tokens=64)
    waits = world.open("waits")
    world.submit(waits, 60, 4)
    world.run(20)
    world.submit(runs := world.open("runs"), 60, 40)
    world.step()
    world.submit(waits, 1, 4)
    tokens = list(waits.tokens)
    held = len(waits.cache.pages)
    for _ in range(39):
        world.step()
    assert len(waits.cache.pages) < held
    assert list(waits.tokens) == tokens
    world.run(100)
    assert not runs.turn
    assert not waits.turn


def test_the_youngest_of_the_lowest_priority_gives_way_and_comes_back() -> None:
    world = World(8, max_running=4, step_tokens=64)
    sequences = {name: world.open(name) for name in ("old", "young", "urgent")}
    world.submit(sequences["old"], 30, 60, ahead=1)
    world.submit(sequences["young"], 30, 40, ahead=1)
    world.submit(sequences["urgent"], 30, 60, ahead=1, priority=5)
    preempted = []
    for _ in range(400):
        preempted += [s.session_id for s in world.step().preempted]
    assert preempted[0] == "young"
    assert "urgent" not in preempted
    assert not any(s.turn for s in sequences.values())
    assert [len(s.tokens) for s in sequences.values()] == [90, 70, 90]


def test_eviction_takes_low_priority_first_then_the_longest_unused_from_the_tail() -> None:
    world = World(12, max_running=4, step_tokens=64)
    for name, priority in (("precious", 1), ("old", 0), ("recent", 0)):
        world.submit(world.open(name, priority=priority), 40, 1)
        world.run(20)
    pages = {name: list(s.cache.pages) for name, s in world.holdings.sequences.items()}
    world.submit(world.open("new"), 60, 4)
    world.run(20)
    left = {name: world.holdings.sequences[name].cache.pages for name in pages}
    assert left["precious"] == pages["precious"]
    assert left["recent"] == pages["recent"]
    assert left["old"] == pages["old"][:2], "three free, one short: the tail went and the head stayed"
    assert world.scheduler.evictor.cost.pages == 1


def test_a_page_shared_with_a_fork_is_computed_again_where_there_is_no_room_for_a_copy() -> None:
    """One page is pinned, three are needed, and to evict the fork frees none while its parent holds the same page."""
    world = World(4, max_running=1, step_tokens=64)
    world.submit(world.open("pinned", pinned=True), 1, 0)
    world.step()
    world.submit(parent := world.open("parent"), 5, 0)
    world.step()
    world.holdings.fork(parent, "fork", 5, world.now)
    world.submit(parent, 28, 0)
    world.step()
    assert len(parent.tokens) == 33
    assert parent.turn is None
    world.scheduler.check_integrity()


def test_pinned_kv_is_never_evicted() -> None:
    world = World(4, max_running=2, step_tokens=64)
    pinned = world.open("pinned", pinned=True)
    world.submit(pinned, 30, 1)
    world.run(10)
    kept = list(pinned.cache.pages)
    for n in range(3):
        world.submit(world.open(f"s{n}"), 20, 4)
        world.run(30)
    assert pinned.cache.pages == kept


@settings(max_examples=60, deadline=None)
@given(
    turns=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 30), st.integers(-1, 1)), min_size=2, max_size=12),
    pages=st.integers(8, 12),
    running=st.integers(1, 5),
)
def test_whatever_comes_at_once_every_turn_ends_with_all_its_tokens(
    turns: list[tuple[int, int, int]], pages: int, running: int
) -> None:
    world = World(pages, max_running=running, step_tokens=48)
    sequences = [world.open(f"s{n}") for n in range(len(turns))]
    for sequence, (prompt, new, priority) in zip(sequences, turns, strict=True):
        world.submit(sequence, prompt, new, priority=priority, ahead=1)
    world.run(limit=40 * sum(prompt + new for prompt, new, _ in turns))
    assert [len(s.tokens) for s in sequences] == [prompt + new for prompt, new, _ in turns]


def test_the_order_of_the_queue_is_priority_then_age() -> None:
    world = World(8, max_running=1, step_tokens=64)
    names = [("a", 0), ("b", 5), ("c", 0), ("d", 5), ("e", -5)]
    for name, priority in names:
        world.submit(world.open(name), 2, 1, priority=priority)
    started = []
    while world.scheduler.waiting:
        started += [s.session_id for s in world.step().admitted]
    assert started == ["b", "d", "a", "c", "e"]


def test_own_copies_of_pages_that_others_have_too_do_not_block_a_turn() -> None:
    """Two sessions computed the same prompt at once; one lost its tail, and its next turn needs the whole pool."""
    world = World(12, max_running=4, step_tokens=64)
    one, two = world.open("one", salt="x"), world.open("two", salt="x")
    world.submit(one, 80, 0)
    world.submit(two, 80, 0)
    world.run(50)
    assert not set(one.cache.pages) & set(two.cache.pages)
    world.holdings.drop(two, 3)
    world.submit(two, 12, 100)
    world.run(400)
    assert len(two.tokens) == 192


def test_a_known_prefix_is_computed_once_within_a_salt_and_never_across() -> None:
    world = World(40, max_running=4, step_tokens=64)
    sequences = {name: world.open(name, salt=salt) for name, salt in [("a", "x"), ("b", "x"), ("c", "y"), ("d", None)]}
    computed = {}
    for name, sequence in sequences.items():
        world.submit(sequence, 50, 1)
        computed[name] = 0
        while sequence.turn:
            computed[name] += sum(work.count for work in world.step().work)
    assert computed == {"a": 50, "b": 2, "c": 50, "d": 50}
    assert sequences["a"].cache.pages[:3] == sequences["b"].cache.pages[:3]


def test_an_open_id_is_not_opened_twice() -> None:
    world = World(4, max_running=1, step_tokens=64)
    world.open("a")
    with pytest.raises(KeyError):
        world.open("a")
