"""The seam between the load and the server: what a target has to do, whatever protocol it speaks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from segue_client.load.results import ContextKind, TargetInfo
from segue_client.load.workload import Plan, Prompt, Turn

Reuse = Literal["session", "prefix", "none"]

CONNECT_TIMEOUT = 10.0  # seconds that a target has to answer a first time


class TargetError(Exception):
    """A turn that the target has refused or failed, in one line."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused  # for want of room or time, rather than for a fault


class Unsupported(Exception):
    """The target cannot do this at all; the message says what it would take."""


class Clock:
    """Seconds since it was made, from the machine's monotonic clock."""

    def __init__(self) -> None:
        self.zero = time.perf_counter()

    def now(self) -> float:
        """Seconds."""
        return time.perf_counter() - self.zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How every turn of a run is asked for.

    Attributes:
        temperature: 0 = greedy.
        top_p: nucleus sampling; None = the model's default.
        ignore_eos: answers are as long as planned; an OpenAI-compatible server must know the field `ignore_eos`.
        reuse: "session": turns go on in their session. "prefix": every turn is a new session that is sent the whole
            history, and the server may find it in its prefix cache. "none": the same, and the server is told not to.
        restore_from: the tier that `ContextKind.RESTORED` brings KV back from.
        timeout: seconds that a turn may take.
    """

    temperature: float = 0.0
    top_p: float | None = None
    ignore_eos: bool = True
    reuse: Reuse = "session"
    restore_from: Literal["host", "disk"] = "host"
    timeout: float = 600.0


@dataclass(slots=True)
class Observation:
    """What is seen of a turn while it runs, so that nothing is lost when it fails half-way."""

    token_times: list[float] = field(default_factory=list)
    context: ContextKind = ContextKind.UNKNOWN
    history_tokens: int | None = None
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    computed_tokens: int | None = None
    reused_tokens: int | None = None
    restored_tokens: int | None = None
    finish_reason: str = ""


class Conversation(Protocol):
    """One session of a target. Turns come one after another.

    Every method raises TargetError when the target refuses or fails, and Unsupported when it has no such thing.
    """

    async def turn(self, turn: Turn, seen: Observation) -> None:
        """Runs a turn to its end, writing down what comes when it comes. Cancelled, it cancels the turn."""

    async def fork(self, count: int) -> Sequence[Conversation]:
        """So many conversations that share this one's history."""

    async def give_history(self, prompt: Prompt) -> None:
        """Puts a history before the next turn, without an answer."""

    async def place(self, context: ContextKind) -> None:
        """Brings the history's KV to where the next turn shall find it: WARM, RESTORED or RECOMPUTED."""

    async def take_back(self) -> None:
        """Takes the last turn back."""

    async def close(self) -> None:
        """Leaves nothing behind on the server, whatever state it is in; never raises."""


class Target(Protocol):
    """A server, connected."""

    @property
    def info(self) -> TargetInfo:
        """What it is."""

    def conversation(self, plan: Plan) -> Conversation:
        """A conversation that has not begun; what it takes to begin it is part of its first turn."""
