"""Prometheus metrics: a collector that reads what the server counts, at the moment it is asked.

Nothing here is written along the path of a request, so no gauge can go stale; names, labels and buckets are the
contract of docs/metrics.md. The only constant label is `model`; no label ever names a session or a request.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from segue_model.paging import PAGE_TOKENS
from segue_server.engine import Engine
from segue_server.families import Families, Key
from segue_server.service import Service
from segue_server.stats import CLASSES, CallStats, Histogram, Tally

PREFIX = "segue_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What build_info and cache_config_info say."""

    version: str
    runner: str
    kv_dtype: str
    kv_bytes_per_token: int
    sessions_limit: int


class SegueCollector(Collector):
    """Hand it to a CollectorRegistry."""

    def __init__(self, model_id: str, engine: Engine, service: Service, calls: CallStats, build: Build) -> None:
        self._new = Families(PREFIX, {"model": model_id})
        self._engine = engine
        self._service = service
        self._calls = calls
        self._build = build

    def collect(self) -> Iterator[Metric]:
        yield from self._turns()
        yield from self._latencies()
        yield from self._tokens()
        yield from self._kv()
        yield from self._sessions()
        yield from self._engine_health()
        yield from self._info()
        yield from self._grpc()

    # Groups, in the order of docs/metrics.md

    def _turns(self) -> Iterator[Metric]:
        stats, rejected = self._engine.stats, self._service.stats.rejections
        yield self._new.counters("turns", "Turns that left the engine", stats.turns.values, "finish_reason")
        yield self._new.gauge("turns_running", "Turns in the batch", len(self._engine.scheduler.running))
        yield self._new.gauges("turns_queued", "Turns waiting for admission", self._queued().values, "reason")
        yield self._new.counters("admission_rejections", "Requests refused before any work", rejected.values, "reason")
        yield self._new.counters(
            "cancellations", "Turns ended before their time", stats.cancellations.values, "phase", "cause"
        )
        yield self._new.counter("preemptions", "Turns taken off the batch to free cache", stats.preemptions)
        wasted = self._service.stats.wasted_tokens.values | stats.wasted_tokens.values
        yield self._new.counters("wasted_tokens", "Tokens computed and not kept or delivered", wasted, "reason")

    def _latencies(self) -> Iterator[Metric]:
        stats = self._engine.stats
        first: dict[Key, Histogram] = {(context,): h for context, h in stats.time_to_first_token.items()}
        text = "Arrival to first token, by where the session's context came from"
        yield self._new.histograms("time_to_first_token_seconds", text, first, "context")
        yield self._new.histogram("inter_token_seconds", "Gap between two tokens of a turn", stats.inter_token)
        text = "Decode time by token after the first, per turn"
        yield self._new.histogram("time_per_output_token_seconds", text, stats.time_per_output_token)
        yield self._new.histogram("turn_duration_seconds", "Arrival to end of a turn", stats.turn_duration)
        yield self._new.histogram("queue_seconds", "Arrival to admission", stats.queue)
        yield self._new.histogram("prefill_seconds", "Admission to first token", stats.prefill)
        steps: dict[Key, Histogram] = {(phase,): h for phase, h in stats.step.items()}
        yield self._new.histograms("engine_step_seconds", "One forward pass", steps, "phase")
        yield self._new.histogram("step_batch_size", "Sequences in a forward pass", stats.step_batch_size)
        blocked = stats.stream_blocked_seconds
        yield self._new.counter("stream_blocked_seconds", "Time turns were paused by slow readers", blocked)

    def _tokens(self) -> Iterator[Metric]:
        stats = self._engine.stats
        text = "Context and prompt positions of turns by where their KV came from"
        yield self._new.counters("prompt_tokens", text, stats.prompt_tokens.values, "source")
        yield self._new.counters(
            "recomputed_tokens", "Positions computed again", stats.recomputed_tokens.values, "reason"
        )
        yield self._new.counter("generated_tokens", "Sampled tokens", stats.generated_tokens)
        text = "Tokens guessed ahead; accepted ones were sampled from the pass that guessed them"
        yield self._new.counters("draft_tokens", text, stats.draft_tokens.values, "outcome")
        yield self._new.histogram("turn_prompt_tokens", "Appended tokens per turn", stats.turn_prompt_tokens)
        yield self._new.histogram("turn_generated_tokens", "Sampled tokens per turn", stats.turn_generated_tokens)
        yield self._new.histogram("session_context_tokens", "Ledger length after a turn", stats.session_context_tokens)

    def _kv(self) -> Iterator[Metric]:
        tiers = self._engine.figures.kv_tiers()
        capacity: dict[Key, float] = {(tier,): kv.capacity for tier, kv in tiers.items()}
        yield self._new.gauges("kv_capacity_bytes", "Budget of the KV cache", capacity, "tier")
        held: dict[Key, float] = {(tier, c): getattr(kv, c) for tier, kv in tiers.items() for c in CLASSES}
        yield self._new.gauges("kv_bytes", "KV bytes held; free = capacity - sum", held, "tier", "class")
        text = "What eviction cannot free, of the capacity"
        ratio: dict[Key, float] = {(t,): (kv.active + kv.pinned) / max(kv.capacity, 1) for t, kv in tiers.items()}
        yield self._new.gauges("kv_usage_ratio", text, ratio, "tier")
        tokens: dict[Key, float] = {(tier,): kv.tokens for tier, kv in tiers.items()}
        yield self._new.gauges("kv_tokens", "Positions with KV", tokens, "tier")
        evictions = self._engine.figures.evictions()
        text = "KV dropped, not moved, that somebody may want again"
        counts: dict[Key, float] = {key: count for key, (count, _) in evictions.items()}
        yield self._new.counters("kv_evictions", text, counts, "tier", "reason")
        sizes: dict[Key, float] = {key: size for key, (_, size) in evictions.items()}
        yield self._new.counters("kv_evicted_bytes", "Bytes of it", sizes, "tier", "reason")
        yield from self._moves()

    def _moves(self) -> Iterator[Metric]:
        stats, tiers = self._engine.stats, ("from_tier", "to_tier")
        moved = stats.moved_bytes
        yield self._new.counters("kv_moved_bytes", "KV copied between tiers", moved, *tiers)
        seconds = stats.move_seconds
        yield self._new.histograms("kv_move_seconds", "Copying one segment between tiers", seconds, *tiers)
        text = "Tokens of turns that their own session had no KV of, looked up in the prefix index"
        yield self._new.counter("prefix_query_tokens", text, stats.prefix_query_tokens)
        yield self._new.counter("prefix_hit_tokens", "Tokens found there", stats.prefix_hit_tokens)

    def _sessions(self) -> Iterator[Metric]:
        stats = self._service.stats
        states: dict[Key, float] = {(state,): n for state, n in self._service.session_states().items()}
        yield self._new.gauges("sessions", "Sessions by state", states, "state")
        yield self._new.gauge("sessions_limit", "Most sessions at once", self._build.sessions_limit)
        yield self._new.counters("sessions_opened", "Sessions opened", stats.sessions_opened.values, "origin")
        yield self._new.counters("sessions_ended", "Sessions ended", stats.sessions_ended.values, "reason")
        yield self._new.histogram("session_lifetime_seconds", "Creation to end of a session", stats.session_lifetime)
        yield self._new.histogram("session_idle_seconds", "Gap between two turns of a session", stats.session_idle)

    def _engine_health(self) -> Iterator[Metric]:
        stats = self._engine.stats
        yield self._new.counters(
            "engine_busy_seconds", "Engine time by what it did", stats.busy_seconds.values, "phase"
        )
        text = "Unix time of the last forward pass"
        yield self._new.gauge("engine_last_step_timestamp_seconds", text, stats.last_step_time)
        yield self._new.gauge("draining", "1 while the server shuts down", int(self._service.draining))

    def _info(self) -> Iterator[Metric]:
        build: dict[Key, float] = {(self._build.version, self._build.runner): 1}
        yield self._new.gauges("build_info", "Version and runner", build, "version", "runner")
        config = (str(PAGE_TOKENS), str(self._engine.runner.num_pages))
        labels = (*config, self._build.kv_dtype, str(self._build.kv_bytes_per_token))
        names = ("block_tokens", "blocks", "kv_dtype", "kv_bytes_per_token")
        yield self._new.gauges("cache_config_info", "Shape of the KV pool", {labels: 1}, *names)

    def _grpc(self) -> Iterator[Metric]:
        """gRFC A66; the names are gRPC's, so they carry no prefix."""
        new, started, durations = Families("grpc_server_", {}), self._calls.started_calls.values, self._calls.durations
        yield new.counters("call_started", "RPCs started", dict(started), "grpc_method")
        yield new.histograms("call_duration_seconds", "Duration of RPCs", dict(durations), "grpc_method", "grpc_status")

    def _queued(self) -> Tally:
        """What waiting turns wait for."""
        tally = Tally(("slots", "kv_budget", "session_busy"))
        scheduler = self._engine.scheduler
        short_of = "slots" if len(scheduler.running) >= scheduler.max_running else "kv_budget"
        tally.add(short_of, amount=len(scheduler.waiting))
        tally.add("session_busy", amount=self._service.waiting_behind)
        return tally
