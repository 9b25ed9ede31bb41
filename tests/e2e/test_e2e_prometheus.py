"""A real Prometheus scrapes a real server in which everything has happened once: no panel is empty, no alert is blind.

A renamed label, a quantile without buckets or a legend that joins nothing shows only in a Prometheus that has data.
"""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.e2e.conftest import LiveServer, live_server, wait_until

from segue_client import AdminClient, Client, QueueFull, SessionLimit
from segue_server.config import ServerConfig

DEPLOY = Path(__file__).parents[2] / "deploy"
PATIENCE = 60.0  # seconds for whatever Prometheus does within one or two
VARIABLES = {"$model": ".*", "$instance": ".*", "$__rate_interval": "2m"}  # longer than this file runs
PAGE = 8192  # bytes of the tiny model's page in float32
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 8}
NO_RETRIES = [("grpc.enable_retries", 0)]

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: apt-get install prometheus)"
)


@dataclass(frozen=True)
class Prometheus:
    url: str
    began: float

    def get(self, path: str, **parameters: object) -> Any:
        """The `data` of an answer. Raises AssertionError with what Prometheus says is wrong."""
        query = urllib.parse.urlencode(parameters, doseq=True)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as answer:  # noqa: S310 - ours
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["error"]) from None

    def value(self, expr: str) -> float:
        """The sum over what is found; 0 for nothing."""
        return sum(float(series["value"][1]) for series in self.get("query", query=expr)["result"])

    def wait_for_a_scrape(self) -> None:
        """Until one that began after this call has succeeded."""
        now = time.time()
        wait_until(lambda: self.value('timestamp(up{job="segue"}) and up == 1') > now, "a scrape", PATIENCE)

    def drawn(self, expr: str) -> list[float]:
        """The points of a panel since the server started; those that are no number are left out, as Grafana does.

        The last point lies after the last scrape, wherever between two points that fell.
        """
        found = self.get("query_range", query=expr, start=self.began, end=time.time() + 1, step=1)["result"]
        values = [float(value) for series in found for _, value in series["values"]]
        return [value for value in values if math.isfinite(value)]


@contextmanager
def monitored(target: str, folder: Path) -> Iterator[Prometheus]:
    """`make monitor`, scraping every second."""
    command = [sys.executable, DEPLOY / "monitor.py", "--target", target, "--port", "0", "--scrape-interval", "1s"]
    began = time.time()
    environment = os.environ | {"TMPDIR": str(folder)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            first = process.stdout.readline() if process.stdout else ""
            found = re.search(r"Prometheus on (\S+) scrapes", first)
            assert found, first
            yield Prometheus(found[1], began)
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=PATIENCE)


@pytest.fixture(scope="module")
def prometheus(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """After a load that made everything happen, and a scrape that saw all of it."""
    threads = torch.get_num_threads()
    config = ServerConfig(
        model=tiny_model,
        port=0,
        admin_port=0,
        metrics_port=0,
        runner="torch",
        threads=1,
        kv_bytes=24 * PAGE,
        kv_host_bytes=16 * PAGE,
        max_running=2,
        max_queued=3,
        max_sessions=30,
    )
    with live_server(config) as server:
        address = f"127.0.0.1:{server.running.ports.metrics}"
        with monitored(address, tmp_path_factory.mktemp("prometheus")) as found:
            found.wait_for_a_scrape()
            make_everything_happen(server)
            for _ in range(2):  # of series that were born in the load, a rate needs two samples
                found.wait_for_a_scrape()
            yield found
    torch.set_num_threads(threads)


def make_everything_happen(server: LiveServer) -> None:
    """Turns with every kind of context, a cancel, a rejection of each kind at hand, a queue, evictions and moves."""
    client = server.client(channel_options=NO_RETRIES)
    story = "Once upon a time, in a pool of only a few pages, there lived a session. " * 2
    session = client.create_session(text=story)
    session.generate(text="It", **GREEDY)  # new
    session.generate(text="spoke", **GREEDY)  # warm
    client.create_session(text=story).generate(text="Another", **GREEDY)  # finds the prefix
    session.move("host")
    session.generate(text="and", bypass_prefix_cache=True, **GREEDY)  # restored
    session.move("none")
    session.generate(text="wrote", bypass_prefix_cache=True, **GREEDY)  # recomputed
    with session.stream(text="without end", temperature=0.0, ignore_eos=True) as turn:
        next(turn.events())  # and leaves: cancelled
    server.wait_idle()
    crowd = [client.create_session(text=f"{number} {story}") for number in range(10)]
    for one in crowd:
        one.generate(text="Me too", **GREEDY)  # evicts
    with AdminClient(f"127.0.0.1:{server.running.ports.admin}") as admin:
        admin.flush(idle_sessions=True)
    queue(server)
    server.settle()
    for _ in range(server.config.max_sessions - client.load().sessions):
        client.create_session()
    with pytest.raises(SessionLimit):
        client.create_session()
    crowd[0].delete()


def queue(server: LiveServer) -> None:
    """More turns at once than the server has places and room in its queue for."""
    refused = threading.Event()

    def ask(number: int) -> None:
        with Client(server.target, channel_options=NO_RETRIES) as client:
            try:
                client.generate(text=f"{number}", temperature=0.0, ignore_eos=True, max_tokens=120)
            except QueueFull:
                refused.set()

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(ask, range(12)))
    assert refused.is_set()


