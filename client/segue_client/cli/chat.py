"""`segue chat`: a conversation in the terminal, in a session that outlives it."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Console

from segue_client import NotFound, SegueError, Session
from segue_client.channel import DEFAULT_TARGET
from segue_client.cli import arguments
from segue_client.cli.exits import connected, report
from segue_client.cli.text import summary
from segue_client.cli.view import JsonView, TextView, TurnView, play
from segue_client.options import TurnOptions

with suppress(ImportError):  # not everywhere; gives input() line editing and history
    import readline  # noqa: F401

PROMPT = "> "
HELP = """/help   this
/info   the session
/undo   take the last turn back
/quit   leave, as Ctrl-D does
Ctrl-C cancels the answer and keeps the session."""


def chat(
    session: Annotated[str | None, typer.Option(metavar="ID", help="Go on with this session.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt of a new session.")] = None,
    max_tokens: arguments.MaxTokens = None,
    temperature: arguments.Temperature = None,
    top_p: arguments.TopP = None,
    seed: arguments.Seed = None,
    timeout: arguments.Timeout = None,
    target: arguments.Target = DEFAULT_TARGET,
    as_json: arguments.Json = False,
) -> None:
    """Talk with the model. Ctrl-C cancels an answer, Ctrl-D leaves, /help lists the commands."""
    if session and system:
        raise typer.BadParameter("a session that is there has its system prompt already", param_hint="--system")
    options: TurnOptions = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "timeout": timeout,
    }
    with connected(target, as_json) as client:
        opened = client.get_session(session) if session else client.create_session(system=system)
        Chat(opened, options, as_json).run()


class Chat:
    """The loop of reading a line and answering it."""

    def __init__(self, session: Session, options: TurnOptions, as_json: bool) -> None:
        self._session = session
        self._options = options
        self._as_json = as_json
        self._interactive = sys.stdin.isatty()
        self._stderr = Console(stderr=True, highlight=False)

    def run(self) -> None:
        """Until the end of the input, or /quit."""
        while (line := self._read()) is not None:
            if line.startswith("/"):
                if not self._command(line.strip()):
                    break
            elif line.strip():
                self._answer(line)
        self._note(f"go on with: segue chat --session {self._session.id}")

    def _read(self) -> str | None:
        try:
            return input(PROMPT if self._interactive and not self._as_json else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            typer.echo(err=True)
            return ""

    def _answer(self, line: str) -> None:
        turn = self._session.chat(line, **self._options)
        try:
            play(turn, self._view())
        except KeyboardInterrupt:
            self._note("cancelled")
        except SegueError as error:
            self._survive(error)
        if turn.finished is not None:
            self._note(summary(turn.completion))

    def _command(self, command: str) -> bool:
        """Obeys; whether to go on."""
        match command:
            case "/quit" | "/exit":
                return False
            case "/info":
                self._note(f"session {self._session.id}, position {self._session.position}")
            case "/undo":
                self._undo()
            case _:
                self._note(HELP)
        return True

    def _undo(self) -> None:
        try:
            self._session.rewind(turn=-1)
        except SegueError as error:
            self._survive(error)
        else:
            self._note(f"position {self._session.position}")

    def _survive(self, error: SegueError) -> None:
        """Someone at a terminal may try again; a script, or a session that is gone, may not."""
        if not self._interactive or isinstance(error, NotFound):
            raise error
        report(error, self._as_json)

    def _view(self) -> TurnView:
        return JsonView() if self._as_json else TextView(self._stderr)

    def _note(self, text: str) -> None:
        if not self._as_json:
            self._stderr.print(text, style="dim", markup=False, soft_wrap=True)
