"""Counters whose truth is easily lost: ends of sessions, work done twice, work done for nothing, refusals."""

import asyncio
import time
from pathlib import Path

import pytest
from tests.server.fakes import EngineBench
from tests.server.service_bench import ServiceBench, serving
from tests.server.test_metrics import Scraper

from segue_server.errors import KvBudgetImpossible, SessionLimit
from segue_server.events import Failed, Finished, Prefill, Tokens
from segue_server.requests import CommitPolicy, ForkSessionRequest, ScoreTokensRequest


async def test_every_session_that_was_opened_is_there_or_has_ended(tmp_path: Path) -> None:
    """Ephemeral ones too, once each, even if deleted in the middle; the fork of ScoreTokens is nobody's session."""
    async with serving(tmp_path) as bench:
        scrape = Scraper(bench)
        await bench.create()
        await bench.ask()
        await bench.service.fork_session(ForkSessionRequest(session_id="chat-1", new_session_id="child"))
        await bench.ask(session_id="")
        async with bench.turn(session_id="", max_tokens=500) as turn:
            await bench.service.delete_session(turn.session_id, force=True)
        request = ScoreTokensRequest(session_id="chat-1", token_ids=(1, 2, 3))
        await bench.service.score_tokens(request, caller="me", time_remaining=lambda: None)
        await bench.until(lambda: len(bench.engine.holdings.sequences) == 2)
        now = scrape()
        assert now.sum("sessions_opened_total") == 4
        assert now.sum("sessions_ended_total") == now.get("session_lifetime_seconds_count") == 2
        assert now.sum("sessions") == 2
        await bench.service.drain(1.0)
        now = scrape()
        assert now.get("sessions_ended_total", reason="drained") == 2
        await bench.service.delete_session("child")
        assert scrape().sum("sessions_ended_total") == 4, "it has been counted"


def test_what_a_turn_computes_again_after_it_gave_way_is_counted() -> None:
    """As many positions as the runner was given a second time."""
    bench = EngineBench(pages=40, step_tokens=32)
    for name in "ab":
        bench.open(name)
    sinks = [bench.submit(range(n), name, open_ended=True, max_tokens=400) for name, n in (("a", 3), ("b", 40))]
    bench.run(*sinks)
    stats = bench.engine.stats
    run = sum(count for step in bench.runner.steps for _, count in step)
    needed = sum(len(bench.ledger(name)) - 1 for name in "ab")
    print(f"{stats.preemptions} preemptions: {run} positions run for {needed}")
    assert stats.preemptions
    assert stats.recomputed_tokens.values["evicted",] == stats.recomputed_tokens.sum == run - needed > 0


def test_evictions_under_pressure_are_counted_in_times_and_bytes() -> None:
    bench = EngineBench(pages=8)
    for name in "abc":
        bench.open(name)
        bench.run(bench.submit(range(40), name, max_tokens=8))
    count, size = bench.engine.figures.evictions()["device", "pressure"]
    assert count >= 1
    assert size == (3 * 3 - bench.holdings.pool.held) * bench.runner.page_bytes
    assert sum(n for n, _ in bench.engine.figures.evictions().values()) == count


@pytest.mark.parametrize("policy", [CommitPolicy.ROLLBACK, CommitPolicy.KEEP_PROMPT])
async def test_what_a_commit_policy_takes_back_is_waste_but_not_what_it_had_reused(
    tmp_path: Path, policy: CommitPolicy
) -> None:
    async with serving(tmp_path) as bench:
        scrape = Scraper(bench)
        await bench.create("first")
        await bench.ask(range(64), "first", max_tokens=2)
        await bench.create()
        async with bench.turn(range(70), max_tokens=1000, commit_policy=policy) as turn:
            tokens = 0
            async for _, event in turn:
                tokens += isinstance(event, Tokens)
                if tokens == 5:
                    bench.gate.shut()
                    _, end = await _cancel_at_gate(bench, turn.request_id)
        assert isinstance(end, Finished)
        kept = end.position
        generated = end.usage.generated_tokens
        wasted = scrape().get("wasted_tokens_total", reason="rolled_back")
        assert end.usage.prefix_reused_tokens == 64
        computed = 70 + generated - 1  # the last token was drawn and has not been run
        assert wasted == computed - max(kept, 64)
        assert scrape().get("wasted_tokens_total", reason="cancelled") == 0


