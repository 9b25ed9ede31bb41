"""What /metrics says against what has happened, scrape by scrape."""

import asyncio
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tests.server.service_bench import ServiceBench, serving

from segue_server.events import Tokens
from segue_server.metrics import Build, SegueCollector
from segue_server.requests import BusyPolicy, CommitPolicy
from segue_server.stats import CallStats, Histogram, Tally

METHODS = ("segue.v1.GenerationService/Generate",)


class Scrape:
    """One scrape, by sample name and labels."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families = list(text_string_to_metric_families(text))
        self.samples = {
            (sample.name, frozenset((k, v) for k, v in sample.labels.items() if k != "model")): sample.value
            for family in self.families
            for sample in family.samples
        }

    def get(self, name: str, **labels: str) -> float:
        return self.samples["segue_" + name, frozenset(labels.items())]

    def sum(self, name: str, **labels: str) -> float:
        wanted = frozenset(labels.items())
        return sum(v for (n, given), v in self.samples.items() if n == "segue_" + name and wanted <= given)


class Scraper:
    def __init__(self, bench: ServiceBench) -> None:
        self.calls = CallStats(METHODS)
        build = Build(version="1", runner="fake", kv_dtype="float32", kv_bytes_per_token=8, sessions_limit=100)
        self.registry = CollectorRegistry()
        self.registry.register(SegueCollector("fake", bench.engine, bench.service, self.calls, build))

    def __call__(self) -> Scrape:
        return Scrape(generate_latest(self.registry).decode())


async def test_counters_and_gauges_tell_what_happened(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        scrape = Scraper(bench)
        await bench.create()
        first = await bench.ask(range(40), max_tokens=10)
        second = await bench.ask([1], max_tokens=4)
        other = await bench.ask(range(40), session_id="", max_tokens=3)
        received = len(first.tokens) + len(second.tokens) + len(other.tokens)
        now = scrape()
        assert now.get("generated_tokens_total") == received == 17
        assert now.get("turns_total", finish_reason="max_tokens") == now.sum("turns_total") == 3
        assert now.get("prompt_tokens_total", source="session") == 49
        assert now.get("prompt_tokens_total", source="prefix") == 32
        assert now.sum("prompt_tokens_total") == 40 + 51 + 40
        assert now.get("time_to_first_token_seconds_count", context="new") == 2
        assert now.get("time_to_first_token_seconds_count", context="warm") == 1
        assert now.get("inter_token_seconds_count") == received - 3
        assert now.get("sessions_opened_total", origin="create") == 1
        assert now.get("sessions_opened_total", origin="ephemeral") == 1
        assert now.get("sessions", state="idle") == now.sum("sessions") == 1
        assert now.get("sessions_ended_total", reason="deleted") == 1, "the ephemeral one"
        assert now.get("session_idle_seconds_count") == 1
        assert now.get("turn_prompt_tokens_sum") == 81
        assert now.get("engine_last_step_timestamp_seconds") > 1e9
        await bench.service.delete_session("chat-1")
        assert scrape().get("sessions_ended_total", reason="deleted") == 2


async def test_kv_bytes_add_up_at_every_moment_and_nothing_is_active_when_idle(tmp_path: Path) -> None:
    async with serving(tmp_path, pages=24, max_running=3, step_tokens=32, max_context_tokens=300) as bench:
        scrape = Scraper(bench)
        bench.runner.before_step = lambda: time.sleep(0.002)  # so that turns are seen while they run
        policies = list(CommitPolicy)
        pool = bench.engine.holdings.pool
        for n in range(4):
            await bench.create(f"chat-{n}")

        async def talk(n: int) -> None:
            for turn in range(3):
                async with bench.turn(
                    range(5 + 7 * n), f"chat-{n}", max_tokens=30, commit_policy=policies[turn]
                ) as reading:
                    async for number, event in reading:
                        if isinstance(event, Tokens) and number > 6 * n:
                            break
                await bench.idle(f"chat-{n}")

        talks = [asyncio.ensure_future(talk(n)) for n in range(4)]
        seen_active = 0.0
        while not all(task.done() for task in talks):
            now, held = await bench.thread.call(lambda: (scrape(), pool.held))  # between two steps
            assert now.sum("kv_bytes", tier="device") == held * bench.runner.page_bytes
            await asyncio.sleep(0.01)
            seen_active = max(seen_active, now.get("kv_bytes", tier="device", **{"class": "active"}))
        await asyncio.gather(*talks)
        assert seen_active > 0
        now = scrape()
        assert now.sum("kv_bytes") == pool.held * bench.runner.page_bytes
        assert now.get("kv_bytes", tier="device", **{"class": "active"}) == 0
        assert now.get("kv_usage_ratio", tier="device") == 0
        assert now.get("turns_running") == now.sum("turns_queued") == 0
        assert now.sum("cancellations_total") == now.get("turns_total", finish_reason="cancelled")


async def test_queue_reasons_tell_what_is_short(tmp_path: Path) -> None:
    async with serving(tmp_path, max_running=1) as bench:
        scrape = Scraper(bench)
        bench.runner.before_step = lambda: time.sleep(0.002)
        turns = [asyncio.ensure_future(bench.ask(session_id="", max_tokens=200)) for _ in range(3)]
        await bench.until(lambda: len(bench.engine.scheduler.waiting) == 2)
        now = scrape()
        assert now.get("turns_running") == 1
        assert now.get("turns_queued", reason="slots") == now.sum("turns_queued") == 2
        for turn in turns:
            turn.cancel()
        await asyncio.gather(*turns, return_exceptions=True)


async def test_a_turn_behind_another_of_its_session_waits_for_that(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        scrape = Scraper(bench)
        await bench.create()
        first = asyncio.ensure_future(bench.ask(max_tokens=1000))
        await bench.until(bench.ledger)
        second = asyncio.ensure_future(bench.ask(max_tokens=2, busy_policy=BusyPolicy.QUEUE))
        await asyncio.sleep(0)
        assert scrape().get("turns_queued", reason="session_busy") == 1
        await bench.service.cancel(session_id="chat-1")
        await asyncio.gather(first, second)
        assert scrape().sum("turns_queued") == 0


async def test_every_series_exists_from_the_start_and_names_no_session(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        scrape = Scraper(bench)
        before = scrape()
        await bench.create("secret-session")
        async with bench.turn(session_id="secret-session", request_id="secret-request", max_tokens=500) as turn:
            async for _, event in turn:
                if isinstance(event, Tokens):
                    break
        await bench.idle("secret-session")
        after = scrape()
        assert before.samples.keys() == after.samples.keys(), "rates start at 0"
        assert "secret" not in after.text
        assert all(value == 0 for (name, _), value in before.samples.items() if name.endswith("_total"))
        assert ":" not in "".join(family.name for family in after.families)


async def test_unknown_methods_share_one_series(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        scrape = Scraper(bench)
        for method in [*METHODS, "scan/1", "scan/2"]:
            scrape.calls.started(method)
            scrape.calls.finished(method, "OK", 0.01)
        samples = scrape().samples
        assert samples["grpc_server_call_started_total", frozenset({("grpc_method", "other")})] == 2
        assert not any("scan" in value for _, labels in samples for _, value in labels)


async def test_promtool_accepts_the_metrics(tmp_path: Path) -> None:
    if not (promtool := shutil.which("promtool")):
        pytest.skip("promtool is not installed")
    async with serving(tmp_path) as bench:
        scrape = Scraper(bench)
        await bench.ask(session_id="", max_tokens=3)
        scrape.calls.finished(METHODS[0], "OK", 0.2)
        text = scrape().text
        check = await asyncio.to_thread(
            subprocess.run, [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
        )
        print(f"{len(scrape().families)} families, {len(scrape().samples)} series, {len(text)} bytes")
        assert (check.returncode, check.stdout, check.stderr) == (0, "", "")


def test_a_histogram_counts_each_value_in_the_bucket_whose_edge_it_does_not_pass() -> None:
    histogram = Histogram((1, 2, 4))
    for value in (0, 1, 1.5, 2, 4, 5):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1, 1]
    assert histogram.total == 13.5


def test_a_tally_knows_its_labels_from_the_start() -> None:
    tally = Tally(("a", "b"), ("x",))
    tally.add("a", "x", amount=2)
    assert tally.values == {("a", "x"): 2, ("b", "x"): 0}
    with pytest.raises(KeyError):
        tally.add("c", "x")
