"""The tables that every report has: what was tested, how fast, how it ended, and whether to believe it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from segue_client.load.report.blocks import Row, Table
from segue_client.load.report.words import count, digits, duration, share
from segue_client.load.results import ContextKind, Experiment, Outcome, Point, Request, Results
from segue_client.load.summary import Spread, Summary, summarize_requests

ALL = "all"
ERRORS_SHOWN = 10
SPREAD_HEADER = ("count", "p50", "p90", "p95", "p99", "max")


@dataclass(frozen=True)
class Part:
    """Requests that are told apart in every table: those of a point, of a group in it, of one kind of context."""

    name: str
    point: Point
    requests: Sequence[Request]  # those of the warm-up too
    context: ContextKind | None = None  # the only one, if that is what tells the part apart

    @cached_property
    def summary(self) -> Summary:
        """Their figures."""
        return summarize_requests(self.requests, self.point)

    def inner(self, name: str, requests: Sequence[Request], context: ContextKind | None = None) -> Part:
        """Some of them."""
        return Part(name if self.name == ALL else f"{self.name}: {name}", self.point, requests, context)

    @property
    def counted(self) -> list[Request]:
        """Those that count."""
        return [request for request in self.requests if not request.warm_up]


def parts(results: Results) -> list[Part]:
    """Each point, below it its groups and kinds of context where it has more than one."""
    return [part for whole in points(results) for part in _parts_of(whole)]


def points(results: Results) -> list[Part]:
    """Each point as a whole."""
    ordered = sorted(results.points, key=lambda point: point.rate or 0.0)  # a sweep jumps
    single = results.experiment is Experiment.RUN
    return [Part(ALL if single else point.label, point, results.requests_of(point)) for point in ordered]


def _parts_of(whole: Part) -> Iterator[Part]:
    yield whole
    yield from by_group(whole)
    yield from by_context(whole)


def by_group(part: Part) -> Iterator[Part]:
    """A part's groups; nothing where it has but one."""
    groups = sorted({request.group for request in part.counted})
    if len(groups) > 1:
        for group in groups:
            requests = [request for request in part.requests if request.group == group]
            yield part.inner(group, requests)


def by_context(part: Part) -> Iterator[Part]:
    """A part's kinds of context; nothing where it has but one."""
    present = [kind for kind in ContextKind if any(request.context is kind for request in part.counted)]
    if len(present) > 1:
        for kind in present:
            requests = [request for request in part.requests if request.context is kind]
            yield part.inner(kind.value, requests, kind)


def head(results: Results) -> Table:
    """What was tested, with what, where."""
    metadata = results.metadata
    target, machine = metadata.target, metadata.machine
    rows = {
        "experiment": results.experiment.value,
        "target": f"{target.kind.value} at {target.address}",
        "model": target.model,
        "server": target.server,
        "context limit": f"{count(target.context_limit)} tokens" if target.context_limit else "",
        "started": metadata.started,
        "seed": str(metadata.seed),
        **{f"workload: {name}": value for name, value in metadata.workload.items()},
        **{f"version of {name}": value for name, value in metadata.versions.items()},
        "machine of the tester": f"{machine.processor}, {machine.cores} cores, {machine.memory_bytes / 2**30:.1f} GiB, "
        f"{machine.system}",
        "command": " ".join(metadata.command),
    }
    return Table(
        "Test", ("", ""), tuple((name, value) for name, value in rows.items() if value), prose=True, folded=True
    )


def throughput(of: Iterable[Part]) -> Table:
    """Requests and tokens a second, into the server and out of it."""
    header = ("", "requests", "requests/s", "tokens in/s", "tokens out/s", "tokens/s a stream, p50", "tokens a piece")
    return Table("Throughput", header, tuple(_throughput_row(part) for part in of))


