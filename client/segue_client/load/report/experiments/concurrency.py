"""What more streams at once cost each of them."""

from __future__ import annotations

from collections.abc import Sequence

from segue_client.load.report.blocks import Axis, Chart, Section, Table, Unit
from segue_client.load.report.experiments.figures import (
    GAP_P50,
    GAP_P99,
    STREAM_P50,
    TTFT_P50,
    TTFT_P99,
    curve,
    load_table,
)
from segue_client.load.report.tables import Part
from segue_client.load.report.words import count
from segue_client.load.results import Point


def concurrency_section(of: Sequence[Part]) -> Section:
    table = load_table("By concurrency", "streams", of, lambda point: count(point.streams))
    return Section("What concurrency costs", (table,), _charts(of, table))


def _charts(of: Sequence[Part], table: Table) -> tuple[Chart, ...]:
    streams = Axis("streams", log=True, ticks_at_values=True)

    return (
        Chart(
            "Throughput against streams",
            streams,
            Axis("tokens/s"),
            (
                curve("all streams together", of, _streams, lambda summary: summary.token_rate),
                curve("one stream, p50", of, _streams, STREAM_P50),
            ),
            table,
        ),
        Chart(
            "Latency against streams",
            streams,
            Axis("latency", Unit.SECONDS, log=True),
            (
                curve("time to first token, p99", of, _streams, TTFT_P99, hue=0),
                curve("time to first token, p50", of, _streams, TTFT_P50, hue=0, dashed=True),
                curve("inter-token latency, p99", of, _streams, GAP_P99, hue=2),
                curve("inter-token latency, p50", of, _streams, GAP_P50, hue=2, dashed=True),
            ),
            table,
        ),
    )


def _streams(point: Point) -> float | None:
    return point.streams
