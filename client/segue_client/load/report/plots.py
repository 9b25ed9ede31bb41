"""Charts as figures of plotly. Colours of text and grid belong to the page, which knows whether it is dark."""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import plotly.graph_objects as go

from segue_client.load.report.blocks import Axis, Chart, Curve, Span, Style, Unit
from segue_client.load.report.words import round_duration

# Of middle lightness, so that each stands out from white and from near black.
HUES = ("#3b82c4", "#2e9e6b", "#d9730d", "#d6455d", "#a463b0", "#8a7a1f")
DASHES = ("solid", "dash", "dot", "dashdot")  # tell curves apart where colours come again
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross")
SHADE = "rgba(128, 128, 128, 0.18)"
LIMIT = "#d6455d"
SPANS_DRAWN = 500
STEPS = ((0.6, (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)), (1.2, (1.0, 2.0, 3.0, 5.0)), (3.0, (1.0, 2.0, 5.0)))


def figure(chart: Chart) -> go.Figure:
    """The chart, every point of it."""
    plot = go.Figure([*_traces(chart), *_limits(chart)])
    plot.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        modebar={"bgcolor": "rgba(0,0,0,0)", "orientation": "v"},
        margin={"l": 80, "r": 40, "t": 12, "b": 56},
        height=420,
        hovermode="closest",
        showlegend=True,
        legend=_legend(chart),
        xaxis=_axis(chart.x, (x for curve in chart.curves for x in _places(chart, curve)), _zero(chart)),
        yaxis=_axis(chart.y, (*(y for curve in chart.curves for y in curve.y), *(limit.y for limit in chart.limits))),
    )
    _shade(plot, chart)
    return plot


def _places(chart: Chart, curve: Curve) -> tuple[float | None, ...]:
    """Where on the x axis: a chosen 0 on a logarithmic one half as far as the smallest place that it has."""
    if not (chart.x.log and chart.x.ticks_at_values):
        return curve.x
    return tuple(_zero(chart) if x == 0 else x for x in curve.x)


def _zero(chart: Chart) -> float:
    return min((x for curve in chart.curves for x in curve.x if x), default=1.0) / 2


def _legend(chart: Chart) -> dict[str, object]:
    dots = any(curve.style is Style.DOTS for curve in chart.curves)
    above = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "xanchor": "left"}
    return above | {"itemwidth": 44, "itemsizing": "constant" if dots else "trace"}


def _traces(chart: Chart) -> Iterator[go.Scatter]:
    used: Counter[int] = Counter()
    for index, curve in enumerate(chart.curves):
        hue = (index if curve.hue is None else curve.hue) % len(HUES)
        yield _trace(curve, chart, HUES[hue], 1 if curve.dashed else used[hue])
        used[hue] += 1


def _trace(curve: Curve, chart: Chart, colour: str, occurrence: int) -> go.Scatter:
    """A curve in a colour; where others had that colour before, its dashes and its symbol tell it apart."""
    trace = go.Scatter(
        x=_places(chart, curve),
        y=curve.y,
        name=_escaped(curve.name),
        hovertext=[_escaped(line) for line in curve.hover] or None,
        hovertemplate=_hover(chart, bool(curve.hover)),
        line={"color": colour, "dash": DASHES[occurrence % len(DASHES)]},
        marker={"color": colour, "symbol": SYMBOLS[occurrence % len(SYMBOLS)], "size": 7},
    )
    return trace.update(_look(curve.style))


def _look(style: Style) -> dict[str, object]:
    match style:
        case Style.LINE:
            return {"mode": "lines+markers"}
        case Style.STEP:
            return {"mode": "lines", "line": {"shape": "hv"}}
        case Style.DOTS:
            return {"mode": "markers", "marker": {"size": 4, "opacity": 0.6}}
        case Style.SEGMENTS:
            return {"mode": "lines", "line": {"width": 4}}
        case Style.CROSSES:
            return {"mode": "markers", "marker": {"symbol": "x", "size": 8}}


