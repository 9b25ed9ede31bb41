"""Segue's server over gRPC: a chat is a session."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from peers.generation import Chat, Generation, one_turn_each
from peers.process import Group
from segue_client import AsyncClient, AsyncSession, Tokens

START_TIMEOUT = 120.0  # seconds


class SegueBackend:
    """Implements generation.Backend over one connection."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    @classmethod
    async def start(cls, group: Group, target: str) -> "SegueBackend":
        """Once the server takes turns."""
        client = AsyncClient(target)
        await client.wait_ready(START_TIMEOUT)
        group.check_alive()
        return cls(client)

    @asynccontextmanager
    async def chat(self) -> AsyncIterator[Chat]:
        session = await self._client.create_session()
        try:
            yield SessionChat(session)
        finally:
            await session.delete()

    async def together(self, prompts: Sequence[Sequence[int]], new: int) -> list[Generation]:
        return await one_turn_each(self, prompts, new)


class SessionChat:
    """Implements generation.Chat: only what is new is sent."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def turn(self, prompt: Sequence[int], new: int) -> Generation:
        ids, times = list[int](), list[float]()
        began = time.perf_counter()
        async with self._session.stream(tokens=prompt, max_tokens=new, temperature=0.0, ignore_eos=True) as turn:
            async for event in turn.events():
                if isinstance(event, Tokens):
                    ids += event.token_ids
                    times += [time.perf_counter()] * len(event.token_ids)
        return Generation(began, ids, times)
