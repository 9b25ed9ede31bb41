"""The load tester against servers of known latency: what it reports is what was performed."""

# ruff: noqa: N802  handlers have the contract's names

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice, pairwise

import pytest
from tests.client.fake_schedule import (
    Schedule,
    ScheduledOpenAi,
    ScheduledSegue,
    serving_openai,
    serving_segue,
)

from segue_client.load import experiments, openai_target, segue_target
from segue_client.load.arrivals import arrivals
from segue_client.load.bisection import Limits
from segue_client.load.distributions import parse
from segue_client.load.driver import Driver, Span
from segue_client.load.experiments import ClosedLoop, ContextGrid, Mix, OpenLoop
from segue_client.load.results import ContextKind, Outcome, Point, Request, SelfCheck
from segue_client.load.self_check import bottleneck
from segue_client.load.summary import Objectives, Spread, Summary, inter_token_times, percentile, summarize_requests
from segue_client.load.target import Clock, Settings, Target, TargetError
from segue_client.load.workload import Shape, Synthetic, Trace

TOLERANCE = 0.02
BRIEF = Span(warm_up=0.0, duration=None, count=None, drain=10.0)


class Silent:
    """Shows nothing."""

    def point_started(self, label: str) -> None: ...
    def sent(self) -> None: ...
    def ended(self, request: Request) -> None: ...
    def point_ended(self, point: Point) -> None: ...


def quick() -> Schedule:
    return Schedule(first=lambda _: 0.001, gap=lambda _: 0.001)


def work(prompt: str = "8", output: str = "4", **shape: object) -> Synthetic:
    options = {"turns": parse("1"), "think": parse("0")} | shape
    return Synthetic(seed=5, shape=Shape(**options), prompt=parse(prompt), output=parse(output))  # type: ignore[arg-type]


@asynccontextmanager
async def segue(servicer: ScheduledSegue, **settings: object) -> AsyncIterator[Driver]:
    asked, clock = Settings(**({"timeout": 30.0} | settings)), Clock()  # type: ignore[arg-type]
    async with serving_segue(servicer) as address, segue_target.connected(address, asked, clock) as target:
        yield driving(target, clock, asked)


@asynccontextmanager
async def openai(peer: ScheduledOpenAi, **settings: object) -> AsyncIterator[Driver]:
    asked, clock = Settings(**({"timeout": 30.0} | settings)), Clock()  # type: ignore[arg-type]
    async with (
        serving_openai(peer) as url,
        openai_target.connected(openai_target.Endpoint(url=url), asked, clock) as target,
    ):
        peer.schedule.performed.clear()  # without the calibration
        yield driving(target, clock, asked)


def driving(target: Target, clock: Clock, settings: Settings) -> Driver:
    return Driver(target, clock, settings.timeout, Silent())


def summary_of(driver: Driver, group: str | None = None, point: int = 0) -> Summary:
    mine = [request for request in driver.requests if request.point == point]
    return summarize_requests(mine, driver.points[point], group)


def compare(name: str, reported: Spread | None, performed: list[float], own: SelfCheck) -> None:
    """To 2 % of the truth, and to what the tester itself owns up to: on a busy machine it, too, is late."""
    truth = Spread.of(performed)
    assert truth is not None
    assert reported is not None
    assert reported.count == truth.count
    for quantile in ("p50", "p90", "p95", "p99", "mean"):
        true, told = getattr(truth, quantile), getattr(reported, quantile)
        print(
            f"{name} {quantile}: performed {true * 1e3:.2f} ms, reported {told * 1e3:.2f} ms ({told / true - 1:+.2%})"
        )
        assert abs(told - true) <= TOLERANCE * true + 2 * (own.loop_lag_max + own.send_lag_max)


def spread_schedule() -> Schedule:
    return Schedule(
        first=lambda rng: min(max(rng.lognormvariate(-1.6, 0.5), 0.1), 0.8),
        gap=lambda rng: rng.uniform(0.05, 0.4),
    )


