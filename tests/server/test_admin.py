"""CacheAdminService over a socket, in front of a real service and a fake runner."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc import aio
from tests.server.service_bench import ServiceBench, serving

from segue.v1 import cache_pb2, cache_pb2_grpc, types_pb2
from segue_server.admin import Admin
from segue_server.cache.segments import Tier
from segue_server.errors import Draining, KvBudgetImpossible
from segue_server.grpc_api.health import READINESS, Health
from segue_server.grpc_api.server import bind, build_admin_server
from segue_server.mover import Offload
from segue_server.requests import BusyPolicy, MoveCacheRequest, SessionSettings
from segue_server.stats import CallStats

PAGE = 128  # bytes of the fake runner's page
TOKEN_KV = 64
DEVICE, HOST, DISK = types_pb2.CACHE_TIER_DEVICE, types_pb2.CACHE_TIER_HOST, types_pb2.CACHE_TIER_DISK
OFFLOAD = Offload(host_bytes=2000 * TOKEN_KV, segment_tokens=32)


@dataclass
class Operator:
    bench: ServiceBench
    health: Health
    stub: cache_pb2_grpc.CacheAdminServiceStub

    async def stats(self, tier: int = DEVICE) -> cache_pb2.TierStats:
        """One tier's figures, which add up."""
        stats = await self.stub.GetCacheStats(cache_pb2.GetCacheStatsRequest())
        (found,) = [t for t in stats.tiers if t.tier == tier]
        parts = (found.active_bytes, found.pinned_bytes, found.idle_bytes, found.prefix_bytes, found.slack_bytes)
        assert sum(parts) + found.free_bytes == found.capacity_bytes
        return found

    async def entries(self, tier: int = DEVICE, page_size: int = 1000) -> list[cache_pb2.CacheEntry]:
        found: list[cache_pb2.CacheEntry] = []
        token = ""
        while True:
            request = cache_pb2.ListCacheEntriesRequest(tier=tier, page_size=page_size, page_token=token)
            page = await self.stub.ListCacheEntries(request)
            found += page.entries
            token = page.next_page_token
            if not token:
                return found

    async def budget(self, size: int, tier: int = DEVICE) -> cache_pb2.CacheStats:
        return await self.stub.SetCacheBudget(cache_pb2.SetCacheBudgetRequest(tier=tier, capacity_bytes=size))


@asynccontextmanager
async def operating(folder: Path, **options: object) -> AsyncIterator[Operator]:
    async with serving(folder, **options) as bench:
        health = Health()
        health.set_ready(True)
        admin = Admin(bench.service, bench.thread, on_drain=health.drain, drain_grace=5.0)
        server = build_admin_server(admin, health=health, observer=CallStats([]))
        port = bind(server, "127.0.0.1:0")
        await server.start()
        try:
            async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                yield Operator(bench, health, cache_pb2_grpc.CacheAdminServiceStub(channel))
            await bench.service.delete_session("ppp", allow_missing=True)  # pinned: at the end nothing may be in use
        finally:
            admin.events.close(Draining("the test is over"))
            await server.stop(None)


def slow_down(bench: ServiceBench) -> None:
    """A turn lasts a second, so that on a busy machine too it is there while something is done beside it."""
    bench.runner.before_step = lambda: time.sleep(0.02)


async def refused(call: "asyncio.Future[object]", code: grpc.StatusCode, text: str) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is code
    assert text in (caught.value.details() or "")


async def talked(bench: ServiceBench, name: str, tokens: int, **settings: object) -> None:
    await bench.create(name, settings=SessionSettings(**settings))  # type: ignore[arg-type]
    await bench.ask([ord(name[0]) % 200] * tokens, name, max_tokens=2)


async def test_figures_add_up_by_class_and_tier(tmp_path: Path) -> None:
    async with operating(tmp_path, offload=OFFLOAD, max_pinned_bytes=1 << 20) as op:
        assert (await op.stats()).free_bytes == (await op.stats()).capacity_bytes
        await talked(op.bench, "aaa", 100)
        await talked(op.bench, "ppp", 50, pinned=True, max_context_tokens=100)
        device = await op.stats()
        assert device.idle_bytes == 101 * 8
        assert device.pinned_bytes == 51 * 8
        await op.bench.service.delete_session("aaa")
        assert (await op.stats()).prefix_bytes == 6 * PAGE
        assert (await op.stats(HOST)).capacity_bytes == 2000 * TOKEN_KV


