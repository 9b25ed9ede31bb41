"""Which segments a session owns, and how much of each is valid for it. Integers only."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from segue_server.cache.segments import Segment, Slot, Tier


class SlotTable:
    """Slots by session and by the number of the segment in its ledger. One thread writes; others may read."""

    def __init__(self, segment_tokens: int) -> None:
        self._segment_tokens = segment_tokens
        self._slots: dict[str, dict[int, Slot]] = {}  # session -> number of the segment -> slot

    def at(self, session_id: str, position: int) -> Slot | None:
        """The slot whose segment reaches beyond `position`, which lies in it."""
        slot = self._slots.get(session_id, {}).get(position // self._segment_tokens)
        return slot if slot and slot.end > position else None

    def run(self, session_id: str, start: int) -> Iterator[Slot]:
        """The slots that hold the positions from `start` on without a gap."""
        while slot := self.at(session_id, start):
            yield slot
            start = slot.end
            if start % self._segment_tokens:
                return

    def of(self, session_id: str) -> list[Slot]:
        """All slots of a session, whatever lies between them."""
        return list(self._slots.get(session_id, {}).values())

    def reach(self, session_id: str, start: int) -> int:
        """The position up to which KV from `start` on is here; `start` itself when there is none."""
        return max((slot.end for slot in self.run(session_id, start)), default=start)

    def lowest(self, session_id: str, start: int, end: int) -> Tier | None:
        """The lowest tier that the KV of positions `start` .. `end - 1` lies in; None when none of it is here."""
        tiers = [slot.segment.tier for slot in self.run(session_id, start) if slot.segment.start < end]
        return max(tiers, key=lambda tier: tier.value, default=None)

    def bytes_of(self, session_id: str) -> Counter[Tier]:
        """Bytes of a session by tier; a segment that forks share counts for each of them."""
        sizes: Counter[Tier] = Counter()
        for slot in self.of(session_id):
            sizes[slot.segment.tier] += slot.segment.size
        return sizes

    def put(self, session_id: str, segment: Segment, tokens: int) -> None:
        """Make a session an owner of a segment, in a place that is free."""
        self._slots.setdefault(session_id, {})[segment.start // self._segment_tokens] = Slot(segment, tokens)
        segment.owners.add(session_id)

    def take(self, session_id: str, segment: Segment) -> None:
        """End a session's ownership of a segment."""
        slots = self._slots[session_id]
        del slots[segment.start // self._segment_tokens]
        if not slots:
            del self._slots[session_id]
        segment.owners.discard(session_id)

    def owners(self) -> dict[Segment, set[str]]:
        """Who names each segment. Raises AssertionError for a slot that is not what it says."""
        named: defaultdict[Segment, set[str]] = defaultdict(set)
        for owner, slots in self._slots.items():
            for number, slot in slots.items():
                segment = slot.segment
                if number * self._segment_tokens != segment.start or not 0 < slot.tokens <= segment.tokens:
                    raise AssertionError(f"session {owner}: a slot at {segment.start} is not what it says")
                named[segment].add(owner)
        return named
