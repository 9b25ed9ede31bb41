"""What the server counts, as plain numbers: the engine and the transport write, a collector reads at scrape time.

Each object is written by one thread and only ever grows, so a reader needs no lock: at worst it misses the last step.
No metrics library is imported here, and no label ever names a session or a request.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import product

from segue_server.requests import CancelCause, FinishReason

# Supersets of the OpenTelemetry GenAI edges, so that its histograms can be derived exactly. Seconds.
TTFT_EDGES = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
)
INTER_TOKEN_EDGES = (
    *(0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5),
)
DURATION_EDGES = tuple(0.01 * 2**n for n in range(17))
TOKEN_EDGES = tuple(2**n for n in range(15))
BATCH_EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
IDLE_EDGES = (0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200)
MOVE_EDGES = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
CALL_EDGES = (
    *(0.0001, 0.0003, 0.0006, 0.001, 0.002, 0.004, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300),
)

CONTEXTS = ("new", "warm", "restored", "recomputed")
SOURCES = ("computed", "session", "prefix", "restored")
TIERS = ("device", "host", "disk")
CLASSES = ("active", "pinned", "idle", "prefix", "slack")
MOVES = (("device", "host"), ("host", "disk"), ("disk", "host"), ("host", "device"))
EVICTION_REASONS = ("pressure", "ttl", "flush", "caller")
REJECTIONS = ("queue_full", "queue_timeout", "kv_budget", "session_limit", "draining", "tenant_quota")
PHASES = ("queued", "prefill", "decode")


class Histogram:
    """Counts of observations between fixed edges, and their sum."""

    __slots__ = ("counts", "edges", "total")

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = tuple(edges)
        self.counts = [0] * (len(self.edges) + 1)  # the last one is beyond every edge
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.edges, value)] += 1
        self.total += value

    @property
    def mean(self) -> float:
        """0 before the first observation."""
        return self.total / max(sum(self.counts), 1)


class Tally:
    """Counters told apart by label values; every combination exists from the start, so that rates begin at 0."""

    __slots__ = ("values",)

    def __init__(self, *labels: Iterable[str]) -> None:
        self.values: dict[tuple[str, ...], float] = dict.fromkeys(product(*labels), 0.0)

    def add(self, *labels: str, amount: float = 1) -> None:
        self.values[labels] += amount

    @property
    def sum(self) -> float:
        return sum(self.values.values())


class EngineStats:
    """Written by the engine thread."""

    def __init__(self) -> None:
        self.turns = Tally(reason.name.lower() for reason in FinishReason)
        self.cancellations = Tally(PHASES, (cause.value for cause in CancelCause))
        self.preemptions = 0
        self.wasted_tokens = Tally(("rolled_back",))
        self.draft_tokens = Tally(("accepted", "rejected"))
        self.time_to_first_token = {context: Histogram(TTFT_EDGES) for context in CONTEXTS}
        self.inter_token = Histogram(INTER_TOKEN_EDGES)
        self.time_per_output_token = Histogram(INTER_TOKEN_EDGES)
        self.turn_duration = Histogram(DURATION_EDGES)
        self.queue = Histogram(TTFT_EDGES)
        self.prefill = Histogram(TTFT_EDGES)
        self.step = {phase: Histogram(INTER_TOKEN_EDGES) for phase in ("prefill", "decode")}
        self.step_batch_size = Histogram(BATCH_EDGES)
        self.prompt_tokens = Tally(SOURCES)
        self.recomputed_tokens = Tally(("evicted", "restarted", "mismatch", "slid"))
        self.moved_bytes: dict[tuple[str, ...], float] = dict.fromkeys(MOVES, 0)
        self.move_seconds: dict[tuple[str, ...], Histogram] = {move: Histogram(MOVE_EDGES) for move in MOVES}
        self.evictions = Tally(TIERS, EVICTION_REASONS)  # those by pressure are counted where they are decided
        self.evicted_bytes = Tally(TIERS, EVICTION_REASONS)
        self.flushed_tokens = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self.prefilled_tokens = 0
        self.generated_tokens = 0
        self.turn_prompt_tokens = Histogram(TOKEN_EDGES)
        self.turn_generated_tokens = Histogram(TOKEN_EDGES)
        self.session_context_tokens = Histogram(TOKEN_EDGES)
        self.busy_seconds = Tally(("prefill", "decode", "sample", "move"))
        self.stream_blocked_seconds = 0.0
        self.last_step_time = 0.0  # Unix seconds; 0 = none yet

    def moved(self, from_tier: str, to_tier: str, *, size: int, seconds: float) -> None:
        """A segment has gone from one tier to the next; the engine was busy with it unless the disk's thread was."""
        self.moved_bytes[from_tier, to_tier] += size
        self.move_seconds[from_tier, to_tier].observe(seconds)
        if "device" in (from_tier, to_tier):
            self.busy_seconds.add("move", amount=seconds)

    def evicted(self, tier: str, reason: str, size: int) -> None:
        """KV was dropped, not moved, though its session may want it again."""
        if size:
            self.evictions.add(tier, reason)
            self.evicted_bytes.add(tier, reason, amount=size)


class ServiceStats:
    """Written by the event loop."""

    def __init__(self) -> None:
        self.rejections = Tally(REJECTIONS)
        self.wasted_tokens = Tally(("cancelled", "slow_client"))
        self.sessions_opened = Tally(("create", "fork", "import", "ephemeral"))
        self.sessions_ended = Tally(("deleted", "expired", "drained"))
        self.session_lifetime = Histogram(IDLE_EDGES)
        self.session_idle = Histogram(IDLE_EDGES)


class CallStats:
    """Written by the gRPC interceptor (gRFC A66): calls by method, and their durations by status."""

    def __init__(self, methods: Iterable[str]) -> None:
        self.started_calls = Tally((*methods, "other"))
        self.durations: dict[tuple[str, ...], Histogram] = {}  # by method and status

    def started(self, method: str) -> None:
        self.started_calls.add(self._known(method))

    def finished(self, method: str, status: str, seconds: float) -> None:
        key = (self._known(method), status)
        self.durations.setdefault(key, Histogram(CALL_EDGES)).observe(seconds)

    def _known(self, method: str) -> str:
        """Methods nobody registered share one label, or a scanner could create series without end."""
        return method if (method,) in self.started_calls.values else "other"
