"""`segue sessions` and `segue info`: what is on the server."""

from __future__ import annotations

from typing import Annotated

import typer

from segue.v1.session_pb2 import Session as SessionInfo
from segue.v1.session_pb2 import SessionState
from segue.v1.types_pb2 import CacheTier
from segue_client.channel import DEFAULT_TARGET
from segue_client.cli import arguments
from segue_client.cli.exits import connected
from segue_client.cli.output import print_document, print_json, print_rows
from segue_client.cli.session_calls import fork, rewind, tokens, update, watch
from segue_client.cli.text import as_document, printable, since, size
from segue_client.cli.transfers import export, import_, move

app = typer.Typer(no_args_is_help=True, help="List, show, change, move, export, import, watch and delete sessions.")
for _command in (fork, rewind, update, tokens, watch, export, move):
    app.command()(_command)
app.command("import")(import_)


@app.command("list")
def list_sessions(
    order_by: Annotated[
        str | None, typer.Option(help='For example "last_used_time desc" or "cache.used_bytes desc".')
    ] = None,
    target: arguments.Target = DEFAULT_TARGET,
    as_json: arguments.Json = False,
) -> None:
    """List the sessions you may see."""
    with connected(target, as_json) as client:
        sessions = list(client.list_sessions(order_by=order_by))
    if as_json:
        print_json([as_document(session) for session in sessions])
    else:
        print_rows(("id", "state", "position", "cached", "KV", "tier", "last used"), map(_row, sessions))


@app.command()
def show(
    session_id: arguments.SessionId,
    target: arguments.Target = DEFAULT_TARGET,
    as_json: arguments.Json = False,
) -> None:
    """Show one session: position, settings, cache."""
    with connected(target, as_json) as client:
        print_document(as_document(client.get_session(session_id).info), as_json)


@app.command()
def delete(
    session_id: arguments.SessionId,
    force: Annotated[bool, typer.Option("--force", help="Cancel a turn in flight.")] = False,
    allow_missing: Annotated[bool, typer.Option("--allow-missing", help="No error when it is not there.")] = False,
    target: arguments.Target = DEFAULT_TARGET,
    as_json: arguments.Json = False,
) -> None:
    """Delete a session and its cache."""
    with connected(target, as_json) as client:
        freed = client.delete_session(session_id, force=force, allow_missing=allow_missing)
    if as_json:
        print_json({"session_id": session_id, "freed_bytes": freed})
    else:
        typer.echo(printable(f"deleted {session_id}, {size(freed)} freed"))


def info(target: arguments.Target = DEFAULT_TARGET, as_json: arguments.Json = False) -> None:
    """Show the server, its model, and what it is doing now."""
    with connected(target, as_json) as client:
        parts = {"server": client.server_info(), "model": client.model_info(), "load": client.load()}
    print_document({name: as_document(part) for name, part in parts.items()}, as_json)


def _row(session: SessionInfo) -> tuple[str, ...]:
    return (
        session.session_id,
        SessionState.Name(session.state).removeprefix("SESSION_STATE_").lower(),
        str(session.position),
        str(session.cache.cached_tokens),
        size(session.cache.used_bytes),
        CacheTier.Name(session.cache.tier).removeprefix("CACHE_TIER_").lower(),
        since(session.last_used_time) if session.HasField("last_used_time") else "",
    )
