"""The names of vLLM and OpenTelemetry tell what Segue's own tell, in the same scrape."""

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.server.service_bench import ServiceBench, serving
from tests.server.test_metrics import Scrape, Scraper

from segue_server.aliases import ALIASES, Aliased
from segue_server.config import METRICS_ALIASES
from segue_server.events import Tokens
from segue_server.metrics import SegueCollector
from segue_server.requests import FinishReason

VLLM = frozenset({("model_name", "fake"), ("engine", "0")})
OTEL = frozenset(
    {
        ("gen_ai_operation_name", "text_completion"),
        ("gen_ai_provider_name", "segue"),
        ("gen_ai_request_model", "fake"),
        ("gen_ai_response_model", "fake"),
    }
)
# OpenTelemetry's prescription, written down a second time.
OTEL_EDGES = {
    "request_duration": "0.01 0.02 0.04 0.08 0.16 0.32 0.64 1.28 2.56 5.12 10.24 20.48 40.96 81.92",
    "time_to_first_token": "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0",
    "time_per_output_token": "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5",
}


class AliasedScraper(Scraper):
    """One scrape with all aliases."""

    def __init__(self, bench: ServiceBench) -> None:
        super().__init__(bench)
        inner = next(c for c in self.registry._collector_to_names if isinstance(c, SegueCollector))
        self.registry = CollectorRegistry()
        self.registry.register(Aliased(inner, METRICS_ALIASES, "fake"))

    def __call__(self) -> "AliasedScrape":
        return AliasedScrape(generate_latest(self.registry).decode())


class AliasedScrape(Scrape):
    def vllm(self, name: str, **labels: str) -> float:
        return self.samples["vllm:" + name, VLLM | frozenset(labels.items())]

    def otel(self, name: str, **labels: str) -> float:
        return self.samples["gen_ai_server_" + name, OTEL | frozenset(labels.items())]


async def mix(bench: ServiceBench) -> None:
    """Turns that finish, fail, are cancelled, and meet a kept cache."""
    await bench.create()
    await bench.ask(range(40), max_tokens=9)
    await bench.ask([1], max_tokens=3)
    await bench.ask(range(40), session_id="", max_tokens=5)
    async with bench.turn(max_tokens=1000) as turn:
        async for _, event in turn:
            if isinstance(event, Tokens):
                break
    await bench.idle()
    bench.runner.failures.append(RuntimeError("a fault that was put there"))
    with pytest.raises(Exception, match="could not compute"):
        await bench.ask()


async def test_vllm_names_have_the_values_of_segues(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        scrape = AliasedScraper(bench)
        await mix(bench)
        now = scrape()
        same = {
            "num_requests_running": now.get("turns_running"),
            "num_requests_waiting": now.sum("turns_queued"),
            "kv_cache_usage_perc": now.get("kv_usage_ratio", tier="device"),
            "prompt_tokens_total": now.sum("prompt_tokens_total"),
            "generation_tokens_total": now.get("generated_tokens_total"),
            "num_preemptions_total": now.get("preemptions_total"),
            "prefix_cache_queries_total": now.get("prefix_query_tokens_total"),
            "prefix_cache_hits_total": now.get("prefix_hit_tokens_total"),
            "time_to_first_token_seconds_count": now.sum("time_to_first_token_seconds_count"),
            "time_to_first_token_seconds_sum": now.sum("time_to_first_token_seconds_sum"),
            "inter_token_latency_seconds_count": now.get("inter_token_seconds_count"),
            "inter_token_latency_seconds_sum": now.get("inter_token_seconds_sum"),
            "e2e_request_latency_seconds_count": now.get("turn_duration_seconds_count"),
            "e2e_request_latency_seconds_sum": now.get("turn_duration_seconds_sum"),
            "request_queue_time_seconds_count": now.get("queue_seconds_count"),
            "request_prefill_time_seconds_sum": now.get("prefill_seconds_sum"),
        }
        assert {name: now.vllm(name) for name in same} == pytest.approx(same)
        reasons = {reason: now.vllm("request_success_total", finished_reason=reason) for reason in _REASONS}
        assert reasons == {"stop": 0, "length": 3, "abort": 1, "error": 1}
        config = {"block_size": "16", "num_gpu_blocks": "128", "cache_dtype": "float32"}
        assert now.vllm("cache_config_info", **config) == 1


_REASONS = ("stop", "length", "abort", "error")


async def test_every_finish_reason_has_a_name_in_vllm(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        scrape = AliasedScraper(bench)
        for number, reason in enumerate(FinishReason):
            bench.engine.stats.turns.add(reason.name.lower(), amount=10**number)
        named = [scrape().vllm("request_success_total", finished_reason=reason) for reason in _REASONS]
        assert sum(named) == int("1" * len(FinishReason)), "each is counted once"


@pytest.mark.parametrize("name", OTEL_EDGES)
async def test_otel_histograms_are_exact_at_the_edges_that_the_conventions_prescribe(tmp_path: Path, name: str) -> None:
    async with serving(tmp_path) as bench:
        scrape = AliasedScraper(bench)
        await mix(bench)
        edges = [float(edge) for edge in OTEL_EDGES[name].split()]
        stats = bench.engine.stats
        for edge in (*edges, 1000.0):
            for value in (edge, edge * 1.01):
                stats.turn_duration.observe(value)
                stats.time_to_first_token["warm"].observe(value)
                stats.time_to_first_token["new"].observe(value)
                stats.time_per_output_token.observe(value)
        now = scrape()
        ours = {"request_duration": "turn_duration"}.get(name, name) + "_seconds"
        theirs = {dict(labels)["le"] for n, labels in now.samples if n == f"gen_ai_server_{name}_seconds_bucket"}
        assert sorted(map(float, theirs)) == [*edges, float("inf")]
        for edge in theirs:
            assert now.otel(f"{name}_seconds_bucket", le=edge) == now.sum(f"{ours}_bucket", le=edge) > 0
        assert now.otel(f"{name}_seconds_sum") == pytest.approx(now.sum(f"{ours}_sum"))
        assert now.otel(f"{name}_seconds_count") == now.sum(f"{ours}_count")


async def test_aliases_add_names_and_change_nothing(tmp_path: Path) -> None:
    """Without an alias the scrape is Segue's alone; with them Segue's part of it is the same; none names a session."""
    async with serving(tmp_path) as bench:
        plain, aliased = Scraper(bench), AliasedScraper(bench)
        await mix(bench)
        alone, both = plain(), aliased()
        assert alone.samples.items() <= both.samples.items()
        added = {name for name, _ in both.samples.keys() - alone.samples.keys()}
        assert all(name.startswith(("vllm:", "gen_ai_server_")) for name in added)
        assert "chat-1" not in both.text
        assert tuple(ALIASES) == METRICS_ALIASES


async def test_promtool_accepts_the_names_of_otel(tmp_path: Path) -> None:
    """vLLM's it would not: it keeps the colon for recording rules."""
    if not (promtool := shutil.which("promtool")):
        pytest.skip("promtool is not installed")
    async with serving(tmp_path) as bench:
        text = "".join(line for line in AliasedScraper(bench)().text.splitlines(keepends=True) if "vllm:" not in line)
        command = [promtool, "check", "metrics"]
        check = await asyncio.to_thread(
            subprocess.run, command, input=text, capture_output=True, text=True, check=False
        )
        assert (check.returncode, check.stdout, check.stderr) == (0, "", "")
