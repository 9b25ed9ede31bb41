"""The tiers below the pool under random use: budgets hold, bytes are where the integers say, and KV stays true."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from segue_server.cache.pages import PageId
from segue_server.cache.segments import Demote, Drop, Promote, Read, SegmentKey, Tier, Unread, Write
from segue_server.cache.tiers import Tiers

SEGMENT = 32
TOKEN = 4
SESSIONS = st.sampled_from("abcd")


class Bytes:
    """Carries out orders; a segment's bytes are the tokens that were computed for it."""

    def __init__(self) -> None:
        self.host: dict[SegmentKey, Sequence[int]] = {}
        self.disk: dict[SegmentKey, Sequence[int]] = {}
        self.read: set[SegmentKey] = set()
        self.pages: Sequence[int] = ()  # what the next write copies

    def carry_out(self, tiers: Tiers) -> None:
        for order in tiers.take_orders():
            match order:
                case Write(key, _, tokens):
                    assert key not in self.host | self.disk
                    self.host[key] = self.pages[:tokens]
                case Demote(key):
                    self.disk[key] = self.host.pop(key)
                case Promote(key):
                    assert key in self.read
                    self.read.discard(key)
                    self.host[key] = self.disk.pop(key)
                case Read(key):
                    assert key in self.disk
                    self.read.add(key)
                case Unread(key):
                    self.read.discard(key)
                case Drop(key):
                    self.read.discard(key)
                    assert (self.host.pop(key, None) is None) != (self.disk.pop(key, None) is None)

    def of(self, key: SegmentKey) -> Sequence[int]:
        found = self.host.get(key)
        return self.disk[key] if found is None else found


class TiersMachine(RuleBasedStateMachine):
    """Ledgers that grow, are cut and forked, while their segments come and go."""

    @initialize(host=st.integers(0, 6), disk=st.integers(0, 6))
    def start(self, host: int, disk: int) -> None:
        whole = SEGMENT * TOKEN
        self.tiers = Tiers(
            segment_tokens=SEGMENT, token_bytes=TOKEN, host_bytes=host * whole, disk_bytes=disk * whole + 7
        )
        self.bytes = Bytes()
        self.ledgers: dict[str, list[int]] = {name: [] for name in "abcd"}
        self.next_token = 0

    @rule(name=SESSIONS, count=st.integers(1, 3 * SEGMENT))
    def grow(self, name: str, count: int) -> None:
        self.ledgers[name] += range(self.next_token, self.next_token + count)
        self.next_token += count

    @rule(name=SESSIONS, at=st.integers(0, 200), tier=st.sampled_from([None, Tier.HOST, Tier.DISK]))
    def keep(self, name: str, at: int, tier: Tier | None) -> None:
        ledger = self.ledgers[name]
        start = min(at, max(0, len(ledger) - 1)) // SEGMENT * SEGMENT
        tokens = min(SEGMENT, len(ledger) - start)
        if tokens <= 0:
            return
        self.bytes.pages = ledger[start : start + tokens]
        kept = self.tiers.keep(name, start, tokens, [PageId(0)] * 2, tier)
        self.bytes.carry_out(self.tiers)
        slot = self.tiers.slots.at(name, start)
        budgets = {t: self.tiers.use[t].budget for t in (Tier.HOST, Tier.DISK)}
        room = max(size for t, size in budgets.items() if tier in (None, t))
        assert kept == (room >= tokens * TOKEN) or slot, "there was room"
        if kept:
            assert slot is not None
            assert slot.end == start + tokens
            assert tier in (None, slot.segment.tier) or tier is Tier.HOST

    @rule(name=SESSIONS, to=st.integers(0, 200))
    def cut(self, name: str, to: int) -> None:
        del self.ledgers[name][to:]
        self.tiers.truncate(name, min(to, len(self.ledgers[name])))

    @rule(parent=SESSIONS, child=SESSIONS, to=st.integers(0, 200))
    def fork(self, parent: str, child: str, to: int) -> None:
        if parent == child:
            return
        self.tiers.close(child)
        position = min(to, len(self.ledgers[parent]))
        self.ledgers[child] = self.ledgers[parent][:position]
        self.tiers.share(parent, child, position)

    @rule(name=SESSIONS)
    def close(self, name: str) -> None:
        self.tiers.close(name)
        self.ledgers[name] = []
        assert not self.tiers.slots.bytes_of(name)

    @rule(name=SESSIONS, at=st.integers(0, 200))
    def read_ahead(self, name: str, at: int) -> None:
        self.tiers.stage(name, at, len(self.ledgers[name]))
        self.bytes.carry_out(self.tiers)
        for key in self.bytes.read:
            self.tiers.arrived(key)

    @rule(name=SESSIONS, start=st.integers(0, 4))
    def promote(self, name: str, start: int) -> None:
        segment = self.tiers.first_on_disk(name, start * SEGMENT)
        if segment and segment.ready:
            room = segment.size <= self.tiers.use[Tier.HOST].budget
            assert self.tiers.promote(segment) == room

    @rule(name=SESSIONS)
    def restore(self, name: str) -> None:
        for slot in list(self.tiers.slots.run(name, 0)):
            self.tiers.restored(name, slot.segment.start)

    @rule(name=SESSIONS)
    def leave(self, name: str) -> None:
        self.tiers.touch(name)
        self.tiers.unstage(name)

    @rule(name=SESSIONS, start=st.integers(0, 4))
    def push_down(self, name: str, start: int) -> None:
        while self.tiers.push_down(name, start * SEGMENT):
            self.bytes.carry_out(self.tiers)

    @rule(tier=st.sampled_from([Tier.HOST, Tier.DISK]), segments=st.integers(0, 6))
    def resize(self, tier: Tier, segments: int) -> None:
        self.tiers.set_budget(tier, segments * SEGMENT * TOKEN)

    @precondition(lambda self: self.bytes.host or self.bytes.disk)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.bytes.host | self.bytes.disk)))
        self.tiers.lost(key)

    @invariant()
    def bytes_are_where_the_integers_say(self) -> None:
        if not hasattr(self, "tiers"):
            return
        self.bytes.carry_out(self.tiers)
        self.tiers.check_integrity()
        assert set(self.bytes.host) == set(self.tiers.use[Tier.HOST].segments)
        assert set(self.bytes.disk) == set(self.tiers.use[Tier.DISK].segments)
        assert self.bytes.read == {s.key for s in self.tiers.segments(Tier.DISK) if s.asked}

    @invariant()
    def every_slot_holds_its_sessions_tokens(self) -> None:
        for name, ledger in getattr(self, "ledgers", {}).items():
            for start in range(0, len(ledger), SEGMENT):
                if slot := self.tiers.slots.at(name, start):
                    assert list(self.bytes.of(slot.segment.key)[: slot.tokens]) == ledger[start : slot.end]
            assert self.tiers.slots.reach(name, 0) <= len(ledger)


