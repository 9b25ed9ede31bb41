"""Snapshots between two services over fake runners: what goes out comes in, and nothing hostile does."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.server.service_bench import ServiceBench, serving

from segue_server.cache.segments import Tier
from segue_server.errors import (
    EtagMismatch,
    FeatureDisabled,
    FieldInvalid,
    PositionBeyondEnd,
    RequestIdReused,
    SegueError,
    SessionBusy,
    SessionExists,
    SnapshotCorrupt,
    SnapshotIncompatible,
)
from segue_server.mover import Offload
from segue_server.requests import BusyPolicy, CreateSessionRequest, MoveCacheRequest, SessionSettings, TokenInput
from segue_server.snapshots import ImportRequest, SnapshotHeader, SnapshotPart, SnapshotTrailer
from segue_server.views import SessionState

TOKEN_KV = 64  # bytes of a position's KV, canonical, of the fake runner
PROMPT = [int(i * 7 % 250) for i in range(300)]
# Without watermarks: between two segments of an import, an idle session would make room for more of it in the pool.
OFFLOAD = Offload(
    host_bytes=2000 * TOKEN_KV, disk_bytes=2000 * TOKEN_KV, segment_tokens=32, high_watermark=1.0, low_watermark=1.0
)


async def stream(parts: Iterable[object]) -> AsyncIterator[SnapshotPart]:
    for part in parts:
        yield part  # type: ignore[misc]


async def exported(bench: ServiceBench, session_id: str = "chat-1", **options: object) -> list[SnapshotPart]:
    return [part async for part in bench.service.export_session(session_id, **options)]  # type: ignore[arg-type]


async def imported(bench: ServiceBench, parts: list[SnapshotPart], **fields: object) -> str:
    header = parts[0]
    assert isinstance(header, SnapshotHeader)
    request = ImportRequest(header=header, **({"session_id": "copy"} | fields))  # type: ignore[arg-type]
    return (await bench.service.import_session(request, stream(parts[1:]), caller="me")).session_id


def payload(parts: list[SnapshotPart]) -> bytes:
    return b"".join(part for part in parts if isinstance(part, bytes))


def sealed(header: SnapshotHeader, data: bytes, chunk: int = 1 << 20) -> list[SnapshotPart]:
    """The parts of a payload, with the checksum that it has."""
    chunks = [data[i : i + chunk] for i in range(0, len(data), chunk)]
    return [header, *chunks, SnapshotTrailer(hashlib.sha256(data).digest())]


async def talked(bench: ServiceBench) -> list[int]:
    """A session of two turns; returns its ledger."""
    await bench.create("chat-1")
    await bench.ask(PROMPT, max_tokens=8)
    await bench.ask([1, 2, 3], max_tokens=8)
    return bench.ledger()


async def test_a_snapshot_holds_tokens_turns_and_kv_in_chunks_of_a_mebibyte(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        ledger = await talked(bench)
        header, *chunks, trailer = await exported(bench)
        assert isinstance(header, SnapshotHeader)
        assert (header.position, header.cached_tokens) == (319, 318)
        assert header.payload_bytes == 319 * 4 + 318 * TOKEN_KV
        assert [(t.start, t.generated_start, t.end) for t in header.turns] == [(0, 300, 308), (308, 311, 319)]
        data = payload([header, *chunks])
        assert all(len(chunk) <= 1 << 20 for chunk in chunks if isinstance(chunk, bytes))
        assert len(data) == header.payload_bytes
        assert trailer == SnapshotTrailer(hashlib.sha256(data).digest())
        assert list(memoryview(data[: 319 * 4]).cast("i")) == ledger


@pytest.mark.parametrize("offload", [Offload(), OFFLOAD], ids=["pool", "host"])
async def test_an_imported_session_goes_on_and_computes_only_its_last_token(tmp_path: Path, offload: Offload) -> None:
    async with serving(tmp_path) as one:
        await talked(one)
        parts = await exported(one)
        expected = (await one.ask([9, 9], max_tokens=8)).tokens
    pages = 128 if not offload.host_bytes else 24
    async with serving(tmp_path, pages=pages, offload=offload, max_context_tokens=340) as two:
        if offload.host_bytes:
            await two.create("other")
            await two.ask([5] * 200, "other")
        await imported(two, parts)
        view = await two.service.get_session("copy")
        assert (view.state, view.position, view.turn_count) == (SessionState.IDLE, 319, 2)
        assert view.cache.cached_tokens == 318
        assert view.cache.tier is (Tier.HOST if offload.host_bytes else Tier.DEVICE)
        answer = await two.ask([9, 9], "copy", max_tokens=8)
        assert answer.tokens == expected
        assert answer.started.to_compute_tokens == 3
        assert two.service.stats.sessions_opened.values["import",] == 1


async def test_tokens_only_is_computed_again_and_says_the_same(tmp_path: Path) -> None:
    async with serving(tmp_path) as one, serving(tmp_path) as two:
        await talked(one)
        parts = await exported(one, tokens_only=True)
        assert len(payload(parts)) == 319 * 4
        await imported(two, parts)
        answer = await two.ask([9, 9], "copy", max_tokens=8)
        assert answer.started.to_compute_tokens == 321
        assert answer.tokens == (await one.ask([9, 9], max_tokens=8)).tokens


async def test_another_model_takes_the_tokens_only_when_it_may(tmp_path: Path) -> None:
    async with serving(tmp_path) as one, serving(tmp_path) as two:
        await talked(one)
        parts = await exported(one)
        foreign = replace(parts[0], model_fingerprint="e" * 64)  # type: ignore[type-var]
        with pytest.raises(SnapshotIncompatible, match="fingerprint"):
            await imported(two, [foreign, *parts[1:]])  # type: ignore[list-item]
        other_dtype = replace(parts[0], settings=SessionSettings(kv_dtype="int8"))  # type: ignore[type-var]
        with pytest.raises(SnapshotIncompatible, match="kvDtype"):
            await imported(two, [other_dtype, *parts[1:]])  # type: ignore[list-item]
        await imported(two, [foreign, *parts[1:]], recompute_on_mismatch=True)  # type: ignore[list-item]
        answer = await two.ask([9, 9], "copy", max_tokens=8)
        assert answer.started.restored_from is Tier.NONE
        assert answer.tokens == (await one.ask([9, 9], max_tokens=8)).tokens
        assert two.engine.stats.recomputed_tokens.values["mismatch",] == 319


async def test_the_same_import_again_gives_the_same_session(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        await talked(bench)
        parts = await exported(bench)
        assert await imported(bench, parts, request_id="r-1") == "copy"
        assert await imported(bench, parts, request_id="r-1") == "copy"
        with pytest.raises(RequestIdReused):
            await imported(bench, parts, request_id="r-1", session_id="other")
        with pytest.raises(SessionExists):
            await imported(bench, parts)


async def test_what_a_caller_says_is_kv_is_believed_for_its_session_alone(tmp_path: Path) -> None:
    """Forged KV must not reach another session, by the prefix index, by a fork, or by what is computed on top of it."""
    async with serving(tmp_path) as bench:
        ledger = await talked(bench)
        parts = await exported(bench)
        await bench.service.delete_session("chat-1")
        await bench.thread.call(bench.engine.holdings.prefixes.flush)
        header = parts[0]
        assert isinstance(header, SnapshotHeader)
        await imported(bench, sealed(replace(header, settings=SessionSettings(cache_salt="me")), payload(parts)))
        await bench.ask([9, 9], "copy", max_tokens=40)
        await bench.service.delete_session("copy")
        await bench.create("victim", settings=SessionSettings(cache_salt="me"))
        answer = await bench.ask(ledger, "victim")
        assert answer.finished.usage.prefix_reused_tokens == 0


# Hostile streams


async def refused(bench: ServiceBench, parts: list[object], error: type[SegueError], match: str = ".") -> None:
    before = bench.service.load()
    with pytest.raises(error, match=match):
        await imported(bench, parts)  # type: ignore[arg-type]
    await bench.thread.call(lambda: None)
    assert bench.service.load().sessions == before.sessions
    assert bench.service.load().kv_free_bytes == before.kv_free_bytes


async def test_streams_that_break_the_rules_change_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        await talked(bench)
        parts = await exported(bench)
        header, data, trailer = parts[0], payload(parts), parts[-1]
        assert isinstance(header, SnapshotHeader)
        flipped = bytes([data[0] ^ 1]) + data[1:]
        nan = data[: 319 * 4] + b"\x00\x00\xc0\x7f" + data[319 * 4 + 4 :]
        foreign = (10_000).to_bytes(4, "little") + data[4:]
        await refused(bench, [header, flipped, trailer], SnapshotCorrupt, "checksum")
        await refused(bench, [header, data[:-1], trailer], SnapshotCorrupt, "came")
        await refused(bench, [header, data], SnapshotCorrupt, "without a trailer")
        await refused(bench, [header], SnapshotCorrupt, "without a trailer")
        await refused(bench, [header, data, SnapshotTrailer(b"")], SnapshotCorrupt)
        await refused(bench, [header, data, b"x", trailer], FieldInvalid, "more bytes")
        await refused(bench, [header, data, trailer, b"x"], FieldInvalid, "last message")
        await refused(bench, [header, data, header], FieldInvalid, "header")
        await refused(bench, [header, b"", data, trailer], FieldInvalid, "1 to")
        await refused(bench, [header, bytes((1 << 20) + 1), trailer], FieldInvalid, "1 to")
        await refused(bench, [*sealed(header, nan)], FieldInvalid, "not finite")
        await refused(bench, [*sealed(header, foreign)], FieldInvalid, r"tokens\[0\]")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"format_version": 2}, "format_version"),
        ({"position": -1}, "position"),
        ({"position": 2**31 - 1}, "position"),
        ({"cached_tokens": 320}, "cached_tokens"),
        ({"cached_tokens": -5}, "cached_tokens"),
        ({"payload_bytes": 1 << 62}, "payload_bytes"),
        ({"payload_bytes": 0}, "payload_bytes"),
        ({"payload_bytes": -1}, "payload_bytes"),
        ({"settings": SessionSettings(ttl=-1.0)}, "ttl"),
        ({"settings": SessionSettings(max_context_tokens=10)}, "position"),
    ],
)
async def test_a_header_is_held_against_the_limits_before_a_byte_is_taken(
    tmp_path: Path, change: dict[str, object], field: str
) -> None:
    async with serving(tmp_path) as bench:
        await talked(bench)
        parts = await exported(bench)
        header = replace(parts[0], **change)  # type: ignore[type-var, arg-type]
        taken: list[object] = []

        async def watched() -> AsyncIterator[SnapshotPart]:
            for part in parts[1:]:
                taken.append(part)
                yield part

        with pytest.raises(FieldInvalid, match=field):
            await bench.service.import_session(ImportRequest(header=header), watched(), caller="me")  # type: ignore[arg-type]
        assert not taken


@pytest.mark.parametrize("shape", [{"layers": 2**31 - 1}, {"head_dim": 0}, {"kv_heads": -1}, {"dtype": "int8"}])
async def test_an_absurd_shape_is_refused_also_where_it_would_be_computed_again(
    tmp_path: Path, shape: dict[str, object]
) -> None:
    async with serving(tmp_path) as bench:
        await talked(bench)
        header, *rest = await exported(bench)
        assert isinstance(header, SnapshotHeader)
        absurd = replace(header, kv=replace(header.kv, **shape))  # type: ignore[arg-type]
        with pytest.raises(FieldInvalid):
            await imported(bench, [absurd, *rest], recompute_on_mismatch=True)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_streams_never_make_a_session_that_differs(tmp_path: Path, data: st.DataObject) -> None:
    """Parts dropped, doubled, swapped, cut and flipped: either the very session comes in, or none."""

    async def run() -> None:
        async with serving(tmp_path) as bench:
            ledger = await talked(bench)
            parts: list[SnapshotPart] = await exported(bench)
            header = parts[0]
            assert isinstance(header, SnapshotHeader)
            parts = sealed(header, payload(parts), chunk=5000)
            for _ in range(data.draw(st.integers(1, 3))):
                index = data.draw(st.integers(1, len(parts) - 1))
                kind = data.draw(st.sampled_from(["drop", "double", "swap", "flip", "cut"]))
                part = parts[index]
                if kind == "drop" and len(parts) > 2:
                    del parts[index]
                elif kind == "double":
                    parts.insert(index, part)
                elif kind == "swap":
                    other = data.draw(st.integers(1, len(parts) - 1))
                    parts[index], parts[other] = parts[other], parts[index]
                elif isinstance(part, bytes) and len(part) > 1:
                    at = data.draw(st.integers(0, len(part) - 1))
                    bit = bytes([part[at] ^ 1])
                    parts[index] = part[:at] + bit + part[at + 1 :] if kind == "flip" else part[: max(1, at)]
            try:
                await imported(bench, parts)
            except (FieldInvalid, SnapshotCorrupt):
                assert bench.service.load().sessions == 1
            else:
                assert bench.ledger("copy") == ledger

    asyncio.run(run())


# What the session does meanwhile


async def test_a_session_takes_no_turn_while_it_is_exported(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        await talked(bench)
        parts = bench.service.export_session("chat-1")
        await anext(parts)
        assert (await bench.service.get_session("chat-1")).state is SessionState.MOVING
        with pytest.raises(SessionBusy):
            await bench.ask([1])
        with pytest.raises(SessionBusy):
            await bench.service.delete_session("chat-1")
        waiting = asyncio.create_task(bench.ask([1], busy_policy=BusyPolicy.QUEUE))
        await bench.create("other")
        await bench.ask([5] * 1500, "other", max_tokens=20)
        assert len([part async for part in parts]) == 2, "its KV stayed, whatever others needed"
        assert (await waiting).tokens


async def test_an_export_that_is_left_frees_the_session(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        await talked(bench)
        parts = bench.service.export_session("chat-1")
        await anext(parts)
        await parts.aclose()
        assert (await bench.ask([1])).tokens
        with pytest.raises(EtagMismatch):
            await exported(bench, etag="other")
        async with bench.turn([1], max_tokens=500) as turn:
            await anext(aiter(turn))
            with pytest.raises(SessionBusy):
                await exported(bench)


# Moving


async def move(bench: ServiceBench, tier: Tier, start: int = 0) -> tuple[Tier, int]:
    view = await bench.service.move_cache(MoveCacheRequest(session_id="chat-1", tier=tier, from_position=start))
    await bench.thread.call(bench.engine.scheduler.check_integrity)
    return view.cache.tier, view.cache.cached_tokens


async def test_kv_moves_to_every_tier_and_back_and_answers_stay_the_same(tmp_path: Path) -> None:
    async with serving(tmp_path, offload=OFFLOAD) as bench:
        ledger = await talked(bench)
        tiers = bench.engine.holdings.tiers
        for tier in (Tier.HOST, Tier.DISK, Tier.HOST, Tier.DEVICE, Tier.DISK, Tier.DEVICE):
            assert await move(bench, tier) == (tier, 318)
            if tier is not Tier.DEVICE:
                assert bench.engine.holdings.pool.held == 0, "it is still in the pool"
                assert tiers.use[tier].used == 318 * TOKEN_KV
        await move(bench, Tier.DISK)
        answer = await bench.ask([9, 9], max_tokens=8)
        assert answer.started.restored_from is Tier.DISK
        assert answer.started.to_compute_tokens == 3
        assert answer.finished.usage.restored_tokens == 318
        assert answer.tokens == bench.plain([*ledger, 9, 9], 8)


@pytest.mark.parametrize("start", [16, 17, 100, 160, 318])
async def test_the_tail_moves_and_the_head_stays(tmp_path: Path, start: int) -> None:
    async with serving(tmp_path, offload=OFFLOAD) as bench:
        ledger = await talked(bench)
        pages = -(-start // 16)
        assert await move(bench, Tier.HOST, start) == (Tier.HOST if pages < 20 else Tier.DEVICE, 318)
        assert bench.engine.holdings.pool.held == pages
        assert await move(bench, Tier.NONE, start) == (Tier.DEVICE, min(318, pages * 16))
        assert (await bench.ask([9, 9], max_tokens=8)).tokens == bench.plain([*ledger, 9, 9], 8)


async def test_none_drops_the_kv_and_keeps_the_tokens(tmp_path: Path) -> None:
    async with serving(tmp_path, offload=OFFLOAD) as bench:
        ledger = await talked(bench)
        await move(bench, Tier.HOST)
        assert await move(bench, Tier.NONE) == (Tier.NONE, 0)
        assert bench.engine.holdings.tiers.use[Tier.HOST].used == 0
        answer = await bench.ask([9, 9], max_tokens=8)
        assert answer.started.restored_from is Tier.NONE
        assert answer.tokens == bench.plain([*ledger, 9, 9], 8)


async def test_a_move_that_cannot_be_says_why(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        await talked(bench)
        with pytest.raises(FeatureDisabled, match="--kv-host-bytes"):
            await move(bench, Tier.HOST)
        with pytest.raises(PositionBeyondEnd):
            await move(bench, Tier.NONE, 320)
        async with bench.turn([1], max_tokens=500) as turn:
            await anext(aiter(turn))
            with pytest.raises(SessionBusy):
                await move(bench, Tier.NONE)
        await bench.idle()
        assert await move(bench, Tier.NONE) == (Tier.NONE, 0)


async def test_a_prefix_that_others_hold_stays_where_it_is(tmp_path: Path) -> None:
    async with serving(tmp_path, offload=OFFLOAD) as bench:
        ledger = await talked(bench)
        request = CreateSessionRequest(session_id="other", prefix=TokenInput(tuple(PROMPT[:160])))
        await bench.service.create_session(request, caller="me")
        await move(bench, Tier.HOST)
        assert bench.engine.holdings.pool.held == 10
        assert (await bench.ask([9, 9], max_tokens=8)).tokens == bench.plain([*ledger, 9, 9], 8)
