"""The first screen: head lines, sparklines, cache, and the table of sessions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.message import Message
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Static

from segue_client.top import panels
from segue_client.top.history import History
from segue_client.top.slots import Head, Slots
from segue_client.top.snapshot import SessionRow, Snapshot
from segue_client.top.table import Column, Order, cell, columns_for, heading, matching

_LINES = ("title", "activity", "trouble", "rates", "cache")
_MOST_COLUMNS = 9  # that have a digit to sort by them


@dataclass(frozen=True, slots=True)
class View:
    """What the app knows at this moment."""

    target: str
    interval: float
    snapshot: Snapshot | None = None
    history: History = field(default_factory=History)
    trouble: str = ""  # why there is nothing newer
    paused: bool = False


class SessionsTable(Slots):
    """`Slots` whose footer tells what Enter does."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Turns")]


class SessionsScreen(Screen[None]):
    """What the server does, and its sessions."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort(1)", "Sort"),
        Binding("S", "sort(-1)", "Sort back", show=False),
        Binding("r", "turn_round", "Reverse"),
        # With priority it is obeyed before the key after it is handed to whoever has the focus.
        Binding("slash", "filter", "Filter", key_display="/", priority=True),
        Binding("escape", "unfilter", "No filter", show=False),
        *(Binding(str(digit), f"sort_by({digit})", show=False) for digit in range(1, _MOST_COLUMNS + 1)),
    ]

    class Chosen(Message):
        """A session whose turns are to be shown."""

        def __init__(self, session_id: str) -> None:
            super().__init__()
            self.session_id = session_id

    def __init__(self, view: View) -> None:
        super().__init__()
        self._view = view
        self._order = Order()
        self._lines = {
            name: Static(id=name, markup=False) for name in ("title", "activity", "trouble", "rates", "cache")
        }
        self._words = Input(placeholder="words found in id, state, tier, name or label", compact=True)
        self._filter = Horizontal(Static("filter ", id="filter-label"), self._words, id="filter")
        self._table = SessionsTable()

    def compose(self) -> ComposeResult:
        """The lines, from above."""
        yield from self._lines.values()
        yield self._filter
        yield self._table
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        """Keys go to the table."""
        self._table.focus()

    def on_resize(self) -> None:
        """Columns, bars and sparklines fit the width."""
        self._draw()

    def show(self, view: View) -> None:
        """Takes what is known from now on."""
        self._view = view
        self._draw()

    def _draw(self) -> None:
        view, width = self._view, self.size.width
        if not width:
            return
        self._lines["title"].update(panels.title(view.snapshot, view.target, width))
        self._lines["activity"].update(panels.activity(view.snapshot, view.interval, view.paused))
        self._lines["trouble"].update(Text(view.trouble))
        self._lines["trouble"].display = bool(view.trouble)
        self._lines["rates"].update(panels.rates(view.snapshot, view.history, width - 1))
        if view.snapshot:
            self._lines["cache"].update(panels.cache(view.snapshot.tiers, view.snapshot.note, width - 1))
        self._filter.display = bool(self._words.value) or self.focused is self._words
        self._draw_table(columns_for(width - 1))

    def _draw_table(self, columns: list[Column]) -> None:
        sessions = self._view.snapshot.sessions if self._view.snapshot else ()
        rows = self._order.sort(matching(sessions, self._words.value))
        heads = [Head(heading(column, self._order), column.width) for column in columns]
        self._table.show(heads, [(row.session_id, _cells(columns, row)) for row in rows])

    # ------------------------------------------------------------------------------------------------------- keys

    @on(DataTable.RowSelected)
    def _open(self) -> None:
        if self._table.chosen is not None:
            self.post_message(self.Chosen(self._table.chosen))

    def action_sort(self, steps: int) -> None:
        """By the next column, or the one before."""
        self._sort(self._order.moved(steps, columns_for(self.size.width - 1)))

    def action_sort_by(self, number: int) -> None:
        """By the column of that number; again: the other way round."""
        columns = columns_for(self.size.width - 1)
        if number <= len(columns):
            self._sort(self._order.by(columns[number - 1].key))

    @on(DataTable.HeaderSelected)
    def _sort_by_header(self, event: DataTable.HeaderSelected) -> None:
        self.action_sort_by(event.column_index + 1)

    def action_turn_round(self) -> None:
        """The other way round."""
        self._sort(self._order.turned())

    def _sort(self, order: Order) -> None:
        self._order = order
        self._draw()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:  # noqa: ARG002  textual's signature
        """Among the words of a filter, / is a letter."""
        return action != "filter" or self.focused is not self._words

    def action_filter(self) -> None:
        """Asks for words."""
        self._filter.display = True
        self.set_focus(self._words)

    def action_unfilter(self) -> None:
        """All sessions again."""
        self._words.value = ""
        self._leave_filter()

    @on(Input.Changed)
    def _filter_by(self) -> None:
        self._draw()

    @on(Input.Submitted)
    def _leave_filter(self) -> None:
        self.set_focus(self._table)
        self._draw()


def _cells(columns: list[Column], row: SessionRow) -> list[Text]:
    styles = {"state": panels.STATES.get(row.state, ""), "id": "bold"}
    return [Text(cell(column, row), styles.get(column.key, "")) for column in columns]
