"""What a history costs the next turn, by where its KV is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from segue_client.load.report.blocks import Axis, Chart, Section, Table, Unit
from segue_client.load.report.charts import HUES
from segue_client.load.report.experiments.figures import GAP_P50, GAP_P99, TTFT_P50, TTFT_P99, Figure, curve
from segue_client.load.report.tables import Part
from segue_client.load.report.words import count, duration
from segue_client.load.results import ContextKind


def context_section(of: Sequence[Part]) -> Section:
    modes = [kind for kind in ContextKind if any(part.point.context is kind for part in of)]
    ttft = _by_history("Time to first token", of, modes, (("p50", TTFT_P50), ("p99", TTFT_P99)))
    gaps = _by_history("Inter-token latency", of, modes, (("p50", GAP_P50), ("p99", GAP_P99)))
    return Section(
        "What history costs",
        (ttft, gaps),
        (
            _against_history("Time to first token", ttft, of, modes, TTFT_P50, log=True),
            _against_history("Inter-token latency", gaps, of, modes, GAP_P50, log=False),
        ),
        warnings=tuple(warning for part in of for warning in _not_as_asked(part)),
    )


def _not_as_asked(part: Part) -> Iterator[str]:
    """Says where the server counted its KV elsewhere than the point was to have it."""
    found = Counter(request.context for request in part.counted)
    del found[ContextKind.UNKNOWN]
    if set(found) - {part.point.context}:
        kinds = ", ".join(f"{times} {kind.value}" for kind, times in found.items())
        yield f"{part.name}: by the server's count its turns were: {kinds}. This is not what was to be measured."


def _by_history(
    title: str, of: Sequence[Part], modes: Sequence[ContextKind], figures: Sequence[tuple[str, Figure]]
) -> Table:
    def cell(history: int | None, mode: ContextKind, figure: Figure) -> str:
        found = (p for p in of if p.point.history_tokens == history and p.point.context is mode)
        part = next(found, None)
        return duration(figure(part.summary) if part else None)

    histories = sorted({part.point.history_tokens or 0 for part in of})
    rows = (
        (count(history), *(cell(history, mode, figure) for mode in modes for _, figure in figures))
        for history in histories
    )
    header = ("history tokens", *(f"{mode.value} {name}" for mode in modes for name, _ in figures))
    return Table(f"{title} by history", header, tuple(rows))


def _against_history(
    title: str, table: Table, of: Sequence[Part], modes: Sequence[ContextKind], figure: Figure, *, log: bool
) -> Chart:
    return Chart(
        f"{title} against history",
        Axis("tokens of history", log=True, ticks_at_values=True),
        Axis(f"{title.lower()}, p50", Unit.SECONDS, log=log),
        tuple(
            curve(
                mode.value,
                [p for p in of if p.point.context is mode],
                lambda point: point.history_tokens,
                figure,
                HUES[mode],
            )
            for mode in modes
        ),
        table,
    )
