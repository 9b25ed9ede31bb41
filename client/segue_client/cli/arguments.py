"""The options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Target = Annotated[str, typer.Option(envvar="SEGUE_TARGET", help="Address of the server, host:port.")]
AdminTarget = Annotated[
    str, typer.Option(envvar="SEGUE_ADMIN_TARGET", help="Address of the server's admin port, host:port.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document; a stream as lines of JSON.")]
SessionId = Annotated[str, typer.Argument(metavar="ID", help="The session's id.")]

MaxTokens = Annotated[int | None, typer.Option(help="At most so many new tokens.")]
Temperature = Annotated[float | None, typer.Option(help="0 = greedy.")]
TopP = Annotated[float | None, typer.Option(help="Nucleus sampling, (0, 1].")]
TopK = Annotated[int | None, typer.Option(help="Sample from the k most likely tokens.")]
MinP = Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest, [0, 1).")]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Above 1 discourages repetition.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
Stop = Annotated[list[str] | None, typer.Option(help="End at this text; may be given more than once.")]
Timeout = Annotated[float | None, typer.Option(help="Deadline of a turn in seconds.")]
