"""What rate of arrivals is kept within the objectives."""

from __future__ import annotations

from collections.abc import Sequence

from segue_client.load.report.blocks import Axis, Chart, Limit, Section, Table, Unit
from segue_client.load.report.experiments.figures import GAP_P50, GAP_P99, TTFT_P50, TTFT_P99, Figure, curve, load_table
from segue_client.load.report.tables import Part, points
from segue_client.load.report.words import digits, duration, share
from segue_client.load.results import Check, Point, Results
from segue_client.load.summary import goodput


def sweep_section(results: Results) -> Section:
    of = sorted(points(results), key=lambda part: part.point.rate or 0.0)
    table = _objectives_table(of)
    load = load_table("Load", "arrivals/s", of, lambda point: digits(point.rate))
    return Section(
        "What rate is kept within the objectives",
        (table, load),
        (
            _against_rate("Time to first token", of, load, TTFT_P50, TTFT_P99, _limit(of, "ttft_p99")),
            _against_rate("Inter-token latency", of, load, GAP_P50, GAP_P99, _limit(of, "inter_token_p99")),
        ),
        statement=_answer(results),
    )


def _objectives_table(of: Sequence[Part]) -> Table:
    checks = [check for part in of if part.point.verdict for check in part.point.verdict.checks]
    limits = {check.objective: check.limit for check in checks}
    header = ("arrivals/s", *(f"{name} ≤ {_measure(name, limit)}" for name, limit in limits.items()), "held")
    return Table("Objectives", header, tuple(_objectives_row(part.point, list(limits)) for part in of))


def _objectives_row(point: Point, names: Sequence[str]) -> tuple[str, ...]:
    verdict = point.verdict
    checks = {check.objective: check for check in verdict.checks} if verdict else {}
    cells = (_check_cell(checks.get(name)) for name in names)
    return (digits(point.rate), *cells, "yes" if verdict and verdict.held else "NO")


def _check_cell(check: Check | None) -> str:
    if check is None:
        return duration(None)
    return _measure(check.objective, check.measured) + ("" if check.held else " (NO)")


def _measure(objective: str, value: float | None) -> str:
    return share(value) if objective == "failed" else duration(value)


def _limit(of: Sequence[Part], objective: str) -> tuple[Limit, ...]:
    checks = (check for part in of if part.point.verdict for check in part.point.verdict.checks)
    limits = {check.limit for check in checks if check.objective == objective}
    return tuple(Limit(f"objective {duration(limit)}", limit) for limit in sorted(limits))


def _against_rate(
    title: str, of: Sequence[Part], table: Table, middle: Figure, tail: Figure, limits: tuple[Limit, ...]
) -> Chart:
    return Chart(
        f"{title} against rate",
        Axis("arrivals/s"),
        Axis(title.lower(), Unit.SECONDS, log=True),
        (
            curve("p99", of, lambda point: point.rate, tail, hue=0),
            curve("p50", of, lambda point: point.rate, middle, hue=0, dashed=True),
        ),
        table,
        limits,
    )


def _answer(results: Results) -> str:
    found = goodput(results)
    if found.point is None:
        lowest = "" if found.failed_rate is None else f"; the lowest was {digits(found.failed_rate)} arrivals/s"
        return f"No rate that was tried kept the objectives{lowest}."
    if found.failed_rate is None:
        return (
            f"Goodput: at least {digits(found.point.rate)} arrivals/s; every rate that was tried kept the objectives."
        )
    kept, missed = digits(found.point.rate), digits(found.failed_rate)
    return f"Goodput: {kept} arrivals/s kept every objective; {missed} arrivals/s did not."