TestTiers = TiersMachine.TestCase
TestTiers.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def tiers_of(host: int, disk: int) -> Tiers:
    whole = SEGMENT * TOKEN
    return Tiers(segment_tokens=SEGMENT, token_bytes=TOKEN, host_bytes=host * whole, disk_bytes=disk * whole)


def keep(tiers: Tiers, name: str, start: int) -> bool:
    return tiers.keep(name, start, SEGMENT, [PageId(0), PageId(1)])


def test_the_longest_idle_session_goes_down_first_and_its_tail_before_its_head() -> None:
    tiers = tiers_of(4, 4)
    for name in "ab":
        keep(tiers, name, SEGMENT)
        keep(tiers, name, 0)
    tiers.touch("a")
    keep(tiers, "c", 0)
    assert [(s.owners, s.start) for s in tiers.segments(Tier.DISK)] == [({"b"}, SEGMENT)]
    keep(tiers, "c", SEGMENT)
    assert [s.start for s in tiers.segments(Tier.DISK)] == [SEGMENT, 0]


def test_a_copy_of_what_is_back_in_the_pool_goes_before_anything_else_and_not_to_disk() -> None:
    tiers = tiers_of(2, 4)
    keep(tiers, "a", 0)
    keep(tiers, "b", 0)
    tiers.restored("b", 0)
    keep(tiers, "c", 0)
    assert tiers.slots.reach("b", 0) == 0
    assert tiers.slots.reach("a", 0) == tiers.slots.reach("c", 0) == SEGMENT
    assert tiers.use[Tier.DISK].used == 0
    assert tiers.use[Tier.HOST].dropped == 0, "nothing was lost by it"


def test_nothing_of_a_guarded_session_goes() -> None:
    tiers = tiers_of(2, 0)
    keep(tiers, "a", 0)
    keep(tiers, "a", SEGMENT)
    tiers.guard("a")
    assert not keep(tiers, "b", 0)
    tiers.unguard("a")
    assert keep(tiers, "b", 0)


@given(st.integers(0, 100))
def test_reach_ends_at_the_first_gap(start: int) -> None:
    tiers = tiers_of(8, 0)
    for at in (0, SEGMENT, 3 * SEGMENT):
        keep(tiers, "a", at)
    expected = 2 * SEGMENT if start < 2 * SEGMENT else 4 * SEGMENT if start >= 3 * SEGMENT else start
    assert tiers.slots.reach("a", start) == expected


def test_a_segment_on_its_way_up_changes_places_with_the_one_that_makes_room() -> None:
    tiers = tiers_of(1, 1)
    keep(tiers, "a", 0)
    keep(tiers, "b", 0)
    segment = tiers.first_on_disk("a", 0)
    assert segment
    tiers.stage("a", 0, SEGMENT)
    tiers.arrived(segment.key)
    assert tiers.promote(segment)
    tiers.check_integrity()
    assert [[s.owners for s in tiers.segments(tier)] for tier in (Tier.HOST, Tier.DISK)] == [[{"a"}], [{"b"}]]
