"""The charts that every report has: how latencies are spread, and what happened when."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from segue_client.load.report.blocks import Axis, Chart, Curve, Span, Style, Table, Unit
from segue_client.load.report.tables import Part, by_context, by_group
from segue_client.load.report.words import count, digits, duration
from segue_client.load.results import ContextKind, Outcome, Point, Request, Results
from segue_client.load.summary import first_token_times, inter_token_times, percentile, token_counts

STEPS_OF_ECDF = 1_000
ECDF_CURVES = 24  # more cannot be told apart
TIMELINE_REQUESTS = 2_000
TABLE_ROWS = 100
WINDOWS = 120  # of the throughput over time
SHARES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
HUES = {kind: hue for hue, kind in enumerate(ContextKind)}
TIME = Axis("seconds since the start")


def ttft_distribution(of: Sequence[Part]) -> Chart:
    """Share of requests whose first token had come, against the time."""
    return _distribution("Time to first token", "time to first token", of, first_token_times)


def gap_distribution(of: Sequence[Part]) -> Chart:
    """Share of the gaps between tokens that were no longer, against their length."""
    return _distribution("Inter-token latency", "time between two pieces", of, inter_token_times)


def _distribution(
    title: str, x_title: str, of: Sequence[Part], values_of: Callable[[Iterable[Request]], list[float]]
) -> Chart:
    told = [(part, sorted(values_of(part.counted))) for part in of]
    told = [(part, ordered) for part, ordered in told if ordered]
    return Chart(
        title,
        Axis(x_title, Unit.SECONDS, log=True),
        Axis("share", Unit.SHARE),
        tuple(_ecdf(part, ordered) for part, ordered in told),
        Table(
            f"{title}, by share",
            ("", *(f"{round(share * 100)} %" for share in SHARES)),
            tuple((part.name, *(duration(percentile(ordered, s)) for s in SHARES)) for part, ordered in told),
            note="So many percent took no longer.",
        ),
    )


def _ecdf(part: Part, ordered: Sequence[float]) -> Curve:
    """Every value if they are few, else evenly chosen ones; the smallest and the largest always."""
    steps = min(len(ordered), STEPS_OF_ECDF)
    ranks = [-(-len(ordered) * step // steps) for step in range(1, steps + 1)]
    values = [ordered[0], *(ordered[rank - 1] for rank in ranks)]
    shares = [0.0, *(rank / len(ordered) for rank in ranks)]
    kind = part.context or part.point.context
    hue = None if kind is None else HUES[kind]
    return Curve(part.name, tuple(values), tuple(shares), Style.STEP, hue=hue)


def distribution_parts(of: Sequence[Part]) -> list[Part]:
    """What gets a curve of its own: kinds of context within a single point, else the points."""
    if len(of) == 1:
        return list(by_context(of[0])) or list(of)
    groups = [group for part in of for group in (list(by_group(part)) or [part])]
    return groups[:ECDF_CURVES]


# ------------------------------------------------------------------------------------------------- over time


def timeline(results: Results) -> Chart:
    """Each request as a bar: waiting for its first token, then streaming."""
    shown = sorted(results.requests, key=lambda request: request.intended)[:TIMELINE_REQUESTS]
    left_out = len(results.requests) - len(shown)
    bad = [request for request in shown if request.outcome is not Outcome.OK]
    curves = (
        _bars("waiting for the first token", shown, hue=2, ends=lambda r: (r.intended, r.first_token or r.end)),
        _bars("streaming", shown, hue=0, ends=lambda r: (r.first_token, r.token_times[-1] if r.token_times else None)),
        Curve(
            "did not end well",
            tuple(request.end for request in bad),
            tuple(float(request.user) for request in bad),
            Style.CROSSES,
            hue=3,
            hover=tuple(f"{request.outcome.value}: {request.error}" for request in bad),
        ),
    )
    return Chart(
        "Requests",
        TIME,
        Axis("virtual user, or arrival", from_zero=False),
        tuple(curve for curve in curves if curve.x),
        _timeline_table(shown),
        spans=_unmeasured(results),
        span_name="not measured",
        note=f"The first {count(len(shown))}; {count(left_out)} later ones are left out." if left_out else "",
    )


def _bars(
    name: str, requests: Iterable[Request], hue: int, ends: Callable[[Request], tuple[float | None, float | None]]
) -> Curve:
    x: list[float | None] = []
    y: list[float | None] = []
    for request in requests:
        begin, end = ends(request)
        if begin is not None and end is not None:
            x += (begin, end, None)
            y += (request.user, request.user, None)
    return Curve(name, tuple(x), tuple(y), Style.SEGMENTS, hue=hue)


def _timeline_table(requests: Sequence[Request]) -> Table:
    header = ("user, turn", "due at", "context", "first token after", "ended after", "pieces", "outcome")
    rows = tuple(
        (
            f"{request.user}, {request.turn}",
            f"{request.intended:.3f} s",
            request.context.value + (", warm-up" if request.warm_up else ""),
            duration(request.time_to_first_token),
            duration(request.latency),
            count(len(request.token_times)),
            request.outcome.value,
        )
        for request in requests[:TABLE_ROWS]
    )
    left = len(requests) - len(rows)
    return Table("Requests", header, rows, note=f"The first {TABLE_ROWS}." if left else "")


def tokens_over_time(results: Results) -> Chart:
    """Generated tokens a second, by window."""
    end = max((request.end for request in results.requests), default=0.0)
    width = max(end / WINDOWS, 1e-3)
    counted = [0.0] * WINDOWS
    for request in results.requests:
        weight = token_counts(request)
        for moment in request.token_times:
            counted[min(int(moment / width), WINDOWS - 1)] += weight
    edges = [index * width for index in range(WINDOWS + 1)]
    rates = [tokens / width for tokens in counted]
    return Chart(
        "Tokens out",
        TIME,
        Axis("tokens/s"),
        (Curve("generated tokens/s", tuple(edges), (*rates, rates[-1]), Style.STEP),),
        _moments_table("Tokens out", ("from", "tokens/s"), edges[:-1], [digits(rate) for rate in rates]),
        spans=_unmeasured(results),
        span_name="not measured",
        note=f"In windows of {duration(width)}.",
    )


def in_flight(results: Results) -> Chart:
    """How many requests were due and had not ended."""
    changes = sorted([(r.intended, 1) for r in results.requests] + [(r.end, -1) for r in results.requests])
    moments, levels = [0.0], [0]
    for moment, step in changes:
        moments.append(moment)
        levels.append(levels[-1] + step)
    every = -(-len(moments) // TABLE_ROWS)
    return Chart(
        "Requests in flight",
        TIME,
        Axis("requests"),
        (Curve("in flight", tuple(moments), tuple(map(float, levels)), Style.STEP, hue=1),),
        _moments_table("Requests in flight", ("at", "requests"), moments[::every], list(map(count, levels[::every]))),
        spans=_unmeasured(results),
        span_name="not measured",
    )


def _moments_table(title: str, header: tuple[str, str], moments: Sequence[float], values: Sequence[str]) -> Table:
    rows = zip((f"{moment:.2f} s" for moment in moments), values, strict=True)
    return Table(title, header, tuple(rows))


def _unmeasured(results: Results) -> tuple[Span, ...]:
    """What lies between the windows that count: the warm-up, and what was still running."""
    edges = [0.0, *(edge for point in results.points for edge in (point.start, point.end))]
    edges.append(max((request.end for request in results.requests), default=0.0))
    return tuple(Span(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if end > begin)


# ------------------------------------------------------------------------- gaps of streams, long prompts among them


def worst_by_window(moments: Sequence[float], values: Sequence[float], most: int) -> tuple[list[float], list[float]]:
    """At most `most` of the points: where there are more, the largest of each stretch of time, which is what hurts.

    Args:
        moments: ascending.
        values: one for each moment.
        most: 1 or more.
    """
    if len(moments) <= most:
        return list(moments), list(values)
    width = (moments[-1] - moments[0]) / most
    edges = [bisect_left(moments, moments[0] + index * width) for index in range(most)] + [len(moments)]
    kept = [max(range(begin, end), key=values.__getitem__) for begin, end in pairwise(edges) if end > begin]
    return [moments[index] for index in kept], [values[index] for index in kept]


def gaps_of(requests: Iterable[Request], point: Point) -> tuple[list[float], list[float]]:
    """When each gap between two pieces ended, in seconds since the point began, and how long it was; by time."""
    told = sorted(
        (later - point.start, gap)
        for request in requests
        for later, gap in zip(request.token_times[1:], request.gaps, strict=True)
    )
    return [moment for moment, _ in told], [gap for _, gap in told]
