"""Single figures of a summary, and what several experiments show of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from segue_client.load.report.blocks import Curve, Style, Table
from segue_client.load.report.tables import Part
from segue_client.load.report.words import digits, duration, share
from segue_client.load.results import Point
from segue_client.load.summary import Spread, Summary

Figure = Callable[[Summary], float | None]


def _of(spread: Callable[[Summary], Spread | None], figure: Callable[[Spread], float]) -> Figure:
    def read(summary: Summary) -> float | None:
        found = spread(summary)
        return None if found is None else figure(found)

    return read


TTFT_P50 = _of(lambda s: s.ttft, lambda spread: spread.p50)
TTFT_P99 = _of(lambda s: s.ttft, lambda spread: spread.p99)
GAP_P50 = _of(lambda s: s.inter_token, lambda spread: spread.p50)
GAP_P99 = _of(lambda s: s.inter_token, lambda spread: spread.p99)
STREAM_P50 = _of(lambda s: s.stream_rate, lambda spread: spread.p50)


def curve(
    name: str,
    of: Sequence[Part],
    x: Callable[[Point], float | None],
    figure: Figure,
    hue: int | None = None,
    dashed: bool = False,
) -> Curve:
    told = [(place, part) for part in of if (place := x(part.point)) is not None]
    told.sort(key=lambda pair: pair[0])
    return Curve(
        name,
        tuple(float(place) for place, _ in told),
        tuple(figure(part.summary) for _, part in told),
        Style.LINE,
        hue,
        dashed,
        tuple(part.name for _, part in told),
    )


def load_table(title: str, first: str, of: Sequence[Part], name: Callable[[Point], str]) -> Table:
    header = (
        first,
        "requests/s",
        "tokens/s",
        "tokens/s a stream",
        "TTFT p50",
        "TTFT p99",
        "gap p50",
        "gap p99",
        "failed",
    )
    return Table(title, header, tuple((name(part.point), *_load_cells(part.summary)) for part in of))


def _load_cells(summary: Summary) -> tuple[str, ...]:
    return (
        digits(summary.request_rate),
        digits(summary.token_rate),
        digits(STREAM_P50(summary)),
        *(duration(figure(summary)) for figure in (TTFT_P50, TTFT_P99, GAP_P50, GAP_P99)),
        share(summary.failed_share),
    )
