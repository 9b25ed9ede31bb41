"""What the engine did in the last few seconds, from the counters it only ever adds to.

A look keeps the counters as they are. What happened since the oldest look is the difference; quantiles come from the
buckets of a histogram, linear inside of one, as Prometheus estimates them.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from segue_server.stats import EngineStats, Histogram
from segue_server.views import Latency

LOOKS = 20  # that are kept; the service looks twice a second


class _Look(NamedTuple):
    time: float  # monotonic seconds
    generated: int
    first: list[int]  # counts of the histograms
    gaps: list[int]


class Lately:
    """The engine's counters over a moving window. Event loop only; the engine may count on meanwhile."""

    def __init__(self, stats: EngineStats, *, looks: int = LOOKS) -> None:
        self._stats = stats
        self._looks: deque[_Look] = deque(maxlen=looks)

    def look(self, now: float) -> None:
        """Keep the counters of this moment; the oldest look goes when there are too many."""
        first, gaps = _counts(self._stats.time_to_first_token.values()), _counts([self._stats.inter_token])
        self._looks.append(_Look(now, self._stats.generated_tokens, first, gaps))

    def generated_per_second(self) -> float:
        """Tokens sampled per second; 0 before the second look."""
        if len(self._looks) < 2:
            return 0.0
        oldest, newest = self._looks[0], self._looks[-1]
        return (newest.generated - oldest.generated) / max(newest.time - oldest.time, 1e-9)

    def time_to_first_token(self) -> Latency:
        """Of turns, whatever their context was."""
        return _latency(list(self._stats.time_to_first_token.values()), self._looks[0].first if self._looks else [])

    def inter_token(self) -> Latency:
        """Gaps between two tokens of a turn."""
        return _latency([self._stats.inter_token], self._looks[0].gaps if self._looks else [])


def _latency(histograms: Sequence[Histogram], before: Sequence[int]) -> Latency:
    counts = _counts(histograms)
    recent = [now - then for now, then in zip(counts, before, strict=True)] if before else counts
    edges = histograms[0].edges
    return Latency(
        count=sum(counts),
        total=sum(histogram.total for histogram in histograms),
        median=quantile(edges, recent, 0.5),
        p95=quantile(edges, recent, 0.95),
    )


def _counts(histograms: Iterable[Histogram]) -> list[int]:
    return [sum(bucket) for bucket in zip(*(histogram.counts for histogram in histograms), strict=True)]


def quantile(edges: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value below which `share` of the observations lie, None without any; never beyond the last edge.

    `counts[i]` are the observations up to `edges[i]`; the last one, beyond every edge.
    """
    rank, below = share * sum(counts), 0
    lower = 0.0
    for edge, count in zip(edges, counts[:-1], strict=True):
        if count and below + count >= rank:
            return lower + (edge - lower) * (rank - below) / count
        below, lower = below + count, edge
    return lower if sum(counts) else None
