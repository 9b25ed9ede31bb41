"""What long prompts do to streams that run."""

from __future__ import annotations

from collections.abc import Sequence

from segue_client.load.report.blocks import Axis, Chart, Curve, Section, Span, Style, Table, Unit
from segue_client.load.report.charts import gaps_of, worst_by_window
from segue_client.load.report.experiments.figures import TTFT_P50, TTFT_P99
from segue_client.load.report.tables import Part
from segue_client.load.report.words import change, count, duration
from segue_client.load.summary import Summary, summarize_requests
from segue_client.load.workload import LONG, STREAM

DOTS_A_POINT = 2_000


def mixed_section(of: Sequence[Part]) -> Section:
    table = Table(
        "Streams, and long prompts among them",
        ("", "gaps", "gap p50", "p90", "p95", "p99", "max", "long prompts", "their TTFT p50", "their TTFT p99"),
        tuple(_mixed_row(part) for part in of),
    )
    return Section("What long prompts do to running streams", (table,), (_gaps(of, table),), statement=_answer(of))


def _answer(of: Sequence[Part]) -> str:
    """What the last point's long prompts did to streams that the first point had alone."""
    before, after = (_group(part, STREAM).inter_token for part in (of[0], of[-1])) if len(of) > 1 else (None, None)
    if before is None or after is None or before.p99 <= 0:
        return ""
    return (
        f"With long prompts among them, the p99 of the streams' inter-token latency is {duration(after.p99)} "
        f"instead of {duration(before.p99)} ({change(after.p99 / before.p99)})."
    )


def _group(part: Part, group: str) -> Summary:
    return summarize_requests(part.requests, part.point, group)


def _mixed_row(part: Part) -> tuple[str, ...]:
    gaps, long = _group(part, STREAM).inter_token, _group(part, LONG)
    spread = (gaps.p50, gaps.p90, gaps.p95, gaps.p99, gaps.maximum) if gaps else (None,) * 5
    return (
        part.name,
        count(gaps.count if gaps else 0),
        *map(duration, spread),
        count(long.requests),
        duration(TTFT_P50(long)),
        duration(TTFT_P99(long)),
    )


def _gaps(of: Sequence[Part], table: Table) -> Chart:
    """The gaps of the streams over time. Those without long prompts are laid over those with, both from their start."""
    curves, thinned = [], False
    for part in of:
        moments, gaps = gaps_of((r for r in part.counted if r.group == STREAM), part.point)
        kept = worst_by_window(moments, gaps, DOTS_A_POINT)
        thinned = thinned or len(kept[0]) < len(moments)
        curves.append(Curve(part.name, tuple(kept[0]), tuple(kept[1]), Style.DOTS))
    spans = tuple(
        Span(request.intended - part.point.start, (request.first_token or request.end) - part.point.start)
        for part in of
        for request in part.counted
        if request.group == LONG
    )
    return Chart(
        "Gaps of the running streams",
        Axis("seconds since the measurement began"),
        Axis("time between two pieces", Unit.SECONDS, log=True),
        tuple(curves),
        table,
        spans=spans,
        span_name="a long prompt waits for its first token",
        note="The longest gap of each stretch of time." if thinned else "",
    )
