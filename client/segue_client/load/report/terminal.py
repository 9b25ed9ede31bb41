"""A report at the terminal: the tables, the warnings in red, the answer first."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table as RichTable
from rich.text import Text

from segue_client.cli.text import printable
from segue_client.load.report.blocks import Section, Table

WIDTH_OF_A_PIPE = 200  # nobody's window wraps it
WIDTH_OF_A_FIGURE = 12  # where room is short, headers are broken, and figures are not


def console() -> Console:
    """Stdout, as wide as the window; wide enough for every table where there is none."""
    out = Console(markup=False, highlight=False, emoji=False)
    return out if out.is_terminal else Console(markup=False, highlight=False, emoji=False, width=WIDTH_OF_A_PIPE)


def show(sections: Iterable[Section], out: Console) -> None:
    """Prints the sections' tables. Those that only repeat a chart belong to the page."""
    for section in sections:
        for warning in section.warnings:
            out.print(Panel(Text(printable(warning)), style="bold red", title="WARNING"))
        if section.statement:
            out.print(Text(printable(section.statement), style="bold"))
            out.print()
        for table in section.tables:
            if table.rows:
                out.print(as_rich(table))
                out.print()
        for note in section.notes:
            out.print(Text(printable(f"Note: {note}")))


def as_rich(table: Table) -> RichTable:
    """A table for rich, whose cells are text and nothing else."""
    named = any(table.header)
    shown = RichTable(
        title=Text(table.title, style="bold"),
        title_justify="left",
        caption=Text(printable(table.note), style="dim") if table.note else None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_header=named,
        pad_edge=False,
        collapse_padding=True,
    )
    for index, name in enumerate(table.header):
        left = index == 0 or table.prose
        width = max((len(row[index]) for row in table.rows), default=0)
        shown.add_column(
            Text(name),
            justify="left" if left else "right",
            overflow="fold",
            min_width=width if width <= WIDTH_OF_A_FIGURE else None,
        )
    for row in table.rows:
        shown.add_row(*(Text(printable(cell)) for cell in row))
    return shown
