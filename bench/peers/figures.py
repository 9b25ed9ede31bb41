"""What is measured, the same way for every system. Adding a figure is adding a line to FIGURES."""

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, Literal, NamedTuple

import numpy as np

from peers.generation import Backend, Generation
from peers.limits import Limits, Work

SHORT: Final = 64  # tokens of a prompt before the first depth, and of one among many streams
TURN_TOKENS: Final = 32  # of the next turn's prompt
CHAT_TOKENS: Final = 128  # of each prompt and of each answer of a growing chat
CHAT_TURNS: Final = 5


class Reading(NamedTuple):
    """One value of one run."""

    table: str
    column: str
    value: float
    share: float | None  # of the limit: the time the machine must take at least, over the time taken


class Prompts:
    """Random token ids, so that nothing is found in a cache unless it was put there by the same prompt."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._history = random.Random(0).choices(range(vocabulary), k=8192)  # noqa: S311 - no secret

    def history(self, count: int) -> list[int]:
        """The same tokens every time, for every system; a longer one begins like a shorter one."""
        return self._history[:count]

    def fresh(self, count: int) -> list[int]:
        return random.choices(range(self._vocabulary), k=count)  # noqa: S311 - no secret


@dataclass(frozen=True, slots=True)
class Bout:
    """A running system, what it is asked, and what is known of the machine."""

    backend: Backend
    prompts: Prompts
    work: Work
    limits: Limits


Measure = Callable[[Bout], Awaitable[list[Reading]]]


@dataclass(frozen=True, slots=True)
class Figure:
    name: str  # for --figures
    where: Literal["single", "serving"]
    measure: Measure
    quick: bool = False  # part of a quick run
    large: bool = False  # measured on the large model too


def decode(depth: int, new: int) -> Measure:
    """Tokens/s of one stream once `depth` tokens lie before it."""

    async def measure(bout: Bout) -> list[Reading]:
        async with bout.backend.chat() as chat:
            generation = await chat.turn(bout.prompts.history(depth), new + 1)
        seconds = _checked(generation, new + 1).times[-1] - generation.times[0]
        floor = new * bout.work.seconds(bout.limits, rows=1, logits=1, context=depth + new // 2)
        return [Reading("decode, 1 stream, tokens/s", f"after {depth:,}", new / seconds, floor / seconds)]

    return measure


def prefill(length: int) -> Measure:
    """Tokens/s of a prompt nobody has seen, up to its first generated token."""

    async def measure(bout: Bout) -> list[Reading]:
        async with bout.backend.chat() as chat:
            seconds = _checked(await chat.turn(bout.prompts.fresh(length), 1), 1).first
        floor = bout.work.seconds(bout.limits, rows=length, logits=1, context=length)
        return [Reading("prefill, tokens/s", f"{length:,}", length / seconds, floor / seconds)]

    return measure


def streams(count: int, new: int) -> Measure:
    """`count` prompts at once. Tokens/s counts generated tokens from the first request on, so prompts count."""

    async def measure(bout: Bout) -> list[Reading]:
        prompts = [bout.prompts.fresh(SHORT) for _ in range(count)]
        generations = [_checked(one, new) for one in await bout.backend.together(prompts, new)]
        began = min(one.began for one in generations)
        seconds = max(one.times[-1] for one in generations) - began
        work, limits = bout.work, bout.limits
        floor = work.seconds(limits, rows=count * SHORT, logits=count, context=SHORT, streams=count)
        floor += (new - 1) * work.seconds(limits, rows=count, logits=count, context=SHORT + new // 2, streams=count)
        waits, gaps = [one.times[0] - began for one in generations], [one.gaps for one in generations]
        column = f"{count} streams"
        return [
            Reading("streams, tokens/s in all", column, count * new / seconds, floor / seconds),
            Reading("streams, TTFT p50, ms", column, float(np.quantile(waits, 0.5)) * 1e3, None),
            Reading("streams, inter-token p99, ms", column, float(np.quantile(list(chain(*gaps)), 0.99)) * 1e3, None),
        ]

    return measure


def next_turn(history: int) -> Measure:
    """TTFT of TURN_TOKENS new tokens after `history` tokens that the system has just seen."""

    async def measure(bout: Bout) -> list[Reading]:
        async with bout.backend.chat() as chat:
            if history:
                await chat.turn(bout.prompts.history(history), 1)
            seconds = _checked(await chat.turn(bout.prompts.fresh(TURN_TOKENS), 1), 1).first
        floor = bout.work.seconds(bout.limits, rows=TURN_TOKENS, logits=1, context=history + TURN_TOKENS)
        return [Reading("next turn, TTFT, ms", f"after {history:,}", seconds * 1e3, floor / seconds)]

    return measure


async def growing_chat(bout: Bout) -> list[Reading]:
    """TTFT of the last of CHAT_TURNS turns, each of CHAT_TOKENS new tokens and an answer as long."""
    async with bout.backend.chat() as chat:
        for _ in range(CHAT_TURNS):
            generation = await chat.turn(bout.prompts.fresh(CHAT_TOKENS), CHAT_TOKENS)
    seconds = _checked(generation, CHAT_TOKENS).first
    context = (2 * CHAT_TURNS - 1) * CHAT_TOKENS
    floor = bout.work.seconds(bout.limits, rows=CHAT_TOKENS, logits=1, context=context)
    return [Reading("next turn, TTFT, ms", "5th of a chat", seconds * 1e3, floor / seconds)]


def _checked(generation: Generation, new: int) -> Generation:
    """Raises RuntimeError: a system that says less than it was asked for would look fast."""
    if len(generation.ids) != new:
        raise RuntimeError(f"gave {len(generation.ids)} tokens instead of {new}")
    return generation


FIGURES: Final[Sequence[Figure]] = (
    Figure("decode-64", "single", decode(SHORT, 128), quick=True, large=True),
    Figure("decode-1k", "single", decode(1024, 64), quick=True),
    Figure("decode-4k", "single", decode(4096, 64)),
    Figure("decode-8k", "single", decode(8000, 64)),
    Figure("prefill-512", "single", prefill(512), quick=True, large=True),
    Figure("prefill-2k", "single", prefill(2048)),
    Figure("streams-4", "serving", streams(4, 128)),
    Figure("streams-8", "serving", streams(8, 128), quick=True),
    Figure("streams-16", "serving", streams(16, 128)),
    Figure("streams-32", "serving", streams(32, 128), quick=True),
    Figure("turn-0", "serving", next_turn(0), quick=True),
    Figure("turn-1k", "serving", next_turn(1024), quick=True),
    Figure("turn-4k", "serving", next_turn(4096)),
    Figure("turn-8k", "serving", next_turn(8000)),
    Figure("chat", "serving", growing_chat),
)
