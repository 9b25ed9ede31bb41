"""Updating, pinning, reading, watching, scoring and estimating, over a real engine and its thread."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.server.fakes import BYTE_VOCAB, next_logits
from tests.server.service_bench import ServiceBench, serving

from segue_server.errors import (
    ContextExceeded,
    Draining,
    EtagMismatch,
    EventHistoryLost,
    FieldInvalid,
    KvBudget,
    PositionBeyondEnd,
    SegueError,
    SessionBusy,
    SessionExists,
    SessionExpired,
    SessionNotFound,
)
from segue_server.events import Finished, Tokens
from segue_server.requests import (
    AppendRequest,
    BusyPolicy,
    CommitPolicy,
    ContextPolicy,
    CreateSessionRequest,
    FinishReason,
    ForkSessionRequest,
    GenerateRequest,
    ReadTokensRequest,
    RewindSessionRequest,
    SamplingParams,
    ScoreTokensRequest,
    SessionSettings,
    StopConditions,
    TextInput,
    TokenInput,
    UpdateSessionRequest,
    WatchSessionsRequest,
)
from segue_server.views import Estimate, Scores, SessionState, SessionView, TokenChunk
from segue_server.watch import EventType, SessionEvent

Serve = Callable[..., AbstractAsyncContextManager[ServiceBench]]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    return partial(serving, tmp_path)


def forever() -> None:
    return None


async def update(bench: ServiceBench, *paths: str, etag: str = "", **fields: object) -> SessionView:
    request = UpdateSessionRequest(session_id="chat-1", paths=paths, etag=etag, **fields)  # type: ignore[arg-type]
    return await bench.service.update_session(request)


async def read(bench: ServiceBench, **fields: object) -> list[TokenChunk]:
    request = ReadTokensRequest(session_id="chat-1", **fields)  # type: ignore[arg-type]
    return [chunk async for chunk in bench.service.read_tokens(request)]


async def score(bench: ServiceBench, tokens: Sequence[int], **fields: object) -> Scores:
    request = ScoreTokensRequest(session_id="chat-1", token_ids=tuple(tokens), **fields)  # type: ignore[arg-type]
    return await bench.service.score_tokens(request, caller="me", time_remaining=forever)


async def estimate(bench: ServiceBench, prompt: Sequence[int] | None, **fields: object) -> Estimate:
    stop = StopConditions(max_tokens=fields.pop("max_tokens", 8), ignore_eos=True)  # type: ignore[arg-type]
    given = TokenInput(tuple(prompt)) if prompt is not None else None
    request = GenerateRequest(**({"session_id": "chat-1", "input": given, "stop": stop} | fields))  # type: ignore[arg-type]
    return await bench.service.estimate(request, caller="me")


def watch(bench: ServiceBench, session_id: str = "", after: int | None = None) -> AsyncIterator[SessionEvent]:
    return bench.service.watch_sessions(WatchSessionsRequest(session_id=session_id, after_sequence=after))


async def seen(bench: ServiceBench, session_id: str = "") -> list[tuple[str, str]]:
    """(type, reason) of everything that has happened so far."""
    hub, found = bench.service.events, []
    if hub.last_sequence:
        async for event in hub.watch(0):
            if session_id in ("", event.session.session_id):
                found.append((event.type.name, event.reason))
            if event.sequence == hub.last_sequence:
                break
    return found


# Update


async def test_an_update_changes_what_its_mask_names_and_nothing_else(serve: Serve) -> None:
    """It is no use of the session: the time to live runs on. The etag changes."""
    async with serve() as bench:
        await bench.create(display_name="old", labels={"a": "1"})
        before = await bench.ask(range(20))
        old = await bench.service.get_session("chat-1")
        settings = SessionSettings(ttl=30.0, priority=7, commit_policy=CommitPolicy.ROLLBACK, keep_tokens=9)
        named = ("settings.ttl", "settings.priority", "settings.commit_policy", "display_name", "labels")
        new = await update(bench, *named, settings=settings, display_name="new", labels={"b": "2"})
        assert (new.settings.ttl, new.settings.priority, new.settings.commit_policy) == (30.0, 7, CommitPolicy.ROLLBACK)
        assert (new.display_name, new.labels, new.settings.keep_tokens) == ("new", {"b": "2"}, 0)
        assert new.last_used_time == old.last_used_time
        assert new.expire_time == old.last_used_time + 30.0
        assert new.etag != before.finished.etag
        await bench.thread.call(lambda: None)
        assert bench.engine.holdings.sequences["chat-1"].priority == 7
        cleared = await update(bench, "settings.ttl", "settings.priority", "labels")
        assert (cleared.settings.ttl, cleared.settings.priority, cleared.labels) == (600.0, 0, {})
        assert (await bench.ask([1])).finished.position == 37, "the session goes on"


async def test_an_update_takes_an_etag_and_works_beside_a_turn(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        stale = (await bench.service.get_session("chat-1")).etag
        fresh = await update(bench, "settings.priority", etag=stale, settings=SessionSettings(priority=1))
        with pytest.raises(EtagMismatch) as caught:
            await update(bench, "settings.priority", etag=stale, settings=SessionSettings(priority=2))
        assert caught.value.metadata == {"etag": fresh.etag}
        async with bench.turn(range(20), max_tokens=500) as turn:  # nobody reads it, so it is paused before its end
            assert (await update(bench, "display_name", display_name="x")).active_request_id == turn.request_id
            async for _ in turn:
                pass


@pytest.mark.parametrize(
    ("paths", "fields", "field"),
    [
        ((), {}, "update_mask"),
        (("settings.kv_dtype",), {}, "update_mask.paths[0]"),
        (("labels", "settings.cache_salt"), {}, "update_mask.paths[1]"),
        (("position",), {}, "update_mask.paths[0]"),
        (("expire_time",), {}, "update_mask.paths[0]"),
        (("settings",), {}, "update_mask.paths[0]"),
        (("nonsense",), {}, "update_mask.paths[0]"),
        (("settings.priority",), {"settings": SessionSettings(priority=101)}, "settings.priority"),
        (("settings.max_context_tokens",), {"settings": SessionSettings(max_context_tokens=27)}, None),
        (
            ("settings.default_sampling",),
            {"settings": SessionSettings(default_sampling=SamplingParams(top_p=2.0))},
            "settings.default_sampling.top_p",
        ),
        (("labels",), {"labels": {f"k{n}": "v" for n in range(17)}}, "labels"),
        (
            ("settings.context_policy", "settings.keep_tokens"),
            {"settings": SessionSettings(context_policy=ContextPolicy.SLIDE, keep_tokens=5000)},
            "settings.keep_tokens",
        ),
    ],
)
async def test_an_update_names_what_is_wrong_and_changes_nothing(
    serve: Serve, paths: tuple[str, ...], fields: dict[str, object], field: str | None
) -> None:
    async with serve() as bench:
        await bench.create()
        await bench.ask(range(20))
        before = await bench.service.get_session("chat-1")
        with pytest.raises(FieldInvalid) as caught:
            await update(bench, *paths, **fields)
        assert [v.field for v in caught.value.violations] == [field or "settings.max_context_tokens"]
        assert await bench.service.get_session("chat-1") == before


async def test_fields_that_are_not_named_are_not_looked_at(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        wrong = SessionSettings(priority=101, ttl=5.0)
        assert (await update(bench, "settings.ttl", settings=wrong)).settings.priority == 0


# Pins


def pinned(tokens: int) -> SessionSettings:
    return SessionSettings(pinned=True, max_context_tokens=tokens)


async def test_pins_are_granted_within_their_limit_and_released(serve: Serve) -> None:
    """By create, update and fork alike; each session counts with all that its context can hold."""
    async with serve(max_pinned_bytes=20 * 16 * 8) as bench:  # 20 pages
        await bench.create("pin-1", settings=pinned(160))
        with pytest.raises(KvBudget) as caught:
            await bench.create("pin-2", settings=pinned(161))
        assert caught.value.quota is not None
        assert (caught.value.quota.value, caught.value.metadata["neededBytes"]) == (2560, str(11 * 128))
        assert bench.service.stats.rejections.values["kv_budget",] == 1
        await bench.create(settings=SessionSettings(max_context_tokens=80))
        assert (await update(bench, "settings.pinned", settings=pinned(0))).settings.pinned
        await bench.thread.call(lambda: None)
        assert bench.engine.holdings.sequences["chat-1"].pinned
        with pytest.raises(KvBudget):
            await update(bench, "settings.max_context_tokens", settings=SessionSettings(max_context_tokens=161))
        fork = partial(ForkSessionRequest, session_id="chat-1")
        with pytest.raises(KvBudget):
            await bench.service.fork_session(fork(count=2))
        (child,) = await bench.service.fork_session(fork())
        assert child.settings.pinned
        plain = await bench.service.fork_session(fork(count=3, settings=SessionSettings(pinned=False, priority=-5)))
        sequence = bench.engine.holdings.sequences[plain[0].session_id]
        assert (sequence.pinned, sequence.priority) == (False, -5)
        await bench.service.delete_session("pin-1")
        await bench.service.fork_session(fork(count=2))


async def test_a_pinned_session_keeps_its_kv_under_pressure(serve: Serve) -> None:
    async with serve(pages=16, max_pinned_bytes=1 << 20) as bench:
        await bench.create("kept", settings=pinned(64))
        await bench.ask(range(50), session_id="kept", max_tokens=2)
        await bench.create("lost")
        await bench.ask(range(100, 150), session_id="lost", max_tokens=2)
        await bench.create("large")
        await bench.ask([3] * 180, session_id="large", max_tokens=2)
        assert (await bench.service.get_session("kept")).cache.cached_tokens == 51
        assert (await bench.service.get_session("lost")).cache.cached_tokens < 51
        await bench.service.delete_session("kept")


async def test_without_a_budget_nothing_is_pinned(serve: Serve) -> None:
    async with serve() as bench:
        with pytest.raises(KvBudget):
            await bench.create(settings=SessionSettings(pinned=True))


# Reading the ledger


async def test_the_ledger_is_read_in_chunks_with_its_turns(serve: Serve) -> None:
    async with serve(pages=256, max_context_tokens=4000) as bench:
        await bench.create()
        first = await bench.ask([n % 250 for n in range(2500)], max_tokens=5)
        second = await bench.ask([7], max_tokens=3)
        chunks = await read(bench)
        assert [(chunk.start_position, len(chunk.token_ids)) for chunk in chunks] == [
            (0, 1024),
            (1024, 1024),
            (2048, 461),
        ]
        assert [token for chunk in chunks for token in chunk.token_ids] == bench.ledger()
        assert [bool(chunk.turns) for chunk in chunks] == [False, False, True]
        spans = [(s.turn, s.request_id, s.start, s.generated_start, s.end) for s in chunks[-1].turns]
        assert spans == [
            (0, first.started.request_id, 0, 2500, 2505),
            (1, second.started.request_id, 2505, 2506, 2509),
        ]
        assert {span.finish_reason for span in chunks[-1].turns} == {FinishReason.MAX_TOKENS}
        (part,) = await read(bench, start_position=10, end_position=20)
        assert part.token_ids == tuple(range(10, 20))
        assert [span.turn for span in part.turns] == [0]
        (empty,) = await read(bench, start_position=2509)
        assert (empty.start_position, empty.token_ids) == (2509, ())


async def test_texts_of_chunks_together_are_the_text_of_the_whole(serve: Serve) -> None:
    """Also where a chunk ends inside a character, and where a part begins."""
    async with serve(pages=512, max_context_tokens=8000) as bench:
        await bench.create()
        text = "aé" * 1023 + "漢字🎈" * 60  # chunks of 1024 tokens end inside characters
        append = AppendRequest(session_id="chat-1", input=TextInput(text))
        async with bench.service.append(append, caller="me", time_remaining=forever) as turn:
            async for _ in turn:
                pass
        chunks = await read(bench, return_text=True)
        assert len(chunks) > 3
        assert "".join(chunk.text for chunk in chunks) == text
        assert not any("\N{REPLACEMENT CHARACTER}" in chunk.text for chunk in chunks)
        halves = [
            *await read(bench, end_position=3, return_text=True),
            *await read(bench, start_position=3, return_text=True),
        ]
        assert "".join(chunk.text for chunk in halves) == text


async def test_positions_of_a_read_are_checked(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        await bench.ask(range(20), max_tokens=2)
        for beyond in ({"start_position": 23}, {"end_position": 23}):
            with pytest.raises(PositionBeyondEnd) as caught:
                await read(bench, **beyond)
            assert caught.value.metadata == {"actualPosition": "22"}
        with pytest.raises(FieldInvalid) as invalid:
            await read(bench, start_position=5, end_position=4)
        assert [v.field for v in invalid.value.violations] == ["end_position"]
        with pytest.raises(SessionNotFound):
            await anext(bench.service.read_tokens(ReadTokensRequest(session_id="nobody")))


async def test_a_read_beside_a_turn_is_what_has_been_put_on_its_stream(serve: Serve) -> None:
    """One moment: tokens, and a span without a finish reason that ends where they do."""
    async with serve() as bench:
        await bench.create()
        await bench.ask(range(20), max_tokens=2)
        async with bench.turn([5, 6], max_tokens=200) as turn:
            shown: list[int] = []
            async for _, event in turn:
                if isinstance(event, Tokens):
                    shown += event.token_ids
                    (chunk,) = await read(bench)
                    assert list(chunk.token_ids[:24]) == [*bench.ledger()[:22], 5, 6]
                    assert list(chunk.token_ids[24 : 24 + len(shown)]) == shown
                    last = chunk.turns[-1]
                    assert (last.start, last.generated_start, last.finish_reason) == (22, 24, None)
                    assert last.end == len(chunk.token_ids)
                if len(shown) == 10:
                    break
        await bench.idle()
        assert (await read(bench))[-1].turns[-1].finish_reason is FinishReason.CANCELLED


# Watching


async def test_a_life_is_told_in_order_with_reasons_and_snapshots(serve: Serve) -> None:
    async with serve() as bench:
        events = watch(bench)
        await bench.create()
        await bench.ask(range(20), max_tokens=2)
        (child,) = await bench.service.fork_session(ForkSessionRequest(session_id="chat-1", new_session_id="child"))
        await bench.service.rewind_session(RewindSessionRequest(session_id="chat-1", position=10))
        await bench.service.delete_session("chat-1")
        told = [await anext(events) for _ in range(6)]
        assert [(e.sequence, e.type, e.session.session_id, e.reason) for e in told] == [
            (1, EventType.CREATED, "chat-1", "CALLER"),
            (2, EventType.TURN_STARTED, "chat-1", "CALLER"),
            (3, EventType.TURN_FINISHED, "chat-1", "MAX_TOKENS"),
            (4, EventType.CREATED, "child", "FORK"),
            (5, EventType.REWOUND, "chat-1", "CALLER"),
            (6, EventType.DELETED, "chat-1", "CALLER"),
        ]
        assert [e.session.position for e in told] == [0, 20, 22, 22, 10, 10]
        assert [e.session.state for e in told[:3]] == [SessionState.IDLE, SessionState.RUNNING, SessionState.IDLE]
        assert told[3].session == child
        assert all(abs(e.time - time.time()) < 60 for e in told)


async def test_the_watch_of_one_session(serve: Serve) -> None:
    """It hears of that session only, ends with it, can be taken up after that, and needs something to watch."""
    async with serve() as bench:
        await bench.create("mine")
        await bench.create("other")
        mine = watch(bench, "mine")
        await bench.ask(range(5), session_id="other", max_tokens=1)
        await bench.ask(range(5), session_id="mine", max_tokens=1)
        await bench.service.delete_session("mine")
        told = [event.type.name async for event in mine]
        assert told == ["TURN_STARTED", "TURN_FINISHED", "DELETED"]
        again = [event.type.name async for event in watch(bench, "mine", after=0)]
        assert again == ["CREATED", *told]
        for missing in (
            partial(watch, bench, "mine"),
            partial(watch, bench, "mine", bench.service.events.last_sequence),
        ):
            with pytest.raises(SessionNotFound):
                missing()
        with pytest.raises(EventHistoryLost) as caught:
            watch(bench, after=10_000)
        assert caught.value.metadata == {"oldestSequence": "1"}
        with pytest.raises(FieldInvalid):
            watch(bench, after=-1)


async def test_ephemeral_sessions_are_told_to_nobody(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        await bench.ask(range(20), max_tokens=2)
        before = bench.service.events.last_sequence
        await bench.ask(range(20), session_id="", max_tokens=2)
        await score(bench, [1, 2, 3])
        assert bench.service.events.last_sequence == before


async def test_turns_that_end_early_or_never_start(serve: Serve) -> None:
    """A cancelled turn says so; one that never left the queue has changed nothing and is not told."""
    async with serve(max_running=1) as bench:
        await bench.create()
        await bench.create("other")
        async with bench.turn(range(40), max_tokens=500, session_id="other") as running:
            assert await anext(aiter(running))
            async with bench.turn(range(5)):
                pass  # left in the queue
            await bench.idle()
        await bench.idle("other")
        assert await seen(bench, "chat-1") == [("CREATED", "CALLER")]
        assert await seen(bench, "other") == [
            ("CREATED", "CALLER"),
            ("TURN_STARTED", "CALLER"),
            ("TURN_FINISHED", "CANCELLED"),
        ]


async def test_a_forced_delete_is_told_after_the_end_of_the_turn(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        events = watch(bench, "chat-1")
        async with bench.turn(range(40), max_tokens=500) as turn:
            async for _, event in turn:
                if isinstance(event, Tokens):
                    break
            await bench.service.delete_session("chat-1", force=True)
        assert [(e.type.name, e.reason) async for e in events] == [
            ("TURN_STARTED", "CALLER"),
            ("TURN_FINISHED", "CANCELLED"),
            ("DELETED", "CALLER"),
        ]


async def test_a_session_that_could_not_be_made_is_told_to_be_gone(serve: Serve) -> None:
    async with serve() as bench:
        prefix = TokenInput((1,) * 2000)
        with pytest.raises(ContextExceeded):
            await bench.service.create_session(CreateSessionRequest(session_id="big", prefix=prefix), caller="me")
        assert await seen(bench) == [("CREATED", "CALLER"), ("DELETED", "CREATE_FAILED")]


async def test_expiry_is_told_beforehand_once_for_each_use_and_leaves_a_tombstone(serve: Serve) -> None:
    """The time to live counts from the end of the last use, and a turn in flight is use."""
    async with serve(ttl=1.2, expiry_notice=0.9) as bench:
        reaper = asyncio.ensure_future(bench.service.reap())
        await bench.create()
        events = watch(bench, "chat-1")
        expiring = await anext(events)
        assert (expiring.type, expiring.reason) == (EventType.EXPIRING, "TTL")
        assert 0 < expiring.session.expire_time - expiring.time <= 0.9
        used = await bench.ask(range(5), max_tokens=1)
        told = [event async for event in events]
        assert [e.type.name for e in told] == ["TURN_STARTED", "TURN_FINISHED", "EXPIRING", "EXPIRED"]
        expired = told[-1]
        assert (expired.session.state, expired.session.position) == (SessionState.EXPIRED, used.finished.position)
        assert expired.time >= expired.session.last_used_time + 1.2
        with pytest.raises(SessionExpired):
            await bench.service.get_session("chat-1")
        with pytest.raises(SessionExpired):
            watch(bench, "chat-1")
        reaper.cancel()


async def test_sessions_that_lose_kv_to_others_are_told(serve: Serve) -> None:
    async with serve(pages=16) as bench:
        await bench.create()
        await bench.ask(range(100), max_tokens=2)
        await bench.create("other")
        await bench.ask([3] * 180, session_id="other", max_tokens=2)
        await bench.until(lambda: bench.service.events.last_sequence >= 7)
        moved = [event async for event in until_last(bench) if event.type is EventType.CACHE_MOVED]
        assert {(event.session.session_id, event.reason) for event in moved} == {("chat-1", "KV_PRESSURE")}
        assert moved[-1].session.cache.cached_tokens < 101


async def until_last(bench: ServiceBench) -> AsyncIterator[SessionEvent]:
    hub = bench.service.events
    async for event in hub.watch(0):
        yield event
        if event.sequence == hub.last_sequence:
            return


async def test_a_drain_ends_every_watch(serve: Serve) -> None:
    async with serve() as bench:
        events = watch(bench)
        await bench.create()
        await bench.service.drain(0.0)
        assert (await anext(events)).type is EventType.CREATED
        with pytest.raises(Draining):
            await anext(events)


# Scoring


def logprob(context: Sequence[int], token: int) -> float:
    logits = next_logits(context, BYTE_VOCAB).astype("float64")
    return float(logits[token] - np.log(np.exp(logits).sum()))


async def test_scores_are_the_models_own_and_the_session_stays_as_it_is(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        await bench.ask(range(40), max_tokens=5)
        before, ledger = await bench.service.get_session("chat-1"), bench.ledger()
        tokens = [n % 250 for n in range(7, 100)]
        scores = await score(bench, tokens, top_logprobs=2)
        assert scores.position == 45
        assert [entry.token_id for entry in scores.logprobs] == tokens
        for number, entry in enumerate(scores.logprobs):
            assert entry.logprob == pytest.approx(logprob([*ledger, *tokens[:number]], tokens[number]), abs=1e-4)
            assert len(entry.top) == 2
        after = await bench.service.get_session("chat-1")
        assert after == replace(before, cache=after.cache), "the cache's figures are measured anew"
        assert bench.ledger() == ledger
        assert bench.runner.copied <= 1, "pages are shared, and one is copied on write"
        await bench.until(lambda: len(bench.engine.holdings.sequences) == 1)
        assert (await bench.ask([1], max_tokens=3)).tokens == bench.plain([*ledger, 1], 3)


async def test_scoring_beside_a_turn_uses_what_was_there_before_it(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        await bench.ask(range(40), max_tokens=5)
        ledger = bench.ledger()
        async with bench.turn([9] * 30, max_tokens=300) as turn:
            async for _, event in turn:
                if isinstance(event, Tokens):
                    break
            scores = await score(bench, [1, 2])
            assert scores.position == 45
            assert scores.logprobs[1].logprob == pytest.approx(logprob([*ledger, 1], 2), abs=1e-4)
            async for _, event in turn:
                if isinstance(event, Finished):
                    assert event.finish_reason is FinishReason.MAX_TOKENS


async def test_what_cannot_be_scored_is_refused(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        for tokens, field in (([], "token_ids"), ([BYTE_VOCAB], "token_ids[0]"), ([1], "session_id")):
            with pytest.raises(FieldInvalid) as caught:
                await score(bench, tokens)
            assert [v.field for v in caught.value.violations] == [field]
        await bench.ask(range(20), max_tokens=2)
        with pytest.raises(FieldInvalid):
            await score(bench, [1], top_logprobs=21)
        with pytest.raises(ContextExceeded):
            await score(bench, [1] * 1579)
        assert len((await score(bench, [1] * 1578)).logprobs) == 1578


async def test_a_score_that_is_given_up_leaves_nothing(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        await bench.ask(range(20), max_tokens=2)
        bench.gate.shut()
        task = asyncio.ensure_future(score(bench, range(200)))
        await bench.gate.wait_reached()
        task.cancel()
        bench.gate.open()
        with pytest.raises(asyncio.CancelledError):
            await task
        await bench.until(lambda: len(bench.engine.holdings.sequences) == 1)


# Estimates


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        (range(3), {}),
        (None, {}),
        (range(50), {"max_tokens": 40}),
        ([7] * 300, {}),
        ([7] * 5, {"session_id": ""}),
        (range(60), {"session_id": "", "max_tokens": 20}),  # its beginning is known
        (range(60), {"session_id": "", "bypass_prefix_cache": True}),
        (range(64), {"session_id": "", "max_tokens": 1}),
    ],
)
async def test_an_estimate_comes_true(serve: Serve, prompt: Sequence[int] | None, fields: dict[str, Any]) -> None:
    """What it says is to be computed, held and evicted is what the same call then computes, holds and evicts."""
    async with serve(pages=24) as bench:
        for name in ("old-1", "old-2"):
            await bench.create(name, settings=SessionSettings(cache_salt=name))
            await bench.ask([ord(name[-1])] * 90, session_id=name, max_tokens=2)
        await bench.create()
        await bench.ask(range(52), max_tokens=8)
        kv, nodes = bench.engine.figures.kv_bytes(), [n.last_used for n in bench.engine.holdings.prefixes.entries()]
        told = await estimate(bench, prompt, **dict(fields))
        assert bench.engine.figures.kv_bytes() == kv, "an estimate changes nothing"
        assert [n.last_used for n in bench.engine.holdings.prefixes.entries()] == nodes
        assert (told.admissible, told.refusal_reason) == (True, "")
        evicted = bench.engine.scheduler.evictor.cost.pages
        answer = await bench.ask(prompt, **fields)
        assert answer.finished.usage.computed_tokens == told.to_compute_tokens == answer.started.to_compute_tokens
        pages = -(-answer.finished.position // 16)
        assert told.needed_bytes == pages * bench.runner.page_bytes
        assert told.would_evict_bytes == (bench.engine.scheduler.evictor.cost.pages - evicted) * bench.runner.page_bytes


async def test_an_estimate_says_which_error_the_call_would_get(serve: Serve) -> None:
    async with serve(pages=32, max_queued=1, max_running=1) as bench:
        await bench.create()
        await bench.ask(range(20), max_tokens=2)
        cases: list[tuple[str, Sequence[int] | None, dict[str, Any]]] = [
            ("SESSION_NOT_FOUND", [1], {"session_id": "nobody"}),
            ("POSITION_MISMATCH", [1], {"expected_position": 3}),
            ("CONTEXT_EXCEEDED", [1] * 1600, {}),
            ("KV_BUDGET_IMPOSSIBLE", [1], {"max_tokens": 600}),
        ]
        for reason, prompt, fields in cases:
            told = await estimate(bench, prompt, **dict(fields))
            assert told == Estimate(refusal_reason=reason)
            with pytest.raises(SegueError) as caught:
                await bench.ask(prompt, **fields)
            assert caught.value.reason == reason
        with pytest.raises(FieldInvalid):
            await estimate(bench, [BYTE_VOCAB])
        with pytest.raises(FieldInvalid):
            await estimate(bench, None, session_id="")


async def test_an_estimate_sees_busy_sessions_and_queues(serve: Serve) -> None:
    async with serve(max_running=1, max_queued=1) as bench:
        await bench.create()
        await bench.create("other")
        async with bench.turn(range(40), max_tokens=400) as turn:
            await anext(aiter(turn))
            assert (await estimate(bench, [1])).refusal_reason == "SESSION_BUSY"
            waits = await estimate(bench, [1], busy_policy=BusyPolicy.QUEUE)
            assert (waits.admissible, waits.refusal_reason) == (False, "")
            other = await estimate(bench, range(100, 130), session_id="other")
            assert (other.admissible, other.refusal_reason, other.to_compute_tokens) == (False, "", 30)
            assert (await estimate(bench, [1], session_id="other", queue_timeout=0.0)).refusal_reason == "QUEUE_TIMEOUT"
            async with bench.turn(range(5), session_id="other"):
                assert (await estimate(bench, [1], session_id="")).refusal_reason == "QUEUE_FULL"
            await bench.idle("other")
        await bench.idle()
        assert bench.service.stats.rejections.values["queue_full",] == 0, "an estimate is no rejection"
        assert (await estimate(bench, [1])).admissible
        await bench.service.drain(0.0)
        assert (await estimate(bench, [1])).refusal_reason == "DRAINING"


async def test_the_time_to_first_token_is_unset_until_measured_and_grows_with_the_prompt(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        assert (await estimate(bench, range(100))).time_to_first_token is None
        await bench.ask(range(200), max_tokens=4)
        short, long = await estimate(bench, range(64)), await estimate(bench, [5] * 1000)
        assert short.time_to_first_token is not None
        assert long.time_to_first_token is not None
        assert 0 < short.time_to_first_token < long.time_to_first_token


async def test_rejected_and_slid_sessions(serve: Serve) -> None:
    """A busy session whose context slides cannot be scored; idle it can, and the whole context counts."""
    async with serve(max_context_tokens=160) as bench:
        await bench.create(settings=SessionSettings(context_policy=ContextPolicy.SLIDE, keep_tokens=16))
        await bench.ask(range(100), max_tokens=40)
        told = await estimate(bench, range(60), max_tokens=4)
        answer = await bench.ask(range(60), max_tokens=4)
        assert told.to_compute_tokens == answer.finished.usage.computed_tokens
        assert len((await score(bench, [1, 2])).logprobs) == 2
        async with bench.turn([1], max_tokens=100) as turn:
            await anext(aiter(turn))
            with pytest.raises(SessionBusy):
                await score(bench, [1])


@asynccontextmanager
async def engine_busy(bench: ServiceBench) -> AsyncIterator[None]:
    """The engine stands inside a pass of another turn, which goes on and ends when this is left."""
    bench.gate.shut()
    async with bench.turn([1], "", max_tokens=2) as other:
        await bench.gate.wait_reached()
        yield
        bench.gate.open()
        async for _ in other:
            pass


async def test_scoring_that_a_drain_meets_leaves_no_fork(serve: Serve) -> None:
    """The drain begins between the fork that nobody sees and its turn, which is refused."""
    async with serve() as bench:
        await bench.create()
        await bench.ask(range(40), max_tokens=3)
        async with engine_busy(bench):
            scoring = asyncio.create_task(score(bench, [1, 2]))
            await asyncio.sleep(0.01)
            drain = asyncio.create_task(bench.service.drain(5.0))
            await asyncio.sleep(0.01)
        with pytest.raises(Draining):
            await scoring
        await drain
        await bench.until(lambda: len(bench.engine.holdings.sequences) == 1)


# Forks that are not waited for


async def test_a_fork_whose_caller_goes_leaves_nothing(serve: Serve) -> None:
    """Cancelled while the engine makes the children: they are neither in the registry nor in the pool."""
    async with serve() as bench:
        await bench.create()
        await bench.ask(range(40), max_tokens=3)
        async with engine_busy(bench):
            fork = asyncio.create_task(bench.service.fork_session(ForkSessionRequest(session_id="chat-1", count=3)))
            await asyncio.sleep(0.01)
            fork.cancel()
            await asyncio.wait([fork])
        await bench.check()
        assert len(bench.engine.holdings.sequences) == 1


async def test_the_ids_of_a_fork_are_taken_while_it_is_made(serve: Serve) -> None:
    """Whoever wants one meanwhile is refused, and the children are whole."""
    async with serve() as bench:
        await bench.create()
        await bench.ask(range(40), max_tokens=3)
        request = ForkSessionRequest(session_id="chat-1", new_session_id="child")
        async with engine_busy(bench):
            fork = asyncio.create_task(bench.service.fork_session(request))
            await asyncio.sleep(0.01)
            with pytest.raises(SessionExists):
                await bench.create("child")
            with pytest.raises(SessionExists):
                await bench.service.fork_session(request)
        (child,) = await fork
        assert child.position == len(bench.ledger("child")) == 43
        await bench.check()