async def check_percentiles(driver: Driver, schedule: Schedule, rate: float, count: int, template: int = 0) -> None:
    """Replays arrivals whose prompts all differ in length, which tells which request is which on both sides."""
    moments = list(islice(arrivals("poisson", rate, 3), count))
    trace = Trace(seed=1, moments=moments, lengths=[(100 + number, 8) for number in range(count)])
    await experiments.replay(driver, trace, Span(warm_up=0.0, duration=None, count=None, drain=0.0))
    summary, own = summary_of(driver), driver.points[0].tester
    print(f"the tester itself: {own}")
    assert summary.outcomes == {Outcome.OK: count}
    assert summary.generated_tokens == count * 8
    assert summary.tokens_per_piece == 1
    began = driver.points[0].start + driver.clock.zero
    due = {100 + template + number: began + moment for number, moment in enumerate(moments)}
    compare("TTFT", summary.ttft, [one.tokens[0] - due[one.size] for one in schedule.performed], own)
    gaps = [after - before for one in schedule.performed for before, after in pairwise(one.tokens)]
    compare("inter-token", summary.inter_token, gaps, own)


async def test_percentiles_of_a_segue_server_are_those_it_performed() -> None:
    servicer = ScheduledSegue(spread_schedule())
    async with segue(servicer) as driver:
        await check_percentiles(driver, servicer.schedule, rate=120, count=160)


async def test_percentiles_of_an_openai_compatible_server_are_those_it_performed() -> None:
    peer = ScheduledOpenAi(spread_schedule())
    async with openai(peer) as driver:
        await check_percentiles(driver, peer.schedule, rate=60, count=60, template=5)


async def test_a_stall_of_the_server_is_seen_by_everyone_who_was_due_in_it() -> None:
    """No coordinated omission: a second's silence under 50 arrivals a second is some 50 waits of up to a second."""
    schedule = Schedule(first=lambda _: 0.0, gap=lambda _: 0.0)
    async with segue(ScheduledSegue(schedule)) as driver:
        stalling = asyncio.create_task(schedule.stall(after=0.5, length=1.0))
        loop = OpenLoop(rate=50, process="constant", seed=0)
        await experiments.run(driver, work(output="1"), loop, Span(warm_up=0.0, duration=2.0, count=None, drain=9.0))
        await stalling
    resumed = schedule.resumed - driver.clock.zero
    held = [one for one in driver.requests if resumed - 0.9 < one.intended < resumed - 0.1]
    performed = sorted(one.tokens[0] - driver.clock.zero for one in schedule.performed)
    own = driver.points[0].tester
    assert len(driver.requests) == 100
    assert 39 <= len(held) <= 41  # every arrival that was due, sent while nothing was answered
    for one in held:
        assert one.time_to_first_token is not None
        assert one.time_to_first_token >= resumed - one.intended
    due = sorted(one.intended for one in driver.requests)
    waits = [answered - moment for answered, moment in zip(performed, due, strict=True)]
    compare("TTFT under a stall", summary_of(driver).ttft, waits, own)
    assert percentile(sorted(waits), 0.9) > 0.6


async def test_a_tester_that_is_held_up_itself_keeps_the_intended_arrivals_and_says_so() -> None:
    async with segue(ScheduledSegue(Schedule(first=lambda _: 0.0, gap=lambda _: 0.0))) as driver:
        asyncio.get_running_loop().call_later(0.2, time.sleep, 0.5)
        loop = OpenLoop(rate=50, process="constant", seed=0)
        await experiments.run(driver, work(output="1"), loop, Span(warm_up=0.0, duration=1.0, count=None, drain=9.0))
    own = driver.points[0].tester
    intended = sorted(one.intended for one in driver.requests)
    assert [after - before for before, after in pairwise(intended)] == pytest.approx([0.02] * 49)
    assert own.send_lag_max > 0.4
    assert own.loop_lag_max > 0.4
    assert "sent requests late" in own.bottleneck
    assert sum((one.time_to_first_token or 0.0) > 0.1 for one in driver.requests) >= 15


def test_a_tester_out_of_breath_says_so_and_one_at_ease_does_not() -> None:
    calm = Spread.of([0.05])
    assert bottleneck(0.2, 0.001, 0.001, calm, calm) == ""
    assert "95% of a core" in bottleneck(0.95, 0.001, 0.001, calm, calm)
    assert "event loop was late by 20.0 ms" in bottleneck(0.2, 0.02, 0.001, calm, calm)
    assert bottleneck(0.2, 0.02, 0.02, None, None) == ""  # nothing was measured that it could have spoilt


async def test_warm_up_counts_apart_and_what_runs_too_long_is_cut_off_at_the_end() -> None:
    slow = Schedule(first=lambda _: 0.05, gap=lambda _: 60.0)
    async with segue(ScheduledSegue(slow)) as driver:
        span = Span(warm_up=0.2, duration=0.3, count=None, drain=1.0)
        await experiments.run(driver, work(output="2"), OpenLoop(rate=20, process="constant", seed=0), span)
    assert {one.outcome for one in driver.requests} == {Outcome.CUT}
    assert sum(one.warm_up for one in driver.requests) == 4
    point = driver.points[0]
    assert point.end - point.start == pytest.approx(0.3)
    assert summary_of(driver).requests == 6
    assert len(inter_token_times(driver.requests)) == 10  # each the silence after its only token


