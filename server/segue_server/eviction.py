"""Which KV goes when the pool is short, and which before that. Integers only; the clock is handed in."""

from collections.abc import Iterator
from dataclasses import dataclass

from segue_model.paging import PAGE_TOKENS
from segue_server.cache.pages import PageId
from segue_server.cache.prefix import Node
from segue_server.holdings import Holdings
from segue_server.sequence import Sequence

ATTENTION_TOKENS = 4096  # depth at which attention costs as much as everything else, roughly, for small models


@dataclass(slots=True)
class Evictions:
    """What pressure on the pool has cost so far: what was dropped, and what could go down a tier."""

    count: int = 0
    pages: int = 0
    tokens: int = 0
    moved: int = 0  # positions


class Evictor:
    """Takes KV from idle sessions and from the prefix index, never from a running turn."""

    def __init__(self, holdings: Holdings, *, watermarks: tuple[float, float]) -> None:
        """With tiers below the pool, idle KV goes down between two watermarks, shares of the pool: from the moment when
        more is held than the upper one says, until it is no more than the lower one.
        """
        self._holdings = holdings
        self._high, self._low = watermarks
        self._relieving = False
        self._shrunk: set[str] = set()  # sessions that have lost KV to others since `take_shrunk`
        self.cost = Evictions()

    def order(self, now: float) -> list[Sequence | Node]:
        """Idle sessions, and prefix pages that no session holds: the first one goes next."""
        keyed: list[tuple[tuple[float, float, int], Sequence | Node]] = [
            ((*_order_of(s, now), 1), s) for s in self._evictable(None)
        ]
        pool, prefixes = self._holdings.pool, self._holdings.prefixes
        unheld = [node for node in reversed(prefixes.entries()) if pool.references(node.page) == 1]
        keyed += [((0, node.last_used - now, 0), node) for node in unheld]
        return [entry for _, entry in sorted(keyed, key=lambda pair: pair[0])]

    def relieve(self, now: float, *, pause: bool) -> bool:
        """Between the watermarks idle KV goes down a segment a step, before anybody has to wait for its pages.

        Not with `pause`: whoever waits for pages already takes them by himself.
        """
        pool, tiers = self._holdings.pool, self._holdings.tiers
        limit = (self._low if self._relieving else self._high) * pool.capacity
        self._relieving = tiers.enabled and pool.held > limit and not pause
        if not self._relieving:
            return False
        pages, moved, before = tiers.segment_tokens // PAGE_TOKENS, self.cost.moved, pool.held
        while self.evict(pages, now=now, subtrees=False):
            if self.cost.moved > moved or pool.held <= max(limit, before - pages):
                return True
        return pool.held < before

    def evict(self, pages: int, *, now: float, keep: Sequence | None = None, subtrees: bool = True) -> bool:
        """Drop up to `pages` pages of whatever is cheapest to lose. False: there is nothing left.

        Nothing of `keep` goes. Sessions lose their tail first. A page that only the prefix index holds counts as an
        idle session of priority 0 that was last used when the page was.
        """
        holdings = self._holdings
        victim = min(self._evictable(keep), key=lambda s: _order_of(s, now), default=None)
        orphan = holdings.prefixes.oldest()
        if victim is None and orphan is None:
            return subtrees and self._evict_subtree()
        if victim is None or (orphan is not None and (0, orphan - now) <= _order_of(victim, now)):
            holdings.prefixes.evict_one()
            self._count(1, PAGE_TOKENS)
        else:
            before = victim.cache.computed
            freed = holdings.shed(victim, pages)
            self._shrunk.add(victim.session_id)
            if (kept := holdings.tiers.slots.reach(victim.session_id, victim.cache.computed)) >= before:
                self.cost.moved += kept - victim.cache.computed
            else:
                self._count(freed, before - victim.cache.computed)
        return True

    def take_shrunk(self) -> set[str]:
        """Sessions that have lost KV to others since the last call."""
        shrunk, self._shrunk = self._shrunk, set()
        return shrunk

    def _evict_subtree(self) -> bool:
        """The last resort: a prefix page that pages of running turns follow."""
        if dropped := self._holdings.prefixes.evict_subtree():
            self._count(1, PAGE_TOKENS)
        return dropped

    def _count(self, pages: int, tokens: int) -> None:
        self.cost.count += 1
        self.cost.pages += pages
        self.cost.tokens += tokens

    def evictable_pages(self, keep: Sequence | None = None, found: list[PageId] | None = None) -> int:
        """Pages that could be had: all but those of running and pinned sequences, and of what `keep` would go on from.

        With `found` that is its own whole pages and then those: a copy of its own that it would give up is no claim.
        """
        kept: set[PageId] = {page for spare in self._holdings.spares for page in spare.pages}
        for sequence in self._holdings.sequences.values():
            if sequence.running or sequence.pinned or sequence.guards:
                kept.update(sequence.cache.pages)
        if keep is not None:
            whole = keep.cache.computed // PAGE_TOKENS
            kept.update([*keep.cache.pages[:whole], *found[whole:]] if found else keep.cache.pages)
        return self._holdings.pool.held - len(kept)

    def _evictable(self, keep: Sequence | None) -> Iterator[Sequence]:
        return (
            s
            for s in self._holdings.sequences.values()
            if s.cache.pages and not s.running and not s.pinned and not s.guards and s is not keep
        )


def _order_of(sequence: Sequence, now: float) -> tuple[int, float]:
    """Least first: low priority, then long idle and cheap to rebuild per byte.

    A position costs its share of the linear layers, and attention to all before it: twice as much at
    ATTENTION_TOKENS of depth. The tail goes first, so its depth is what counts.
    """
    idle = now - sequence.last_used
    return sequence.priority, -idle / (1 + sequence.cache.computed / ATTENTION_TOKENS)
