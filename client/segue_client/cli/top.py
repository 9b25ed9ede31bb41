"""`segue top`: a server, live, in the terminal."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import typer

from segue_client.admin import DEFAULT_ADMIN_TARGET
from segue_client.channel import DEFAULT_TARGET
from segue_client.cli import arguments

_USAGE = 2  # exit code


def top(
    target: arguments.Target = DEFAULT_TARGET,
    admin_target: Annotated[
        str | None,
        typer.Option(
            envvar="SEGUE_ADMIN_TARGET",
            help=f"Address of its admin port: the cache by tier and class. Default: {DEFAULT_ADMIN_TARGET} for the"
            " default target, else none.",
            show_default=False,
        ),
    ] = None,
    interval: Annotated[float, typer.Option(min=0.2, max=60, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Watch a server: throughput, latencies, cache and sessions. ? lists the keys, q leaves."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        typer.echo("segue top needs a terminal; for scripts: segue info --json, segue sessions list --json", err=True)
        raise typer.Exit(_USAGE)
    if admin_target is None and target == DEFAULT_TARGET:
        admin_target = DEFAULT_ADMIN_TARGET
    raise typer.Exit(_shown(target, admin_target, interval))


def _shown(target: str, admin_target: str | None, interval: float) -> int:
    try:
        from segue_client.top.app import run  # noqa: PLC0415  half a second that only this command needs
    except ModuleNotFoundError as error:
        if error.name != "textual":
            raise
        sys.exit("segue top needs the package textual: pip install 'segue[cli]'")
    return asyncio.run(run(target, admin_target, interval))
