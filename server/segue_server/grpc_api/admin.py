"""segue.v1.CacheAdminService."""
# ruff: noqa: N802 - methods have the names of the proto

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import aclosing
from itertools import groupby

from segue.v1 import cache_pb2, types_pb2
from segue_model.paging import PAGE_TOKENS
from segue_server.admin import Admin
from segue_server.cache.prefix import Change, Removed, Stored
from segue_server.cache.segments import Tier
from segue_server.cache_admin import CacheEntry, CacheStats
from segue_server.cache_events import CacheEventBatch
from segue_server.grpc_api.convert_events import duration
from segue_server.grpc_api.convert_snapshots import TIERS
from segue_server.grpc_api.convert_views import timestamp
from segue_server.grpc_api.form import CallContext, Form, check, read
from segue_server.kv_figures import KvBytes

MAX_BLOCKS = 256  # of one BlocksStored: a batch stays far below the size of a message


class AdminServicer:
    """What operators ask; for a loopback port."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    async def GetCacheStats(
        self, _message: cache_pb2.GetCacheStatsRequest, _context: CallContext
    ) -> cache_pb2.CacheStats:
        return _stats(await self._admin.cache_stats())

    async def ListCacheEntries(
        self, message: cache_pb2.ListCacheEntriesRequest, context: CallContext
    ) -> cache_pb2.ListCacheEntriesResponse:
        tier = read(message, context, _tier)
        page = await self._admin.list_entries(page_size=message.page_size, page_token=message.page_token, tier=tier)
        return cache_pb2.ListCacheEntriesResponse(
            entries=[_entry(entry) for entry in page.entries], next_page_token=page.next_page_token
        )

    async def FlushCache(
        self, message: cache_pb2.FlushCacheRequest, context: CallContext
    ) -> cache_pb2.FlushCacheResponse:
        check(message, context)
        flushed = await self._admin.flush(
            idle_sessions=message.idle_sessions, prefixes=message.prefixes, salt=message.cache_salt
        )
        return cache_pb2.FlushCacheResponse(freed_bytes=flushed.freed_bytes, sessions=flushed.sessions)

    async def SetCacheBudget(
        self, message: cache_pb2.SetCacheBudgetRequest, context: CallContext
    ) -> cache_pb2.CacheStats:
        tier = read(message, context, _tier)
        return _stats(await self._admin.set_budget(tier or Tier.NONE, message.capacity_bytes))

    async def VerifyCache(
        self, message: cache_pb2.VerifyCacheRequest, context: CallContext
    ) -> cache_pb2.VerifyCacheResponse:
        check(message, context)
        verified = await self._admin.verify(message.session_id)
        return cache_pb2.VerifyCacheResponse(
            compared_tokens=verified.compared_tokens,
            max_abs_difference=verified.max_difference,
            bit_equal=verified.bit_equal,
            argmax_equal=verified.argmax_equal,
        )

    async def SubscribeCacheEvents(
        self, message: cache_pb2.SubscribeCacheEventsRequest, context: CallContext
    ) -> AsyncIterator[cache_pb2.CacheEventBatch]:
        check(message, context)
        subscription = self._admin.subscribe(
            after_sequence=message.after_sequence, include_snapshot=message.include_snapshot
        )
        async with aclosing(subscription) as batches:
            async for batch in batches:
                yield _batch(batch)

    async def Drain(self, message: cache_pb2.DrainRequest, context: CallContext) -> cache_pb2.DrainResponse:
        grace = read(message, context, _grace)
        return cache_pb2.DrainResponse(running_requests=self._admin.drain(grace))


def _tier(form: Form, message: cache_pb2.ListCacheEntriesRequest | cache_pb2.SetCacheBudgetRequest) -> Tier | None:
    return form.choice("tier", message.tier, TIERS)


def _grace(form: Form, message: cache_pb2.DrainRequest) -> float | None:
    return form.seconds("grace", message.grace) if message.HasField("grace") else None


def _stats(stats: CacheStats) -> cache_pb2.CacheStats:
    return cache_pb2.CacheStats(
        tiers=[_tier_stats(tier, use) for tier, use in stats.tiers.items()],
        evictions=stats.evictions,
        evicted_tokens=stats.evicted_tokens,
        recomputed_tokens=stats.recomputed_tokens,
        prefix_query_tokens=stats.prefix_query_tokens,
        prefix_hit_tokens=stats.prefix_hit_tokens,
    )


def _tier_stats(tier: Tier, use: KvBytes) -> cache_pb2.TierStats:
    return cache_pb2.TierStats(
        tier=_proto(tier),
        capacity_bytes=use.capacity,
        active_bytes=use.active,
        pinned_bytes=use.pinned,
        idle_bytes=use.idle,
        prefix_bytes=use.prefix,
        slack_bytes=use.slack,
        free_bytes=use.capacity - use.held,
    )


def _entry(entry: CacheEntry) -> cache_pb2.CacheEntry:
    return cache_pb2.CacheEntry(
        entry_id=entry.entry_id,
        session_ids=entry.session_ids,
        start_position=entry.start,
        tokens=entry.tokens,
        size_bytes=entry.size,
        reference_count=entry.holders,
        priority=entry.priority,
        last_used_time=timestamp(entry.last_used),
        estimated_rebuild=duration(entry.rebuild),
        protection=entry.protection,
    )


def _batch(batch: CacheEventBatch) -> cache_pb2.CacheEventBatch:
    return cache_pb2.CacheEventBatch(
        sequence=batch.sequence, time=timestamp(batch.time), events=list(_events(batch.changes))
    )


def _events(changes: Iterable[Change]) -> Iterator[cache_pb2.CacheEvent]:
    """Neighbours of one kind become one event, pages that follow each other one run of blocks."""
    for kind, group in groupby(changes, type):
        if kind is Stored:
            for run in _runs(change for change in group if isinstance(change, Stored)):
                yield cache_pb2.CacheEvent(stored=_stored(run))
        elif kind is Removed:
            hashes = [change.hash for change in group if isinstance(change, Removed)]
            removed = cache_pb2.BlocksRemoved(block_hashes=hashes, tier=_proto(Tier.DEVICE))
            yield cache_pb2.CacheEvent(removed=removed)
        else:
            yield cache_pb2.CacheEvent(cleared=cache_pb2.AllBlocksCleared())


def _runs(pages: Iterable[Stored]) -> Iterator[list[Stored]]:
    run: list[Stored] = []
    for page in pages:
        if run and (page.parent != run[-1].hash or len(run) == MAX_BLOCKS):
            yield run
            run = []
        run.append(page)
    if run:
        yield run


def _stored(run: list[Stored]) -> cache_pb2.BlocksStored:
    return cache_pb2.BlocksStored(
        block_hashes=[page.hash for page in run],
        parent_block_hash=run[0].parent,
        token_ids=[token for page in run for token in page.tokens],
        block_tokens=PAGE_TOKENS,
        tier=_proto(Tier.DEVICE),
        cache_salt=run[0].salt,
    )


def _proto(tier: Tier) -> types_pb2.CacheTier:
    return tier.value  # type: ignore[return-value]  # the values are those of the proto enum
