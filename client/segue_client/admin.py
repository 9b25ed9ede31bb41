"""What operators ask of a server, on its admin port: the cache's figures, flush, budgets, proof, events, drain."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Literal, Self, Unpack

from segue.v1 import cache_pb2, types_pb2
from segue_client.calls import Call, Method
from segue_client.connection import Connection
from segue_client.options import ConnectionOptions
from segue_client.requests import enum_name

DEFAULT_ADMIN_TARGET = "127.0.0.1:50052"
Tier = Literal["device", "host", "disk"]

_SERVICE = "/segue.v1.CacheAdminService/"
GET_CACHE_STATS = Method(_SERVICE + "GetCacheStats", cache_pb2.GetCacheStatsRequest, cache_pb2.CacheStats)
LIST_CACHE_ENTRIES = Method(
    _SERVICE + "ListCacheEntries", cache_pb2.ListCacheEntriesRequest, cache_pb2.ListCacheEntriesResponse
)
FLUSH_CACHE = Method(_SERVICE + "FlushCache", cache_pb2.FlushCacheRequest, cache_pb2.FlushCacheResponse)
SET_CACHE_BUDGET = Method(_SERVICE + "SetCacheBudget", cache_pb2.SetCacheBudgetRequest, cache_pb2.CacheStats)
VERIFY_CACHE = Method(_SERVICE + "VerifyCache", cache_pb2.VerifyCacheRequest, cache_pb2.VerifyCacheResponse)
SUBSCRIBE_CACHE_EVENTS = Method(
    _SERVICE + "SubscribeCacheEvents", cache_pb2.SubscribeCacheEventsRequest, cache_pb2.CacheEventBatch
)
DRAIN = Method(_SERVICE + "Drain", cache_pb2.DrainRequest, cache_pb2.DrainResponse)


class AdminClient:
    """A connection to a server's admin port, which listens on the server's own machine only.

    Example:
        >>> with AdminClient() as admin:
        ...     admin.flush(idle_sessions=True).freed_bytes
    """

    def __init__(self, target: str = DEFAULT_ADMIN_TARGET, **options: Unpack[ConnectionOptions]) -> None:
        self._connection = Connection(target, options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()

    def stats(self, *, timeout: float | None = None) -> cache_pb2.CacheStats:
        """Bytes by tier and class, and what eviction has cost since the server started."""
        return self._connection.send(Call(GET_CACHE_STATS, cache_pb2.GetCacheStatsRequest(), timeout=timeout))

    def entries(
        self, *, tier: Tier | None = None, page_size: int | None = None, timeout: float | None = None
    ) -> Iterator[cache_pb2.CacheEntry]:
        """What is cached, in eviction order, fetched page by page as it is read."""
        token = ""
        while True:
            request = cache_pb2.ListCacheEntriesRequest(tier=_tier(tier), page_size=page_size, page_token=token)
            page = self._connection.send(Call(LIST_CACHE_ENTRIES, request, timeout=timeout))
            yield from page.entries
            token = page.next_page_token
            if not token:
                return

    def flush(
        self,
        *,
        idle_sessions: bool = False,
        prefixes: bool = False,
        cache_salt: str = "",
        timeout: float | None = None,
    ) -> cache_pb2.FlushCacheResponse:
        """Drops KV that nobody uses; tokens stay. An empty `cache_salt` means every salt."""
        request = cache_pb2.FlushCacheRequest(idle_sessions=idle_sessions, prefixes=prefixes, cache_salt=cache_salt)
        return self._connection.send(Call(FLUSH_CACHE, request, timeout=timeout))

    def set_budget(self, tier: Tier, capacity_bytes: int, *, timeout: float | None = None) -> cache_pb2.CacheStats:
        """Resizes a tier; returns the figures after it.

        Raises:
            KvBudget: active and pinned sessions hold more than that.
        """
        request = cache_pb2.SetCacheBudgetRequest(tier=_tier(tier), capacity_bytes=capacity_bytes)
        return self._connection.send(Call(SET_CACHE_BUDGET, request, timeout=timeout))

    def verify(self, session_id: str, *, timeout: float | None = None) -> cache_pb2.VerifyCacheResponse:
        """Computes a session a second time and compares every logit with those from its cache."""
        request = cache_pb2.VerifyCacheRequest(session_id=session_id)
        return self._connection.send(Call(VERIFY_CACHE, request, session_id, timeout, runs_model=True))

    def events(
        self, *, after_sequence: int = 0, include_snapshot: bool = False, timeout: float | None = None
    ) -> Iterator[cache_pb2.CacheEventBatch]:
        """What the prefix index gains and loses, for as long as it is read.

        Raises:
            EventHistoryLost: what came after `after_sequence` is no longer kept.
        """
        request = cache_pb2.SubscribeCacheEventsRequest(
            after_sequence=after_sequence, include_snapshot=include_snapshot
        )
        call = Call(SUBSCRIBE_CACHE_EVENTS, request, timeout=timeout, runs_model=True)
        return self._connection.iterate(call)

    def drain(self, *, grace: float | None = None, timeout: float | None = None) -> int:
        """Has the server take no new work and let running turns end; returns how many there are.

        Args:
            grace: seconds after which turns that still run are ended; default: the server's.
            timeout: seconds of this call, which does not wait for the turns.
        """
        request = cache_pb2.DrainRequest(grace=None if grace is None else timedelta(seconds=grace))
        return self._connection.send(Call(DRAIN, request, timeout=timeout)).running_requests


def _tier(tier: str | None) -> str | None:
    return enum_name(types_pb2.CacheTier, "tier", tier)
