"""The parts of the load tester that need no server: distributions, arrivals, search, figures, files."""

import math
import statistics
from itertools import islice, pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue_client.load.arrivals import arrivals
from segue_client.load.bisection import Limits, RateSearch
from segue_client.load.distributions import SpecError, parse
from segue_client.load.results import (
    Check,
    ContextKind,
    Experiment,
    Machine,
    Metadata,
    Outcome,
    Point,
    Request,
    Results,
    ResultsError,
    SelfCheck,
    TargetInfo,
    TargetKind,
    Verdict,
)
from segue_client.load.summary import Objectives, Spread, goodput, judge, percentile, summarize

DRAWS = 20_000


def draws(spec: str) -> list[float]:
    rng = Random(7)
    distribution = parse(spec)
    return [distribution.sample(rng) for _ in range(DRAWS)]


@pytest.mark.parametrize(
    ("spec", "median", "mean"),
    [
        ("120", 120, 120),
        ("fixed:120", 120, 120),
        ("uniform:50,200", 125, 125),
        ("lognormal:120,0.6", 120, 120 * math.exp(0.18)),
        ("exponential:2", 2 * math.log(2), 2),
    ],
)
def test_a_distribution_has_the_median_and_mean_its_name_promises(spec: str, median: float, mean: float) -> None:
    values = draws(spec)
    assert statistics.median(values) == pytest.approx(median, rel=0.03)
    assert statistics.fmean(values) == pytest.approx(mean, rel=0.03)


def test_bounds_cut_a_distribution_and_counts_are_whole_and_at_least_one() -> None:
    values = draws("lognormal:120,2,min=8,max=1024")
    assert (min(values), max(values)) == (8, 1024)
    assert parse("0.2").count(Random(1)) == 1
    assert parse("2.6").count(Random(1)) == 3


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("gauss:1,2", "known are fixed, uniform"),
        ("uniform:5", "takes 2 numbers, not 1"),
        ("uniform:9,5", "above the upper"),
        ("lognormal:0,1", "must be above 0"),
        ("lognormal:5,1,most=9", "use min= or max="),
        ("5,min=9,max=8", "is not a number|min is above max"),
        ("fixed:x", "'x' is not a number"),
        ("fixed:-1", "out of range"),
        ("fixed:inf", "out of range"),
    ],
)
def test_a_spec_that_cannot_be_meant_is_refused_with_its_reason(spec: str, complaint: str) -> None:
    with pytest.raises(SpecError, match=complaint) as caught:
        parse(spec)
    assert spec in str(caught.value)


