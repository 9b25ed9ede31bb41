"""Percentiles, rates and verdicts, computed from the records of a test."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from segue_client.load.results import Check, Experiment, Outcome, Point, Request, Results, Verdict

CENSORED = (Outcome.TIMEOUT, Outcome.CUT)  # they would have taken longer still


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all are not above (nearest rank): one that was really measured.

    Args:
        ordered: at least one value, ascending.
        share: 0..1.
    """
    return ordered[max(math.ceil(share * len(ordered) - 1e-9), 1) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How durations are spread, in seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    maximum: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self | None:
        """The spread of the values; None when there are none."""
        ordered = sorted(values)
        if not ordered:
            return None
        return cls(
            count=len(ordered),
            mean=math.fsum(ordered) / len(ordered),
            p50=percentile(ordered, 0.5),
            p90=percentile(ordered, 0.9),
            p95=percentile(ordered, 0.95),
            p99=percentile(ordered, 0.99),
            maximum=ordered[-1],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of one point, or of one group of its requests.

    Attributes:
        requests: that were meant to arrive in the window.
        outcomes: how many of them ended how.
        ttft: from the intended arrival to the first token. A request that was given up before it counts with the time
            it had waited: leaving it out would flatter the server.
        inter_token: from one piece to the next, over all gaps of all requests. The silence before a request was given
            up counts too.
        latency: from the intended arrival to the end, of those that ended well.
        stream_rate: tokens a second of each stream after its first token.
        request_rate: requests a second that ended well within the window.
        token_rate: generated tokens a second that came within the window, warm-up requests' included.
        tokens_per_piece: above 1 when the server sends several tokens at once; gaps are then between pieces.
        reused_share: of the context (history and prompt), how much was not computed in the turn; None where unknown.
    """

    requests: int
    outcomes: Mapping[Outcome, int]
    ttft: Spread | None
    inter_token: Spread | None
    latency: Spread | None
    stream_rate: Spread | None
    request_rate: float
    token_rate: float
    prompt_tokens: int
    generated_tokens: int
    tokens_per_piece: float | None
    reused_share: float | None

    @property
    def failed_share(self) -> float:
        """Requests that did not end well, CUT ones apart: those the test itself has ended."""
        bad = self.requests - self.outcomes.get(Outcome.OK, 0) - self.outcomes.get(Outcome.CUT, 0)
        return bad / self.requests if self.requests else 0.0


def summarize(results: Results, point: Point, group: str | None = None) -> Summary:
    """The figures of a point; of one group of its requests, if given."""
    return summarize_requests(results.requests_of(point), point, group)


def summarize_requests(requests: Sequence[Request], point: Point, group: str | None = None) -> Summary:
    """The same, of a point's requests."""
    everything = [request for request in requests if group in (None, request.group)]
    counted = [request for request in everything if not request.warm_up]
    well = [request for request in counted if request.outcome is Outcome.OK]
    window = max(point.end - point.start, 1e-9)
    return Summary(
        requests=len(counted),
        outcomes=Counter(request.outcome for request in counted),
        ttft=Spread.of(first_token_times(counted)),
        inter_token=Spread.of(inter_token_times(counted)),
        latency=Spread.of(request.latency for request in well),
        stream_rate=Spread.of(_stream_rates(counted)),
        request_rate=sum(point.start <= r.end <= point.end for r in everything if r.outcome is Outcome.OK) / window,
        token_rate=sum(_tokens_within(request, point) for request in everything) / window,
        prompt_tokens=sum(request.prompt_tokens or 0 for request in counted),
        generated_tokens=sum(request.generated_tokens or 0 for request in counted),
        tokens_per_piece=_tokens_per_piece(counted),
        reused_share=_reused_share(counted),
    )


def first_token_times(requests: Iterable[Request]) -> list[float]:
    """Times to first token; see `Summary.ttft`."""
    times = []
    for request in requests:
        if request.time_to_first_token is not None:
            times.append(request.time_to_first_token)
        elif request.outcome in CENSORED:
            times.append(request.latency)
    return times


def inter_token_times(requests: Iterable[Request]) -> list[float]:
    """Gaps between pieces; see `Summary.inter_token`."""
    gaps: list[float] = []
    for request in requests:
        gaps.extend(request.gaps)
        if request.token_times and request.outcome in CENSORED:
            gaps.append(request.end - request.token_times[-1])
    return gaps


def token_counts(request: Request) -> float:
    """Tokens in each piece of a request, on average; 1 where the target does not count them."""
    pieces = len(request.token_times)
    return request.generated_tokens / pieces if pieces and request.generated_tokens else 1.0


def _tokens_within(request: Request, point: Point) -> float:
    times = request.token_times
    return (bisect_right(times, point.end) - bisect_left(times, point.start)) * token_counts(request)


def _stream_rates(requests: Iterable[Request]) -> Iterable[float]:
    for request in requests:
        times = request.token_times
        if len(times) > 1 and times[-1] > times[0]:
            yield (len(times) - 1) * token_counts(request) / (times[-1] - times[0])


def _tokens_per_piece(requests: Iterable[Request]) -> float | None:
    told = [r for r in requests if r.generated_tokens and r.token_times and r.outcome is Outcome.OK]
    pieces = sum(len(request.token_times) for request in told)
    return sum(request.generated_tokens or 0 for request in told) / pieces if pieces else None


def _reused_share(requests: Iterable[Request]) -> float | None:
    told = [r for r in requests if r.reused_tokens is not None and r.computed_tokens is not None]
    reused = sum((r.reused_tokens or 0) + (r.restored_tokens or 0) for r in told)
    context = reused + sum(r.computed_tokens or 0 for r in told)
    return reused / context if context else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """What a server has to keep: seconds, and the share of requests that may fail."""

    ttft_p99: float
    inter_token_p99: float
    failed: float = 0.0


def judge(summary: Summary, objectives: Objectives) -> Verdict:
    """Whether the figures keep within the objectives. Where nothing was measured, nothing is kept."""
    checks = (
        _check("ttft_p99", objectives.ttft_p99, _p99(summary.ttft)),
        _check("inter_token_p99", objectives.inter_token_p99, _p99(summary.inter_token)),
        _check("failed", objectives.failed, summary.failed_share if summary.requests else None),
    )
    return Verdict(held=all(check.held for check in checks), checks=checks)


def _p99(spread: Spread | None) -> float | None:
    return spread.p99 if spread else None


def _check(objective: str, limit: float, measured: float | None) -> Check:
    held = measured is not None and measured <= limit
    return Check(objective=objective, limit=limit, measured=measured, held=held)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """What a sweep found.

    Attributes:
        point: the highest rate that kept the objectives; None when no rate did.
        failed_rate: the lowest rate that did not; None when all did.
    """

    point: Point | None
    failed_rate: float | None


def goodput(results: Results) -> Goodput:
    """The outcome of a sweep.

    Raises:
        ValueError: the results are of another experiment.
    """
    if results.experiment is not Experiment.SWEEP:
        raise ValueError(f"the results are of segue load {results.experiment}, not of sweep")
    failed = [p.rate for p in results.points if p.verdict and not p.verdict.held and p.rate is not None]
    lowest = min(failed, default=None)
    held = [p for p in results.points if p.verdict and p.verdict.held and (lowest is None or (p.rate or 0) < lowest)]
    return Goodput(point=max(held, key=lambda p: p.rate or 0.0, default=None), failed_rate=lowest)
