"""Segue's metrics under the names that other dashboards look for: vLLM's, and OpenTelemetry's for GenAI servers.

Everything here is made from Segue's own families, within one scrape, so that the two cannot differ. A histogram under
another name has the edges of Segue's, or for OpenTelemetry that subset of them which its conventions prescribe:
cumulative counts at shared edges are exact.

vLLM's names: vllm/v1/metrics/loggers.py. OpenTelemetry's: semantic-conventions, docs/gen-ai/gen-ai-metrics.md.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from segue_server.families import Families, Key
from segue_server.metrics import PREFIX
from segue_server.stats import Histogram

Found = Mapping[str, Metric]  # Segue's families, by name without the prefix

_VLLM_COUNTERS = {
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generated_tokens",
    "num_preemptions": "preemptions",
    "prefix_cache_queries": "prefix_query_tokens",
    "prefix_cache_hits": "prefix_hit_tokens",
}
_VLLM_HISTOGRAMS = {
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_seconds",
    "e2e_request_latency_seconds": "turn_duration_seconds",
    "request_queue_time_seconds": "queue_seconds",
    "request_prefill_time_seconds": "prefill_seconds",
}
_VLLM_REASONS = {
    "stop": ("eos", "stop_token", "stop_sequence"),
    "length": ("max_tokens", "context_full", "time_limit"),
    "abort": ("cancelled", "preempted", "draining"),
    "error": ("error",),
}
_OTEL_HISTOGRAMS = {
    "request_duration_seconds": ("turn_duration_seconds", tuple(0.01 * 2**n for n in range(14))),
    "time_to_first_token_seconds": (
        "time_to_first_token_seconds",
        (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    ),
    "time_per_output_token_seconds": (
        "time_per_output_token_seconds",
        (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5),
    ),
}
OTEL_OPERATION = "text_completion"  # a ledger of tokens is continued, whatever made them: chat, text or ids
OTEL_PROVIDER = "segue"


class Aliased(Collector):
    """What a collector says, and the same again under other names."""

    def __init__(self, inner: Collector, names: Sequence[str], model_id: str) -> None:
        """`names`: keys of ALIASES."""
        self._inner = inner
        self._aliases = [ALIASES[name] for name in names]
        self._model = model_id

    def collect(self) -> Iterator[Metric]:
        families = list(self._inner.collect())
        yield from families
        found = {family.name.removeprefix(PREFIX): family for family in families}
        for alias in self._aliases:
            yield from alias(found, self._model)


def vllm(found: Found, model_id: str) -> Iterator[Metric]:
    """The colon is vLLM's: Prometheus keeps it for recording rules, and takes it all the same."""
    new = Families("vllm:", {"model_name": model_id, "engine": "0"})
    yield new.gauge("num_requests_running", "Turns in the batch", _sum(found["turns_running"]))
    yield new.gauge("num_requests_waiting", "Turns waiting for admission", _sum(found["turns_queued"]))
    usage = _sum(found["kv_usage_ratio"], tier="device")
    yield new.gauge("kv_cache_usage_perc", "What eviction cannot free of the pool, 0 to 1", usage)
    yield _vllm_cache_config(new, found["cache_config_info"])
    for name, source in _VLLM_COUNTERS.items():
        yield new.counter(name, found[source].documentation, _sum(found[source]))
    turns = found["turns"]
    reasons: dict[Key, float] = {
        (theirs,): _sum_over(turns, "finish_reason", ours) for theirs, ours in _VLLM_REASONS.items()
    }
    yield new.counters("request_success", turns.documentation, reasons, "finished_reason")
    for name, source in _VLLM_HISTOGRAMS.items():
        yield new.histogram(name, found[source].documentation, _merged(found[source]))


def _vllm_cache_config(new: Families, ours: Metric) -> Metric:
    labels = ours.samples[0].labels
    names = {"block_size": "block_tokens", "num_gpu_blocks": "blocks", "cache_dtype": "kv_dtype"}
    values = tuple(labels[ours] for ours in names.values())
    return new.gauges("cache_config_info", "Shape of the KV pool", {values: 1}, *names)


def otel(found: Found, model_id: str) -> Iterator[Metric]:
    """With the required attributes, and the recommended ones that a server knows, as labels."""
    attributes = {
        "gen_ai_operation_name": OTEL_OPERATION,
        "gen_ai_provider_name": OTEL_PROVIDER,
        "gen_ai_request_model": model_id,
        "gen_ai_response_model": model_id,
    }
    new = Families("gen_ai_server_", attributes)
    for name, (source, edges) in _OTEL_HISTOGRAMS.items():
        yield new.histogram(name, found[source].documentation, _merged(found[source], edges))


ALIASES: Mapping[str, Callable[[Found, str], Iterator[Metric]]] = {"vllm": vllm, "otel": otel}


def _sum(family: Metric, **labels: str) -> float:
    """Over all samples of a counter or a gauge that carry these labels."""
    return sum(sample.value for sample in family.samples if labels.items() <= sample.labels.items())


def _sum_over(family: Metric, label: str, values: Iterable[str]) -> float:
    return sum(_sum(family, **{label: value}) for value in values)


def _merged(family: Metric, edges: Sequence[float] | None = None) -> Histogram:
    """A histogram over all label values, with `edges`, which are a subset of its own; None = its own."""
    up_to: dict[float, float] = {}
    total = 0.0
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            edge = float(sample.labels["le"])
            up_to[edge] = up_to.get(edge, 0) + sample.value
        elif sample.name.endswith("_sum"):
            total += sample.value
    merged = Histogram(sorted(up_to)[:-1] if edges is None else edges)
    counts = [round(up_to[edge]) for edge in (*merged.edges, float("inf"))]
    merged.counts = [count - before for count, before in zip(counts, [0, *counts], strict=False)]
    merged.total = total
    return merged