async def test_users_of_a_closed_loop_wait_for_their_answers_and_think() -> None:
    servicer = ScheduledSegue(Schedule(first=lambda _: 0.05, gap=lambda _: 0.0))
    async with segue(servicer) as driver:
        span = Span(warm_up=0.0, duration=None, count=6, drain=0.0)
        await experiments.run(driver, work(output="1", turns=parse("2"), think=parse("0.1")), ClosedLoop(users=2), span)
    assert len(driver.requests) == 12
    for user in (0, 1):
        mine = sorted((one for one in driver.requests if one.user == user), key=lambda one: one.intended)
        for before, after in pairwise(mine):
            assert after.intended - before.end >= (0.1 if after.turn == 1 else 0.0)
    assert servicer.positions == {}  # every session was deleted


@pytest.mark.parametrize("reuse", ["session", "prefix", "none"])
async def test_every_way_of_reuse_carries_the_same_conversation(reuse: str) -> None:
    """In a session only what is new is sent; otherwise all of it, and what was generated is part of the history."""
    servicer = ScheduledSegue(quick())
    async with segue(servicer, reuse=reuse) as driver:
        await experiments.run(
            driver,
            work(turns=parse("3"), system_tokens=20),
            ClosedLoop(users=1),
            Span(warm_up=0.0, duration=None, count=1, drain=0.0),
        )
    sent = [one.request for one in servicer.schedule.performed]
    assert [len(one.token_ids.ids) for one in sent] == ([8, 8, 8] if reuse == "session" else [28, 40, 52])
    assert {one.bypass_prefix_cache for one in sent} == {reuse == "none"}
    told = [(one.turn, one.history_tokens, one.prompt_tokens) for one in driver.requests]
    assert told == (
        [(0, 20, 8), (1, 32, 8), (2, 44, 8)] if reuse == "session" else [(0, 0, 28), (1, 32, 8), (2, 44, 8)]
    )
    ids = [list(one.token_ids.ids) for one in sent]
    if reuse != "session":
        assert ids[1][:28] == ids[0]
        assert ids[1][28:32] == [0, 1, 2, 3]


async def test_the_last_turn_of_a_session_fans_out_into_forks() -> None:
    servicer = ScheduledSegue(quick())
    async with segue(servicer) as driver:
        shape = {"turns": parse("2"), "fork": 3}
        span = Span(warm_up=0.0, duration=None, count=1, drain=0.0)
        await experiments.run(driver, work(**shape), ClosedLoop(users=1), span)
    branches = [one for one in driver.requests if one.turn == 1]
    assert [one.history_tokens for one in branches] == [12, 12, 12]
    assert len({one.session for one in branches}) == 3
    assert len({one.intended for one in branches}) == 1
    prompts = {tuple(one.request.token_ids.ids) for one in servicer.schedule.performed[1:]}
    assert len(prompts) == 3  # each goes its own way
    assert servicer.positions == {}


async def test_refusals_are_told_and_never_tried_again_in_secret() -> None:
    servicer = ScheduledSegue(quick())
    async with segue(servicer) as driver:
        servicer.refusing = True
        loop = OpenLoop(rate=100, process="constant", seed=0)
        await experiments.run(driver, work(), loop, Span(warm_up=0.0, duration=0.2, count=None, drain=9.0))
    assert {one.outcome for one in driver.requests} == {Outcome.REFUSED}
    assert "the queue is full" in driver.requests[0].error
    assert summary_of(driver).failed_share == 1


async def test_a_turn_past_its_deadline_is_a_timeout() -> None:
    async with segue(ScheduledSegue(Schedule(first=lambda _: 30.0, gap=lambda _: 0.0)), timeout=0.2) as driver:
        await experiments.run(driver, work(), ClosedLoop(users=1), Span(warm_up=0, duration=None, count=1, drain=0))
    assert [one.outcome for one in driver.requests] == [Outcome.TIMEOUT]
    assert driver.requests[0].latency >= 0.2


