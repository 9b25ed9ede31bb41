"""The tiers below the pool: which segment goes to host memory or to disk, which one goes for it. Integers only.

    pool ── keep ──▶ host ── overflow ──▶ disk ── overflow ──▶ gone (the tokens stay: it is computed again)
      ◀── restore ──────────────────────────┘

A segment (segments.py) is a copy: it stays valid for as long as the tokens before its end are the session's, whatever
happens in the pool, and forks share it; slots.py tells whose it is. What a session has read back lies in the pool as
well, so its copy is *spare*: kept while there is room, for the next eviction is free then, and the first to go.

Decisions become orders (`take_orders`) that whoever owns the bytes carries out, in order, before a page is written.

Invariant: the bytes of each tier are the sum over its segments, at most its budget; each segment has an owner, and
each owner names it in exactly one slot. `check_integrity` runs it.
"""

from collections import Counter
from collections.abc import Sequence

from segue_server.cache.pages import PageId
from segue_server.cache.segments import (
    Demote,
    Drop,
    Order,
    Promote,
    Read,
    Segment,
    SegmentKey,
    Tier,
    TierUse,
    Unread,
    Write,
)
from segue_server.cache.slots import SlotTable

STAGE_BYTES = 256 << 20  # read ahead from disk for turns that wait, at most


class Tiers:
    """Host memory and disk by segments. The engine thread owns it; others may read the counts."""

    def __init__(self, *, segment_tokens: int, token_bytes: int, host_bytes: int = 0, disk_bytes: int = 0) -> None:
        """`segment_tokens` is a whole number of pages; `token_bytes` what a position takes outside the pool."""
        self.segment_tokens = segment_tokens
        self.token_bytes = token_bytes
        self.use = {Tier.HOST: TierUse(host_bytes), Tier.DISK: TierUse(disk_bytes)}
        self.slots = SlotTable(segment_tokens)
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
        slot = self.slots.at(session_id, start)
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
        held = [s.segment for s in self.slots.of(session_id) if s.segment.tier is Tier.HOST]
        segment = max((s for s in held if s.start >= start), key=lambda s: s.start, default=None)
        if segment is None:
            return False
        return True if self._demote(segment) else None

    # Up

    def need(self, session_id: str, start: int, end: int) -> None:
        """These positions are about to be restored: their segments go last."""
        for slot in list(self.slots.run(session_id, start)):
            if slot.segment.start < end:
                slot.segment.spare = False
                self.use[slot.segment.tier].segments.move_to_end(slot.segment.key)

    def stage(self, session_id: str, start: int, end: int, *, urgent: bool = False) -> None:
        """Have what lies on disk of these positions read ahead, as far as memory for it allows.

        With `urgent` one segment is read in any case: somebody waits for it, and for nothing else.
        """
        for slot in self.slots.run(session_id, start):
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
        for slot in self.slots.of(session_id):
            self._unstage(slot.segment)

    def first_on_disk(self, session_id: str, start: int) -> Segment | None:
        """The first segment from `start` on that lies on disk."""
        held = [s.segment for s in self.slots.of(session_id) if s.segment.tier is Tier.DISK]
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
        slot = self.slots.at(session_id, start)
        if slot is None:
            return
        self._unstage(slot.segment)
        if slot.segment.owners == {session_id}:
            slot.segment.spare = True
            self.use[slot.segment.tier].segments.move_to_end(slot.segment.key, last=False)

    # What changes with the session

    def touch(self, session_id: str) -> None:
        """The session has been used: its segments go last, and the tail before the head."""
        for slot in sorted(self.slots.of(session_id), key=lambda slot: slot.segment.start, reverse=True):
            segment = slot.segment
            if not segment.spare:
                self.use[segment.tier].segments.move_to_end(segment.key)

    def truncate(self, session_id: str, position: int) -> None:
        """The ledger has been cut at `position`: what was computed of the rest belongs to nobody."""
        for slot in self.slots.of(session_id):
            slot.tokens = min(slot.tokens, position - slot.segment.start)
            if slot.tokens <= 0:
                self._release(session_id, slot.segment)

    def close(self, session_id: str) -> int:
        """The session is gone; returns the bytes that became free."""
        before = sum(use.used for use in self.use.values())
        for slot in self.slots.of(session_id):
            self._release(session_id, slot.segment)
        return before - sum(use.used for use in self.use.values())

    def share(self, parent: str, child: str, position: int) -> None:
        """A fork owns what its parent does, up to `position`."""
        for slot in self.slots.of(parent):
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
        if segment := self.use[Tier.HOST].segments.get(key) or self.use[Tier.DISK].segments.get(key):
            for owner in list(segment.owners):
                self._release(owner, segment)

    # Budgets

    def set_budget(self, tier: Tier, size: int) -> None:
        """Give a tier more or less room; what no longer fits goes down or away. Raises ValueError: some is guarded."""
        use = self.use[tier]
        needed = sum(s.size for s in use.segments.values() if self.is_guarded(s))
        if size < needed:
            raise ValueError(f"{needed} bytes are being read and cannot go")
        use.budget = size
        self._make_room(tier, 0)

    def check_integrity(self) -> None:
        """Raises AssertionError naming what is off."""
        named = self.slots.owners()
        for tier, use in self.use.items():
            if use.used != sum(s.size for s in use.segments.values()) or use.used > use.budget:
                raise AssertionError(f"{tier.name}: {use.used} bytes of {use.budget}, by its segments otherwise")
            if use.tokens != sum(s.tokens for s in use.segments.values()):
                raise AssertionError(f"{tier.name}: {use.tokens} tokens, by its segments otherwise")
            for segment in use.segments.values():
                owners = named.pop(segment, None)
                if segment.tier is not tier or not owners or owners != segment.owners:
                    raise AssertionError(f"segment {segment.key}: owners {segment.owners}, named by {owners}")
        if named:
            raise AssertionError(f"sessions own segments that lie nowhere: {named}")
        staged = sum(s.size for s in self.use[Tier.DISK].segments.values() if s.asked)
        if staged != self._staged:
            raise AssertionError(f"{self._staged} bytes are read ahead, by their segments {staged}")

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
        if (old := self.slots.at(session_id, segment.start)) is not None:
            self._release(session_id, old.segment)
        self.slots.put(session_id, segment, tokens)

    def _release(self, session_id: str, segment: Segment) -> None:
        """One owner less; a segment without one goes."""
        self.slots.take(session_id, segment)
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

    def _first_write(self, segment: Segment) -> int:
        """Where the write of a new segment belongs: before it is demoted, if that has been ordered already."""
        last = len(self._orders)
        return last - 1 if last and self._orders[-1] == Demote(segment.key) else last
