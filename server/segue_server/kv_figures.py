"""Where KV is, in bytes: plain integers, safe to read from any thread, at worst one step old."""

from dataclasses import dataclass

from segue_model.paging import PAGE_TOKENS
from segue_server.accountant import Accountant
from segue_server.cache.accounting import pool_use
from segue_server.cache.segments import Tier
from segue_server.events import CacheUsage
from segue_server.scheduler import Scheduler
from segue_server.sequence import Sequence
from segue_server.stats import EngineStats


@dataclass(frozen=True, slots=True)
class KvBytes:
    """Bytes of the pool by class; their sum is what the allocator has given out."""

    active: int
    pinned: int
    idle: int
    prefix: int
    slack: int
    capacity: int
    tokens: int

    @property
    def held(self) -> int:
        return self.active + self.pinned + self.idle + self.prefix + self.slack


class KvFigures:
    """Reads the pool and the tiers, and changes nothing."""

    def __init__(
        self, scheduler: Scheduler, stats: EngineStats, accounts: Accountant, *, page_bytes: int, kv_dtype: str
    ) -> None:
        self._scheduler = scheduler
        self._holdings = scheduler.holdings
        self._stats = stats
        self._accounts = accounts
        self._page_bytes = page_bytes
        self._position_bytes = page_bytes // PAGE_TOKENS
        self._kv_dtype = kv_dtype

    def cache_usage(self, session_id: str) -> CacheUsage:
        """KV of one session; zeros when it is unknown."""
        sequence = self._holdings.sequences.get(session_id)
        return CacheUsage() if sequence is None else self.usage_of(sequence)

    def kv_tiers(self) -> dict[str, KvBytes]:
        """Every tier by its label, those without a budget too."""
        tiers = {"device": self.kv_bytes()}
        return tiers | {tier.name.lower(): self.kv_below(tier) for tier in self._holdings.tiers.use}

    def evictions(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(how often, how many bytes) of KV was dropped, by tier and reason."""
        counted, pool = self._stats.evictions.values, self._scheduler.evictor.cost
        sizes = self._stats.evicted_bytes.values
        dropped = {(tier, reason): (round(n), round(sizes[tier, reason])) for (tier, reason), n in counted.items()}
        dropped["device", "pressure"] = pool.count, pool.pages * self._page_bytes
        for tier, use in self._holdings.tiers.use.items():
            dropped[tier.name.lower(), "pressure"] = use.dropped, use.dropped_bytes
        return dropped

    @property
    def lower_tiers(self) -> tuple[str, ...]:
        """What the server declares of its tiers below the pool."""
        return tuple(f"tier:{tier.name.lower()}" for tier, use in self._holdings.tiers.use.items() if use.budget)

    def kv_bytes(self) -> KvBytes:
        """The pool by class."""
        sequences = list(self._holdings.sequences.values())
        idle = [s for s in sequences if not s.running]
        use = pool_use(
            active=(*(s.cache for s in sequences if s.running), *self._holdings.spares),
            pinned=(s.cache for s in idle if s.pinned),
            idle=(s.cache for s in idle if not s.pinned),
            held_pages=self._holdings.pool.held,
        )
        each = self._position_bytes
        return KvBytes(
            active=use.active * each,
            pinned=use.pinned * each,
            idle=use.idle * each,
            prefix=use.prefix * each,
            slack=use.slack * each,
            capacity=self._holdings.pool.capacity * self._page_bytes,
            tokens=use.tokens,
        )

    def kv_below(self, tier: Tier) -> KvBytes:
        """A tier below the pool by class; a segment of several sessions counts with the busiest of them."""
        use = self._holdings.tiers.use[tier]
        sizes = dict.fromkeys(("active", "pinned", "idle"), 0)
        for segment in self._holdings.tiers.segments(tier):
            owners = [self._holdings.sequences.get(owner) for owner in list(segment.owners)]
            running = any(s.running for s in owners if s)
            pinned = any(s.pinned for s in owners if s)
            sizes["active" if running else "pinned" if pinned else "idle"] += segment.size
        return KvBytes(**sizes, prefix=0, slack=0, capacity=use.budget, tokens=use.tokens)

    def usage_of(self, sequence: Sequence) -> CacheUsage:
        """KV of one sequence, wherever it is."""
        cache, page_bytes, tiers = sequence.cache, self._page_bytes, self._holdings.tiers
        cached = tiers.slots.reach(sequence.session_id, cache.computed)
        below = tiers.slots.lowest(sequence.session_id, cache.computed, cached)
        return CacheUsage(
            used_bytes=cache.computed * self._position_bytes + (cached - cache.computed) * tiers.token_bytes,
            reserved_bytes=len(cache.pages) * page_bytes,
            shared_bytes=self._holdings.shared_pages(sequence) * page_bytes,
            kv_dtype=self._kv_dtype,
            cached_tokens=cached,
            estimated_rebuild=cached * self._accounts.seconds_per_token,
            tier=below or (Tier.DEVICE if cached else Tier.NONE),
        )
