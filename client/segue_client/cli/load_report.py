"""`segue load report` and `segue load compare`: what there is to read in the results of tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from segue_client.cli.extras import extra_load
from segue_client.cli.text import printable

if TYPE_CHECKING:
    from segue_client.load.results import Results

WRONG_USAGE, WORSE = 2, 1

ResultsFile = Annotated[Path, typer.Argument(exists=True, dir_okay=False, readable=True, metavar="FILE.json")]


def report(
    file: ResultsFile,
    html: Annotated[Path | None, typer.Option(dir_okay=False, help="Write a page with plots to this file.")] = None,
) -> None:
    """What a test has left with --json, as tables, and as a page with plots."""
    with extra_load():
        from segue_client.load.report.html import page  # noqa: PLC0415
        from segue_client.load.report.sections import sections  # noqa: PLC0415
        from segue_client.load.report.terminal import console, show  # noqa: PLC0415

    results = _read(file)
    show(sections(results), console())
    if html:
        _write(html, page(results))


def compare(
    before: ResultsFile,
    after: ResultsFile,
    force: Annotated[bool, typer.Option("--force", help="Compare even if the workloads differ.")] = False,
    fail_if_worse: Annotated[
        float | None,
        typer.Option(min=0, metavar="PERCENT", help="Exit code 1 if a figure is worse by more, beyond noise."),
    ] = None,
    confidence: Annotated[float, typer.Option(min=0.5, max=0.999, help="Of the intervals.")] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Of the resampling.")] = 0,
) -> None:
    """What changed between two results, and whether it is more than noise."""
    with extra_load():
        from segue_client.load.report import compare as comparison  # noqa: PLC0415
        from segue_client.load.report.terminal import console, show  # noqa: PLC0415

    precision = comparison.Precision(seed=seed, confidence=confidence)
    try:
        found = comparison.compare(_read(before), _read(after), precision, force=force)
    except comparison.ComparisonError as error:
        raise _refused(str(error)) from None
    show(found.sections(), console())
    if fail_if_worse is not None and (worse := found.worse_by(fail_if_worse)):
        names = ", ".join(f"{change.point} {change.metric.name}" for change in worse)
        typer.echo(printable(f"segue: worse by more than {fail_if_worse:g} %: {names}"), err=True)
        raise typer.Exit(WORSE)


def _read(file: Path) -> Results:
    """The results in a file; ends the command when there are none in it."""
    from segue_client.load.results import Results, ResultsError  # noqa: PLC0415

    try:
        return Results.from_json(file.read_bytes())
    except ResultsError as error:
        raise _refused(f"{file}: {error}") from None


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{file}: {error.strerror}", param_hint="--html") from None


def _refused(message: str) -> typer.Exit:
    typer.echo(printable(f"segue: {message}"), err=True)
    return typer.Exit(WRONG_USAGE)