# ------------------------------------------------------------------------------------------------------------- boards


BOARDS = {path.stem: json.loads(path.read_text()) for path in sorted((DEPLOY / "grafana/dashboards").glob("*.json"))}
QUERIES = [
    pytest.param(target["expr"], id=f"{name}: {panel['title']}: {target['legendFormat']}")
    for name, board in BOARDS.items()
    for panel in board["panels"]
    for target in panel.get("targets", [])
]


def substituted(expr: str) -> str:
    for variable, value in VARIABLES.items():
        expr = expr.replace(variable, value)
    return expr


@pytest.mark.parametrize("expr", QUERIES)
def test_every_query_of_the_boards_draws_something(prometheus: Prometheus, expr: str) -> None:
    assert prometheus.drawn(substituted(expr))


@pytest.mark.parametrize(
    "expr",
    [
        *(
            f'segue_time_to_first_token_seconds_count{{context="{c}"}}'
            for c in ("new", "warm", "restored", "recomputed")
        ),
        *(f'segue_prompt_tokens_total{{source="{s}"}}' for s in ("computed", "session", "prefix", "restored")),
        'segue_kv_evictions_total{reason="pressure"}',
        'segue_kv_moved_bytes_total{from_tier="device", to_tier="host"}',
        'segue_kv_moved_bytes_total{from_tier="host", to_tier="device"}',
        'segue_recomputed_tokens_total{reason="evicted"}',
        'segue_admission_rejections_total{reason="session_limit"}',
        'segue_admission_rejections_total{reason="queue_full"}',
        'segue_turns_total{finish_reason="cancelled"}',
        "segue_cancellations_total",
        "segue_session_idle_seconds_count",
    ],
)
def test_the_load_made_it_happen(prometheus: Prometheus, expr: str) -> None:
    """Without these, a panel could draw a line at 0 and prove nothing."""
    assert prometheus.value(expr) > 0


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_the_choices_on_a_board_find_the_server(prometheus: Prometheus, board: dict[str, Any]) -> None:
    for variable in board["templating"]["list"]:
        found = re.fullmatch(r"label_values\((.+), (\w+)\)", substituted(variable["query"]["query"]))
        assert found
        assert len(prometheus.get(f"label/{found[2]}/values", **{"match[]": found[1]})) == 1


# ------------------------------------------------------------------------------------------------------------- alerts


ALERTS = {
    rule["alert"]: rule["expr"]
    for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
}


@pytest.mark.parametrize("expr", ALERTS.values(), ids=ALERTS)
def test_both_sides_of_an_alert_have_data(prometheus: Prometheus, expr: str) -> None:
    """With `bool` a comparison answers 0 or 1 where it would otherwise drop the series: nothing means no data."""
    judged, comparisons = re.subn(r" (==|[<>]) ", r" \1 bool ", expr)
    assert comparisons
    assert prometheus.get("query", query=judged)["result"]


def test_prometheus_evaluates_the_rules_and_a_healthy_server_fires_none(prometheus: Prometheus) -> None:
    def rules() -> list[dict[str, Any]]:
        return [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]

    wait_until(lambda: all(rule["health"] != "unknown" for rule in rules()), "every rule evaluated", PATIENCE)
    assert {rule["name"]: (rule["health"], rule.get("lastError", "")) for rule in rules()} == dict.fromkeys(
        ALERTS, ("ok", "")
    )
    assert [rule["name"] for rule in rules() if rule["state"] == "firing"] == []
