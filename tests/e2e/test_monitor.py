"""`make monitor`: a Prometheus of one's own beside a server, and nothing left of it afterwards."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MONITOR = [sys.executable, str(ROOT / "deploy/monitor.py")]
PATIENCE = 60.0  # seconds

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: apt-get install prometheus)"
)


@needs_prometheus
def test_it_scrapes_says_where_to_look_and_leaves_nothing(tmp_path: Path) -> None:
    """The target is asked for /metrics within seconds; after Ctrl-C or SIGTERM neither process nor file is left.

    Both at once, for a Prometheus takes five seconds to look at its targets.
    """
    signals = (signal.SIGINT, signal.SIGTERM)
    with ThreadPoolExecutor(len(signals)) as pool:
        folders = [tmp_path / number.name for number in signals]
        list(pool.map(monitor_until, signals, folders))


def monitor_until(number: signal.Signals, folder: Path) -> None:
    folder.mkdir()
    scraped = threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), answering(scraped)) as target:
        threading.Thread(target=target.serve_forever).start()
        words = ["--port", "0", "--scrape-interval", "1s", "--target", f"127.0.0.1:{target.server_port}"]
        environment = os.environ | {"TMPDIR": str(folder)}
        with subprocess.Popen([*MONITOR, *words], stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout
            first = process.stdout.readline()
            assert re.fullmatch(r"Prometheus on http://127\.0\.0\.1:[1-9]\d* scrapes http://127\S+/metrics\n", first)
            assert list(folder.iterdir())
            assert scraped.wait(PATIENCE)
            process.send_signal(number)
            rest, _ = process.communicate(timeout=PATIENCE)
        target.shutdown()
    assert process.returncode == 0
    assert "Nothing answers" not in rest
    assert "segue_time_to_first_token_seconds_bucket" in rest
    assert list(folder.iterdir()) == []


def answering(scraped: threading.Event) -> type[BaseHTTPRequestHandler]:
    """What serves a single metric, and notes that Prometheus came for it."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if "Prometheus" in self.headers.get("User-Agent", ""):
                scraped.set()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(b"segue_draining 0\n")

        def log_message(self, *_: object) -> None:
            """Nothing."""

    return Answer


@needs_prometheus
def test_a_port_that_is_taken_is_said_and_ends_it(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as taken:
        command = [*MONITOR, "--port", str(taken.server_port)]
        environment = os.environ | {"TMPDIR": str(tmp_path)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, env=environment)
    assert done.returncode == 1
    assert "address already in use" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_without_prometheus_it_says_how_to_get_one(tmp_path: Path) -> None:
    environment = os.environ | {"PATH": str(tmp_path)}
    done = subprocess.run(MONITOR, capture_output=True, text=True, timeout=PATIENCE, check=False, env=environment)
    assert done.returncode == 2
    assert "apt-get install prometheus" in done.stderr
