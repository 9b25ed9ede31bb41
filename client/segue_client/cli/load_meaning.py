"""What the options of `segue load` mean: words into workloads, loops, spans and grids, each refused by its name."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import typer

from segue_client.cli.load_options import (
    ContextOptions,
    LoopOptions,
    MixOptions,
    ReportOptions,
    SpanOptions,
    StreamsOptions,
    SweepOptions,
    TargetOptions,
    WorkloadOptions,
)
from segue_client.load.bisection import Limits
from segue_client.load.datasets import read_conversations, read_trace
from segue_client.load.distributions import Distribution, parse
from segue_client.load.driver import Span
from segue_client.load.experiments import ClosedLoop, ContextGrid, Mix, OpenLoop
from segue_client.load.results import ContextKind
from segue_client.load.summary import Objectives
from segue_client.load.target import Settings
from segue_client.load.workload import Conversations, Shape, Synthetic, Trace, Workload

DEFAULT_DURATION = 30.0  # seconds
DEFAULT_OUTPUT = "lognormal:64,0.5,max=256"
FIRST_HISTORY = 256  # tokens, then doubled
UNKNOWN_LIMIT = 4096  # tokens, where the target does not tell its context limit
ROOM = 64  # tokens that a chat template and an inexact count of words may add


@contextmanager
def refusing(option: str) -> Iterator[None]:
    """A word that cannot be understood ends the command with the option's name."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def settings(
    target: TargetOptions, work: WorkloadOptions | None = None, grid: ContextOptions | None = None
) -> Settings:
    """How every turn is asked for."""
    if target.top_p is not None and not 0 < target.top_p <= 1:
        raise typer.BadParameter(f"is {target.top_p:g}; it must be above 0 and at most 1", param_hint="--top-p")
    return Settings(
        temperature=target.temperature,
        top_p=target.top_p,
        ignore_eos=target.ignore_eos,
        reuse=work.reuse.value if work else "session",
        restore_from=grid.restore_from.value if grid else "host",
        timeout=target.timeout,
    )


def check_outputs(options: ReportOptions) -> None:
    """Refuses files that could not be written, before a test of minutes has run in vain."""
    for option, path in (("--json", options.json), ("--html", options.html)):
        if path is None:
            continue
        if not path.parent.is_dir():
            raise typer.BadParameter(f"{path}: there is no folder {path.parent}", param_hint=option)
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise typer.BadParameter(f"{path}: no file can be written there", param_hint=option)


def span(options: SpanOptions) -> Span:
    """How long a point lasts."""
    duration = options.duration
    if duration is None and options.count is None:
        duration = DEFAULT_DURATION
    if duration is not None and not duration > 0:
        raise typer.BadParameter(f"is {duration:g}; it must be above 0 seconds", param_hint="--duration")
    return Span(warm_up=options.warm_up, duration=duration, count=options.count, drain=options.drain)


def workload(options: WorkloadOptions, seed: int) -> Workload:
    """Made-up sessions, or those of --data."""
    shape = Shape(
        turns=_lengths("--turns", options.turns),
        think=_lengths("--think", options.think),
        system_tokens=options.system_tokens,
        fork=options.fork,
    )
    if options.fork and options.turns == "1" and not options.system_tokens:
        raise typer.BadParameter("needs --turns 2 or --system-tokens: there is nothing to share", param_hint="--fork")
    if options.data is not None:
        return _data(options, options.data, shape, seed)
    return Synthetic(
        seed=seed,
        shape=shape,
        prompt=_lengths("--prompt", options.prompt),
        output=_lengths("--output", options.output or DEFAULT_OUTPUT),
        long_share=options.long_share,
        long_prompt=_lengths("--long-prompt", options.long_prompt) if options.long_share else None,
    )


def _data(options: WorkloadOptions, path: Path, shape: Shape, seed: int) -> Workload:
    with refusing("--data"):
        conversations = read_conversations(path)
    output = _lengths("--output", options.output) if options.output else None
    return Conversations(seed=seed, shape=shape, conversations=conversations, output=output)


