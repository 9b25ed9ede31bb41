"""The whole report, in the order in which it is read."""

from __future__ import annotations

from segue_client.load.report import charts, tables
from segue_client.load.report.blocks import Section
from segue_client.load.report.experiments.concurrency import concurrency_section
from segue_client.load.report.experiments.context import context_section
from segue_client.load.report.experiments.mixed import mixed_section
from segue_client.load.report.experiments.sweep import sweep_section
from segue_client.load.results import Experiment, Results


def sections(results: Results) -> list[Section]:
    """What the results say, the answer of the experiment first."""
    own = _experiment(results)
    return [
        Section("Test", (tables.head(results),), warnings=tables.distrust(results), notes=results.notes),
        *([own] if own else []),
        _speed(results),
        _end(results),
        _course(results),
        Section("Can the tester be trusted?", (tables.tester(results),)),
    ]


def _experiment(results: Results) -> Section | None:
    """The experiment's own part; a plain run has none."""
    match results.experiment:
        case Experiment.CONTEXT:
            return context_section(tables.points(results))
        case Experiment.CONCURRENCY:
            return concurrency_section(tables.points(results))
        case Experiment.MIXED:
            return mixed_section(tables.points(results))
        case Experiment.SWEEP:
            return sweep_section(results)
        case Experiment.RUN:
            return None


def _speed(results: Results) -> Section:
    parts = tables.parts(results)
    drawn = charts.distribution_parts(tables.points(results))
    return Section(
        "Throughput and latency",
        (tables.throughput(parts), *tables.latencies(parts)),
        (charts.ttft_distribution(drawn), charts.gap_distribution(drawn)),
    )


def _end(results: Results) -> Section:
    parts = tables.parts(results)
    return Section("Outcomes and tokens", (tables.outcomes(parts), tables.reasons(results), tables.tokens(parts)))


def _course(results: Results) -> Section:
    return Section(
        "Over time",
        charts=(charts.timeline(results), charts.tokens_over_time(results), charts.in_flight(results)),
    )
