"""What is shown while a test runs: one line that moves, and one that stays for each point."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from segue_client.load.results import Outcome, Point, Request
from segue_client.load.summary import Spread, Summary, summarize_requests

_REFRESHES = 2  # a second: drawing takes time from measuring


class ProgressView:
    """Shows progress on a console; where that is no terminal, only the lines that stay."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.fields[counts]}", markup=False),
            console=console,
            transient=True,
            refresh_per_second=_REFRESHES,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._requests: list[Request] = []
        self._sent = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def point_started(self, label: str) -> None:
        """A point begins."""
        self._requests, self._sent = [], 0
        self._task = self._progress.add_task(label, total=None, counts="")

    def sent(self) -> None:
        """A request is on its way."""
        self._sent += 1
        self._update()

    def ended(self, request: Request) -> None:
        """A request is over."""
        self._requests.append(request)
        self._update()

    def _update(self) -> None:
        if self._task is not None:
            done = len(self._requests)
            self._progress.update(self._task, counts=f"{self._sent - done} running, {done} done")

    def point_ended(self, point: Point) -> None:
        """A point is over: its line stays."""
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
        self._console.print(point_line(point, summarize_requests(self._requests, point)), markup=False, soft_wrap=True)


def point_line(point: Point, summary: Summary) -> str:
    """A point's figures in one line."""
    parts = [
        f"{point.label}: {summary.requests} requests",
        f"{summary.token_rate:.1f} tokens/s",
        _milliseconds("TTFT", summary.ttft),
        _milliseconds("inter-token", summary.inter_token),
        *(f"{count} {outcome}" for outcome, count in summary.outcomes.items() if outcome is not Outcome.OK),
    ]
    if point.verdict is not None:
        parts.append("held" if point.verdict.held else "not held")
    if point.tester.bottleneck:
        parts.append(f"THE TESTER WAS THE BOTTLENECK: {point.tester.bottleneck}")
    return " · ".join(part for part in parts if part)


def _milliseconds(name: str, spread: Spread | None) -> str:
    if spread is None:
        return ""
    return f"{name} p50 {spread.p50 * 1e3:.1f}, p99 {spread.p99 * 1e3:.1f} ms"
