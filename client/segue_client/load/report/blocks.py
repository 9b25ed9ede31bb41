"""What a report is made of, whoever shows it: sections of tables and charts, as plain values.

`sections.py` makes them of results. `terminal.py` prints the tables; `html.py` shows both, the charts through
`plots.py`. Text is as it came: each of the three escapes what its medium needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under a title; the first column names the row, the others are figures unless `prose` is set."""

    title: str
    header: Row
    rows: tuple[Row, ...]
    note: str = ""
    prose: bool = False
    folded: bool = False  # a page shows it on demand


class Unit(Enum):
    """How an axis writes its numbers."""

    PLAIN = ""
    SECONDS = "s"
    SHARE = "%"


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a chart."""

    title: str
    unit: Unit = Unit.PLAIN
    log: bool = False
    from_zero: bool = True  # if it is not log
    ticks_at_values: bool = False  # they are few, and chosen by whoever ran the test


class Style(Enum):
    """How a curve is drawn."""

    LINE = "line"  # points, joined
    STEP = "step"  # holds its value until the next x
    DOTS = "dots"  # points alone
    SEGMENTS = "segments"  # thick, broken where x is None
    CROSSES = "crosses"  # points alone, that something is wrong with


@dataclass(frozen=True, slots=True)
class Curve:
    """Points (x[i], y[i]); None breaks the line."""

    name: str
    x: tuple[float | None, ...]
    y: tuple[float | None, ...]
    style: Style = Style.LINE
    hue: int | None = None  # the same number, the same colour; None = the next one
    dashed: bool = False
    hover: tuple[str, ...] = ()  # a line of text for each point

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(f"the curve {self.name!r} has {len(self.x)} x and {len(self.y)} y")


@dataclass(frozen=True, slots=True)
class Limit:
    """A horizontal line that must not be crossed."""

    name: str
    y: float


@dataclass(frozen=True, slots=True)
class Span:
    """A shaded stretch of the x axis."""

    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over two axes. The table holds the same for those who do not see them."""

    title: str
    x: Axis
    y: Axis
    curves: tuple[Curve, ...]
    table: Table
    limits: tuple[Limit, ...] = ()
    spans: tuple[Span, ...] = ()
    span_name: str = ""  # what the shade stands for
    note: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a report under its own heading."""

    title: str
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    statement: str = ""  # the answer in one sentence, where there is one
