"""Comparison of load tests: it finds what changed, calls noise noise, and its intervals hold what they promise."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.client import load_results as made
from typer.testing import CliRunner

from segue_client.cli.app import app
from segue_client.load.report.compare import Change, Comparison, ComparisonError, Finding, Precision, compare
from segue_client.load.report.resampling import Sample, mean, quantile, ratio_interval
from segue_client.load.results import Experiment, Outcome, Results
from segue_client.load.summary import percentile

FAST = Precision(draws=200)


def change(found: Comparison, metric: str, point: str = "all") -> Change:
    return next(c for c in found.changes if (c.point, c.metric.name) == (point, metric))


# ------------------------------------------------------------------------------------------------- known truth


def short(seed: int, slower: float = 1.0) -> Results:
    """240 turns of 120 sessions, whose pace varies by 15 %."""
    return made.run(seed, slower, sessions=120, turns=2, pieces=6)


def test_ten_percent_more_is_found_and_none_is_not() -> None:
    """Over 20 pairs of runs each. Of 95 % intervals, one in 20 is wrong; more than 3 would be too many."""
    draws = Precision(draws=100)
    slower = [change(compare(short(3 * n), short(3 * n + 1, 1.1), draws), "inter-token p50") for n in range(20)]
    same = [change(compare(short(3 * n), short(3 * n + 2), draws), "inter-token p50") for n in range(20)]
    found = sum(c.finding is Finding.WORSE for c in slower)
    quiet = sum(c.finding is Finding.NOISE for c in same)
    print(f"\n10 % slower: found in {found} of 20 pairs; no change: called noise in {quiet} of 20")
    assert found >= 18
    assert quiet >= 17


def drawn(rng: random.Random, middle: float, sessions: int = 40, turns: int = 5, by_session: bool = True) -> Sample:
    """Values around the middle, those of a session alike; by_session=False takes them for independent."""
    pairs = []
    for session in range(sessions):
        pace = rng.lognormvariate(0, 0.3) * middle
        pairs += [((session, 0 if by_session else turn), pace * rng.lognormvariate(0, 0.2)) for turn in range(turns)]
    return Sample.of(pairs)


def coverage(by_session: bool, repetitions: int, ratio: float = 1.1) -> float:
    """How many of the intervals hold the true ratio of the medians."""
    rng, chance, held = random.Random(5), np.random.default_rng(5), 0
    for _ in range(repetitions):
        before, after = (drawn(rng, middle, by_session=by_session) for middle in (1.0, ratio))
        found = ratio_interval(before, after, quantile(0.5), draws=200, confidence=0.95, rng=chance)
        held += found.low <= ratio <= found.high
    return held / repetitions


def test_intervals_hold_the_truth_as_often_as_they_promise() -> None:
    """95 % promised; chance alone moves the share over 250 repetitions by 1.4 % (one sigma)."""
    begin = time.monotonic()
    honest, naive = coverage(True, 250), coverage(False, 100)
    print(f"\n95 % intervals hold the truth in {honest:.1%}, taking a session's turns for independent in {naive:.1%}")
    print(f"{time.monotonic() - begin:.1f} s")
    assert 0.91 <= honest <= 0.985
    assert naive < 0.85, "which is why whole sessions are drawn"


def test_a_schedule_that_varies_in_both_alike_is_no_noise() -> None:
    """Throughput rises and falls with the arrivals; drawn in pairs, a 10 % change still shows."""
    rng = np.random.default_rng(1)
    schedule = np.linspace(10, 100, 20)
    before, after = (Sample.of(enumerate(schedule * s * rng.lognormal(0, 0.02, 20))) for s in (1.0, 0.9))
    paired, apart = (
        ratio_interval(before, after, mean, paired=paired, draws=300, confidence=0.95, rng=rng)
        for paired in (True, False)
    )
    assert 0.88 < paired.low < 0.9 < paired.high < 0.92
    assert apart.low < 0.8
    assert apart.high > 1


# ------------------------------------------------------------------------------------------------- the figures


@given(st.lists(st.floats(0.001, 100), min_size=1, max_size=50), st.sampled_from([0.0, 0.5, 0.9, 0.95, 0.99, 1.0]))
def test_percentiles_are_those_of_the_summary(values: list[float], share: float) -> None:
    sample = Sample.of((None, value) for value in values)
    assert sample.figure(quantile(share)) == percentile(sorted(values), share)


@given(st.lists(st.tuples(st.floats(0.001, 100), st.integers(0, 4)), min_size=1, max_size=30))
def test_a_weight_is_so_many_times_the_value(weighted: list[tuple[float, int]]) -> None:
    values, weights = map(np.array, zip(*sorted(weighted), strict=True))
    written_out = np.repeat(values, weights)
    found = quantile(0.5)(values, weights.astype(float)), mean(values, weights.astype(float))
    if len(written_out):
        assert found == (percentile(list(written_out), 0.5), pytest.approx(written_out.mean()))
    else:
        assert np.isnan(found).all()


def test_a_sample_is_drawn_by_whole_clusters() -> None:
    """Two clusters, of 1s and of 3s: a mean of two clusters is 1, 2 or 3, each as often as it should be."""
    sample = Sample.of([("a", 1.0)] * 5 + [("b", 3.0)] * 5)
    means = sample.redrawn(mean, sample.draw(4_000, np.random.default_rng(0)))
    values, counts = np.unique(means, return_counts=True)
    assert values.tolist() == [1.0, 2.0, 3.0]
    assert counts / 4_000 == pytest.approx([0.25, 0.5, 0.25], abs=0.03)


def test_the_same_seed_gives_the_same_intervals() -> None:
    before, after = made.run(1), made.run(2)
    assert compare(before, after, FAST) == compare(before, after, FAST)
    assert compare(before, after, FAST) != compare(before, after, replace(FAST, seed=1))


def test_few_requests_are_too_few_to_tell() -> None:
    """Fewer than 10 sessions have no interval, nor has a percentile that fewer than 5 values lie beyond."""
    few = compare(made.run(1, sessions=3, turns=2), made.run(2, 3.0, sessions=3, turns=2), FAST)
    assert change(few, "TTFT p50").finding is Finding.UNKNOWN
    some = compare(made.run(1, sessions=60), made.run(2, sessions=60), FAST)
    assert change(some, "TTFT p95").interval is not None
    assert change(some, "TTFT p99").finding is Finding.UNKNOWN


def test_a_server_that_fails_more_is_worse() -> None:
    good = made.run(1)
    lost = [replace(r, outcome=Outcome.FAILED) if n % 5 == 0 else r for n, r in enumerate(good.requests)]
    answered = change(compare(good, replace(good, requests=tuple(lost)), FAST), "answered")
    assert answered.finding is Finding.WORSE
    assert answered.ratio == pytest.approx(0.8)
    assert answered.worse_by(10)
    assert not answered.worse_by(30)


def test_points_are_compared_with_those_of_the_same_label() -> None:
    before = made.concurrency(1)
    fewer = replace(before, points=before.points[:-1], requests=tuple(r for r in before.requests if r.point < 5))
    found = compare(before, fewer, FAST)
    assert {c.point for c in found.changes} == {point.label for point in fewer.points}
    assert found.unmatched == ("32 streams",)


def test_two_sweeps_compare_their_goodput() -> None:
    assert compare(made.sweep(1), made.sweep(2), FAST).goodputs == ("6.00 arrivals/s", "6.00 arrivals/s")


# ------------------------------------------------------------------------------------------- what is not the same


def test_other_workloads_are_refused_by_name_unless_forced() -> None:
    before, after = made.run(1), made.run(1, workload={"prompt": "500", "output": "64", "turns": "4"})
    with pytest.raises(ComparisonError, match=r"prompt: lognormal:120,0\.6 and 500"):
        compare(before, after, FAST)
    found = compare(before, after, FAST, force=True)
    assert found.differences == (("workload: prompt", "lognormal:120,0.6", "500"),)


def test_other_experiments_share_no_point() -> None:
    with pytest.raises(ComparisonError, match="the one is of segue load run, the other of segue load sweep"):
        compare(made.run(), made.sweep(), FAST)
    with pytest.raises(ComparisonError, match="share no point; the one has all, the other 2 a second"):
        compare(made.run(), made.sweep(), FAST, force=True)


def test_versions_machines_and_seeds_that_differ_are_listed() -> None:
    machine = replace(made.METADATA.machine, cores=8)
    versions = {**made.METADATA.versions, "segue": "0.2.0"}
    before = made.run(1)
    other = replace(before, metadata=replace(before.metadata, seed=8, machine=machine, versions=versions))
    assert compare(before, other, FAST).differences == (
        ("seed", "7", "8"),
        ("version of segue", "0.1.0", "0.2.0"),
        ("cores", "2", "8"),
    )


# -------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def segue_compare(tmp_path):
    def run(before: Results, after: Results, *options: str):
        files = [tmp_path / "before.json", tmp_path / "after.json"]
        for file, results in zip(files, (before, after), strict=True):
            file.write_bytes(results.to_json())
        return CliRunner().invoke(app, ["load", "compare", *map(str, files), *options])

    return run


def test_exit_code_is_1_when_it_is_worse_by_more_than_allowed(segue_compare) -> None:
    before, slower = made.run(1, sessions=120), made.run(2, 1.2, sessions=120)
    result = segue_compare(before, slower, "--fail-if-worse", "5")
    assert result.exit_code == 1
    assert "worse by more than 5 %: all TTFT p50" in result.stderr
    assert segue_compare(before, slower, "--fail-if-worse", "60").exit_code == 0
    assert segue_compare(slower, before, "--fail-if-worse", "5").exit_code == 0, "better is not worse"


def test_noise_is_called_so_and_fails_nothing(segue_compare) -> None:
    result = segue_compare(made.run(1), made.run(1), "--fail-if-worse", "0")
    assert result.exit_code == 0
    assert result.stdout.count("no change beyond noise") >= 8


def test_wrong_usage_is_exit_code_2_and_says_what_to_do(segue_compare) -> None:
    result = segue_compare(made.run(), made.sweep())
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--force" in result.stderr
    assert made.run().experiment is Experiment.RUN
