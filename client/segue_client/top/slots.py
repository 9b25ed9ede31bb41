"""A table whose rows stay while what stands in them changes: nothing flickers and the scroll does not jump."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.text import Text
from textual.coordinate import Coordinate
from textual.widgets import DataTable


class Head(NamedTuple):
    """A column: title and cells."""

    title: str
    width: int


class Slots(DataTable[Text]):
    """Shows rows by key; the cursor follows the row it is on, but stays on top when it is there."""

    def __init__(self) -> None:
        super().__init__(cursor_type="row", cell_padding=0, zebra_stripes=False)
        self._heads: list[Head] = []
        self._keys: list[str] = []
        self._shown: list[Sequence[Text]] = []

    @property
    def chosen(self) -> str | None:
        """The key of the row the cursor is on; None without rows."""
        return self._keys[self.cursor_row] if self.cursor_row < len(self._keys) else None

    def show(self, heads: Sequence[Head], rows: Sequence[tuple[str, Sequence[Text]]]) -> None:
        """Takes what is to be seen from now on: columns, and rows with their keys."""
        followed = self.chosen if self.cursor_row > 0 else None
        keys, cells = [key for key, _ in rows], [row for _, row in rows]
        with self.app.batch_update():
            if list(heads) != self._heads:
                self._begin_anew(heads)
            self._fit(len(cells))
            for index, row in enumerate(cells):
                self._write(index, row)
            self._keys, self._shown = keys, cells
            if followed in keys:
                self.move_cursor(row=keys.index(followed))

    def _begin_anew(self, heads: Sequence[Head]) -> None:
        row = self.cursor_row
        self.clear(columns=True)
        self._heads, self._shown = list(heads), []
        for title, width in heads:
            self.add_column(Text(title), width=width + 1)
        self._fit(len(self._keys))
        self.move_cursor(row=row)

    def _fit(self, count: int) -> None:
        blank = [Text()] * len(self._heads)
        while len(self._shown) < count:
            self.add_row(*blank)
            self._shown.append(blank)
        while len(self._shown) > count:
            self._shown.pop()
            self.remove_row(self.coordinate_to_cell_key(Coordinate(len(self._shown), 0)).row_key)

    def _write(self, index: int, row: Sequence[Text]) -> None:
        for column, (old, new) in enumerate(zip(self._shown[index], row, strict=True)):
            if old != new:
                self.update_cell_at(Coordinate(index, column), new)
