"""The tiers below the pool: which segment of which session's KV lies in host memory or on disk. Integers only.

    pool ── keep ──▶ host ── overflow ──▶ disk ── overflow ──▶ gone (the tokens stay: it is computed again)
      ◀── restore ──────────────────────────┘

A segment is the KV of up to `segment_tokens` positions of a ledger, beginning at a multiple of that. It is a copy: it
stays valid for as long as the tokens before its end are the session's, whatever happens in the pool, and forks share
it. What a session has read back lies in the pool as well, so its copy is *spare*: kept while there is room, for the
next eviction is free then, and the first to go.

Decisions become orders (`take_orders`) that whoever owns the bytes carries out, in order, before a page is written.

Invariant: the bytes of each tier are the sum over its segments, at most its budget; each segment has an owner, and
each owner names it in exactly one slot. `check_integrity` runs it.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

from segue_server.cache.pages import PageId

SegmentKey = NewType("SegmentKey", int)
STAGE_BYTES = 256 << 20  # read ahead from disk for turns that wait, at most


class Tier(Enum):
    """Where KV can be; the values are those of the proto enum."""

    DEVICE = 1
    HOST = 2
    DISK = 3
    NONE = 4


LOWER = (Tier.HOST, Tier.DISK)


@dataclass(frozen=True, slots=True)
class Write:
    """Copy the first `tokens` positions of pages into host memory under `key`."""

    key: SegmentKey
    pages: Sequence[PageId]
    tokens: int


@dataclass(frozen=True, slots=True)
class Demote:
    """Move a segment from host memory to disk."""

    key: SegmentKey


@dataclass(frozen=True, slots=True)
class Promote:
    """Move a segment that has been read ahead from disk to host memory."""

    key: SegmentKey


@dataclass(frozen=True, slots=True)
class Read:
    """Begin to read a segment from disk, so that it is there when it is needed."""

    key: SegmentKey


@dataclass(frozen=True, slots=True)
class Unread:
    """What was read ahead is not needed after all; the file stays."""

    key: SegmentKey


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget a segment, wherever it is."""

    key: SegmentKey


Order = Write | Demote | Promote | Read | Unread | Drop


@dataclass(slots=True, eq=False)
class Segment:
    """KV of positions `start` .. `start + tokens - 1`, for every owner."""

    key: SegmentKey
    start: int
    tokens: int
    size: int  # bytes
    tier: Tier
    owners: set[str] = field(default_factory=set)
    spare: bool = False  # its one owner has it in the pool too
    asked: bool = False  # of disk: it is being read ahead, or has been
    ready: bool = False  # of disk: it has been read ahead


@dataclass(slots=True)
class Slot:
    """What of a segment is valid for one owner: fewer positions than it holds after a rewind or a fork."""

    segment: Segment
    tokens: int

    @property
    def end(self) -> int:
        return self.segment.start + self.tokens


@dataclass(slots=True)
class TierUse:
    """One tier's account."""

    budget: int
    used: int = 0
    tokens: int = 0
    dropped: int = 0  # segments that fell out for want of room, since the start
    dropped_bytes: int = 0
    segments: "OrderedDict[SegmentKey, Segment]" = field(default_factory=OrderedDict)  # the first one goes first

    def add(self, segment: Segment) -> None:
        self.segments[segment.key] = segment
        self.used += segment.size
        self.tokens += segment.tokens

    def remove(self, segment: Segment) -> None:
        del self.segments[segment.key]
        self.used -= segment.size
        self.tokens -= segment.tokens


