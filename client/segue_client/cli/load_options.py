"""The options of `segue load`, in groups that its commands share. Nothing here needs the extra `load`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from segue_client.channel import DEFAULT_TARGET

LENGTH = "120, uniform:50,200, lognormal:120,0.6, exponential:120; bounds by ,min=8,max=1024."


class Arrivals(StrEnum):
    """How an open loop's arrivals are spread."""

    POISSON = "poisson"
    CONSTANT = "constant"


class Reuse(StrEnum):
    """What a session's next turn may find of its history."""

    SESSION = "session"
    PREFIX = "prefix"
    NONE = "none"


class RestoreFrom(StrEnum):
    """A tier below the pool."""

    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """What is tested, and how every turn is asked for."""

    target: Annotated[
        str,
        typer.Option(envvar="SEGUE_TARGET", help="host:port of a Segue server, or openai=http://host:port/v1."),
    ] = DEFAULT_TARGET
    model: Annotated[str, typer.Option(help="Of an OpenAI-compatible server; default: the first it lists.")] = ""
    temperature: Annotated[float, typer.Option(min=0, help="0 = greedy.")] = 0.0
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling, (0, 1].")] = None
    ignore_eos: Annotated[bool, typer.Option(help="Answers are as long as planned.")] = True
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that a turn may take.")] = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """What is left of a test."""

    seed: Annotated[int | None, typer.Option(help="Of lengths, arrivals and pauses; default: a new one.")] = None
    json: Annotated[Path | None, typer.Option("--json", help="Write every request and figure to this file.")] = None
    html: Annotated[Path | None, typer.Option("--html", help="Write a report with plots to this file.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """What is asked."""

    prompt: Annotated[str, typer.Option(help=f"Tokens of a prompt: {LENGTH}")] = "lognormal:120,0.6,max=1024"
    output: Annotated[
        str | None,
        typer.Option(help="Tokens of an answer, likewise. Default: lognormal:64,0.5,max=256, or as in the data."),
    ] = None
    turns: Annotated[str, typer.Option(help="Turns of a session, likewise.")] = "1"
    think: Annotated[str, typer.Option(help="Seconds between an answer and the next turn, likewise.")] = "0"
    system_tokens: Annotated[int, typer.Option(min=0, help="Of a system prompt that all sessions share.")] = 0
    fork: Annotated[int, typer.Option(min=0, help="Run the last turn of a session in so many forks at once.")] = 0
    long_share: Annotated[float, typer.Option(min=0, max=1, help="Share of sessions that open with a long one.")] = 0.0
    long_prompt: Annotated[str, typer.Option(help="Tokens of a long prompt.")] = "2000"
    data: Annotated[
        Path | None, typer.Option(help="Prompts from this file: a JSON object a line, as ShareGPT or chat messages.")
    ] = None
    reuse: Annotated[
        Reuse,
        typer.Option(
            help="session: turns go on in their session. prefix: each is a new session with the whole history, and the"
            " server may find its prefix. none: the same, and it may not."
        ),
    ] = Reuse.SESSION


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """Who asks."""

    rate: Annotated[float | None, typer.Option(help="Open loop: sessions that arrive a second.")] = None
    arrivals: Annotated[Arrivals, typer.Option(help="How they are spread.")] = Arrivals.POISSON
    users: Annotated[int | None, typer.Option(min=1, help="Closed loop: users who wait for their answers.")] = None
    trace: Annotated[
        Path | None, typer.Option(help="Arrivals and lengths from this file: a JSON object a line, with timestamps.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanOptions:
    """How long."""

    duration: Annotated[float | None, typer.Option(help="Seconds that count; default: 30 unless --count.")] = None
    count: Annotated[int | None, typer.Option(min=1, help="Sessions at most, those of the warm-up too.")] = None
    warm_up: Annotated[float, typer.Option(min=0, help="Seconds before requests count.")] = 3.0
    drain: Annotated[float, typer.Option(min=0, help="Seconds that running requests get at the end.")] = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextOptions:
    """Which histories."""

    history: Annotated[
        str, typer.Option(help="Tokens, for example 0,1024,4096; default: 0, doubling, to the context limit.")
    ] = ""
    modes: Annotated[
        str, typer.Option(help="Where the next turn finds the history's KV: warm, restored, recomputed.")
    ] = "warm,restored,recomputed"
    repeat: Annotated[int, typer.Option(min=1, help="Turns at each point.")] = 5
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of each turn.")] = 16
    output_tokens: Annotated[int, typer.Option(min=2, help="Of each turn.")] = 32
    restore_from: Annotated[RestoreFrom, typer.Option(help="Where restored KV lies.")] = RestoreFrom.HOST


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsOptions:
    """How many at once."""

    streams: Annotated[str, typer.Option(help="Numbers of streams.")] = "1,2,4,8,16,32,64"


@dataclass(frozen=True, slots=True, kw_only=True)
class MixOptions:
    """Running streams, and what disturbs them."""

    users: Annotated[int, typer.Option(min=1, help="Streams that always run.")] = 8
    prompt: Annotated[str, typer.Option(help=f"Tokens of a stream's prompt: {LENGTH}")] = "32"
    output: Annotated[str, typer.Option(help="Tokens of a stream's answer.")] = "uniform:96,160"
    long_rate: Annotated[float, typer.Option(help="Long prompts a second.")] = 0.2
    long_prompt: Annotated[str, typer.Option(help="Their tokens.")] = "2000"
    long_output: Annotated[str, typer.Option(help="Tokens of their answers.")] = "8"
    arrivals: Annotated[Arrivals, typer.Option(help="How long prompts are spread.")] = Arrivals.POISSON


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """What the server has to keep, and where to look for the rate at which it just does."""

    ttft_p99: Annotated[float, typer.Option(min=0, help="Objective: seconds to the first token.")] = 2.0
    inter_token_p99: Annotated[float, typer.Option(min=0, help="Objective: seconds between tokens.")] = 0.2
    failed: Annotated[float, typer.Option(min=0, max=1, help="Objective: share of requests that fail.")] = 0.0
    start: Annotated[float, typer.Option(help="The first rate, in sessions a second.")] = 1.0
    lowest: Annotated[float, typer.Option(help="Nothing below is tried.")] = 0.05
    highest: Annotated[float, typer.Option(help="Nothing above is tried.")] = 1000.0
    tolerance: Annotated[float, typer.Option(help="Ends when the two bounds are so close.")] = 0.1
    probes: Annotated[int, typer.Option(min=1, help="Rates at most.")] = 12
    arrivals: Annotated[Arrivals, typer.Option(help="How arrivals are spread.")] = Arrivals.POISSON