def test_poisson_arrivals_repeat_with_their_seed_and_have_exponential_gaps_of_the_rate() -> None:
    first = list(islice(arrivals("poisson", 50, 3), DRAWS))
    assert first == list(islice(arrivals("poisson", 50, 3), DRAWS))
    assert first != list(islice(arrivals("poisson", 50, 4), DRAWS))
    gaps = [after - before for before, after in pairwise(first)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert statistics.pstdev(gaps) == pytest.approx(1 / 50, rel=0.05)  # what tells exponential from constant


def test_constant_arrivals_do_not_drift_and_a_rate_of_zero_is_refused() -> None:
    assert list(islice(arrivals("constant", 8, 0), 1000))[-1] == 999 / 8
    with pytest.raises(ValueError, match="above 0"):
        arrivals("poisson", 0, 1)


@given(capacity=st.floats(0.02, 500), start=st.floats(0.1, 100))
def test_the_search_brackets_the_capacity_within_its_tolerance(capacity: float, start: float) -> None:
    search = RateSearch(Limits(start=start, lowest=0.01, highest=1000, tolerance=0.05, probes=60))
    while (rate := search.next_rate()) is not None:
        search.tell(rate, held=rate <= capacity)
    assert search.best is not None
    assert search.failed is not None
    assert search.best <= capacity < search.failed <= search.best * 1.05


@pytest.mark.parametrize(("capacity", "best"), [(0.001, None), (1e9, 64)])
def test_the_search_ends_at_its_outer_limits(capacity: float, best: float | None) -> None:
    search = RateSearch(Limits(start=1, lowest=0.25, highest=64, tolerance=0.1, probes=99))
    tried = []
    while (rate := search.next_rate()) is not None:
        tried.append(rate)
        search.tell(rate, held=rate <= capacity)
    assert search.best == best
    assert len(tried) < 10


def test_the_search_tries_no_more_than_its_probes_and_keeps_its_bounds_apart_when_outcomes_contradict() -> None:
    search = RateSearch(Limits(start=8, lowest=1, highest=64, tolerance=0.01, probes=4))
    for held in (False, True, False):
        rate = search.next_rate()
        assert rate is not None
        search.tell(rate, held=held)
    search.tell(60, held=True)
    assert search.next_rate() is None
    assert search.best is not None
    assert search.failed is not None
    assert search.best < search.failed


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = list(range(1, 101))
    assert [percentile(values, share) for share in (0.0, 0.5, 0.9, 0.99, 1.0)] == [1, 50, 90, 99, 100]
    assert percentile([3.0], 0.99) == 3.0
    assert Spread.of([]) is None


def request(**fields: object) -> Request:
    told = {"point": 0, "user": 0, "intended": 1.0, "sent": 1.1, "end": 2.0} | fields
    return Request(**told)  # type: ignore[arg-type]  # a test's shorthand


def results(*requests: Request, points: tuple[Point, ...] = (), experiment: Experiment = Experiment.RUN) -> Results:
    machine = Machine(system="Linux", processor="x", cores=2, memory_bytes=1 << 30)
    target = TargetInfo(kind=TargetKind.SEGUE, address="127.0.0.1:1", model="tiny", context_limit=2048)
    metadata = Metadata(
        command=("segue", "load", "run"),
        seed=1,
        started="2026-01-01T00:00:00+00:00",
        versions={"segue": "0.1.0"},
        machine=machine,
        target=target,
        workload={"prompt": "lognormal:120,0.6"},
    )
    return Results(
        experiment=experiment, metadata=metadata, points=points or (point(),), requests=requests, notes=("none",)
    )


def point(**fields: object) -> Point:
    tester = SelfCheck(cpu_share=0.1, loop_lag_p99=0.001, loop_lag_max=0.002, send_lag_p99=0.001, send_lag_max=0.003)
    return Point(**({"label": "1", "start": 1.0, "end": 11.0, "tester": tester} | fields))  # type: ignore[arg-type]


def test_latencies_count_from_the_intended_arrival_and_not_from_the_sending() -> None:
    late = request(intended=1.0, sent=3.0, token_times=(3.5, 3.75), end=3.75)
    assert late.time_to_first_token == 2.5
    assert late.latency == 2.75
    assert late.gaps == [0.25]


def test_a_request_given_up_counts_with_the_time_it_had_waited() -> None:
    """Dropping what did not answer would make a server look better the worse it is."""
    answered = request(token_times=(1.5, 1.6), end=1.6)
    silent = request(intended=1.0, end=9.0, outcome=Outcome.TIMEOUT)
    stuck = request(token_times=(1.5,), end=8.5, outcome=Outcome.CUT)
    refused = request(end=1.01, outcome=Outcome.REFUSED)
    one = results(answered, silent, stuck, refused)
    summary = summarize(one, one.points[0])
    assert summary.ttft is not None
    assert summary.inter_token is not None
    assert (summary.ttft.count, summary.ttft.maximum) == (3, 8.0)
    assert summary.inter_token.maximum == 7.0
    assert summary.failed_share == 0.5


def test_warm_up_is_left_out_of_latencies_but_its_tokens_in_the_window_are_throughput() -> None:
    warm = request(intended=0.5, warm_up=True, token_times=(0.9, 1.0, 2.0), end=2.0, generated_tokens=3)
    later = request(token_times=(10.0, 11.0, 12.0), end=12.0, generated_tokens=3)
    one = results(warm, later)
    summary = summarize(one, one.points[0])
    assert (summary.requests, summary.generated_tokens) == (1, 3)
    assert summary.token_rate == pytest.approx(4 / 10)
    assert summary.request_rate == pytest.approx(1 / 10)  # the other one ended past the window


def test_pieces_of_several_tokens_are_told_and_counted_as_tokens() -> None:
    two_each = request(token_times=(2.0, 3.0), end=3.0, generated_tokens=4, computed_tokens=30, reused_tokens=90)
    one = results(two_each)
    summary = summarize(one, one.points[0])
    assert summary.tokens_per_piece == 2
    assert summary.token_rate == pytest.approx(4 / 10)
    assert summary.reused_share == 0.75
    assert summary.stream_rate is not None
    assert summary.stream_rate.p50 == 2


def test_groups_are_summed_up_apart() -> None:
    one = results(request(group="stream"), request(group="long"), request(group="long"))
    assert summarize(one, one.points[0], "long").requests == 2
    assert summarize(one, one.points[0]).requests == 3


def test_a_verdict_names_each_objective_and_nothing_measured_is_nothing_kept() -> None:
    one = results(request(token_times=(1.2, 1.25), end=1.25))
    objectives = Objectives(ttft_p99=0.3, inter_token_p99=0.04)
    verdict = judge(summarize(one, one.points[0]), objectives)
    assert [(check.objective, check.held) for check in verdict.checks] == [
        ("ttft_p99", True),
        ("inter_token_p99", False),
        ("failed", True),
    ]
    assert not verdict.held
    nothing = results()
    assert not any(check.held for check in judge(summarize(nothing, nothing.points[0]), objectives).checks)


def verdict(held: bool) -> Verdict:
    return Verdict(held=held, checks=(Check(objective="ttft_p99", limit=1.0, measured=0.5, held=held),))


def test_goodput_is_the_highest_rate_that_held_below_every_rate_that_failed() -> None:
    tried = [(1.0, True), (2.0, True), (4.0, False), (2.8, True), (5.0, True)]
    points = tuple(point(label=str(rate), rate=rate, verdict=verdict(held)) for rate, held in tried)
    found = goodput(results(points=points, experiment=Experiment.SWEEP))
    assert found.point is not None
    assert (found.point.rate, found.failed_rate) == (2.8, 4.0)
    with pytest.raises(ValueError, match="not of sweep"):
        goodput(results())


def test_results_come_back_from_json_as_they_were() -> None:
    whole = request(
        token_times=(1.2, 1.3), context=ContextKind.WARM, history_tokens=5, outcome=Outcome.FAILED, error="x"
    )
    one = results(whole, request(), points=(point(rate=2.0, verdict=verdict(True)), point(streams=8)))
    assert Results.from_json(one.to_json()) == one


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        (b"not json", "schema_version is missing"),
        (b"[]", "schema_version is missing"),
        (b'{"schema_version": 99}', "schema_version is 99; this version of segue reads 1"),
        (b'{"schema_version": 1}', "missing required field"),
        (results().to_json().replace(b'"seed":1', b'"seed":"one"'), r"metadata\.seed"),
    ],
)
def test_a_file_that_is_no_results_is_refused_with_the_field(document: bytes, complaint: str) -> None:
    with pytest.raises(ResultsError, match=complaint):
        Results.from_json(document)