async def _cancel_at_gate(bench: ServiceBench, request_id: str) -> tuple[bool, Finished | None]:
    """Cancel while the engine stands inside a pass."""
    cancelling = asyncio.ensure_future(bench.service.cancel(request_id=request_id))
    await asyncio.sleep(0)
    bench.gate.open()
    return await cancelling


async def test_tokens_that_nobody_came_for_are_waste(tmp_path: Path) -> None:
    """A reader leaves after three tokens; what was drawn until the engine heard of it is waste, and no more."""
    async with serving(tmp_path) as bench:
        scrape = Scraper(bench)
        await bench.create()
        bench.runner.before_step = lambda: time.sleep(0.002)
        async with bench.turn(max_tokens=1500, detach_grace=0.5) as turn:
            taken = 0
            async for _, event in turn:
                taken += isinstance(event, Tokens)
                if taken == 3:
                    break
        await bench.idle()
        drawn = scrape().get("generated_tokens_total")
        wasted = scrape().get("wasted_tokens_total", reason="cancelled")
        assert wasted == drawn - taken > 0
        assert scrape().get("wasted_tokens_total", reason="slow_client") == 0


@pytest.mark.parametrize(("session", "waste"), [("chat-1", 0), ("", 48)])
async def test_the_prompt_of_an_abandoned_one_off_is_waste(tmp_path: Path, session: str, waste: int) -> None:
    """No session keeps its KV. A session does, and then the next turn goes on from there."""
    async with serving(tmp_path, step_tokens=16) as bench:
        scrape = Scraper(bench)
        await bench.create()
        bench.runner.before_step = lambda: bench.gate() if len(bench.runner.steps) == 2 else None  # in the third chunk
        bench.gate.shut()
        async with bench.turn(range(200), session) as turn:
            async for _, event in turn:
                if isinstance(event, Prefill) and event.processed_tokens == 32:
                    break
            await bench.gate.wait_reached()
        bench.gate.open()
        await bench.until(lambda: scrape().sum("turns_total"))
        await bench.until(lambda: not bench.service.load().running_requests)
        assert scrape().get("wasted_tokens_total", reason="cancelled") == waste


async def test_a_turn_that_a_slow_reader_loses_names_him(tmp_path: Path) -> None:
    async with serving(tmp_path, slow_reader_limit=0.05) as bench:
        scrape = Scraper(bench)
        await bench.create()
        async with bench.turn(max_tokens=1500):
            await bench.idle()
        now = scrape()
        assert now.get("cancellations_total", phase="decode", cause="slow_client") == 1
        assert now.get("wasted_tokens_total", reason="slow_client") == now.get("generated_tokens_total") > 100
        assert now.get("wasted_tokens_total", reason="cancelled") == 0
        assert now.get("stream_blocked_seconds_total") >= 0.05


async def test_refusals_for_want_of_room_are_counted_wherever_they_are_met(tmp_path: Path) -> None:
    async with serving(tmp_path, max_sessions=2, pages=8) as bench:
        scrape = Scraper(bench)
        await bench.create()
        await bench.ask()
        with pytest.raises(KvBudgetImpossible):
            await bench.ask(range(200))
        with pytest.raises(SessionLimit):
            await bench.service.fork_session(ForkSessionRequest(session_id="chat-1", count=3))
        now = scrape()
        assert now.get("admission_rejections_total", reason="kv_budget") == 1
        assert now.get("admission_rejections_total", reason="session_limit") == 1
        assert now.sum("turns_total") == 1, "neither was a turn"


async def test_turns_of_a_failed_step_are_counted_once_and_leave_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        scrape = Scraper(bench)
        await bench.create()
        bench.runner.failures.append(RuntimeError("a fault that was put there"))
        events = []
        with pytest.raises(Exception, match="could not compute"):
            async with bench.turn(range(20)) as turn:
                events = [event async for _, event in turn]
        assert not any(isinstance(event, Failed) for event in events)
        now = scrape()
        assert now.get("turns_total", finish_reason="error") == now.get("turn_duration_seconds_count") == 1
        assert now.get("turns_running") == now.sum("turns_queued") == 0
        assert now.get("kv_bytes", tier="device", **{"class": "active"}) == 0
