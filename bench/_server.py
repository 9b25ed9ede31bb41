"""What the benchmarks and the demo share: a server process on 127.0.0.1, and tables of medians with their spread."""

import argparse
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from segue_client import Client
from segue_client.load.summary import percentile

START_TIMEOUT = 120.0  # seconds
STOP_TIMEOUT = 60.0
FREE_PORTS = ("--port", "0", "--admin-port", "0", "--metrics-port", "0")


class Addresses(NamedTuple):
    """Where the server listens."""

    grpc: str
    metrics: str


class ServerLog:
    """Reads what a server logs, for as long as it runs: a full pipe would stop it."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def find(self, pattern: str) -> str:
        """The first group of `pattern`, once a line matches it. Raises RuntimeError when the server ends before."""
        with self._news:
            self._news.wait_for(lambda: self._match(pattern) or self._ended, START_TIMEOUT)
            if found := self._match(pattern):
                return found[1]
        raise RuntimeError("the server did not start:\n" + "".join(self._lines))

    def _match(self, pattern: str) -> "re.Match[str] | None":
        return next((found for line in self._lines if (found := re.search(pattern, line))), None)

    def _read(self) -> None:
        for line in self._process.stderr or ():
            with self._news:
                self._lines.append(line)
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def join(self) -> None:
        self._thread.join(STOP_TIMEOUT)


@contextmanager
def running_server(*words: str, program: Sequence[str] = ("-m", "segue_server")) -> Iterator[Addresses]:
    """A server on free ports of 127.0.0.1, started with `words`, and stopped by SIGTERM at the end.

    `program`: what Python runs, if not the server as it is.

    SIGTERM ends this process as Ctrl-C does, so that it leaves no server behind.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    command = [sys.executable, *program, *FREE_PORTS, *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        log = ServerLog(process)
        try:
            yield Addresses(log.find(r"serving .* on (\S+)$"), log.find(r"metrics on (\S+)$"))
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
            log.join()


def parser(description: str | None) -> argparse.ArgumentParser:
    """For `parse_known_args`: what a benchmark does not know goes to its server."""
    return argparse.ArgumentParser(
        description=description,
        epilog="Other options go to the server, for example: --dtype bfloat16 --threads 1 --runner native",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def random_tokens(vocabulary: int, count: int) -> list[int]:
    """A prompt that no other prompt begins like, so that nothing of it is reused."""
    return random.choices(range(vocabulary), k=count)  # noqa: S311 - no secret


def print_served(target: str) -> None:
    """The runner and the model that the figures belong to."""
    with Client(target) as client:
        print(f"{client.server_info().build}, {client.model_info().model_id}")


def spread(values: Sequence[float], digits: int = 1) -> str:
    """The median, and the smallest and the largest of the runs."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}..{max(values):.{digits}f})"


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least the share `q` of all is not above."""
    return percentile(sorted(values), q)


def read(url: str) -> str:
    """What a page of our own server says."""
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - an address of our own server
        text: str = answer.read().decode()
    return text


def cpu_seconds(metrics: str) -> float:
    """User and system time of a server so far; `metrics` is the URL of its metrics."""
    found = re.search(r"^process_cpu_seconds_total\S* (\S+)$", read(metrics), re.MULTILINE)
    if found is None:
        raise RuntimeError("the server does not tell its CPU time")
    return float(found[1])


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their widest cell, numbers to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(head, *rows, strict=True)]
    for row in (head, ["-" * width for width in widths], *rows):
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