async def test_the_first_entry_is_dropped_next(tmp_path: Path) -> None:
    """The listed order beside the order in which a shrinking pool drops things, one page at a time."""
    async with operating(tmp_path) as op:
        for name, priority in (("low", -5), ("old", 0), ("new", 0), ("top", 7)):
            await talked(op.bench, name, 60, priority=priority)
        await op.bench.service.delete_session("old")
        capacity = (await op.stats()).capacity_bytes
        while listed := [e for e in await op.entries(page_size=3) if not e.protection]:
            first = listed[0]
            held = capacity - (await op.stats()).free_bytes
            if held <= PAGE:
                break
            await op.budget(held - PAGE)
            left = {e.entry_id: e.tokens for e in await op.entries()}
            assert left.get(first.entry_id, 0) < first.tokens, f"{first.entry_id} was to go first"
            capacity = held - PAGE
        order = [e.session_ids for e in await op.entries()]
        assert order in ([], [("top",)], [()]) or len(order) == 1


async def test_protected_entries_come_last_and_say_why(tmp_path: Path) -> None:
    async with operating(tmp_path, max_pinned_bytes=1 << 20) as op:
        await talked(op.bench, "ppp", 50, pinned=True, max_context_tokens=100)
        await talked(op.bench, "aaa", 50)
        await op.bench.create("run")
        slow_down(op.bench)
        async with op.bench.turn([1] * 40, "run", max_tokens=400) as turn:
            await anext(aiter(turn))
            listed = await op.entries()
            assert [(e.session_ids[0], e.protection, e.reference_count) for e in listed if e.session_ids] == [
                ("aaa", "", 0),
                ("ppp", "PINNED", 1),
                ("run", "ACTIVE", 1),
            ]


async def test_flush_drops_what_nobody_uses_by_salt(tmp_path: Path) -> None:
    async with operating(tmp_path, offload=OFFLOAD, max_pinned_bytes=1 << 20) as op:
        await talked(op.bench, "aaa", 100, cache_salt="one")
        await talked(op.bench, "bbb", 100, cache_salt="two")
        await talked(op.bench, "ppp", 50, pinned=True, max_context_tokens=100)
        await talked(op.bench, "ccc", 100, cache_salt="three")
        await op.bench.service.delete_session("ccc")
        held = (await op.stats()).capacity_bytes - (await op.stats()).free_bytes
        answer = await op.stub.FlushCache(cache_pb2.FlushCacheRequest(idle_sessions=True, cache_salt="one"))
        assert (answer.sessions, answer.freed_bytes) == (1, 7 * PAGE)
        assert held - 7 * PAGE == (await op.stats()).capacity_bytes - (await op.stats()).free_bytes
        answer = await op.stub.FlushCache(cache_pb2.FlushCacheRequest(prefixes=True))
        assert (answer.sessions, answer.freed_bytes) == (0, 6 * PAGE)
        answer = await op.stub.FlushCache(cache_pb2.FlushCacheRequest(idle_sessions=True))
        assert answer.sessions == 1
        device = await op.stats()
        assert device.capacity_bytes - device.free_bytes == 4 * PAGE, "the pinned session's stay"
        ledger = op.bench.ledger("aaa")
        assert (await op.bench.ask([9], "aaa", max_tokens=4)).tokens == op.bench.plain([*ledger, 9], 4)
        await refused(
            op.stub.FlushCache(cache_pb2.FlushCacheRequest()), grpc.StatusCode.INVALID_ARGUMENT, "name what to flush"
        )
        stats = op.bench.engine.stats
        assert stats.evicted_bytes.values["device", "flush"] == (7 + 6 + 7) * PAGE


async def test_the_pool_shrinks_and_grows_while_turns_run(tmp_path: Path) -> None:
    async with operating(tmp_path, pages=64) as op:
        await talked(op.bench, "aaa", 300)
        slow_down(op.bench)
        async with op.bench.turn([1] * 100, "aaa", max_tokens=100) as turn:
            await anext(aiter(turn))
            await refused(op.budget(4 * PAGE), grpc.StatusCode.RESOURCE_EXHAUSTED, "active and pinned")
        await op.bench.idle("aaa")
        shrunk = await op.budget(10 * PAGE)
        assert shrunk.tiers[0].capacity_bytes == 10 * PAGE
        assert op.bench.engine.holdings.pool.held <= 10
        with pytest.raises(KvBudgetImpossible):
            await op.bench.ask([1] * 300, "aaa")
        await op.bench.create("bbb")
        assert (await op.bench.ask([2] * 100, "bbb", max_tokens=8)).tokens
        await op.budget(64 * PAGE)
        assert (await op.bench.ask([1] * 300, "aaa", max_tokens=4)).tokens
        for size in (0, 65 * PAGE, 1 << 60):
            await refused(op.budget(size), grpc.StatusCode.INVALID_ARGUMENT, "capacity_bytes")
        await refused(op.budget(1, types_pb2.CACHE_TIER_UNSPECIFIED), grpc.StatusCode.INVALID_ARGUMENT, "tier")
        await refused(op.budget(-1, HOST), grpc.StatusCode.INVALID_ARGUMENT, "negative")


