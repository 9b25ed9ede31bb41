"""`segue sessions export`, `import` and `move`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from segue_client import Client
from segue_client.channel import DEFAULT_TARGET
from segue_client.cli import arguments
from segue_client.cli.exits import connected
from segue_client.cli.output import print_document, print_json
from segue_client.cli.text import as_document, printable, size
from segue_client.session import Session

STREAM = "-"
Tier = Annotated[str, typer.Argument(help="device, host, disk or none.")]


def export(
    session_id: arguments.SessionId,
    file: Annotated[str, typer.Argument(help="Where to; - is stdout. A file gets mode 0600.")],
    tokens_only: Annotated[bool, typer.Option("--tokens-only", help="Without KV.")] = False,
    target: arguments.Target = DEFAULT_TARGET,
    as_json: arguments.Json = False,
) -> None:
    """Write a session, tokens and KV, to a file."""
    with connected(target, as_json) as client:
        session = client.get_session(session_id)
        header = session.export(sys.stdout.buffer if file == STREAM else file, tokens_only=tokens_only)
    if file == STREAM:
        return
    if as_json:
        print_json({"file": file, **as_document(header)})
    else:
        told = f"{header.position} tokens, {header.cached_tokens} with KV, {size(header.payload_bytes)}"
        typer.echo(printable(f"wrote {file}: {told}"))


def import_(
    file: Annotated[str, typer.Argument(help="A file that export wrote; - is stdin.")],
    session_id: Annotated[str | None, typer.Option("--id", help="Of the new session; default: a new one.")] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Of another model: take the tokens and compute them.")
    ] = False,
    target: arguments.Target = DEFAULT_TARGET,
    as_json: arguments.Json = False,
) -> None:
    """Open a session from a file that export wrote."""
    with connected(target, as_json) as client:
        session = _imported(client, file, session_id, recompute)
    if as_json:
        print_json(as_document(session.info))
    else:
        cached = session.info.cache.cached_tokens
        typer.echo(printable(f"opened {session.id}: {session.position} tokens, {cached} with KV"))


def _imported(client: Client, file: str, session_id: str | None, recompute: bool) -> Session:
    source = sys.stdin.buffer if file == STREAM else Path(file)
    try:
        return client.import_session(source, session_id=session_id, recompute_on_mismatch=recompute)
    except OSError as error:
        raise typer.BadParameter(f"{file}: {error.strerror}", param_hint="FILE") from None


def move(
    session_id: arguments.SessionId,
    tier: Tier,
    from_position: Annotated[int | None, typer.Option(help="Only the KV from this position on.")] = None,
    target: arguments.Target = DEFAULT_TARGET,
    as_json: arguments.Json = False,
) -> None:
    """Bring a session's KV into a tier; its tokens stay."""
    if tier not in ("device", "host", "disk", "none"):
        raise typer.BadParameter("must be device, host, disk or none", param_hint="TIER")
    with connected(target, as_json) as client:
        session = client.get_session(session_id)
        session.move(cast("Literal['device', 'host', 'disk', 'none']", tier), from_position=from_position)
    print_document(as_document(session.info.cache), as_json)
