"""A system in the contest: its processes, started once and standing still except while they are measured."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from peers.figures import Bout, Figure, Prompts, Reading
from peers.generation import Backend
from peers.limits import Limits, Work
from peers.process import Group
from peers.reference import Reference
from peers.systems import Launch, System

READY, PEAK = "ready after, s", "peak memory, MB"
BEYOND = "start and memory"
AGREEMENT = "greedy tokens equal to float32's"


class Contender:
    def __init__(self, system: System, work: Work, reference: Reference | None, logs: Path) -> None:
        """reference: None for a model whose answers mean nothing."""
        self.system, self.work = system, work
        self._reference = reference
        self._logs = logs
        self._prompts = Prompts(work.config.vocab_size)
        self._started: dict[int, tuple[Group, Backend]] = {}  # by the identity of its launch: some serve both purposes

    async def start(self, wheres: Sequence[Literal["single", "serving"]]) -> list[Reading]:
        """Bring up what the figures need. Raises RuntimeError or OSError when it does not come up."""
        readings = list[Reading]()
        for launch in {id(one): one for one in map(self._launch, wheres)}.values():
            began = time.perf_counter()
            group, backend = await launch.start(self._log())
            if launch is self.system.serving:
                readings.append(Reading(BEYOND, READY, time.perf_counter() - began, None))
            self._started[id(launch)] = group, backend
            await self._warm_up(backend, many=launch is self.system.serving)
            readings += await self._compare(backend)
            group.pause()
        return readings

    async def measure(self, figure: Figure, limits: Limits) -> list[Reading]:
        group, backend = self._started[id(self._launch(figure.where))]
        with group.running():
            group.check_alive()
            return await figure.measure(Bout(backend, self._prompts, self.work, limits))

    async def start_again(self) -> list[Reading]:
        """A second process beside the one that stands still."""
        began = time.perf_counter()
        group, _ = await self.system.serving.start(self._log())
        seconds = time.perf_counter() - began
        group.stop()
        return [Reading(BEYOND, READY, seconds, None)]

    def memory(self) -> list[Reading]:
        """Of the serving process, after everything it was asked."""
        started = self._started.get(id(self.system.serving))
        return [Reading(BEYOND, PEAK, started[0].peak_bytes() / 1e6, None)] if started else []

    def stop(self) -> None:
        for group, _ in self._started.values():
            group.stop()
        self._started.clear()

    def _launch(self, where: Literal["single", "serving"]) -> Launch:
        return self.system.single if where == "single" else self.system.serving

    def _log(self) -> Path:
        return self._logs / f"{self.system.name}.log"

    async def _warm_up(self, backend: Backend, *, many: bool) -> None:
        async with backend.chat() as chat:
            await chat.turn(self._prompts.fresh(64), 8)
        if many:
            await backend.together([self._prompts.fresh(64) for _ in range(4)], 8)

    async def _compare(self, backend: Backend) -> list[Reading]:
        if self._reference is None:
            return []
        async with backend.chat() as chat:
            generation = await chat.turn(self._reference.prompt, len(self._reference.expected))
        column = f"of {len(self._reference.expected)}"
        return [Reading(AGREEMENT, column, self._reference.agreeing(generation.ids), None)]


@asynccontextmanager
async def stopping(contenders: list[Contender]) -> AsyncIterator[None]:
    """No process outlives the contest."""
    try:
        yield
    finally:
        for contender in contenders:
            contender.stop()