async def test_a_waiting_turn_that_a_smaller_pool_cannot_hold_is_told(tmp_path: Path) -> None:
    async with operating(tmp_path, pages=64, max_running=1) as op:
        await op.bench.create("aaa")
        await op.bench.create("bbb")
        slow_down(op.bench)
        async with op.bench.turn([1] * 50, "aaa", max_tokens=300) as turn:
            await anext(aiter(turn))
            waiting = asyncio.create_task(op.bench.ask([1] * 600, "bbb"))
            await op.bench.until(lambda: op.bench.engine.scheduler.waiting)
            await op.budget(30 * PAGE)
            with pytest.raises(KvBudgetImpossible):
                await waiting


async def test_lower_tiers_grow_and_shrink_too(tmp_path: Path) -> None:
    async with operating(tmp_path, pages=12, offload=Offload(segment_tokens=32, disk_dir=tmp_path / "kv")) as op:
        await op.budget(500 * TOKEN_KV, HOST)
        await op.budget(500 * TOKEN_KV, DISK)
        await talked(op.bench, "aaa", 90)
        await talked(op.bench, "bbb", 150)
        await op.bench.until(lambda: op.bench.engine.holdings.pool.held <= 9)  # below the upper watermark
        await op.bench.thread.call(lambda: None)
        host = (await op.stats(HOST)).idle_bytes
        assert host >= 64 * TOKEN_KV
        await op.budget(0, HOST)
        assert (await op.stats(DISK)).idle_bytes == host
        assert {e.session_ids[0] for e in await op.entries(DISK)} <= {"aaa", "bbb"}
        ledger = op.bench.ledger("aaa")
        answer = await op.bench.ask([9], "aaa", max_tokens=4)
        assert answer.tokens == op.bench.plain([*ledger, 9], 4)
        assert answer.finished.usage.restored_tokens > 0
        await op.budget(0, DISK)
        assert op.bench.engine.holdings.tiers.use[list(op.bench.engine.holdings.tiers.use)[1]].used == 0


@pytest.mark.parametrize("below", [False, True], ids=["pool", "host"])
async def test_verification_finds_sound_kv_equal_and_damaged_kv_different(tmp_path: Path, below: bool) -> None:
    async with operating(tmp_path, offload=OFFLOAD) as op:
        await talked(op.bench, "aaa", 150)
        if below:
            await op.bench.service.move_cache(MoveCacheRequest(session_id="aaa", tier=Tier.HOST))
        request = cache_pb2.VerifyCacheRequest(session_id="aaa")
        answer = await op.stub.VerifyCache(request)
        assert (answer.compared_tokens, answer.max_abs_difference) == (152, 0.0)
        assert answer.bit_equal
        assert answer.argmax_equal
        ledger = op.bench.ledger("aaa")
        if below:
            store = op.bench.engine.mover.store
            (kv,) = [
                kv for key in sorted(store.keys()) if (kv := store.get(key)) is not None and kv[1, 0, 0, 0, 0] == 64
            ]
            kv[0, 0, 0, 5, 0] += 1
        else:
            page = op.bench.engine.holdings.sequences["aaa"].cache.pages[4]
            op.bench.runner._tokens[page, 5] += 1
        spoilt = await op.stub.VerifyCache(request)
        assert not spoilt.bit_equal
        assert spoilt.max_abs_difference > 0
        assert op.bench.ledger("aaa") == ledger
        if not below:
            op.bench.runner._tokens[page, 5] -= 1
        await op.stub.FlushCache(cache_pb2.FlushCacheRequest(idle_sessions=True))


async def test_verification_needs_room_and_an_idle_session(tmp_path: Path) -> None:
    async with operating(tmp_path, pages=24) as op:
        await talked(op.bench, "aaa", 200)
        request = cache_pb2.VerifyCacheRequest(session_id="aaa")
        await refused(op.stub.VerifyCache(request), grpc.StatusCode.RESOURCE_EXHAUSTED, "verifying takes")
        slow_down(op.bench)
        async with op.bench.turn([1], "aaa", max_tokens=100) as turn:
            await anext(aiter(turn))
            await refused(op.stub.VerifyCache(request), grpc.StatusCode.ABORTED, "turn in flight")
        await op.bench.idle("aaa")
        missing = cache_pb2.VerifyCacheRequest(session_id="nobody")
        await refused(op.stub.VerifyCache(missing), grpc.StatusCode.NOT_FOUND, "nobody")


