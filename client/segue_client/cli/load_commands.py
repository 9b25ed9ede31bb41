"""What the commands of `segue load` do: options in, an experiment, results out."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from os import environ
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from segue_client.cli import load_meaning as meaning
from segue_client.cli.exits import reporting
from segue_client.cli.load_options import (
    ContextOptions,
    LoopOptions,
    MixOptions,
    ReportOptions,
    SpanOptions,
    StreamsOptions,
    SweepOptions,
    TargetOptions,
    WorkloadOptions,
)
from segue_client.cli.text import printable
from segue_client.load import experiments, segue_target
from segue_client.load.driver import Driver
from segue_client.load.metadata import describe
from segue_client.load.progress import ProgressView
from segue_client.load.report.sections import sections
from segue_client.load.report.terminal import console, show
from segue_client.load.results import Experiment, Outcome, Results
from segue_client.load.target import Clock, Settings, Target, TargetError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

OPENAI = "openai="

Load = Callable[[Driver], Awaitable[None]]


def run(
    target: TargetOptions, work: WorkloadOptions, loop: LoopOptions, span: SpanOptions, report: ReportOptions
) -> None:
    """See `segue load run`."""
    seed, length = _seed(report), meaning.span(span)
    words = _words(loop, span)
    if loop.trace is not None:
        trace = meaning.trace(loop, loop.trace, seed)
        load: Load = lambda driver: experiments.replay(driver, trace, length)  # noqa: E731  one line in each branch
    else:
        asked, asking = meaning.workload(work, seed), meaning.loop(loop, seed)
        words |= _words(work)
        load = lambda driver: experiments.run(driver, asked, asking, length)  # noqa: E731
    test = Measurement(Experiment.RUN, target, meaning.settings(target, work), seed, words)
    test.carry_out(load, report)


def context(target: TargetOptions, grid: ContextOptions, report: ReportOptions) -> None:
    """See `segue load context`."""
    seed = _seed(report)
    meaning.grid(grid, seed, None)  # refuses what is wrong before anything is sent
    test = Measurement(Experiment.CONTEXT, target, meaning.settings(target, grid=grid), seed, _words(grid))
    test.carry_out(
        lambda driver: experiments.context(driver, meaning.grid(grid, seed, driver.target.info.context_limit)), report
    )


def concurrency(
    target: TargetOptions, work: WorkloadOptions, streams: StreamsOptions, span: SpanOptions, report: ReportOptions
) -> None:
    """See `segue load concurrency`."""
    seed, length = _seed(report), meaning.span(span)
    asked, counts = meaning.workload(work, seed), meaning.streams(streams)
    words = _words(work, streams, span)
    test = Measurement(Experiment.CONCURRENCY, target, meaning.settings(target, work), seed, words)
    test.carry_out(lambda driver: experiments.concurrency(driver, asked, counts, length), report)


def mixed(target: TargetOptions, mix: MixOptions, span: SpanOptions, report: ReportOptions) -> None:
    """See `segue load mixed`."""
    seed, length = _seed(report), meaning.span(span)
    both = meaning.mix(mix, seed)
    test = Measurement(Experiment.MIXED, target, meaning.settings(target), seed, _words(mix, span))
    test.carry_out(lambda driver: experiments.mixed(driver, both, length), report)


def sweep(
    target: TargetOptions, work: WorkloadOptions, search: SweepOptions, span: SpanOptions, report: ReportOptions
) -> None:
    """See `segue load sweep`."""
    seed, length = _seed(report), meaning.span(span)
    asked, (limits, objectives) = meaning.workload(work, seed), meaning.search(search)
    loop = meaning.open_loop("--start", search.start, search.arrivals.value, seed)
    words = _words(work, search, span)
    test = Measurement(Experiment.SWEEP, target, meaning.settings(target, work), seed, words)
    test.carry_out(lambda driver: experiments.sweep(driver, asked, loop, length, limits, objectives), report)


def _seed(report: ReportOptions) -> int:
    return random.SystemRandom().randrange(1 << 31) if report.seed is None else report.seed


def _words(*groups: DataclassInstance) -> dict[str, str]:
    """The options as they were given, for the records."""
    given = {name: value for group in groups for name, value in asdict(group).items()}
    return {name: str(value) for name, value in given.items() if value is not None}


_WHO_IS_ASKED = {"target", "model"}  # the records tell them apart from what is asked: two servers can be compared


class Measurement:
    """One experiment, from its options to its report."""

    def __init__(
        self,
        experiment: Experiment,
        target: TargetOptions,
        settings: Settings,
        seed: int,
        workload: Mapping[str, str],
    ) -> None:
        self._experiment = experiment
        self._target = target
        self._settings = settings
        self._seed = seed
        how_asked = {name: word for name, word in _words(target).items() if name not in _WHO_IS_ASKED}
        self._workload = {**how_asked, **workload}
        self._started = datetime.now(UTC)
        self._clock = Clock()

    def carry_out(self, load: Load, report: ReportOptions) -> None:
        """Connects, loads, reports. Ends the command with exit code 1 when no request that counts has gone well."""
        meaning.check_outputs(report)
        with reporting(as_json=False):
            try:
                results = asyncio.run(self._measure(load))
            except TargetError as error:
                typer.echo(printable(f"segue: {error}"), err=True)
                raise typer.Exit(1) from None
        _report(results, report)
        if not any(request.outcome is Outcome.OK and not request.warm_up for request in results.requests):
            raise typer.Exit(1)

    async def _measure(self, load: Load) -> Results:
        async with self._connected() as target:
            with ProgressView(Console(stderr=True, highlight=False)) as view:
                driver = Driver(target, self._clock, self._settings.timeout, view)
                try:
                    await load(driver)
                except asyncio.CancelledError:  # Ctrl-C: what was measured until now is kept
                    driver.notes.append("interrupted before the test was over")
            return self._results(driver)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Target]:
        address = self._target.target
        if not address.startswith(OPENAI):
            async with segue_target.connected(address, self._settings, self._clock) as segue:
                yield segue
            return
        from segue_client.load import openai_target  # noqa: PLC0415  only this target needs httpx2

        endpoint = openai_target.Endpoint(
            url=address.removeprefix(OPENAI), model=self._target.model, api_key=environ.get("OPENAI_API_KEY", "")
        )
        async with openai_target.connected(endpoint, self._settings, self._clock) as peer:
            yield peer

    def _results(self, driver: Driver) -> Results:
        metadata = describe(sys.argv, self._seed, self._started, driver.target.info, self._workload)
        return Results(
            experiment=self._experiment,
            metadata=metadata,
            points=tuple(driver.points),
            requests=tuple(driver.requests),
            notes=tuple(driver.notes),
        )


def _report(results: Results, options: ReportOptions) -> None:
    show(sections(results), console())
    if options.json is not None:
        _write("--json", options.json, results.to_json())

    if options.html is not None:
        from segue_client.load.report.html import page  # noqa: PLC0415  the plotting library, which only this needs

        _write("--html", options.html, page(results).encode())


def _write(option: str, path: Path, document: bytes) -> None:
    try:
        path.write_bytes(document)
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}", param_hint=option) from None
