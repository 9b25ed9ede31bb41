"""What an operator asks of the cache: figures, order of eviction, flush, budgets, proof. Engine thread only.

SetCacheBudget  takes pages out of circulation; the pool's tensors stay as large as they were made
VerifyCache     computes a session a second time in borrowed pages, and compares the logits of both, chunk by chunk
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from segue_model.arrays import Floats
from segue_model.paging import PAGE_TOKENS
from segue_model.runner.base import Slice, Want
from segue_server.cache.prefix import Node, stored
from segue_server.cache.prefix import Stored as StoredPage
from segue_server.cache.segments import LOWER, Segment, Tier
from segue_server.cache.session import SessionCache, pages_for
from segue_server.engine import Engine
from segue_server.errors import FieldInvalid, KvBudget, Quota
from segue_server.kv_control import Guarded
from segue_server.kv_figures import KvBytes
from segue_server.page_claims import borrow, resize
from segue_server.sequence import Sequence

VERIFY_TOKENS = 64  # positions that are compared in one portion, between two steps of the batch


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Bytes by tier and class, and what eviction has cost since the start."""

    tiers: dict[Tier, KvBytes]
    evictions: int
    evicted_tokens: int
    recomputed_tokens: int
    prefix_query_tokens: int
    prefix_hit_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """As in cache.proto. Times in Unix seconds."""

    entry_id: str
    tier: Tier
    session_ids: tuple[str, ...]
    start: int
    tokens: int
    size: int
    holders: int
    priority: int
    last_used: float
    rebuild: float  # seconds
    protection: str  # "", "ACTIVE", "PINNED"


@dataclass(frozen=True, slots=True)
class Flushed:
    freed_bytes: int
    sessions: int