async def follow(op: Operator, held: dict[int, tuple[int, ...]], **fields: object) -> None:
    """Replay batches into `held`: hash -> tokens."""
    request = cache_pb2.SubscribeCacheEventsRequest(**fields)  # type: ignore[arg-type]
    async for batch in op.stub.SubscribeCacheEvents(request):
        for event in batch.events:
            match event.WhichOneof("event"):
                case "stored":
                    tokens = np.array(event.stored.token_ids).reshape(-1, event.stored.block_tokens)
                    for number, digest in enumerate(event.stored.block_hashes):
                        held[digest] = tuple(tokens[number].tolist())
                case "removed":
                    for digest in event.removed.block_hashes:
                        held.pop(digest, None)
                case _:
                    held.clear()


async def test_a_client_that_replays_the_events_holds_the_index(tmp_path: Path) -> None:
    """Turns, deletions, flushes and evictions; one client from the start, one with a snapshot in the middle."""
    async with operating(tmp_path, pages=40) as op:
        index = op.bench.engine.holdings.prefixes
        from_start: dict[int, tuple[int, ...]] = {}
        late: dict[int, tuple[int, ...]] = {}
        tasks = [asyncio.create_task(follow(op, from_start, include_snapshot=True))]
        for number in range(12):
            await talked(op.bench, f"{chr(97 + number) * 3}", 40 + 10 * number)
            if number == 5:
                tasks.append(asyncio.create_task(follow(op, late, include_snapshot=True)))
            if number == 8:
                await op.bench.service.delete_session("iii")
                await op.stub.FlushCache(cache_pb2.FlushCacheRequest(prefixes=True))
        for wanted in (True, False):
            if not wanted:
                await op.bench.thread.call(index.flush)
            picture = {node.hash: node.tokens for node in index.entries()}
            assert bool(picture) is wanted
            await op.bench.until(lambda p=picture: from_start == p and late == p)  # type: ignore[misc]
        for task in tasks:
            task.cancel()


async def test_events_that_are_no_longer_kept_are_lost_aloud(tmp_path: Path) -> None:
    async with operating(tmp_path) as op:
        request = cache_pb2.SubscribeCacheEventsRequest(after_sequence=99)
        with pytest.raises(aio.AioRpcError) as caught:
            await anext(aiter(op.stub.SubscribeCacheEvents(request)))
        assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE
        await talked(op.bench, "aaa", 40)
        await talked(op.bench, "bbb", 40)
        again = op.stub.SubscribeCacheEvents(cache_pb2.SubscribeCacheEventsRequest(after_sequence=1))
        batch = await anext(aiter(again))
        assert batch.sequence == 2
        again.cancel()


async def test_drain_refuses_new_work_lets_turns_end_and_stops_serving(tmp_path: Path) -> None:
    async with operating(tmp_path) as op:
        await op.bench.create("aaa")
        slow_down(op.bench)
        async with op.bench.turn([1] * 10, "aaa", max_tokens=60) as turn:
            events = aiter(turn)
            await anext(events)
            answer = await op.stub.Drain(cache_pb2.DrainRequest(grace=Duration(seconds=20)))
            assert answer.running_requests == 1
            with pytest.raises(Draining):
                await op.bench.ask([1], "aaa", busy_policy=BusyPolicy.QUEUE)
            with pytest.raises(Draining):
                await op.bench.create("bbb")
            rest = [event async for _, event in events]
            assert type(rest[-1]).__name__ == "Finished"
            assert rest[-1].finish_reason.name == "MAX_TOKENS"  # type: ignore[union-attr]
        assert op.health._statuses[READINESS] == 2
        await refused(
            op.stub.Drain(cache_pb2.DrainRequest(grace=Duration(seconds=-1))), grpc.StatusCode.INVALID_ARGUMENT, "grace"
        )


async def test_drain_ends_turns_that_outlast_its_grace(tmp_path: Path) -> None:
    async with operating(tmp_path) as op:
        await op.bench.create("aaa")
        async with op.bench.turn([1] * 10, "aaa", max_tokens=1500) as turn:
            events = aiter(turn)
            await anext(events)
            await op.stub.Drain(cache_pb2.DrainRequest(grace=Duration(nanos=50_000_000)))
            rest = [event async for _, event in events]
            assert rest[-1].finish_reason.name == "DRAINING"  # type: ignore[union-attr]
