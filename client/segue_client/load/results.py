"""What a load test leaves behind: every request as it was seen, and nothing that can be computed from that.

Moments are seconds since the start of the experiment, taken from one monotonic clock. Durations are seconds. A field is
None where the target does not say. `summary.py` computes percentiles and rates from these records, and no one else
does.

    results = Results.from_json(Path("run.json").read_bytes())
    for point in results.points:
        requests = results.requests_of(point)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Self

import msgspec

SCHEMA_VERSION = 1


class ResultsError(ValueError):
    """Not a file of results, or one of another version; the message names the field."""


class Experiment(StrEnum):
    """Which command made the results, and so which field tells its points apart."""

    RUN = "run"  # one point
    CONTEXT = "context"  # Point.history_tokens and Point.context
    CONCURRENCY = "concurrency"  # Point.streams
    MIXED = "mixed"  # one point of streams alone, one with long prompts among them: Point.streams, Point.rate
    SWEEP = "sweep"  # Point.rate and Point.verdict, in the order they were tried


class TargetKind(StrEnum):
    """The protocol that was spoken."""

    SEGUE = "segue"
    OPENAI = "openai"


class ContextKind(StrEnum):
    """Where the KV of a turn's history came from."""

    NEW = "new"  # there was no history
    WARM = "warm"  # the session, or a prefix it shares, still held it
    RESTORED = "restored"  # brought back from host memory or disk
    RECOMPUTED = "recomputed"  # computed again from the tokens
    UNKNOWN = "unknown"  # the target does not say


class Outcome(StrEnum):
    """How a request ended."""

    OK = "ok"
    REFUSED = "refused"  # the server is too busy or has no room
    TIMEOUT = "timeout"  # past the tester's own deadline
    FAILED = "failed"  # any other error
    CUT = "cut"  # still running when the test ended, so its latencies are those of what had come


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One turn, from the moment it was meant to arrive to its last token."""

    point: int  # index into Results.points
    group: str = "main"  # which part of the workload: "main", and in a mix "stream" and "long"
    warm_up: bool = False  # kept for the plots, left out of every figure
    user: int  # which virtual user, or which arrival of an open loop
    session: str = ""  # of this test; not the server's id
    turn: int = 0  # of its session, from 0
    context: ContextKind = ContextKind.UNKNOWN
    history_tokens: int | None = None  # in the session before this turn

    intended: float  # when it was due; every latency counts from here
    sent: float  # when the tester really sent it; the difference is the tester's own delay
    token_times: tuple[float, ...] = ()  # one for each piece that came, the first token's first
    end: float

    prompt_tokens: int | None = None  # appended by this turn
    generated_tokens: int | None = None
    computed_tokens: int | None = None  # run through prefill
    reused_tokens: int | None = None  # their KV was still there, in the session or in a shared prefix
    restored_tokens: int | None = None  # their KV came back from host memory or disk

    outcome: Outcome = Outcome.OK
    finish_reason: str = ""  # in the target's words
    error: str = ""  # what went wrong, in one line

    @property
    def first_token(self) -> float | None:
        """When the first token came."""
        return self.token_times[0] if self.token_times else None

    @property
    def time_to_first_token(self) -> float | None:
        """From the intended arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.intended

    @property
    def gaps(self) -> Sequence[float]:
        """Inter-token latencies: the times between one piece and the next."""
        return [after - before for before, after in pairwise(self.token_times)]

    @property
    def latency(self) -> float:
        """From the intended arrival to the end."""
        return self.end - self.intended


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheck:
    """What the load tester itself did during a point: whether its figures can be trusted."""

    cpu_share: float  # of one core, 0..1; the tester runs on one thread
    loop_lag_p99: float  # how late its event loop woke
    loop_lag_max: float
    send_lag_p99: float  # Request.sent - Request.intended
    send_lag_max: float
    bottleneck: str = ""  # why the tester, not the server, bounded the figures; empty = it did not


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One objective beside what was measured."""

    objective: str  # "ttft_p99", "inter_token_p99", "failed"
    limit: float  # seconds; of "failed" a share, 0..1
    measured: float | None  # None = there was nothing to measure, which does not hold
    held: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a rate was kept within the objectives."""

    held: bool
    checks: tuple[Check, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measurement of an experiment; which fields are set depends on `Results.experiment`."""

    label: str  # for people: "8 streams", "history 4,096, warm"
    start: float  # the window that counts begins when the warm-up has ended, ...
    end: float  # ... and ends when no more requests are sent: tokens and requests a second are those that came in it
    tester: SelfCheck
    history_tokens: int | None = None
    context: ContextKind | None = None
    streams: int | None = None
    rate: float | None = None  # intended arrivals a second
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where the tester ran."""

    system: str
    processor: str
    cores: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetInfo:
    """What was tested."""

    kind: TargetKind
    address: str
    model: str
    server: str = ""  # version and build, where the server tells them
    context_limit: int | None = None  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """What it takes to run the same test again."""

    command: tuple[str, ...]
    seed: int
    started: str  # UTC, ISO 8601
    versions: Mapping[str, str]  # of segue, Python and the transport's package
    machine: Machine
    target: TargetInfo
    workload: Mapping[str, str]  # each part of the workload, as it was given


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """One experiment. Read from a file by `from_json`, written to one by `to_json`."""

    schema_version: int = SCHEMA_VERSION
    experiment: Experiment
    metadata: Metadata
    points: tuple[Point, ...]
    requests: tuple[Request, ...]
    notes: tuple[str, ...] = ()  # what was left out, and why

    def requests_of(self, point: Point) -> Sequence[Request]:
        """The requests of a point, those of its warm-up too."""
        index = self.points.index(point)
        return [request for request in self.requests if request.point == index]

    def to_json(self) -> bytes:
        """One JSON document, in UTF-8."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, document: bytes | str) -> Self:
        """The results in a document.

        Raises:
            ResultsError: it is none, or of another version.
        """
        _check_version(document)
        try:
            return msgspec.json.decode(document, type=cls)
        except msgspec.MsgspecError as error:
            raise ResultsError(f"not results of segue load: {error}") from None


def _check_version(document: bytes | str) -> None:
    try:
        version = json.loads(document)["schema_version"]
    except (ValueError, TypeError, KeyError):
        raise ResultsError("not results of segue load: schema_version is missing") from None
    if version != SCHEMA_VERSION:
        raise ResultsError(f"schema_version is {version!r}; this version of segue reads {SCHEMA_VERSION}")