class Tiers:
    """Host memory and disk by segments. The engine thread owns it; others may read the counts."""

    def __init__(self, *, segment_tokens: int, token_bytes: int, host_bytes: int = 0, disk_bytes: int = 0) -> None:
        """`segment_tokens` is a whole number of pages; `token_bytes` what a position takes outside the pool."""
        self.segment_tokens = segment_tokens
        self.token_bytes = token_bytes
        self.use = {Tier.HOST: TierUse(host_bytes), Tier.DISK: TierUse(disk_bytes)}
        self._slots: dict[str, dict[int, Slot]] = {}  # session -> number of the segment -> slot
        self._guarded: Counter[str] = Counter()
        self._orders: list[Order] = []
        self._next_key = 0
        self._staged = 0  # bytes of segments asked for

    @property
    def enabled(self) -> bool:
        return any(use.budget for use in self.use.values())

    def take_orders(self) -> list[Order]:
        """What is to be done with the bytes since the last call, in order."""
        orders, self._orders = self._orders, []
        return orders

    # What is there

    def slot(self, session_id: str, position: int) -> Slot | None:
        """The slot whose segment reaches beyond `position`, which lies in it."""
        slot = self._slots.get(session_id, {}).get(position // self.segment_tokens)
        return slot if slot and slot.end > position else None

    def slots(self, session_id: str, start: int) -> Iterator[Slot]:
        """The slots that hold the positions from `start` on without a gap."""
        while slot := self.slot(session_id, start):
            yield slot
            start = slot.end
            if start % self.segment_tokens:
                return

    def reach(self, session_id: str, start: int) -> int:
        """The position up to which KV from `start` on is here; `start` itself when there is none."""
        return max((slot.end for slot in self.slots(session_id, start)), default=start)

    def lowest(self, session_id: str, start: int, end: int) -> Tier | None:
        """The lowest tier that the KV of positions `start` .. `end - 1` lies in; None when none of it is here."""
        tiers = [slot.segment.tier for slot in self.slots(session_id, start) if slot.segment.start < end]
        return max(tiers, key=lambda tier: tier.value, default=None)

    def bytes_of(self, session_id: str) -> Counter[Tier]:
        """Bytes of a session by tier; a segment that forks share counts for each of them."""
        sizes: Counter[Tier] = Counter()
        for slot in list(self._slots.get(session_id, {}).values()):
            sizes[slot.segment.tier] += slot.segment.size
        return sizes

    def segments(self, tier: Tier) -> list[Segment]:
        """In the order in which they go. A reader: safe from any thread."""
        return list(self.use[tier].segments.values())

    def is_on_disk(self, key: SegmentKey) -> bool:
        return key in self.use[Tier.DISK].segments

    def is_guarded(self, segment: Segment) -> bool:
        return any(self._guarded[owner] for owner in segment.owners)

    # Down

    def keep(self, session_id: str, start: int, tokens: int, pages: Sequence[PageId], tier: Tier | None = None) -> bool:
        """Take a copy of `tokens` positions from `start` on, which lie in `pages`. False: there is no room for it.

        Into `tier`; where that is None, as high as there is room. A copy that is here already is not made again.
        """
        slot = self.slot(session_id, start)
        if slot and slot.tokens >= tokens:
            return self._keep_copy(slot.segment, tier)
        segment = self._new(start, tokens)
        if not self._place(segment, tier):
            return False
        self._orders.insert(self._first_write(segment), Write(segment.key, list(pages), tokens))
        self._assign(session_id, segment, tokens)
        return True

    def _keep_copy(self, segment: Segment, tier: Tier | None) -> bool:
        """The pool gives a segment up that has a copy here."""
        segment.spare = False
        if tier is Tier.DISK and segment.tier is Tier.HOST:
            return self._demote(segment)
        self.use[segment.tier].segments.move_to_end(segment.key)
        return True

    def add(self, session_id: str, start: int, tokens: int) -> SegmentKey | None:
        """Room in host memory or on disk for KV that comes from elsewhere. None: there is none.

        The caller puts the bytes into the store before it carries out the next orders.
        """
        segment = self._new(start, tokens)
        if not self._place(segment, None):
            return None
        self._assign(session_id, segment, tokens)
        return segment.key

    def push_down(self, session_id: str, start: int) -> bool | None:
        """Move the last segment from `start` on that lies in host memory to disk; False: none is left.

        None: the disk has no room for it.
        """
        held = [s.segment for s in self._slots.get(session_id, {}).values() if s.segment.tier is Tier.HOST]
        segment = max((s for s in held if s.start >= start), key=lambda s: s.start, default=None)
        if segment is None:
            return False
        return True if self._demote(segment) else None

    # Up

    def need(self, session_id: str, start: int, end: int) -> None:
        """These positions are about to be restored: their segments go last."""
        for slot in list(self.slots(session_id, start)):
            if slot.segment.start < end:
                slot.segment.spare = False
                self.use[slot.segment.tier].segments.move_to_end(slot.segment.key)

    def stage(self, session_id: str, start: int, end: int, *, urgent: bool = False) -> None:
        """Have what lies on disk of these positions read ahead, as far as memory for it allows.

        With `urgent` one segment is read in any case: somebody waits for it, and for nothing else.
        """
        for slot in self.slots(session_id, start):
            segment = slot.segment
            if segment.start >= end:
                return
            if segment.tier is Tier.DISK and not segment.asked:
                if self._staged + segment.size > STAGE_BYTES and not urgent:
                    return
                segment.asked = True
                self._staged += segment.size
                self._orders.append(Read(segment.key))
            urgent = False

    def unstage(self, session_id: str) -> None:
        """Let go of what was read ahead."""
        for slot in self._slots.get(session_id, {}).values():
            self._unstage(slot.segment)

    def first_on_disk(self, session_id: str, start: int) -> Segment | None:
        """The first segment from `start` on that lies on disk."""
        held = [s.segment for s in self._slots.get(session_id, {}).values() if s.segment.tier is Tier.DISK]
        return min((s for s in held if s.start >= start), key=lambda s: s.start, default=None)

    def promote(self, segment: Segment) -> bool:
        """Move a segment that has been read ahead from disk to host memory. False: there is no room for it."""
        self.use[Tier.DISK].remove(segment)  # first: what goes down to make room for it must not push it out
        if not self._make_room(Tier.HOST, segment.size):
            self.use[Tier.DISK].add(segment)
            return False
        self._unstage(segment, tell=False)
        segment.tier = Tier.HOST
        self.use[Tier.HOST].add(segment)
        self._orders.append(Promote(segment.key))
        return True

    def arrived(self, key: SegmentKey) -> None:
        """A segment has been read from disk."""
        if (segment := self.use[Tier.DISK].segments.get(key)) and segment.asked:
            segment.ready = True

    def restored(self, session_id: str, start: int) -> None:
        """The segment at `start` is in the pool now: its copy is the first to go."""
        slot = self._slots.get(session_id, {}).get(start // self.segment_tokens)
        if slot is None:
            return
        self._unstage(slot.segment)
        if slot.segment.owners == {session_id}:
            slot.segment.spare = True
            self.use[slot.segment.tier].segments.move_to_end(slot.segment.key, last=False)

    # What changes with the session

    def touch(self, session_id: str) -> None:
        """The session has been used: its segments go last, and the tail before the head."""
        slots = self._slots.get(session_id, {})
        for number in sorted(slots, reverse=True):
            segment = slots[number].segment
            if not segment.spare:
                self.use[segment.tier].segments.move_to_end(segment.key)

    def truncate(self, session_id: str, position: int) -> None:
        """The ledger has been cut at `position`: what was computed of the rest belongs to nobody."""
        slots = self._slots.get(session_id, {})
        for number, slot in list(slots.items()):
            slot.tokens = min(slot.tokens, position - slot.segment.start)
            if slot.tokens <= 0:
                self._release(session_id, number)

    def close(self, session_id: str) -> int:
        """The session is gone; returns the bytes that became free."""
        before = sum(use.used for use in self.use.values())
        for number in list(self._slots.get(session_id, {})):
            self._release(session_id, number)
        return before - sum(use.used for use in self.use.values())

    def share(self, parent: str, child: str, position: int) -> None:
        """A fork owns what its parent does, up to `position`."""
        for slot in list(self._slots.get(parent, {}).values()):
            tokens = min(slot.tokens, position - slot.segment.start)
            if tokens > 0:
                slot.segment.spare = False
                self._assign(child, slot.segment, tokens)

    def guard(self, session_id: str) -> None:
        """Nothing of this session goes while it is read; ended by `unguard`."""
        self._guarded[session_id] += 1

    def unguard(self, session_id: str) -> None:
        self._guarded[session_id] -= 1
        if not self._guarded[session_id]:
            del self._guarded[session_id]

    def lost(self, key: SegmentKey) -> None:
        """The bytes of a segment are damaged or missing: nobody owns it any more."""
        segment = self._find(key)
        for owner in list(segment.owners) if segment else ():
            number = segment.start // self.segment_tokens if segment else 0
            self._release(owner, number)

    # Budgets

    def set_budget(self, tier: Tier, size: int) -> None:
        """Give a tier more or less room; what no longer fits goes down or away. Raises ValueError: some is guarded."""
        use = self.use[tier]
        needed = sum(s.size for s in use.segments.values() if self.is_guarded(s))
        if size < needed:
            raise ValueError(f"{needed} bytes are being read and cannot go")
        use.budget = size
        self._make_room(tier, 0)

    def flush(self, session_id: str) -> int:
        """Forget all of a session's segments; returns the bytes that became free."""
        return self.close(session_id)

    def check_integrity(self) -> None:
        """Raises AssertionError naming what is off."""
        named = self._owners_by_slot()
        for tier, use in self.use.items():
            if use.used != sum(s.size for s in use.segments.values()) or use.used > use.budget:
                raise AssertionError(f"{tier.name}: {use.used} bytes of {use.budget}, by its segments otherwise")
            if use.tokens != sum(s.tokens for s in use.segments.values()):
                raise AssertionError(f"{tier.name}: {use.tokens} tokens, by its segments otherwise")
            for segment in use.segments.values():
                owners = named.get(segment.key)
                if segment.tier is not tier or not owners or owners != segment.owners:
                    raise AssertionError(f"segment {segment.key}: owners {segment.owners}, named by {owners}")
        staged = sum(s.size for s in self.use[Tier.DISK].segments.values() if s.asked)
        if staged != self._staged:
            raise AssertionError(f"{self._staged} bytes are read ahead, by their segments {staged}")

    def _owners_by_slot(self) -> dict[SegmentKey, set[str]]:
        """Who names each segment. Raises AssertionError for a slot that is not what it says."""
        named: defaultdict[SegmentKey, set[str]] = defaultdict(set)
        for owner, slots in self._slots.items():
            for number, slot in slots.items():
                segment = slot.segment
                in_place = number * self.segment_tokens == segment.start and self._find(segment.key) is segment
                if not in_place or not 0 < slot.tokens <= segment.tokens:
                    raise AssertionError(f"session {owner}: a slot at {segment.start} is not what it says")
                named[segment.key].add(owner)
        return named

    # Room

    def _new(self, start: int, tokens: int) -> Segment:
        self._next_key += 1
        return Segment(SegmentKey(self._next_key), start, tokens, tokens * self.token_bytes, Tier.HOST)

    def _place(self, segment: Segment, tier: Tier | None) -> bool:
        """Find room for a new segment in `tier`; in host memory, else on disk, where that is None."""
        if tier is not Tier.DISK and self._make_room(Tier.HOST, segment.size):
            self.use[Tier.HOST].add(segment)
            return True
        if tier is Tier.HOST or not self._make_room(Tier.DISK, segment.size):
            return False
        segment.tier = Tier.DISK
        self.use[Tier.DISK].add(segment)
        self._orders.append(Demote(segment.key))
        return True

    def _make_room(self, tier: Tier, size: int) -> bool:
        """Let the first ones go until `size` bytes fit. False: they cannot, and nothing was touched in vain."""
        use = self.use[tier]
        fixed = sum(s.size for s in use.segments.values() if self.is_guarded(s)) if self._guarded else 0
        if size and fixed + size > use.budget:
            return False
        while use.used + size > use.budget:
            segment = next(s for s in use.segments.values() if not self.is_guarded(s))
            if tier is Tier.DISK or segment.spare or not self._demote(segment):
                self._fall_out(segment)
        return True

    def _demote(self, segment: Segment) -> bool:
        """Host to disk, if it fits there."""
        if not self._make_room(Tier.DISK, segment.size):
            return False
        self.use[Tier.HOST].remove(segment)
        segment.tier = Tier.DISK
        self.use[Tier.DISK].add(segment)
        self._orders.append(Demote(segment.key))
        return True

    def _fall_out(self, segment: Segment) -> None:
        use = self.use[segment.tier]
        if not segment.spare:
            use.dropped += 1
            use.dropped_bytes += segment.size
        self.lost(segment.key)

    # Owners

    def _assign(self, session_id: str, segment: Segment, tokens: int) -> None:
        number = segment.start // self.segment_tokens
        slots = self._slots.setdefault(session_id, {})
        if number in slots:
            self._release(session_id, number)
            slots = self._slots.setdefault(session_id, {})
        slots[number] = Slot(segment, tokens)
        segment.owners.add(session_id)

    def _release(self, session_id: str, number: int) -> None:
        """One owner less; a segment without one goes."""
        slots = self._slots[session_id]
        segment = slots.pop(number).segment
        if not slots:
            del self._slots[session_id]
        segment.owners.discard(session_id)
        if not segment.owners:
            self._unstage(segment, tell=False)
            self.use[segment.tier].remove(segment)
            self._orders.append(Drop(segment.key))

    def _unstage(self, segment: Segment, *, tell: bool = True) -> None:
        if segment.asked:
            segment.asked = segment.ready = False
            self._staged -= segment.size
            if tell:
                self._orders.append(Unread(segment.key))

    def _find(self, key: SegmentKey) -> Segment | None:
        return self.use[Tier.HOST].segments.get(key) or self.use[Tier.DISK].segments.get(key)

    def _first_write(self, segment: Segment) -> int:
        """Where the write of a new segment belongs: before it is demoted, if that has been ordered already."""
        last = len(self._orders)
        return last - 1 if last and self._orders[-1] == Demote(segment.key) else last
