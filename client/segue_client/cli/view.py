"""What a turn looks like while it streams."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Protocol, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from segue_client import Event, Finished, PrefillProgress, Tokens, Turn
from segue_client.cli.text import event_line, printable


class TurnView(Protocol):
    """Shows the events of one turn."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...
    def show(self, event: Event) -> None:
        """Shows one event."""


class TextView:
    """The text on stdout as it comes; a bar on stderr while a long prompt is prefilled, if that is a terminal."""

    def __init__(self, stderr: Console) -> None:
        self._raw = not sys.stdout.isatty()
        self._bar = PrefillBar(stderr)
        self._at_line_start = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()
        if not self._at_line_start and not self._raw:
            typer.echo()

    def show(self, event: Event) -> None:
        match event:
            case PrefillProgress():
                self._bar.update(event)
            case Tokens() if event.text:
                self._bar.stop()
                typer.echo(event.text if self._raw else printable(event.text), nl=False)
                self._at_line_start = event.text.endswith("\n")
            case _:
                pass


class JsonView:
    """Every event as a line of JSON on stdout."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    def show(self, event: Event) -> None:
        typer.echo(event_line(event))


class PrefillBar:
    """Appears with the first chunk of a prefill that needs more than one."""

    def __init__(self, stderr: Console) -> None:
        self._progress = Progress(
            TextColumn("prefill"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=stderr,
            transient=True,
            disable=not stderr.is_terminal,
        )
        self._task: TaskID | None = None

    def update(self, event: PrefillProgress) -> None:
        """Moves the bar."""
        if self._task is None and event.processed_tokens < event.total_tokens:
            self._progress.start()
            self._task = self._progress.add_task("prefill", total=event.total_tokens)
        if self._task is not None:
            self._progress.update(self._task, completed=event.processed_tokens)

    def stop(self) -> None:
        """Takes the bar away."""
        if self._task is not None:
            self._progress.stop()
            self._task = None


def play(turn: Turn, view: TurnView) -> None:
    """Shows a turn to its end. Interrupted, it cancels the turn and shows how that ended, if the server has said so."""
    ended = False
    try:
        with view, turn:
            for event in turn.events():
                view.show(event)
                ended = isinstance(event, Finished)
    except KeyboardInterrupt:
        if turn.finished is not None and not ended:
            view.show(turn.finished)
        raise
