"""How the command ends: exit codes that scripts can use, and what is said about a failure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import typer

from segue_client import AdminClient, Client
from segue_client.cli.text import printable
from segue_client.errors import (
    Aborted,
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    OutOfRange,
    ResourceExhausted,
    SegueError,
    Unavailable,
    Unimplemented,
)


class ExitCode(NamedTuple):
    """One row of the table below."""

    code: int
    meaning: str
    errors: tuple[type[SegueError], ...] = ()


INTERRUPTED = 130
EXIT_CODES = (
    ExitCode(0, "done"),
    ExitCode(1, "any other failure"),
    ExitCode(2, "wrong usage, or an argument the server refuses", (InvalidArgument, OutOfRange, Unimplemented)),
    ExitCode(3, "no such session or request", (NotFound,)),
    ExitCode(4, "session busy, or changed by someone else", (Aborted, AlreadyExists, FailedPrecondition)),
    ExitCode(5, "server unavailable, or out of room: try later", (Unavailable, ResourceExhausted)),
    ExitCode(124, "deadline exceeded", (DeadlineExceeded,)),
    ExitCode(INTERRUPTED, "interrupted", (Cancelled,)),
)


def exit_code(error: SegueError) -> int:
    """The exit code for an error."""
    return next((row.code for row in EXIT_CODES if isinstance(error, row.errors)), 1)


def describe_exit_codes() -> str:
    """The table for `--help`."""
    return "Exit codes: " + "; ".join(f"{row.code} {row.meaning}" for row in EXIT_CODES) + "."


@contextmanager
def connected(target: str, as_json: bool) -> Iterator[Client]:
    """A client for the length of a command; failures end it with a message on stderr and their exit code."""
    with reporting(as_json), Client(target) as client:
        yield client


@contextmanager
def administering(target: str, as_json: bool) -> Iterator[AdminClient]:
    """`connected`, to the admin port."""
    with reporting(as_json), AdminClient(target) as admin:
        yield admin


@contextmanager
def reporting(as_json: bool) -> Iterator[None]:
    """Failures end the command with a message on stderr and their exit code."""
    try:
        yield
    except SegueError as error:
        report(error, as_json)
        raise typer.Exit(exit_code(error)) from error
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def report(error: SegueError, as_json: bool) -> None:
    """Says on stderr what failed, as a line or as a JSON document."""
    typer.echo(json.dumps(_as_document(error)) if as_json else printable(f"segue: {error}"), err=True)


def _as_document(error: SegueError) -> dict[str, object]:
    return {
        "error": {
            "code": error.code.name,
            "reason": error.reason,
            "message": error.message,
            "metadata": dict(error.metadata),
            "violations": [violation._asdict() for violation in error.violations],
            "retry_after": error.retry_after,
        }
    }
