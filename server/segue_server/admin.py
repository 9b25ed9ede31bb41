"""What operators may do: look into the cache, flush and resize it, prove it, drain the server. Event loop only."""

import asyncio
import base64
import binascii
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial

from segue_server.cache.segments import Tier
from segue_server.cache_admin import CacheAdmin, CacheEntry, CacheStats, Flushed, Verification
from segue_server.cache_events import CacheEventBatch, CacheEventLog
from segue_server.engine_thread import EngineThread
from segue_server.errors import FieldInvalid
from segue_server.service import Service
from segue_server.transfers import SegmentReader

DEFAULT_PAGE_SIZE = 50
MAX_PAGE_SIZE = 1000


@dataclass(frozen=True, slots=True)
class EntryPage:
    entries: tuple[CacheEntry, ...]
    next_page_token: str  # "" = the last page


@dataclass(frozen=True, slots=True)
class Verified:
    """A cached session beside the same one, computed again."""

    compared_tokens: int
    max_difference: float
    bit_equal: bool
    argmax_equal: bool


class Admin:
    """One per server."""

    def __init__(
        self, service: Service, engine: EngineThread, *, on_drain: Callable[[], None], drain_grace: float
    ) -> None:
        """`on_drain` tells balancers; `drain_grace`: seconds that running turns get when the caller names none."""
        self._service = service
        self._engine = engine
        self._cache = CacheAdmin(engine.engine)
        self._on_drain = on_drain
        self._drain_grace = drain_grace
        self._draining: asyncio.Task[None] | None = None
        self.events = CacheEventLog()
        engine.on_cache_changes(self.events.seal)

    async def cache_stats(self) -> CacheStats:
        return await self._engine.call(self._cache.stats)

    async def list_entries(self, *, page_size: int, page_token: str, tier: Tier | None) -> EntryPage:
        """In eviction order. The order moves on between two pages, so an entry may be seen twice or not at all."""
        if page_size < 0:
            raise FieldInvalid.one("page_size", f"must not be negative, got {page_size}")
        if tier is Tier.NONE:
            raise FieldInvalid.one("tier", "nothing lies in NONE; name DEVICE, HOST or DISK, or leave it out")
        start, size = _decode(page_token), min(page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
        entries = await self._engine.call(partial(self._cache.entries, tier))
        more = len(entries) > start + size
        return EntryPage(tuple(entries[start : start + size]), _encode(start + size) if more else "")

    async def flush(self, *, idle_sessions: bool, prefixes: bool, salt: str) -> Flushed:
        """Drop KV that nobody uses; an empty salt means every salt."""
        if not (idle_sessions or prefixes):
            raise FieldInvalid.one("idle_sessions", "name what to flush: idle_sessions, prefixes or both")
        call = partial(self._cache.flush, idle_sessions=idle_sessions, prefixes=prefixes, salt=salt or None)
        return await self._engine.call(call)

    async def set_budget(self, tier: Tier, size: int) -> CacheStats:
        """Resize a tier; returns the figures after it. Raises FieldInvalid, or KvBudget when too much is in use."""
        if tier is Tier.NONE:
            raise FieldInvalid.one("tier", "must be DEVICE, HOST or DISK")
        if size < 0:
            raise FieldInvalid.one("capacity_bytes", f"must not be negative, got {size}")
        await self._engine.call(partial(self._cache.set_budget, tier, size))
        self._service.pool_resized(self._engine.engine.holdings.pool.capacity)
        return await self.cache_stats()

    async def verify(self, session_id: str) -> Verified:
        """Compute a session a second time and compare. It takes no turn meanwhile."""
        async with self._service.guarded(session_id) as (guarded, segment):
            check = await self._engine.call(partial(self._cache.begin_verification, guarded))
            try:
                while not check.done:
                    await self._compare(check, segment)
            finally:
                self._engine.post(partial(self._cache.end_verification, check))
        return Verified(check.at, check.max_difference, check.bit_equal, check.argmax_equal)

    async def _compare(self, check: Verification, segment: SegmentReader) -> None:
        start, _ = check.next_chunk
        size = self._engine.engine.holdings.tiers.segment_tokens
        kv = await segment(start // size * size) if start < check.guarded.tokens else None
        await self._engine.call(partial(self._cache.verify, check, kv))

    async def subscribe(self, *, after_sequence: int, include_snapshot: bool) -> AsyncGenerator[CacheEventBatch, None]:
        """Batches of changes of the prefix index; with a snapshot, first what it holds now.

        What happens while the snapshot is taken comes again after it; carried out in order, it changes nothing.
        Raises EventHistoryLost.
        """
        if after_sequence < 0:
            raise FieldInvalid.one("after_sequence", f"must not be negative, got {after_sequence}")
        after = after_sequence or self.events.last_sequence
        self.events.check(after)
        if include_snapshot:
            after = self.events.last_sequence
            held = await self._engine.call(self._cache.index)
            yield CacheEventBatch(after, time.time(), held)
        async for batch in self.events.follow(after):
            yield batch

    def drain(self, grace: float | None) -> int:
        """Take no new work, and let running turns end; returns how many there are. May be called again."""
        load = self._service.load()
        self._service.draining = True
        self._on_drain()
        if self._draining is None or self._draining.done():
            seconds = self._drain_grace if grace is None else grace
            self._draining = asyncio.create_task(self._service.drain(seconds))
        return load.running_requests + load.queued_requests


def _encode(start: int) -> str:
    return base64.urlsafe_b64encode(str(start).encode()).decode()


def _decode(token: str) -> int:
    """Raises FieldInvalid on a token this server did not make."""
    try:
        start = int(base64.b64decode(token.encode(), altchars=b"-_", validate=True)) if token else 0
    except (ValueError, binascii.Error):
        raise FieldInvalid.one("page_token", "is not a token of an earlier answer") from None
    if start < 0:
        raise FieldInvalid.one("page_token", "is not a token of an earlier answer")
    return start
