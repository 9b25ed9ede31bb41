"""Watch a server on this machine with Prometheus, without Docker: `make monitor`. Ctrl-C ends it.

Scrape configuration and alert rules are those of docker-compose.yml; only the target is another. What Prometheus stores
lies in a temporary folder, which is removed at the end.
"""

import argparse
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path

DEPLOY = Path(__file__).parent
COMPOSE_TARGET = '"server:9464"'
STOP_TIMEOUT = 20.0  # seconds
NO_PROMETHEUS = """\
There is no `prometheus` on PATH. Debian and Ubuntu have it as a package:  apt-get install prometheus
macOS:  brew install prometheus.   Or run the whole stack, Grafana included:  docker compose up --build"""
QUERIES = {
    "tokens a second": "sum(rate(segue_generated_tokens_total[1m]))",
    "time to first token, by context": (
        "histogram_quantile(0.95, sum by (le, context) (rate(segue_time_to_first_token_seconds_bucket[1m])))"
    ),
    "where prompt tokens came from": "sum by (source) (rate(segue_prompt_tokens_total[1m]))",
    "what waiting turns wait for": "sum by (reason) (segue_turns_queued)",
    "what the KV pool holds": 'sum by (class) (segue_kv_bytes{tier="device"})',
    "alerts": "ALERTS",
}


def main(words: Sequence[str] | None = None) -> int:
    """0 after Ctrl-C or SIGTERM, 1 when Prometheus fails, 2 when there is none."""
    arguments = _parser().parse_args(words)
    program = shutil.which("prometheus")
    if program is None:
        print(NO_PROMETHEUS, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: _interrupt())
    try:
        with tempfile.TemporaryDirectory(prefix="segue-monitor-") as folder:
            configure(Path(folder), arguments.target, arguments.scrape_interval)
            return watch(program, Path(folder), arguments.target, arguments.port)
    except KeyboardInterrupt:
        print("stopped")
        return 0


def configure(folder: Path, target: str, scrape_interval: str | None) -> None:
    """Write Prometheus' configuration and rules for a target, host:port, to `folder`."""
    text = (DEPLOY / "prometheus.yml").read_text(encoding="utf-8")
    if COMPOSE_TARGET not in text:
        raise ValueError(f"deploy/prometheus.yml does not scrape {COMPOSE_TARGET}")
    text = text.replace(COMPOSE_TARGET, f'"{target}"')
    if scrape_interval:
        text = re.sub(r"(scrape_interval|evaluation_interval): \S+", rf"\1: {scrape_interval}", text)
    (folder / "prometheus.yml").write_text(text, encoding="utf-8")
    shutil.copy(DEPLOY / "alerts.yml", folder)


def watch(program: str, folder: Path, target: str, port: int) -> int:
    """Run Prometheus until it ends by itself, or until KeyboardInterrupt; returns its exit code."""
    command = [
        program,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            _follow(process, target)
            return int(process.wait() != 0)
        finally:
            process.terminate()
            try:
                process.communicate(timeout=STOP_TIMEOUT)  # reads on: a full pipe would keep it from ending
            except subprocess.TimeoutExpired:
                process.kill()


def _follow(process: "subprocess.Popen[str]", target: str) -> None:
    """Read the log to its end: say where to look once Prometheus is ready, and repeat what it complains about."""
    address = ""
    for line in process.stderr or ():
        if found := re.search(r'msg="?Listening on"? address=(\S+)', line):
            address = found[1]
        elif "Server is ready to receive web requests" in line:
            _tell(f"http://{address}", target)
        elif re.search(r"level=(error|warn)", line, re.IGNORECASE):
            print(line, end="", file=sys.stderr)


def _tell(url: str, target: str) -> None:
    print(f"Prometheus on {url} scrapes http://{target}/metrics")
    if not _answers(target):
        print("Nothing answers there yet: start the server with `make serve`, or name another: --target HOST:PORT")
    print("Good questions to ask it:")
    for name, query in QUERIES.items():
        print(f"  {name:<32}  {query}")
    print("Ctrl-C stops it and removes what it has stored.", flush=True)


def _answers(target: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _interrupt() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="127.0.0.1:9464", help="the server's metrics port (default: %(default)s)")
    parser.add_argument("--port", type=int, default=9090, help="of Prometheus; 0 = any free one (default: %(default)s)")
    parser.add_argument("--scrape-interval", help="such as 1s; default: that of deploy/prometheus.yml")
    return parser


if __name__ == "__main__":
    sys.exit(main())
