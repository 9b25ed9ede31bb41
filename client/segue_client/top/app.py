"""The view as a program: asks at every interval, shows the answer, obeys keys."""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import replace
from typing import ClassVar

from textual import on
from textual.app import App
from textual.binding import Binding, BindingType

from segue_client.cli.text import printable
from segue_client.errors import SegueError
from segue_client.top.figures import span
from segue_client.top.help_screen import HelpScreen
from segue_client.top.sessions_screen import SessionsScreen, View
from segue_client.top.source import ServerSource, Source
from segue_client.top.turns_screen import TurnsScreen

_INTERRUPTED, _TERMINATED = 130, 143  # exit codes


class TopApp(App[None]):
    """Shows what a source tells, until it is left."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Static { height: auto; width: 100%; text-wrap: nowrap; text-overflow: ellipsis; }
    #title { background: $primary-background; }
    #facts { background: $primary-background; }
    #trouble { background: #d55e00; color: #ffffff; text-style: bold; display: none; }
    #filter { height: 1; display: none; }
    #filter-label { width: 7; text-style: bold; }
    Input { width: 1fr; }
    Slots { height: 1fr; scrollbar-size-vertical: 1; overflow-x: hidden; background: $background; }
    #request { height: 1; }
    HelpScreen { align: center middle; background: $background 60%; }
    #help { width: 62; height: auto; max-height: 100%; border: round $primary; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "pause", "Pause"),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "interrupt", show=False, priority=True),
    ]

    def __init__(self, source: Source, target: str, interval: float) -> None:
        super().__init__()
        self._source = source
        self._view = View(target, interval)
        self._silent_since: float | None = None
        self._sessions = SessionsScreen(self._view)

    def on_mount(self) -> None:
        """Begins to ask."""
        self.push_screen(self._sessions)
        self.run_worker(self._follow())

    async def _follow(self) -> None:
        while True:
            if not self._view.paused:
                await self._look()
            await asyncio.sleep(self._view.interval)

    async def _look(self) -> None:
        try:
            snapshot = await self._source.snapshot()
        except SegueError as error:
            self._update(trouble=self._trouble(error))
            return
        self._silent_since = None
        if not self._view.paused:  # it may have been paused while the answer was on its way
            self._view.history.add(snapshot)
            self._update(snapshot=snapshot, trouble="")

    def _trouble(self, error: SegueError) -> str:
        if self._silent_since is None:
            self._silent_since = time.monotonic()
        silent = span(time.monotonic() - self._silent_since)
        return printable(f"No answer from {self._view.target} for {silent}, trying again: {error.message or error}")

    def _update(self, **changes: object) -> None:
        self._view = replace(self._view, **changes)  # type: ignore[arg-type]  # its own fields
        self._sessions.show(self._view)

    @on(SessionsScreen.Chosen)
    def _open_turns(self, event: SessionsScreen.Chosen) -> None:
        self.push_screen(TurnsScreen(self._source, event.session_id, self._view.interval))

    def action_pause(self) -> None:
        """Shows nothing new, until it is pressed again."""
        self._update(paused=not self._view.paused)
        for screen in self.screen_stack:
            if isinstance(screen, TurnsScreen):
                screen.paused = self._view.paused

    def action_help(self) -> None:
        """The keys, and what the words mean."""
        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen())

    def action_interrupt(self) -> None:
        """Ctrl-C."""
        self.exit(return_code=_INTERRUPTED)


async def run(target: str, admin_target: str | None, interval: float) -> int:
    """Shows a server until the user leaves; returns the exit code."""
    async with ServerSource(target, admin_target) as source:
        app = TopApp(source, target, interval)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, lambda: app.exit(return_code=_TERMINATED))
        await app.run_async()
        return app.return_code or 0
