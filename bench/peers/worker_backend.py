"""A system that runs in a worker process: one line of JSON out, one line back."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from peers.generation import Chat, Generation, resending
from peers.process import Group


class WorkerBackend:
    """Implements generation.Backend; one order at a time."""

    def __init__(self, group: Group) -> None:
        self._group = group

    @classmethod
    async def start(cls, group: Group) -> "WorkerBackend":
        """Once the model is loaded. Raises RuntimeError with the end of the log when it is not."""
        started = cls(group)
        await asyncio.to_thread(started._read)
        return started

    def chat(self) -> AbstractAsyncContextManager[Chat]:
        return resending(self._generate)

    async def together(self, prompts: Sequence[Sequence[int]], new: int) -> list[Generation]:
        order = {"prompts": [list(prompt) for prompt in prompts], "new": new}
        return await asyncio.to_thread(self._ask, order)

    async def _generate(self, prompt: Sequence[int], new: int) -> Generation:
        [generation] = await self.together([prompt], new)
        return generation

    def _ask(self, order: Mapping[str, object]) -> list[Generation]:
        pipe = self._group.process.stdin
        if pipe is None:
            raise RuntimeError("the worker was started without pipes")
        pipe.write(json.dumps(order).encode() + b"\n")
        pipe.flush()
        answer = self._read()
        streams = zip(answer["ids"], answer["times"], strict=True)
        return [Generation(answer["began"], ids, times) for ids, times in streams]

    def _read(self) -> dict[str, Any]:
        pipe = self._group.process.stdout
        line = pipe.readline() if pipe else b""
        if not line:
            self._group.process.wait(10)
            self._group.check_alive()
        answer: dict[str, Any] = json.loads(line)
        return answer
