"""What GetLoad tells of the last few seconds: rates and quantiles from counters that only grow."""

import random
import statistics

import pytest

from segue_server.lately import Lately, quantile
from segue_server.stats import INTER_TOKEN_EDGES, EngineStats, Histogram


@pytest.fixture
def stats():
    return EngineStats()


def test_a_quantile_lies_in_the_bucket_of_the_true_one():
    """1,000 gaps between 1 and 400 ms: median and p95 are off by no more than their bucket is wide."""
    drawn = random.Random(3)
    values = [drawn.uniform(0.001, 0.4) for _ in range(1000)]
    histogram = Histogram(INTER_TOKEN_EDGES)
    for value in values:
        histogram.observe(value)
    cuts = statistics.quantiles(values, n=20)
    for share, true in ((0.5, cuts[9]), (0.95, cuts[18])):
        estimate = quantile(histogram.edges, histogram.counts, share)
        upper = next(edge for edge in histogram.edges if edge >= true)
        lower = max((edge for edge in histogram.edges if edge < true), default=0.0)
        print(f"share {share}: true {true:.4f}, estimated {estimate:.4f}")
        assert lower <= estimate <= upper


def test_a_quantile_of_nothing_is_none_and_beyond_the_last_edge_it_is_the_edge():
    assert quantile((1.0, 2.0), [0, 0, 0], 0.5) is None
    assert quantile((1.0, 2.0), [0, 0, 9], 0.5) == 2.0


def test_what_has_left_the_window_is_not_lately_any_more(stats):
    """Counters go on from the start, quantiles forget: a slow second is gone when a window has passed."""
    lately = Lately(stats, looks=2)
    lately.look(0.0)
    stats.inter_token.observe(2.0)
    stats.time_to_first_token["new"].observe(0.5)
    slow = lately.inter_token()
    assert (slow.count, slow.total) == (1, 2.0)
    assert slow.median > 1
    for second in (1.0, 2.0):
        lately.look(second)
    assert lately.inter_token().median is None
    assert lately.inter_token().count == 1
    stats.inter_token.observe(0.005)
    assert lately.inter_token().p95 < 0.01


def test_first_tokens_of_every_context_count(stats):
    for context in stats.time_to_first_token:
        stats.time_to_first_token[context].observe(0.25)
    first = Lately(stats).time_to_first_token()
    assert (first.count, first.total) == (4, 1.0)


def test_the_token_rate_is_that_of_the_window(stats):
    """Nothing before two looks; then the tokens between the oldest and the newest."""
    lately = Lately(stats, looks=2)
    assert lately.generated_per_second() == 0
    lately.look(0.0)
    stats.generated_tokens += 1000
    lately.look(10.0)
    assert lately.generated_per_second() == 100
    stats.generated_tokens += 5
    lately.look(12.0)
    assert lately.generated_per_second() == 2.5