async def test_a_trace_is_replayed_at_its_own_times() -> None:
    trace = Trace(seed=1, moments=[0.0, 0.1, 0.15], lengths=[(5, 2), (9, 3), (7, 1)])
    async with segue(ScheduledSegue(quick())) as driver:
        await experiments.replay(driver, trace, Span(warm_up=0.0, duration=None, count=None, drain=0.0))
    seen = sorted(driver.requests, key=lambda one: one.intended)
    assert [one.intended - seen[0].intended for one in seen] == pytest.approx([0.0, 0.1, 0.15])
    assert [(one.prompt_tokens, one.generated_tokens) for one in seen] == [(5, 2), (9, 3), (7, 1)]


async def test_context_measures_each_mode_at_each_history_and_says_what_is_left_out() -> None:
    servicer = ScheduledSegue(quick())
    modes = (ContextKind.WARM, ContextKind.RESTORED, ContextKind.RECOMPUTED)
    grid = ContextGrid(histories=(0, 100), modes=modes, turns=2, prompt_tokens=8, output_tokens=3, seed=1)
    async with segue(servicer) as driver:
        await experiments.context(driver, grid)
    told = [(one.point, one.history_tokens, one.context, one.computed_tokens) for one in driver.requests]
    assert told == [
        *[(0, 0, ContextKind.NEW, 8)] * 2,
        *[(1, 100, ContextKind.WARM, 8)] * 2,
        *[(2, 100, ContextKind.RESTORED, 8)] * 2,
        *[(3, 100, ContextKind.RECOMPUTED, 108)] * 2,
    ]
    assert [(point.history_tokens, point.context) for point in driver.points[1:]] == [(100, mode) for mode in modes]
    assert driver.notes == []
    assert servicer.positions == {}


async def test_context_goes_on_without_a_mode_the_server_does_not_have() -> None:
    modes = (ContextKind.RESTORED, ContextKind.RECOMPUTED)
    grid = ContextGrid(histories=(50, 100), modes=modes, turns=1, prompt_tokens=8, output_tokens=2, seed=1)
    async with segue(ScheduledSegue(quick()), restore_from="disk") as driver:
        await experiments.context(driver, grid)
    assert [point.context for point in driver.points] == [ContextKind.RECOMPUTED] * 2
    assert len(driver.notes) == 1
    assert "restored was left out" in driver.notes[0]


async def test_concurrency_keeps_as_many_streams_as_it_says() -> None:
    schedule = Schedule(first=lambda _: 0.05, gap=lambda _: 0.01)
    async with segue(ScheduledSegue(schedule)) as driver:
        span = Span(warm_up=0.0, duration=0.3, count=None, drain=9.0)
        await experiments.concurrency(driver, work(), (1, 3), span)
    assert [point.streams for point in driver.points] == [1, 3]
    for index, streams in ((0, 1), (1, 3)):
        assert {one.user for one in driver.requests if one.point == index} == set(range(streams))
    names = [tuple(one.request.token_ids.ids) for one in schedule.performed]
    assert len(set(names)) == len(names)  # no prompt twice, or the second point would find the first one's prefixes


async def test_mixed_measures_the_streams_with_and_without_long_prompts() -> None:
    mix = Mix(
        streams=work(prompt="4"),
        users=2,
        long=work(prompt="300"),
        arrivals=OpenLoop(rate=20, process="constant", seed=0),
    )
    async with segue(ScheduledSegue(quick())) as driver:
        await experiments.mixed(driver, mix, Span(warm_up=0.0, duration=0.3, count=None, drain=9.0))
    assert summary_of(driver, "long", 0).requests == 0
    assert summary_of(driver, "long", 1).requests == 6
    assert {one.prompt_tokens for one in driver.requests if one.group == "long"} == {300}
    assert summary_of(driver, "stream", 1).requests > 0


class OneAtATime(ScheduledSegue):
    """Answers one request after another, each in 20 ms: it holds less than 50 a second."""

    def __init__(self) -> None:
        super().__init__(Schedule(first=lambda _: 0.02, gap=lambda _: 0.0))
        self._turn = asyncio.Lock()

    async def GenerateStream(self, request: object, context: object) -> AsyncIterator[object]:
        async with self._turn:
            async for event in super().GenerateStream(request, context):  # type: ignore[arg-type]
                yield event


