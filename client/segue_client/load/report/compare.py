"""What changed between two results, and whether it is more than noise.

The interval tells how far chance within the two tests reaches. It cannot know what differs from one start of a server
to the next, nor what else the machine did: for that, run each side more than once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from segue_client.load.report.blocks import Section, Table
from segue_client.load.report.resampling import Interval, Sample, Statistic, mean, quantile, ratio_interval
from segue_client.load.report.tables import Part, by_group, distrust, points
from segue_client.load.report.words import NOTHING, change, digits, duration, share
from segue_client.load.results import Experiment, Outcome, Request, Results
from segue_client.load.summary import first_token_times, goodput, inter_token_times, token_counts

FEWEST_CLUSTERS = 10  # the interval of fewer would be too narrow to be true
FEWEST_BEYOND = 5  # values beyond a percentile, or it is one of the largest values and says nothing
WINDOWS = 20  # of a throughput


class ComparisonError(ValueError):
    """Two results that do not measure the same; the message says where they differ."""


@dataclass(frozen=True)
class Precision:
    """How the noise is estimated."""

    seed: int = 0
    confidence: float = 0.95
    draws: int = 1_000


class Finding(Enum):
    """What a change amounts to."""

    NOISE = "no change beyond noise"
    BETTER = "better"
    WORSE = "worse"
    UNKNOWN = "too few to tell"


@dataclass(frozen=True)
class Change:
    """One figure of one point, before and after."""

    point: str
    metric: Metric
    before: float
    after: float
    interval: Interval | None  # of the ratio; None = too few to tell

    @property
    def ratio(self) -> float | None:
        """After over before."""
        return self.after / self.before if self.before > 0 else None

    @property
    def finding(self) -> Finding:
        """What it amounts to."""
        if self.interval is None:
            return Finding.UNKNOWN
        if self.interval.low <= 1 <= self.interval.high:
            return Finding.NOISE
        return Finding.BETTER if (self.interval.low > 1) is self.metric.more_is_better else Finding.WORSE

    def worse_by(self, percent: float) -> bool:
        """Whether it is worse beyond noise, and by more than so much."""
        limit = percent / 100
        if self.finding is not Finding.WORSE or self.ratio is None:
            return False
        return self.ratio < 1 - limit if self.metric.more_is_better else self.ratio > 1 + limit


@dataclass(frozen=True)
class Metric:
    """A figure, the values it is made of, and which way is good."""

    name: str
    statistic: Statistic
    sample: Callable[[Part], Sample]
    written: Callable[[float | None], str] = duration
    more_is_better: bool = False
    tail: float = 1.0  # the share of values beyond it
    paired: bool = False  # its clusters are the same in both results


@dataclass(frozen=True)
class Comparison:
    """All that changed, and what was not the same to begin with."""

    changes: tuple[Change, ...]
    differences: tuple[tuple[str, str, str], ...]  # what, before, after
    warnings: tuple[str, ...]
    unmatched: tuple[str, ...]  # points that only one of the results has
    goodputs: tuple[str, str] | None = None  # of two sweeps
    confidence: float = 0.95

    def sections(self) -> list[Section]:
        """For whoever shows it."""
        notes = [f"Only one of the two has: {', '.join(self.unmatched)}."] if self.unmatched else []
        if self.goodputs:
            notes.append(
                "Goodput: {} before, {} after. A search ends at one rate; it has no interval.".format(*self.goodputs)
            )
        differing = Table("What was not the same", ("", "before", "after"), self.differences, prose=True)
        return [
            Section(
                "Differences", (differing,) if self.differences else (), warnings=self.warnings, notes=tuple(notes)
            ),
            Section("Changes", (self._table(),)),
        ]

    def _table(self) -> Table:
        header = ("", "metric", "before", "after", "change", f"{self.confidence * 100:g} % interval", "finding")
        return Table("What changed", header, tuple(_row(found) for found in self.changes))

    def worse_by(self, percent: float) -> list[Change]:
        """Those that are worse beyond noise, and by more than so many percent."""
        return [found for found in self.changes if found.worse_by(percent)]


def _row(found: Change) -> tuple[str, ...]:
    interval, ratio, written = found.interval, found.ratio, found.metric.written
    return (
        found.point,
        found.metric.name,
        written(found.before),
        written(found.after),
        NOTHING if ratio is None else change(ratio),
        f"{change(interval.low)} to {change(interval.high)}" if interval else NOTHING,
        found.finding.value,
    )


def compare(before: Results, after: Results, precision: Precision, *, force: bool = False) -> Comparison:
    """What changed from one to the other.

    Args:
        force: compare different workloads too, point by point where the points have the same label.

    Raises:
        ComparisonError: experiment or workload are not the same, or no point is.
    """
    _check_same_work(before, after, force)
    old, new = ({part.name: part for whole in points(r) for part in [whole, *by_group(whole)]} for r in (before, after))
    shared = [name for name in old if name in new]
    if not shared:
        raise ComparisonError(f"they share no point; the one has {_listed(old)}, the other {_listed(new)}")
    rng = np.random.default_rng(precision.seed)
    both_sweep = before.experiment is after.experiment is Experiment.SWEEP
    return Comparison(
        tuple(found for name in shared for found in _changes(old[name], new[name], precision, rng)),
        tuple(_differences(before, after)),
        tuple(f"{name}: {text}" for name, r in (("before", before), ("after", after)) for text in distrust(r)),
        tuple(name for name in [*old, *new] if name not in shared),
        (_goodput(before), _goodput(after)) if both_sweep else None,
        precision.confidence,
    )


def _listed(names: Iterable[str]) -> str:
    return "; ".join(names) or "none"


def _check_same_work(before: Results, after: Results, force: bool) -> None:
    if force:
        return
    if before.experiment is not after.experiment:  # then hardly an option is the same: a list would tell nothing
        raise ComparisonError(
            f"the one is of segue load {before.experiment}, the other of segue load {after.experiment}."
            " --force compares them all the same"
        )
    pairs = _unequal(before.metadata.workload, after.metadata.workload)
    differing = [f"{name}: {old} and {new}" for name, old, new in pairs]
    if differing:
        raise ComparisonError(
            f"the workloads are not the same: {'; '.join(differing)}. --force compares them all the same"
        )


def _unequal(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for name in {**before, **after}:
        old, new = before.get(name, NOTHING), after.get(name, NOTHING)
        if old != new:
            yield name, old, new


def _differences(before: Results, after: Results) -> Iterator[tuple[str, str, str]]:
    return _unequal(_circumstances(before), _circumstances(after))


def _circumstances(results: Results) -> dict[str, str]:
    metadata = results.metadata
    machine, target = metadata.machine, metadata.target
    return {
        "experiment": results.experiment.value,
        **{f"workload: {name}": value for name, value in metadata.workload.items()},
        "seed": str(metadata.seed),
        "target": target.kind.value,
        "address": target.address,
        "model": target.model,
        "server": target.server,
        **{f"version of {name}": value for name, value in metadata.versions.items()},
        "processor": machine.processor,
        "cores": str(machine.cores),
        "memory": f"{machine.memory_bytes / 2**30:.1f} GiB",
        "system": machine.system,
    }


def _goodput(results: Results) -> str:
    found = goodput(results).point
    return f"{digits(found.rate)} arrivals/s" if found else "none"


# --------------------------------------------------------------------------------------------------- the figures


def _changes(before: Part, after: Part, precision: Precision, rng: np.random.Generator) -> Iterator[Change]:
    for metric in METRICS:
        old, new = metric.sample(before), metric.sample(after)
        if len(old.values) and len(new.values):
            interval = _interval(metric, old, new, precision, rng)
            figures = old.figure(metric.statistic), new.figure(metric.statistic)
            yield Change(before.name, metric, *figures, interval)


def _interval(
    metric: Metric, before: Sample, after: Sample, precision: Precision, rng: np.random.Generator
) -> Interval | None:
    for sample in (before, after):
        if sample.clusters < FEWEST_CLUSTERS or len(sample.values) * metric.tail < FEWEST_BEYOND:
            return None
    return ratio_interval(
        before,
        after,
        metric.statistic,
        paired=metric.paired,
        draws=precision.draws,
        confidence=precision.confidence,
        rng=rng,
    )


def _clustered(part: Part, values_of: Callable[[Sequence[Request]], Sequence[float]]) -> Sample:
    """Values by session, whose turns are alike; by request where there are too few sessions."""
    sessions = {request.session for request in part.counted}
    by_session = len(sessions) >= FEWEST_CLUSTERS
    return Sample.of(
        (_cluster(request, index, by_session), value)
        for index, request in enumerate(part.counted)
        for value in values_of([request])
    )


def _cluster(request: Request, index: int, by_session: bool) -> Hashable:
    return request.session if by_session else index


def _ttft(part: Part) -> Sample:
    return _clustered(part, first_token_times)


def _gaps(part: Part) -> Sample:
    return _clustered(part, inter_token_times)


def _latency(part: Part) -> Sample:
    return _clustered(part, lambda requests: [r.latency for r in requests if r.outcome is Outcome.OK])


def _answered(part: Part) -> Sample:
    return _clustered(
        part, lambda requests: [float(r.outcome is Outcome.OK) for r in requests if r.outcome is not Outcome.CUT]
    )


def _requests_over_time(part: Part) -> Sample:
    return _over_time(part, [(r.end, 1.0) for r in part.requests if r.outcome is Outcome.OK])


def _tokens_over_time(part: Part) -> Sample:
    return _over_time(part, [(moment, token_counts(r)) for r in part.requests for moment in r.token_times])


def _over_time(part: Part, events: Sequence[tuple[float, float]]) -> Sample:
    """How much came a second, in each stretch of the point's window."""
    start, end = part.point.start, part.point.end
    moments, amounts = np.array(events, dtype=np.float64).reshape(-1, 2).T
    counted, edges = np.histogram(moments, WINDOWS, (start, max(end, start + 1e-9)), weights=amounts)
    return Sample.of(enumerate(counted / np.diff(edges)))


METRICS = (
    Metric("requests/s", mean, _requests_over_time, digits, more_is_better=True, paired=True),
    Metric("tokens/s", mean, _tokens_over_time, digits, more_is_better=True, paired=True),
    Metric("answered", mean, _answered, share, more_is_better=True),
    Metric("TTFT p50", quantile(0.5), _ttft, tail=0.5),
    Metric("TTFT p95", quantile(0.95), _ttft, tail=0.05),
    Metric("TTFT p99", quantile(0.99), _ttft, tail=0.01),
    Metric("inter-token p50", quantile(0.5), _gaps, tail=0.5),
    Metric("inter-token p99", quantile(0.99), _gaps, tail=0.01),
    Metric("end-to-end p50", quantile(0.5), _latency, tail=0.5),
    Metric("end-to-end p95", quantile(0.95), _latency, tail=0.05),
)
