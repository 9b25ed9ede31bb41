"""The table of sessions: columns, order, filter. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from segue_client.cli.text import printable
from segue_client.top.figures import compact_bytes, shortened, span
from segue_client.top.snapshot import SessionRow

_FOR_EVER = float("inf")
GAP = 1  # cell between two columns


@dataclass(frozen=True, slots=True)
class Column:
    """One column: how it is told and what it is sorted by."""

    key: str
    title: str
    width: int  # cells; 0 = what is left
    text: Callable[[SessionRow], str]
    rank: Callable[[SessionRow], str | float]
    number: bool = True  # right-aligned, and greatest first
    from_width: int = 0  # in less room the column is left out


COLUMNS = (
    Column("id", "id", 0, lambda s: s.session_id, lambda s: s.session_id, number=False),
    Column("state", "state", 7, lambda s: s.state, lambda s: s.state, number=False),
    Column("position", "pos", 6, lambda s: str(s.position), lambda s: s.position),
    Column("bytes", "KV", 5, lambda s: compact_bytes(s.used), lambda s: s.used),
    Column("shared", "shared", 7, lambda s: compact_bytes(s.shared), lambda s: s.shared),
    Column("tier", "tier", 6, lambda s: s.tier, lambda s: s.tier, number=False),
    Column("idle", "idle", 5, lambda s: span(s.idle), lambda s: -1 if s.idle is None else s.idle),
    Column("ttl", "TTL", 5, lambda s: span(s.ttl), lambda s: _FOR_EVER if s.ttl is None else s.ttl),
    Column("cached", "cached", 7, lambda s: str(s.cached), lambda s: s.cached, from_width=110),
    Column("turns", "turns", 6, lambda s: str(s.turns), lambda s: s.turns, from_width=110),
    Column("pinned", "pin", 4, lambda s: "pin" if s.pinned else "", lambda s: s.pinned, from_width=110),
    Column("name", "name", 18, lambda s: s.name, lambda s: s.name, number=False, from_width=130),
)


def columns_for(width: int) -> list[Column]:
    """The columns for so many cells; the first one gets what the others leave."""
    shown = [column for column in COLUMNS if column.from_width <= width]
    taken = sum(column.width + GAP for column in shown[1:])
    return [replace(shown[0], width=max(width - taken - GAP, 8)), *shown[1:]]


@dataclass(frozen=True, slots=True)
class Order:
    """What the table is sorted by. Without `reverse`, numbers run down and words up."""

    key: str = "idle"
    reverse: bool = True  # those in use, or used just now, first

    def by(self, key: str) -> Order:
        """By a column; by the one it is sorted by already: the other way round."""
        return self.turned() if key == self.key else Order(key, reverse=False)

    def turned(self) -> Order:
        """The other way round."""
        return replace(self, reverse=not self.reverse)

    def moved(self, steps: int, columns: Iterable[Column]) -> Order:
        """By a column further right or left; from the last one to the first."""
        keys = [column.key for column in columns]
        at = keys.index(self.key) if self.key in keys else 0
        return Order(keys[(at + steps) % len(keys)], reverse=False)

    def sort(self, rows: Iterable[SessionRow]) -> list[SessionRow]:
        """Sorted; rows that rank the same, by id."""
        column = next(column for column in COLUMNS if column.key == self.key)
        named = sorted(rows, key=lambda row: row.session_id)
        return sorted(named, key=column.rank, reverse=column.number != self.reverse)

    def arrow(self, column: Column) -> str:
        """Beside the title of the column it is sorted by: down when the greatest comes first."""
        if column.key != self.key:
            return ""
        return "▼" if column.number != self.reverse else "▲"


def matching(rows: Iterable[SessionRow], pattern: str) -> list[SessionRow]:
    """Rows in which every word of the pattern is found: in id, state, tier, name or a label as key=value."""
    words = pattern.lower().split()
    return [row for row in rows if all(word in _searched(row) for word in words)]


def _searched(row: SessionRow) -> str:
    labels = (f"{key}={value}" for key, value in row.labels.items())
    return "\n".join((row.session_id, row.state, row.tier, row.name, *labels)).lower()


def heading(column: Column, order: Order) -> str:
    """The title of a column, in its place, with an arrow where the table is sorted by it."""
    return _placed(column, column.title + order.arrow(column))


def cell(column: Column, row: SessionRow) -> str:
    """The text of a cell in its place, on one line and without what could steer the terminal."""
    text = printable(column.text(row)).replace("\n", " ").replace("\t", " ")
    return _placed(column, shortened(text, column.width))


def _placed(column: Column, text: str) -> str:
    return text.rjust(column.width) if column.number else text.ljust(column.width)