def _throughput_row(part: Part) -> Row:
    summary = part.summary
    seconds = part.point.end - part.point.start
    stream = summary.stream_rate
    return (
        part.name,
        count(summary.requests),
        digits(summary.request_rate),
        digits(summary.prompt_tokens / seconds if seconds > 0 else None),
        digits(summary.token_rate),
        digits(stream.p50 if stream else None),
        digits(summary.tokens_per_piece),
    )


def latencies(of: Sequence[Part]) -> tuple[Table, Table, Table]:
    """How the three durations of a request are spread."""
    return (
        Table("Time to first token", ("", *SPREAD_HEADER), tuple(_spread_row(p.name, p.summary.ttft) for p in of)),
        Table(
            "Inter-token latency", ("", *SPREAD_HEADER), tuple(_spread_row(p.name, p.summary.inter_token) for p in of)
        ),
        Table(
            "End-to-end latency",
            ("", *SPREAD_HEADER),
            tuple(_spread_row(p.name, p.summary.latency) for p in of),
            note="Requests that ended well.",
        ),
    )


def _spread_row(name: str, spread: Spread | None) -> Row:
    if spread is None:
        return (name, "0", *(duration(None) for _ in SPREAD_HEADER[1:]))
    values = (spread.p50, spread.p90, spread.p95, spread.p99, spread.maximum)
    return (name, count(spread.count), *map(duration, values))


def outcomes(of: Iterable[Part]) -> Table:
    """How the requests ended."""
    rows = (
        (
            part.name,
            count(part.summary.requests),
            *(count(part.summary.outcomes.get(outcome, 0)) for outcome in Outcome),
            share(part.summary.failed_share),
        )
        for part in of
    )
    return Table("Outcomes", ("", "requests", *(outcome.value for outcome in Outcome), "failed share"), tuple(rows))


def reasons(results: Results) -> Table:
    """Why requests ended, in the target's words; the commonest first."""
    told = Counter((r.outcome.value, r.error or r.finish_reason) for r in results.requests if not r.warm_up)
    rows = tuple((outcome, text, count(times)) for (outcome, text), times in told.most_common(ERRORS_SHOWN))
    left = len(told) - len(rows)
    return Table("Reasons", ("outcome", "reason", "requests"), rows, f"{left} more kinds" if left else "", prose=True)


def tokens(of: Iterable[Part]) -> Table:
    """Where the tokens of the context came from: computed, or still known."""
    header = ("", "requests", "history", "prompt", "computed", "reused", "restored", "not computed", "generated")
    return Table("Tokens", header, tuple(_tokens_row(part) for part in of))


def _tokens_row(part: Part) -> Row:
    counted, summary = part.counted, part.summary
    return (
        part.name,
        count(summary.requests),
        _total(request.history_tokens for request in counted),
        _total(request.prompt_tokens for request in counted),
        _total(request.computed_tokens for request in counted),
        _total(request.reused_tokens for request in counted),
        _total(request.restored_tokens for request in counted),
        share(summary.reused_share),
        _total(request.generated_tokens for request in counted),
    )


def _total(values: Iterable[int | None]) -> str:
    known = [value for value in values if value is not None]
    return count(sum(known) if known else None)


def tester(results: Results) -> Table:
    """What the tester itself needed; its delays are part of every latency."""
    header = ("", "CPU of a core", "loop lag p99", "loop lag max", "send lag p99", "send lag max", "the bottleneck?")
    rows = (
        (
            point.label,
            share(point.tester.cpu_share),
            duration(point.tester.loop_lag_p99),
            duration(point.tester.loop_lag_max),
            duration(point.tester.send_lag_p99),
            duration(point.tester.send_lag_max),
            "YES" if point.tester.bottleneck else "no",
        )
        for point in results.points
    )
    return Table("The tester itself", header, tuple(rows))


def distrust(results: Results) -> tuple[str, ...]:
    """A warning for each point that was bounded by the tester."""
    return tuple(
        f"{point.label}: the load tester was the bottleneck ({point.tester.bottleneck}). "
        "These figures say what the tester can do, not what the server can."
        for point in results.points
        if point.tester.bottleneck
    )
