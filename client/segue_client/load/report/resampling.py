"""How sure a ratio of two measurements is: the percentile bootstrap over clusters (Efron and Tibshirani, "An
Introduction to the Bootstrap", 1993, chapters 8 and 13).

What is drawn again is a whole cluster (a session, a stretch of time) with all its values: those within one resemble
each other, and drawing them one by one would promise a certainty that is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Statistic = Callable[[Floats, Floats], float]
"""(values [N], ascending; how often each counts [N]) -> a figure."""

ROUNDING = 1e-9  # as in `summary.percentile`


@dataclass(frozen=True)
class Sample:
    """Values and the cluster that each is from.

    Attributes:
        values: [N], ascending.
        cluster: [N], 0..clusters-1.
        clusters: how many there are; one may hold no value.
    """

    values: Floats
    cluster: NDArray[np.intp]
    clusters: int

    @classmethod
    def of(cls, pairs: Iterable[tuple[Hashable, float]]) -> Self:
        """A sample from (cluster, value)."""
        numbers: dict[Hashable, int] = {}
        following = count()
        told = [(numbers[key] if key in numbers else numbers.setdefault(key, next(following)), v) for key, v in pairs]
        cluster = np.array([number for number, _ in told], dtype=np.intp)
        values = np.array([value for _, value in told], dtype=np.float64)
        order = np.argsort(values, kind="stable")
        return cls(values[order], cluster[order], len(numbers))

    def figure(self, statistic: Statistic) -> float:
        """The statistic of the values as they were measured."""
        return statistic(self.values, np.ones_like(self.values))

    def draw(self, draws: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """How often each cluster comes when as many are drawn with replacement: [draws, clusters]."""
        return rng.multinomial(self.clusters, np.full(self.clusters, 1 / self.clusters), size=draws)

    def redrawn(self, statistic: Statistic, times: NDArray[np.int64]) -> Floats:
        """The statistic of every draw: [draws]."""
        return np.array([statistic(self.values, row[self.cluster].astype(np.float64)) for row in times])


def quantile(share: float) -> Statistic:
    """The nearest-rank percentile, as in `summary.percentile`; NaN of nothing."""

    def of(values: Floats, weights: Floats) -> float:
        below = np.cumsum(weights)
        if not len(below) or below[-1] <= 0:
            return float("nan")
        rank = np.searchsorted(below, max(np.ceil(share * below[-1] - ROUNDING), 1.0))
        return float(values[rank])

    return of


def mean(values: Floats, weights: Floats) -> float:
    """The mean; NaN of nothing."""
    total = weights.sum()
    return float(values @ weights / total) if total > 0 else float("nan")


class Interval(NamedTuple):
    """Where a ratio lies, with a given confidence."""

    low: float
    high: float


def ratio_interval(
    before: Sample,
    after: Sample,
    statistic: Statistic,
    *,
    paired: bool = False,
    draws: int,
    confidence: float,
    rng: np.random.Generator,
) -> Interval | None:
    """Where `statistic(after) / statistic(before)` lies; None where a figure to divide by may be 0 or missing.

    Args:
        paired: the clusters of both are the same ones, such as the same stretch of a schedule, and are drawn together:
            what varies from one to another in both alike is then no noise.
        draws: how often each sample is drawn again.
        confidence: 0..1, the share of intervals that hold the true ratio.
        rng: where chance comes from; the same state gives the same interval.
    """
    times = before.draw(draws, rng)
    divisor = before.redrawn(statistic, times)
    dividend = after.redrawn(statistic, times if paired else after.draw(draws, rng))
    known = np.isfinite(divisor) & np.isfinite(dividend)
    if not known.any() or (divisor[known] <= 0).any():
        return None
    tail = (1 - confidence) / 2
    low, high = np.quantile(dividend[known] / divisor[known], [tail, 1 - tail])
    return Interval(float(low), float(high))