async def test_sweep_finds_the_rate_at_which_a_server_saturates() -> None:
    """A server of 20 ms a request saturates below 50 a second; a sweep ends between a rate that held and one that did
    not, and what it calls held was within the objectives."""
    limits = Limits(start=20, lowest=1, highest=200, tolerance=0.5, probes=8)
    objectives = Objectives(ttft_p99=0.25, inter_token_p99=1.0)
    async with segue(OneAtATime()) as driver:
        span = Span(warm_up=0.0, duration=0.8, count=None, drain=2.0)
        loop = OpenLoop(rate=1, process="constant", seed=0)
        await experiments.sweep(driver, work(output="2"), loop, span, limits, objectives)
    verdicts = {point.rate: point.verdict.held for point in driver.points if point.rate and point.verdict}
    held = [rate for rate, kept in verdicts.items() if kept]
    print("sweep:", verdicts)
    assert max(held, default=0) < 75
    assert not verdicts[max(verdicts)]
    for point in (point for point in driver.points if point.verdict and point.verdict.held):
        summary = summary_of(driver, point=driver.points.index(point))
        assert summary.ttft is not None
        assert summary.ttft.p99 <= 0.25


async def test_an_openai_peer_is_sent_the_whole_conversation_and_its_counts_are_taken() -> None:
    peer = ScheduledOpenAi(quick())
    async with openai(peer) as driver:
        await experiments.run(
            driver,
            work(prompt="40", turns=parse("2"), system_tokens=30),
            ClosedLoop(users=1),
            Span(warm_up=0.0, duration=None, count=1, drain=0.0),
        )
    first, second = (one.request for one in peer.schedule.performed)
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "user"]
    assert second["messages"][:2] == first["messages"]
    assert second["messages"][2]["content"] == "w0 w1 w2 w3 "
    assert second["stream"] is True
    assert second["ignore_eos"] is True
    one, two = driver.requests
    assert one.prompt_tokens == (30 + 5) + (40 + 5)  # two words a token, as the calibration has found
    assert two.history_tokens == 80 + 4
    assert two.prompt_tokens == 40 + 5 + 3  # the template's five, twice, less four tokens that are two as words
    assert (two.context, two.reused_tokens) == (ContextKind.WARM, 80)


async def test_context_against_an_openai_peer_is_warm_or_recomputed_by_what_is_sent() -> None:
    grid = ContextGrid(
        histories=(200,), modes=tuple(ContextKind)[1:4], turns=2, prompt_tokens=8, output_tokens=2, seed=1
    )
    async with openai(ScheduledOpenAi(quick())) as driver:
        await experiments.context(driver, grid)
    assert [(one.point, one.context) for one in driver.requests] == [
        *[(0, ContextKind.WARM)] * 2,
        *[(1, ContextKind.RECOMPUTED)] * 2,
    ]
    assert "restored was left out" in driver.notes[0]


async def test_a_peer_that_is_busy_refuses_and_one_that_breaks_off_fails() -> None:
    peer = ScheduledOpenAi(quick())
    once = Span(warm_up=0.0, duration=None, count=1, drain=0.0)
    async with openai(peer) as driver:
        peer.status = 429
        await experiments.run(driver, work(), ClosedLoop(users=1), once)
        peer.status = 500
        await experiments.run(driver, work(), ClosedLoop(users=1), once)
        peer.status, peer.broken = 200, True
        await experiments.run(driver, work(), ClosedLoop(users=1), once)
    assert [one.outcome for one in driver.requests] == [Outcome.REFUSED, Outcome.FAILED, Outcome.FAILED]
    assert "slow down" in driver.requests[0].error
    assert "without a finish_reason" in driver.requests[2].error


async def test_a_peer_without_the_wanted_model_is_refused_by_name() -> None:
    async with serving_openai(ScheduledOpenAi(quick())) as url:
        endpoint = openai_target.Endpoint(url=f"{url}/v1/", model="other")
        with pytest.raises(TargetError, match="no model 'other'; the server has peer"):
            async with openai_target.connected(endpoint, Settings(), Clock()):
                pass


def test_a_workload_repeats_with_its_seed_and_mixes_long_prompts_in() -> None:
    def made(seed: int) -> list[object]:
        source = Synthetic(
            seed=seed,
            shape=Shape(turns=parse("uniform:1,3"), think=parse("exponential:1")),
            prompt=parse("lognormal:50,0.5"),
            output=parse("uniform:2,9"),
            long_share=0.2,
            long_prompt=parse("2000"),
        )
        return [source.plan(number) for number in range(500)]

    assert made(1) == made(1)
    assert made(1) != made(2)
    long = [plan for plan in made(1) if plan.group == "long"]  # type: ignore[attr-defined]
    assert 70 <= len(long) <= 130
    assert {plan.turns[0].prompt.tokens for plan in long} == {2000}  # type: ignore[attr-defined]
