"""Systems behind an HTTP server that streams server-sent events: llama.cpp's own endpoint and OpenAI's completions."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple

import httpx2

from peers.generation import Chat, Generation, one_turn_each, resending
from peers.process import Group

Event = Mapping[str, Any]
STRANGERS = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
POLL = 0.05  # seconds between two questions whether a server is ready


class Dialect(NamedTuple):
    """How a server wants to be asked."""

    path: str
    body: Callable[[Sequence[int], int], Event]
    tokens: Callable[[Event], Sequence[int]]  # of one event


LLAMA_SERVER = Dialect(
    "/completion",
    lambda prompt, new: {
        "prompt": list(prompt),
        "n_predict": new,
        "temperature": 0.0,
        "top_k": 1,
        "samplers": ["top_k"],
        "ignore_eos": True,
        "cache_prompt": True,
        "stream": True,
        "return_tokens": True,
    },
    lambda event: [] if event.get("stop") else event.get("tokens", []),
)
OPENAI = Dialect(
    "/v1/completions",
    lambda prompt, new: {
        "model": "model",
        "prompt": list(prompt),
        "max_tokens": new,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    },
    lambda event: [token for choice in event["choices"] for token in choice.get("token_ids") or []],
)


class HttpBackend:
    """Implements generation.Backend. Each request has a connection of its own, as the requests of strangers have."""

    def __init__(self, client: httpx2.AsyncClient, dialect: Dialect) -> None:
        self._client, self._dialect = client, dialect

    @classmethod
    async def start(cls, group: Group, address: str, dialect: Dialect) -> "HttpBackend":
        """Once /health says yes. Raises RuntimeError with the end of the log when the server dies before."""
        client = httpx2.AsyncClient(base_url=address, timeout=None, limits=STRANGERS, trust_env=False, verify=False)
        while not await _is_ready(client):
            group.check_alive()
            await asyncio.sleep(POLL)
        return cls(client, dialect)

    def chat(self) -> AbstractAsyncContextManager[Chat]:
        return resending(self._generate)

    async def together(self, prompts: Sequence[Sequence[int]], new: int) -> list[Generation]:
        return await one_turn_each(self, prompts, new)

    async def _generate(self, prompt: Sequence[int], new: int) -> Generation:
        body, ids, times = self._dialect.body(prompt, new), list[int](), list[float]()
        began = time.perf_counter()
        async with self._client.stream("POST", self._dialect.path, json=body) as answer:
            if answer.is_error:
                raise RuntimeError(f"{answer.status_code}: {(await answer.aread()).decode(errors='replace')}")
            async for event in _events(answer):
                tokens = self._dialect.tokens(event)
                ids += tokens
                times += [time.perf_counter()] * len(tokens)
        return Generation(began, ids, times)


async def _events(answer: httpx2.Response) -> AsyncIterator[Event]:
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


async def _is_ready(client: httpx2.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).is_success
    except httpx2.TransportError:
        return False
