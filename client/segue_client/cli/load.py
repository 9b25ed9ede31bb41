"""`segue load`: latency, throughput and goodput of a server, measured honestly. Needs the extra `load`."""

from __future__ import annotations

import typer

from segue_client.cli.extras import extra_load
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
from segue_client.cli.load_report import compare, report
from segue_client.cli.option_groups import grouped

app = typer.Typer(no_args_is_help=True, help="Load a server and measure it: one command for each experiment.")


@app.command()
@grouped
def run(
    target: TargetOptions, work: WorkloadOptions, loop: LoopOptions, span: SpanOptions, report: ReportOptions
) -> None:
    """Any workload, in an open loop (--rate, --trace) or a closed one (--users)."""
    with extra_load():
        from segue_client.cli import load_commands  # noqa: PLC0415
    load_commands.run(target, work, loop, span, report)


@app.command()
@grouped
def context(target: TargetOptions, grid: ContextOptions, report: ReportOptions) -> None:
    """A next turn against the length of its history: warm, restored and recomputed."""
    with extra_load():
        from segue_client.cli import load_commands  # noqa: PLC0415
    load_commands.context(target, grid, report)


@app.command()
@grouped
def concurrency(
    target: TargetOptions, work: WorkloadOptions, streams: StreamsOptions, span: SpanOptions, report: ReportOptions
) -> None:
    """Throughput and latencies against the number of streams."""
    with extra_load():
        from segue_client.cli import load_commands  # noqa: PLC0415
    load_commands.concurrency(target, work, streams, span, report)


@app.command()
@grouped
def mixed(target: TargetOptions, mix: MixOptions, span: SpanOptions, report: ReportOptions) -> None:
    """What long prompts do to streams that run: the streams alone, then with long prompts among them."""
    with extra_load():
        from segue_client.cli import load_commands  # noqa: PLC0415
    load_commands.mixed(target, mix, span, report)


@app.command()
@grouped
def sweep(
    target: TargetOptions, work: WorkloadOptions, search: SweepOptions, span: SpanOptions, report: ReportOptions
) -> None:
    """The highest rate of arrivals at which the objectives are kept: goodput."""
    with extra_load():
        from segue_client.cli import load_commands  # noqa: PLC0415
    load_commands.sweep(target, work, search, span, report)


app.command()(report)
app.command()(compare)
