"""`segue sessions fork|rewind|update|tokens|watch`: what is done to one session, and what happens to all."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, get_args

import typer

from segue.v1.session_pb2 import Session as SessionInfo
from segue.v1.session_pb2 import SessionEvent, SessionEventType
from segue_client.channel import DEFAULT_TARGET
from segue_client.cli import arguments
from segue_client.cli.exits import connected
from segue_client.cli.text import as_document, printable
from segue_client.options import CommitPolicy, UpdateOptions

POLICIES = get_args(CommitPolicy)
WATCH_TIMEOUT = 7 * 24 * 3600.0  # seconds


def fork(
    session_id: arguments.SessionId,
    position: Annotated[int | None, typer.Option(help="Share the first so many tokens; default: all.")] = None,
    count: Annotated[int | None, typer.Option(help="Make so many.")] = None,
    new_id: Annotated[
        str | None, typer.Option(help="Id of the new session; with --count what the ids begin with.")
    ] = None,
    target: arguments.Target = DEFAULT_TARGET,
    as_json: arguments.Json = False,
) -> None:
    """Make new sessions that share the beginning of one; prints their ids."""
    with connected(target, as_json) as client:
        session = client.get_session(session_id)
        made = session.fork(count=1 if count is None else count, position=position, new_session_id=new_id)
    infos = [child.info for child in made]
    if as_json:
        typer.echo(json.dumps([as_document(info) for info in infos], indent=2, ensure_ascii=False))
    else:
        typer.echo("\n".join(info.session_id for info in infos))


def rewind(
    session_id: arguments.SessionId,
    position: Annotated[int | None, typer.Option(help="Keep the first so many tokens.")] = None,
    turn: Annotated[int | None, typer.Option(help="Go back to the start of this turn; -1 = the last one.")] = None,
    target: arguments.Target = DEFAULT_TARGET,
    as_json: arguments.Json = False,
) -> None:
    """Cut a session back."""
    if (position is None) == (turn is None):
        raise typer.BadParameter("give either --position or --turn")
    with connected(target, as_json) as client:
        session = client.get_session(session_id)
        session.rewind(position=position, turn=turn)
        _print_session(session.info, as_json, f"{session_id} ends at {session.position}")


def update(
    session_id: arguments.SessionId,
    ttl: Annotated[float | None, typer.Option(help="Idle seconds until it expires.")] = None,
    priority: Annotated[int | None, typer.Option(help="-100 .. 100; higher stays in memory longer.")] = None,
    pinned: Annotated[bool | None, typer.Option("--pin/--unpin", help="Never evict its cache.")] = None,
    max_context_tokens: Annotated[int | None, typer.Option(help="Longest context.")] = None,
    commit_policy: Annotated[
        str | None, typer.Option(help=f"What is kept of a turn that does not end by itself: {', '.join(POLICIES)}.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name for people.")] = None,
    label: Annotated[list[str] | None, typer.Option(help="key=value, in place of all labels; may be repeated.")] = None,
    target: arguments.Target = DEFAULT_TARGET,
    as_json: arguments.Json = False,
) -> None:
    """Change settings, name or labels; what is not given stays."""
    given = {
        "ttl": ttl,
        "priority": priority,
        "pinned": pinned,
        "max_context_tokens": max_context_tokens,
        "commit_policy": commit_policy,
        "display_name": name,
        "labels": _labels(label) if label else None,
    }
    changes = UpdateOptions(**{key: value for key, value in given.items() if value is not None})  # type: ignore[typeddict-item]  # typer has checked the types
    if not changes:
        raise typer.BadParameter("give at least one option to change")
    if commit_policy not in (None, *POLICIES):
        raise typer.BadParameter(f"must be one of {', '.join(POLICIES)}", param_hint="--commit-policy")
    with connected(target, as_json) as client:
        session = client.get_session(session_id)
        session.update(**changes)
        _print_session(session.info, as_json, f"updated {session_id}")


def tokens(
    session_id: arguments.SessionId,
    start: Annotated[int, typer.Option(help="First position.")] = 0,
    end: Annotated[int | None, typer.Option(help="Position to stop before; default: the end.")] = None,
    text: Annotated[bool, typer.Option("--text", help="Print the text, not the ids.")] = False,
    target: arguments.Target = DEFAULT_TARGET,
    as_json: arguments.Json = False,
) -> None:
    """Print what a session holds, token by token."""
    with connected(target, as_json) as client:
        part = client.get_session(session_id).read_tokens(start, end, text=text)
    if as_json:
        document = {
            "start_position": part.start_position,
            "token_ids": part.token_ids,
            "text": part.text,
            "turns": [as_document(turn) for turn in part.turns],
        }
        typer.echo(json.dumps(document, ensure_ascii=False))
    else:
        typer.echo(printable(part.text) if text else " ".join(map(str, part.token_ids)))


def watch(
    session_id: Annotated[str, typer.Argument(metavar="[ID]", help="The session's id; default: all sessions.")] = "",
    after: Annotated[int | None, typer.Option(help="Number of the last event seen; 0 = from the first one on.")] = None,
    target: arguments.Target = DEFAULT_TARGET,
    as_json: arguments.Json = False,
) -> None:
    """Print what happens to sessions, as it happens, until Ctrl-C or the end of the one session."""
    with (
        connected(target, as_json) as client,
        client.watch(session_id, after_sequence=after, timeout=WATCH_TIMEOUT) as events,
    ):
        for event in events:
            typer.echo(json.dumps(as_document(event), ensure_ascii=False) if as_json else _line(event))


def _line(event: SessionEvent) -> str:
    kind = SessionEventType.Name(event.type).removeprefix("SESSION_EVENT_TYPE_").lower()
    session = event.session
    return printable(f"{event.sequence}\t{kind}\t{session.session_id}\t{session.position}\t{event.reason}")


def _labels(given: Iterable[str]) -> dict[str, str]:
    pairs = [entry.partition("=") for entry in given]
    if wrong := [key for key, equals, _ in pairs if not (key and equals)]:
        raise typer.BadParameter(f"{wrong[0]!r} is not key=value", param_hint="--label")
    return {key: value for key, _, value in pairs}


def _print_session(info: SessionInfo, as_json: bool, message: str) -> None:
    typer.echo(json.dumps(as_document(info), indent=2, ensure_ascii=False) if as_json else printable(message))
