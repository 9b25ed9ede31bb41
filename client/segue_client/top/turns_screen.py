"""The second screen: one session and its turns."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Static

from segue_client.cli.text import printable
from segue_client.errors import NotFound, SegueError
from segue_client.top import panels
from segue_client.top.slots import Head, Slots
from segue_client.top.snapshot import SessionTurns
from segue_client.top.source import Source
from segue_client.top.turns import REQUEST_FROM, columns_for


class TurnsScreen(Screen[None]):
    """Follows one session for as long as it is open."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,backspace,left", "app.pop_screen", "Sessions")]

    def __init__(self, source: Source, session_id: str, interval: float) -> None:
        super().__init__()
        self._source, self._session_id, self._interval = source, session_id, interval
        self._found: SessionTurns | None = None
        self._facts = Static(session_id, id="facts", markup=False)
        self._trouble = Static(id="trouble", markup=False)
        self._table = Slots()
        self._request = Static(id="request", markup=False)
        self.paused = False

    def compose(self) -> ComposeResult:
        """The lines, from above."""
        yield from (self._facts, self._trouble, self._table, self._request)
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        """Begins to follow."""
        self._table.focus()
        self.run_worker(self._follow())

    def on_resize(self) -> None:
        """Columns fit the width."""
        self._draw()

    def on_data_table_row_highlighted(self, _: DataTable.RowHighlighted) -> None:
        """The request of the turn under the cursor stands below."""
        self._draw_request()

    async def _follow(self) -> None:
        gone = False
        while not gone:
            if not self.paused:
                gone = await self._look()
            await asyncio.sleep(self._interval)

    async def _look(self) -> bool:
        """Asks once; whether the session is gone for good."""
        try:
            self._found = await self._source.turns(self._session_id)
        except NotFound as error:
            self._say(f"The session is gone: {error.message}")
            return True
        except SegueError as error:
            self._say(f"No answer: {error}; trying again")
            return False
        self._say("")
        self._draw()
        return False

    def _say(self, trouble: str) -> None:
        self._trouble.update(Text(printable(trouble)))
        self._trouble.display = bool(trouble)

    def _draw(self) -> None:
        width = self.size.width
        if self._found is None or not width:
            return
        self._facts.update(panels.session_facts(self._found, width))
        columns = columns_for(width)
        heads = [Head(column.placed(column.title), column.width) for column in columns]
        newest_first = reversed(self._found.turns)
        rows = [(str(row.turn), [Text(column.placed(column.text(row))) for column in columns]) for row in newest_first]
        self._table.show(heads, rows)
        self._draw_request()

    def _draw_request(self) -> None:
        """Where the table has no room for request ids, the one under the cursor is told below it."""
        chosen = self._table.chosen
        turns = {str(row.turn): row for row in self._found.turns} if self._found else {}
        request = turns[chosen].request_id if chosen in turns else ""
        self._request.update(Text(f"turn {chosen}: request {request}" if request else "", "dim"))
        self._request.display = self.size.width < REQUEST_FROM
