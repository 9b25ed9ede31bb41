"""`segue generate`: one turn, streamed to stdout."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from segue_client import Client, Turn
from segue_client.channel import DEFAULT_TARGET
from segue_client.cli import arguments
from segue_client.cli.exits import connected
from segue_client.cli.text import summary
from segue_client.cli.view import JsonView, TextView, play
from segue_client.options import TurnOptions


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The text to go on from; - or nothing reads stdin.")] = None,
    session: Annotated[str | None, typer.Option(metavar="ID", help="Append to this session.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's message.")] = False,
    max_tokens: arguments.MaxTokens = None,
    temperature: arguments.Temperature = None,
    top_p: arguments.TopP = None,
    top_k: arguments.TopK = None,
    min_p: arguments.MinP = None,
    repetition_penalty: arguments.RepetitionPenalty = None,
    seed: arguments.Seed = None,
    stop: arguments.Stop = None,
    timeout: arguments.Timeout = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print the turn's figures on stderr.")] = False,
    target: arguments.Target = DEFAULT_TARGET,
    as_json: arguments.Json = False,
) -> None:
    """Continue a text, or answer a message, and stream it to stdout."""
    options: TurnOptions = {
        **_input(_read(prompt), chat),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop": stop,
        "timeout": timeout,
    }
    stderr = Console(stderr=True, highlight=False)
    with connected(target, as_json) as client:
        turn = _turn(client, session, options)
        play(turn, JsonView() if as_json else TextView(stderr))
        if stats:
            stderr.print(summary(turn.completion), style="dim", markup=False)


def _read(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise typer.BadParameter("give a prompt, or - to read it from stdin", param_hint="PROMPT")
    return sys.stdin.read()


def _input(prompt: str, chat: bool) -> TurnOptions:
    return {"messages": [{"role": "user", "content": prompt}]} if chat else {"text": prompt}


def _turn(client: Client, session: str | None, options: TurnOptions) -> Turn:
    return client.get_session(session).stream(**options) if session else client.stream(**options)