@dataclass(slots=True)
class Verification:
    """A session that is being computed a second time."""

    guarded: Guarded
    tokens: list[int]  # as far as there is KV, and one more where the ledger has one
    fresh: SessionCache
    cached: SessionCache
    step: int  # positions of a chunk, at most; a chunk lies in one segment
    at: int = 0
    max_difference: float = 0.0
    bit_equal: bool = True
    argmax_equal: bool = True

    @property
    def done(self) -> bool:
        return self.at >= len(self.tokens)

    @property
    def next_chunk(self) -> tuple[int, int]:
        """The first position, whose logits no cache can change, alone; then the rest of its page; then whole steps."""
        start = self.at
        step = PAGE_TOKENS if start < PAGE_TOKENS else self.step
        end = (start // step + 1) * step if start else 1
        return start, min(end, len(self.tokens))


class CacheAdmin:
    """One per engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._scheduler = engine.scheduler
        self._holdings = engine.holdings
        self._tiers = engine.holdings.tiers

    # Figures

    def stats(self) -> CacheStats:
        engine, evictions = self._engine, self._scheduler.evictor.cost
        below = {tier: engine.figures.kv_below(tier) for tier in LOWER if self._tiers.use[tier].budget}
        fallen = [self._tiers.use[tier] for tier in LOWER]
        return CacheStats(
            tiers={Tier.DEVICE: engine.figures.kv_bytes()} | below,
            evictions=evictions.count + sum(use.dropped for use in fallen) + round(engine.stats.evictions.sum),
            evicted_tokens=evictions.tokens
            + sum(use.dropped_bytes for use in fallen) // self._tiers.token_bytes
            + engine.stats.flushed_tokens,
            recomputed_tokens=round(engine.stats.recomputed_tokens.sum),
            prefix_query_tokens=engine.stats.prefix_query_tokens,
            prefix_hit_tokens=engine.stats.prefix_hit_tokens,
        )

    def entries(self, tier: Tier | None) -> list[CacheEntry]:
        """Tier by tier: what goes next first, what is protected last."""
        device = self._device_entries() if tier in (None, Tier.DEVICE) else ()
        below = [self._segment_entry(s) for t in LOWER if tier in (None, t) for s in self._tiers.segments(t)]
        return [*device, *below]

    def _device_entries(self) -> Iterator[CacheEntry]:
        order = self._scheduler.evictor.order(self._engine.clock())
        for entry in order:
            yield self._page_entry(entry) if isinstance(entry, Node) else self._session_entry(entry, "")
        evictable = {id(entry) for entry in order}
        for sequence in self._holdings.sequences.values():
            if sequence.cache.pages and id(sequence) not in evictable:
                busy = sequence.running or sequence.guards
                yield self._session_entry(sequence, "ACTIVE" if busy else "PINNED")

    def _session_entry(self, sequence: Sequence, protection: str) -> CacheEntry:
        cache = sequence.cache
        return CacheEntry(
            entry_id=f"device:session:{sequence.session_id}",
            tier=Tier.DEVICE,
            session_ids=(sequence.session_id,),
            start=0,
            tokens=cache.computed,
            size=len(cache.pages) * self._engine.runner.page_bytes,
            holders=int(bool(protection)),
            priority=sequence.priority,
            last_used=self._unix(sequence.last_used),
            rebuild=cache.computed * self._engine.seconds_per_token,
            protection=protection,
        )

    def _page_entry(self, node: Node) -> CacheEntry:
        depth, above = 0, node.parent
        while above is not None:
            depth, above = depth + 1, above.parent
        return CacheEntry(
            entry_id=f"device:page:{node.hash & (2**64 - 1):016x}",
            tier=Tier.DEVICE,
            session_ids=(),
            start=depth * PAGE_TOKENS,
            tokens=PAGE_TOKENS,
            size=self._engine.runner.page_bytes,
            holders=0,
            priority=0,
            last_used=self._unix(node.last_used),
            rebuild=PAGE_TOKENS * self._engine.seconds_per_token,
            protection="",
        )

    def _segment_entry(self, segment: Segment) -> CacheEntry:
        owners = [s for o in sorted(segment.owners) if (s := self._holdings.sequences.get(o))]
        guarded = self._tiers.is_guarded(segment)
        return CacheEntry(
            entry_id=f"{segment.tier.name.lower()}:{segment.key}",
            tier=segment.tier,
            session_ids=tuple(s.session_id for s in owners),
            start=segment.start,
            tokens=segment.tokens,
            size=segment.size,
            holders=int(guarded),
            priority=max((s.priority for s in owners), default=0),
            last_used=self._unix(max((s.last_used for s in owners), default=self._engine.clock())),
            rebuild=segment.tokens * self._engine.seconds_per_token,
            protection="ACTIVE" if guarded else "",
        )

    def _unix(self, engine_time: float) -> float:
        return time.time() - (self._engine.clock() - engine_time)

    def index(self) -> list[StoredPage]:
        """What the prefix index holds, parents before children."""
        return [stored(node) for node in self._holdings.prefixes.entries()]

    # Flush

    def flush(self, *, idle_sessions: bool, prefixes: bool, salt: str | None) -> Flushed:
        """Drop what nobody uses; the tokens stay."""
        before = self._held_bytes()
        victims = list(self._flushable(salt)) if idle_sessions else []
        for sequence in victims:
            self._flush_session(sequence)
        if prefixes:
            pages = self._holdings.prefixes.flush_unheld(salt)
            self._engine.stats.evicted("device", "flush", pages * self._engine.runner.page_bytes)
        self._engine.mover.carry_out()
        return Flushed(before - self._held_bytes(), len(victims))

    def _flushable(self, salt: str | None) -> Iterator[Sequence]:
        for s in self._holdings.sequences.values():
            free = s.turn is None and not s.pinned and not s.guards
            if free and salt in (None, s.salt) and (s.cache.pages or self._tiers.slots.bytes_of(s.session_id)):
                yield s

    def _flush_session(self, sequence: Sequence) -> None:
        stats, cached = self._engine.stats, self._engine.figures.cache_usage(sequence.session_id).cached_tokens
        for tier, size in self._tiers.slots.bytes_of(sequence.session_id).items():
            stats.evicted(tier.name.lower(), "flush", size)
        self._tiers.close(sequence.session_id)
        known = sequence.tokens[: sequence.cache.computed]
        freed = self._holdings.drop(sequence)
        if sequence.salt is not None:
            freed += self._holdings.prefixes.forget(sequence.salt, known, 0)
        stats.evicted("device", "flush", freed * self._engine.runner.page_bytes)
        stats.flushed_tokens += cached

    def _held_bytes(self) -> int:
        below = sum(use.used for use in self._tiers.use.values())
        return self._holdings.pool.held * self._engine.runner.page_bytes + below

    # Budgets

    def set_budget(self, tier: Tier, size: int) -> None:
        """Raises KvBudget when active and pinned sessions hold more, FieldInvalid for more than can be had."""
        if tier is Tier.DEVICE:
            self._set_pool(size)
            return
        if tier is Tier.DISK and size:
            self._engine.mover.open_disk()
        try:
            self._tiers.set_budget(tier, size)
        except ValueError as error:
            raise KvBudget(str(error), quota=Quota(f"kv_{tier.name.lower()}_bytes", size)) from error
        self._engine.mover.carry_out()

    def _set_pool(self, size: int) -> None:
        runner, pages = self._engine.runner, size // self._engine.runner.page_bytes
        if not 1 <= pages <= runner.num_pages:
            most = runner.num_pages * runner.page_bytes
            text = f"must be in [{runner.page_bytes}, {most}]: the pool cannot grow beyond what it was made with"
            raise FieldInvalid.one("capacity_bytes", f"{text}, got {size}")
        if not resize(self._scheduler, pages, self._engine.clock()):
            text = f"active and pinned sessions hold or have been promised more than {size} bytes"
            raise KvBudget(text, quota=Quota("kv_bytes", size))
        self._engine.mover.carry_out()
        self._engine.jobs.refuse_impossible()

    # Proof

    def begin_verification(self, guarded: Guarded) -> Verification:
        """Borrow pages for two more copies of a session's KV. Raises KvBudget when there are none."""
        sequence = guarded.sequence
        count = min(guarded.tokens + 1, len(sequence.tokens))
        now, tokens = self._engine.clock(), list(sequence.tokens[:count])
        fresh = borrow(self._scheduler, count, now)
        cached = borrow(self._scheduler, count, now) if fresh else None
        self._engine.mover.carry_out()
        if fresh is None or cached is None:
            if fresh is not None:
                self._holdings.give_back(fresh)
            size = 2 * pages_for(count) * self._engine.runner.page_bytes
            raise KvBudget(
                f"verifying takes {size} bytes of the pool, which others hold", quota=Quota("kv_bytes", size)
            )
        return Verification(guarded, tokens, fresh, cached, min(VERIFY_TOKENS, self._tiers.segment_tokens))

    def verify(self, check: Verification, segment: Floats | None) -> None:
        """Compare the next chunk; `segment`: the cached KV that holds it, None beyond the end of it."""
        start, end = check.next_chunk
        ids = check.tokens[start:end]
        pair = [Slice(ids, start, cache.pages, Want.ALL) for cache in (check.fresh, check.cached)]
        fresh, cached = self._engine.runner.forward(pair)
        if fresh is None or cached is None:
            raise AssertionError("a runner gave no logits for Want.ALL")
        with np.errstate(invalid="ignore"):  # a broken model's: infinity less infinity
            check.max_difference = max(check.max_difference, float(np.abs(fresh - cached).max()))
        check.bit_equal &= np.array_equal(fresh, cached)
        check.argmax_equal &= np.array_equal(fresh.argmax(-1), cached.argmax(-1))
        check.at = end
        if segment is not None:  # the pass has written over what it was to be compared with
            self._import(check, segment, start, end)

    def _import(self, check: Verification, segment: Floats, start: int, end: int) -> None:
        first = start // PAGE_TOKENS * PAGE_TOKENS
        offset = first % self._tiers.segment_tokens
        part = segment[:, :, :, offset : offset + end - first]
        if part.shape[3]:
            self._engine.runner.import_pages(check.cached.pages[first // PAGE_TOKENS :], part)

    def end_verification(self, check: Verification) -> None:
        for spare in (check.fresh, check.cached):
            self._holdings.give_back(spare)