def _hover(chart: Chart, with_text: bool) -> str:
    """A line for the place, which the curve may name itself, and one for the height."""
    place = "%{hovertext}" if with_text else _value("x", chart.x)
    return f"{place}<br>{_value('y', chart.y)}"


def _value(name: str, axis: Axis) -> str:
    formats = {Unit.PLAIN: ":,.4~g", Unit.SECONDS: ":.3~s", Unit.SHARE: ":.1%"}
    suffix = "s" if axis.unit is Unit.SECONDS else ""
    return f"{axis.title} %{{{name}{formats[axis.unit]}}}{suffix}"


def _axis(axis: Axis, values: Iterable[float | None], zero: float | None = None) -> dict[str, object]:
    look: dict[str, object] = {
        "title": {"text": axis.title, "standoff": 8},
        "automargin": True,
        "zeroline": False,
        "ticks": "outside",
        "showline": True,
        "tickmode": "auto",
        "rangemode": "tozero" if axis.from_zero else "normal",
    }
    match axis.unit:
        case Unit.SECONDS:
            look |= {"tickformat": "~s", "ticksuffix": "s"}
        case Unit.SHARE:
            look |= {"tickformat": ".0%", "range": [0, 1.02]}
        case Unit.PLAIN:
            look |= {"tickformat": ",~g"}
    return look | (_log_axis(axis, [value for value in values if value], zero) if axis.log else {})


def _log_axis(axis: Axis, values: Sequence[float], zero: float | None) -> dict[str, object]:
    """Ticks at round numbers of each decade, the more the fewer decades there are, all written out in full."""
    if not values:
        return {"type": "log"}
    low, high = math.log10(min(values)), math.log10(max(values))
    margin = max((high - low) * 0.05, 0.05)
    low, high = low - margin, high + margin
    ticks = sorted(set(values)) if axis.ticks_at_values else _round_numbers(low, high)
    text = [
        round_duration(tick) if axis.unit is Unit.SECONDS else f"{0 if tick == zero else tick:,g}" for tick in ticks
    ]
    return {"type": "log", "range": [low, high], "tickmode": "array", "tickvals": ticks, "ticktext": text}


def _round_numbers(low: float, high: float) -> list[float]:
    """Numbers whose decadic logarithm lies between."""
    steps = next((steps for most, steps in STEPS if high - low < most), (1.0,))
    decades = range(math.floor(low), math.ceil(high))
    return [step * 10.0**ten for ten in decades for step in steps if low <= math.log10(step) + ten <= high]


def _shade(plot: go.Figure, chart: Chart) -> None:
    """All spans in one trace, so that the legend names them once and can hide them."""
    if not chart.spans:
        return
    x = [edge for span in chart.spans[:SPANS_DRAWN] for edge in _outline(span)]
    y = [level for _ in chart.spans[:SPANS_DRAWN] for level in (0, 1, 1, 0, None)]
    plot.add_trace(
        go.Scatter(
            x=x,
            y=y,
            yaxis="y2",
            name=_escaped(chart.span_name),
            mode="lines",
            line={"width": 0},
            fill="toself",
            fillcolor=SHADE,
            hoverinfo="skip",
        )
    )
    # An axis of their own, from 0 to 1 over the whole height, under the curves.
    plot.update_layout(
        yaxis={"overlaying": "y2"},
        yaxis2={"range": [0, 1], "fixedrange": True, "visible": False},
    )


def _outline(span: Span) -> tuple[float | None, ...]:
    return (span.start, span.start, span.end, span.end, None)


def _limits(chart: Chart) -> Iterator[go.Scatter]:
    """A line each, as long as the curves are, so that the legend names it."""
    x = [x for curve in chart.curves for x in curve.x if x is not None]
    for limit in chart.limits if x else ():
        yield go.Scatter(
            x=[min(x), max(x)],
            y=[limit.y, limit.y],
            name=_escaped(limit.name),
            mode="lines",
            line={"color": LIMIT, "dash": "dot", "width": 2},
            hoverinfo="skip",
        )


def _escaped(text: str) -> str:
    """Plotly reads tags in what it writes; names from outside must not become any."""
    return html.escape(text, quote=False)
