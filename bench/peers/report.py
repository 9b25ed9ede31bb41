"""Results as tables: systems down, one table for each kind of figure; the same for the terminal and as Markdown."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from peers.results import Results, Round, Sample

WIDTH: Final = 160
NOTES: Final = (
    "Each cell: median (smallest..largest) of the rounds, and the median share of the limit measured in the same round:"
    " the time this machine needs to read the bytes of the system's own weights and KV, or for the model's int8"
    " products, whichever is longer, over the time taken. How to read this: docs/bench.md."
)


def show(results: Results, console: Console) -> None:
    for line in _head(results):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for title in dict.fromkeys(sample.table for sample in results.samples):
        console.print(f"\n**{title}**\n", markup=False, highlight=False)
        console.print(_table(results, title))


def write(results: Results, folder: Path) -> None:
    """table.md and results.json."""
    folder.mkdir(parents=True, exist_ok=True)
    results.write(folder / "results.json")
    with (folder / "table.md").open("w", encoding="utf-8") as file:
        show(results, Console(file=file, width=WIDTH))


def _head(results: Results) -> list[str]:
    lines = [f"{results.machine}; {results.threads} threads for each system.", *_conditions(results.rounds)]
    lines += [f"- {name}: {shown}" for name, shown in results.systems.items()]
    lines += [f"- {name}: missing, {why}" for name, why in results.missing.items()]
    return [*lines, "", NOTES]


def _conditions(rounds: Sequence[Round]) -> list[str]:
    if not rounds:
        return []
    loads = [one.load for one in rounds]
    reads = {model: [one.read / 1e9 for one in rounds if one.model == model] for model in {one.model for one in rounds}}
    read = ", ".join(f"{_spread(values)} ({model})" for model, values in sorted(reads.items()))
    integer, bfloat16 = ([getattr(one, name) / 5e8 for one in rounds] for name in ("integer", "bfloat16"))
    return [
        f"{rounds[0].began} to {rounds[-1].began}; load average {min(loads):.1f}..{max(loads):.1f}.",
        f"Reading as many bytes as the weights have, GB/s: {read}.",
        f"Products: int8 {_spread(integer)} GOP/s, bfloat16 {_spread(bfloat16)} GFLOP/s.",
    ]


def _table(results: Results, title: str) -> Table:
    columns = results.columns(title)
    table = Table("", *columns, box=box.MARKDOWN)
    for system in results.systems:
        cells = [results.cell(system, title, column) for column in columns]
        if any(cells):
            table.add_row(system, *map(_cell, cells))
    return table


def _cell(samples: Sequence[Sample]) -> str:
    if not samples:
        return "-"
    text = _spread([sample.value for sample in samples])
    shares = [sample.share for sample in samples if sample.share is not None]
    return f"{text}, {statistics.median(shares):.0%}" if shares else text


def _spread(values: Sequence[float], digits: int | None = None) -> str:
    middle = statistics.median(values)
    if digits is None:
        digits = 0 if middle >= 100 else 1
    shown = f"{middle:,.{digits}f}"
    return shown if len(values) == 1 else f"{shown} ({min(values):,.{digits}f}..{max(values):,.{digits}f})"
