"""What /metrics says of KV below the pool, against what has happened."""

from pathlib import Path

from tests.server.service_bench import serving
from tests.server.test_metrics import Scraper

from segue_server.cache.segments import Tier
from segue_server.cache_admin import CacheAdmin
from segue_server.mover import Offload
from segue_server.requests import MoveCacheRequest
from segue_server.stats import CLASSES, EVICTION_REASONS, MOVES, TIERS

TOKEN_KV = 64


async def test_tiers_moves_and_evictions_are_counted_where_they_happen(tmp_path: Path) -> None:
    offload = Offload(host_bytes=300 * TOKEN_KV, disk_bytes=400 * TOKEN_KV, segment_tokens=32)
    async with serving(tmp_path, offload=offload) as bench:
        scrape = Scraper(bench)
        now = scrape()
        for tier in TIERS:
            assert all(now.get("kv_bytes", **{"tier": tier, "class": c}) == 0 for c in CLASSES)
            assert all(now.get("kv_evictions_total", tier=tier, reason=r) == 0 for r in EVICTION_REASONS)
        assert all(now.get("kv_moved_bytes_total", from_tier=a, to_tier=b) == 0 for a, b in MOVES)
        await bench.create()
        await bench.ask([7] * 99, max_tokens=2)
        await bench.service.move_cache(MoveCacheRequest(session_id="chat-1", tier=Tier.HOST))
        now = scrape()
        assert now.get("kv_bytes", **{"tier": "host", "class": "idle"}) == 100 * TOKEN_KV
        assert now.get("kv_tokens", tier="host") == 100
        assert now.sum("kv_bytes", tier="device") == 0
        assert now.get("kv_moved_bytes_total", from_tier="device", to_tier="host") == 100 * TOKEN_KV
        assert now.get("kv_move_seconds_count", from_tier="device", to_tier="host") == 4
        assert now.get("engine_busy_seconds_total", phase="move") > 0
        await bench.service.move_cache(MoveCacheRequest(session_id="chat-1", tier=Tier.DISK))
        await bench.until(lambda: scrape().get("kv_moved_bytes_total", from_tier="host", to_tier="disk") > 0)
        await bench.ask([1], max_tokens=2)
        now = scrape()
        assert now.get("kv_moved_bytes_total", from_tier="disk", to_tier="host") == 100 * TOKEN_KV
        assert now.get("kv_moved_bytes_total", from_tier="host", to_tier="device") == 100 * TOKEN_KV
        assert now.get("time_to_first_token_seconds_count", context="restored") == 1
        assert now.get("prompt_tokens_total", source="restored") == 100
        assert now.get("prefix_query_tokens_total") > now.get("prefix_hit_tokens_total")
        admin = CacheAdmin(bench.engine)
        await bench.thread.call(lambda: admin.flush(idle_sessions=True, prefixes=True, salt=None))
        now = scrape()
        assert now.get("kv_evictions_total", tier="device", reason="flush") == 1
        assert now.get("kv_evicted_bytes_total", tier="disk", reason="flush") == 100 * TOKEN_KV
        await bench.ask([1], max_tokens=2)
        assert scrape().get("recomputed_tokens_total", reason="evicted") > 0
        await bench.service.delete_session("chat-1")
        assert scrape().get("kv_evictions_total", tier="device", reason="caller") == 1
