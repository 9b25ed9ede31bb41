"""What is asked of the server: sessions, their turns, and how long everything is.

Lengths, pauses and the mix follow from the seed alone, so that two runs ask for the same. What prompts say is new in
every run (see `prompts.py`), or a server would still hold the KV of the run before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from random import Random
from typing import Protocol

from segue_client.load.distributions import Distribution

MAIN, LONG, STREAM = "main", "long", "stream"  # groups of requests


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one turn says: made up, or a text of a data set."""

    name: str  # equal names make equal prompts within a run
    tokens: int = 0  # of a made-up one
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a session."""

    prompt: Prompt
    max_tokens: int
    think: float = 0.0  # seconds between the end of the turn before and this one


@dataclass(frozen=True, slots=True)
class Plan:
    """One session, all its turns. With `fork` the last turn is run by as many forks at once."""

    number: int
    turns: tuple[Turn, ...]
    system: Prompt | None = None
    fork: int = 0
    group: str = MAIN


class Workload(Protocol):
    """Where plans come from."""

    def plan(self, number: int) -> Plan:
        """The plan of a number: the same one each time."""


def plans(workload: Workload) -> Iterator[Plan]:
    """One plan after another, without end. Points of an experiment share it, so that no prompt comes twice."""
    return map(workload.plan, count())


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How sessions are built around their prompts."""

    turns: Distribution
    think: Distribution
    system_tokens: int = 0  # of a system prompt that all sessions share
    fork: int = 0

    def plan(self, number: int, turns: Sequence[Turn], seed: int) -> Plan:
        """A session of the given turns."""
        system = Prompt(f"{seed}/system", self.system_tokens) if self.system_tokens else None
        return Plan(number, tuple(turns), system, self.fork)


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """Made-up prompts whose lengths are drawn; a share of the sessions opens with a long one."""

    seed: int
    shape: Shape
    prompt: Distribution
    output: Distribution
    long_share: float = 0.0
    long_prompt: Distribution | None = None

    def plan(self, number: int) -> Plan:
        rng = Random(f"{self.seed}/{number}")  # noqa: S311  no secret
        is_long = self.long_prompt is not None and rng.random() < self.long_share
        turns = [self._turn(rng, number, turn) for turn in range(self.shape.turns.count(rng))]
        if is_long and self.long_prompt is not None:
            prompt = replace(turns[0].prompt, tokens=self.long_prompt.count(rng))
            turns[0] = replace(turns[0], prompt=prompt)
        plan = self.shape.plan(number, turns, self.seed)
        return replace(plan, group=LONG) if is_long else plan

    def _turn(self, rng: Random, number: int, turn: int) -> Turn:
        prompt = Prompt(f"{self.seed}/{number}/{turn}", self.prompt.count(rng))
        return Turn(prompt, self.output.count(rng), self.shape.think.sample(rng) if turn else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Conversations of a data set, drawn at random, each cut to the turns that are drawn."""

    seed: int
    shape: Shape
    conversations: Sequence[Sequence[tuple[str, int]]]  # of each: what the user says, and tokens of the answer
    output: Distribution | None = None  # over the lengths of the data set

    def plan(self, number: int) -> Plan:
        rng = Random(f"{self.seed}/{number}")  # noqa: S311  no secret
        length = self.shape.turns.count(rng)
        said = rng.choice(self.conversations)[:length]
        turns = [self._turn(rng, number, turn, *one) for turn, one in enumerate(said)]
        return self.shape.plan(number, turns, self.seed)

    def _turn(self, rng: Random, number: int, turn: int, text: str, tokens: int) -> Turn:
        output = self.output.count(rng) if self.output else tokens
        prompt = Prompt(f"{self.seed}/{number}/{turn}", text=text)
        return Turn(prompt, output, self.shape.think.sample(rng) if turn else 0.0)


@dataclass(frozen=True, slots=True)
class Trace:
    """Single turns that a trace recorded: when each came, and how long prompt and answer were."""

    seed: int
    moments: Sequence[float]  # seconds from the first one
    lengths: Sequence[tuple[int, int]]  # tokens of prompt and answer

    def plan(self, number: int) -> Plan:
        prompt, output = self.lengths[number % len(self.lengths)]
        return Plan(number, (Turn(Prompt(f"{self.seed}/{number}/0", prompt), output),))
