"""Documents and rows, for people and for pipes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping

import typer
from rich.console import Console
from rich.table import Table

from segue_client.cli.text import printable


def print_document(document: Mapping[str, object], as_json: bool) -> None:
    """A document as JSON, or a line for each of its values."""
    if as_json:
        print_json(document)
    else:
        print_rows(("", ""), _flattened(document))


def _flattened(document: Mapping[str, object], above: str = "") -> Iterable[tuple[str, str]]:
    for key, value in document.items():
        path = f"{above}{key}"
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{path}.")
        elif isinstance(value, list):
            yield path, ", ".join(map(str, value))
        else:
            yield path, str(value)


def print_rows(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """Columns at a terminal; to a pipe one line a row, tabs between its fields."""
    clean = [tuple(map(printable, row)) for row in ([header] if any(header) else []) + list(rows)]
    if not sys.stdout.isatty():
        typer.echo("\n".join("\t".join(row) for row in clean))
        return
    table = Table.grid(padding=(0, 2))
    for row in clean:
        table.add_row(*row)
    Console(markup=False, highlight=False, emoji=False).print(table)


def print_json(document: object) -> None:
    """One document."""
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
