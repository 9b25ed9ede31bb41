"""The command's tree."""

from __future__ import annotations

from importlib.metadata import version as version_of
from typing import Annotated

import typer

from segue_client.cli import cache, load, sessions
from segue_client.cli.chat import chat
from segue_client.cli.exits import describe_exit_codes
from segue_client.cli.generate import generate
from segue_client.cli.top import top

EPILOG = describe_exit_codes()

app = typer.Typer(
    no_args_is_help=True,
    help="Talk to a Segue server.",
    epilog=EPILOG,
    pretty_exceptions_show_locals=False,  # they hold prompts
)
app.command(epilog=EPILOG)(chat)
app.command(epilog=EPILOG)(generate)
app.add_typer(sessions.app, name="sessions", epilog=EPILOG)
app.add_typer(cache.app, name="cache", epilog=EPILOG)
app.add_typer(load.app, name="load", epilog=EPILOG)
app.command(epilog=EPILOG)(sessions.info)
app.command(epilog=EPILOG)(top)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"segue {version_of('segue')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Talk to a Segue server."""