def _lengths(option: str, spec: str) -> Distribution:
    with refusing(option):
        return parse(spec)


def loop(options: LoopOptions, seed: int) -> OpenLoop | ClosedLoop:
    """Who asks, when it is no trace."""
    if (options.rate is None) == (options.users is None):
        raise _one_loop()
    if options.rate is None:
        return ClosedLoop(users=options.users or 1)
    return open_loop("--rate", options.rate, options.arrivals.value, seed)


def open_loop(option: str, rate: float, process: Literal["poisson", "constant"], seed: int) -> OpenLoop:
    """Arrivals from outside."""
    if not 0 < rate < math.inf:
        raise typer.BadParameter(f"is {rate:g}; it must be above 0 a second, and finite", param_hint=option)
    return OpenLoop(rate=rate, process=process, seed=seed)


def _one_loop() -> typer.BadParameter:
    return typer.BadParameter("give one of --rate, --users and --trace", param_hint="--rate")


def trace(options: LoopOptions, path: Path, seed: int) -> Trace:
    """Arrivals and lengths of a file, which leaves no other loop to choose."""
    if options.rate is not None or options.users is not None:
        raise _one_loop()
    with refusing("--trace"):
        return Trace(seed, *read_trace(path))


def mix(options: MixOptions, seed: int) -> Mix:
    """Streams and long prompts."""
    alone = Shape(turns=parse("1"), think=parse("0"))
    return Mix(
        streams=Synthetic(
            seed=seed,
            shape=alone,
            prompt=_lengths("--prompt", options.prompt),
            output=_lengths("--output", options.output),
        ),
        users=options.users,
        long=Synthetic(
            seed=seed + 1,
            shape=alone,
            prompt=_lengths("--long-prompt", options.long_prompt),
            output=_lengths("--long-output", options.long_output),
        ),
        arrivals=open_loop("--long-rate", options.long_rate, options.arrivals.value, seed),
    )


def search(options: SweepOptions) -> tuple[Limits, Objectives]:
    """Where to look, and for what."""
    with refusing("--start, --lowest, --highest, --tolerance"):
        limits = Limits(
            start=options.start,
            lowest=options.lowest,
            highest=options.highest,
            tolerance=options.tolerance,
            probes=options.probes,
        )
    objectives = Objectives(ttft_p99=options.ttft_p99, inter_token_p99=options.inter_token_p99, failed=options.failed)
    return limits, objectives


def streams(options: StreamsOptions) -> Sequence[int]:
    """Numbers of streams."""
    return _numbers("--streams", options.streams, least=1)


def _numbers(option: str, text: str, least: int) -> Sequence[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers, such as 1,2,4", param_hint=option) from None
    if min(numbers) < least:
        raise typer.BadParameter(f"{min(numbers)} is too small; the least is {least}", param_hint=option)
    return numbers


def grid(options: ContextOptions, seed: int, context_limit: int | None) -> ContextGrid:
    """Histories and modes; where no history is given, doubling to the target's context limit."""
    used = options.prompt_tokens + options.output_tokens
    longest = (context_limit or UNKNOWN_LIMIT + used) - used - ROOM
    histories = _numbers("--history", options.history, 0) if options.history else _doubling(longest)
    return ContextGrid(
        histories=histories,
        modes=_modes(options.modes),
        turns=options.repeat,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        seed=seed,
    )


def _doubling(longest: int) -> Sequence[int]:
    histories, history = [0], FIRST_HISTORY
    while history < longest:
        histories.append(history)
        history *= 2
    return [*histories, longest] if longest > 0 else histories


def _modes(text: str) -> Sequence[ContextKind]:
    known = (ContextKind.WARM, ContextKind.RESTORED, ContextKind.RECOMPUTED)
    words = [word.strip() for word in text.split(",")]
    if unknown := [word for word in words if word not in known]:
        message = f"{', '.join(unknown)}: known are {', '.join(known)}"
        raise typer.BadParameter(message, param_hint="--modes")
    return [ContextKind(word) for word in words]
