"""What every system that is compared can do: go on from token ids, greedily, by a fixed number of tokens."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Generation:
    """Generated tokens and when each one came; clock of `time.perf_counter`, which all processes share on Linux."""

    began: float
    ids: Sequence[int]
    times: Sequence[float]  # as many as ids

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.began

    @property
    def gaps(self) -> list[float]:
        """Seconds between one token and the next."""
        return [after - before for before, after in pairwise(self.times)]


class Chat(Protocol):
    """A conversation: each turn appends a prompt and what was generated."""

    async def turn(self, prompt: Sequence[int], new: int) -> Generation: ...


class Backend(Protocol):
    """A running system."""

    def chat(self) -> AbstractAsyncContextManager[Chat]: ...

    async def together(self, prompts: Sequence[Sequence[int]], new: int) -> list[Generation]:
        """All prompts at once."""
        ...


class ResendingChat:
    """A chat with a system without sessions: the client sends everything again, and a prefix cache may find it."""

    def __init__(self, generate: Callable[[Sequence[int], int], Awaitable[Generation]]) -> None:
        self._generate = generate
        self._ledger: list[int] = []

    async def turn(self, prompt: Sequence[int], new: int) -> Generation:
        sent = [*self._ledger, *prompt]
        generation = await self._generate(sent, new)
        self._ledger = [*sent, *generation.ids]
        return generation


async def one_turn_each(backend: Backend, prompts: Sequence[Sequence[int]], new: int) -> list[Generation]:
    """`Backend.together` for a server: as many clients as prompts."""

    async def one(prompt: Sequence[int]) -> Generation:
        async with backend.chat() as chat:
            return await chat.turn(prompt, new)

    return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


@asynccontextmanager
async def resending(generate: Callable[[Sequence[int], int], Awaitable[Generation]]) -> AsyncIterator[Chat]:
    yield ResendingChat(generate)
