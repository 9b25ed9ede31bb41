"""A service over a real engine, its thread and a fake runner, with a byte tokenizer: what test_service drives."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.server.fakes import BYTE_VOCAB, SPECIAL, FakeRunner, byte_tokenizer, greedy

from segue_model.chat import ChatTemplate
from segue_server.engine import Engine
from segue_server.engine_thread import EngineThread
from segue_server.events import Event, Finished, Started, Tokens
from segue_server.mover import Offload
from segue_server.prompts import Prompts
from segue_server.reports import TurnObserver
from segue_server.requests import (
    CreateSessionRequest,
    GenerateRequest,
    OutputOptions,
    SamplingParams,
    StopConditions,
    TokenInput,
)
from segue_server.served import ServedModel
from segue_server.service import Service, Turn
from segue_server.views import Limits, SessionState

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EOS = SPECIAL["<|im_end|>"]


@dataclass
class Answer:
    """What one turn's reader has received."""

    events: list[Event] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events if isinstance(event, Tokens) for token in event.token_ids]

    @property
    def finished(self) -> Finished:
        assert isinstance(self.events[-1], Finished), self.events
        return self.events[-1]

    @property
    def started(self) -> Started:
        return next(event for event in self.events if isinstance(event, Started))


PASS_SECONDS = 0.0005


class Gate:
    """Holds the engine inside a forward pass while it is shut.

    A pass through the open gate takes a moment too, without Python's lock, as every model's does: an engine that never
    lets go of it leaves the event loop behind by hundreds of tokens.
    """

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.reached = threading.Event()

    def __call__(self) -> None:
        time.sleep(PASS_SECONDS)
        self.reached.set()
        self._open.wait(10.0)

    def shut(self) -> None:
        self.reached.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def wait_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, 5.0)


class ServiceBench:
    def __init__(
        self,
        folder: Path,
        *,
        pages: int = 128,
        max_running: int = 8,
        max_queued: int = 64,
        max_sessions: int = 100,
        step_tokens: int = 64,
        queue_timeout: float = 30.0,
        max_context_tokens: int = 1600,
        ttl: float = 600.0,
        slow_reader_limit: float = 30.0,
        expiry_notice: float = 60.0,
        max_pinned_bytes: int = 0,
        offload: Offload | None = None,
        observers: Sequence[TurnObserver] = (),
    ) -> None:
        self.runner = FakeRunner(pages, vocab=BYTE_VOCAB)
        self.gate = Gate()
        self.runner.before_step = self.gate
        self.engine = Engine(
            self.runner,
            max_running=max_running,
            step_tokens=step_tokens,
            slow_reader_limit=slow_reader_limit,
            offload=offload,
        )
        self.crashes: list[BaseException] = []
        self.thread = EngineThread(self.engine, on_crash=self.crashes.append)
        self.model = ServedModel(
            config=self.runner.config,
            model_id="fake",
            fingerprint="f" * 64,
            prompts=Prompts(byte_tokenizer(folder), ChatTemplate(CHATML)),
            eos_token_ids=frozenset({EOS}),
            bos_token_id=None,
            default_sampling=SamplingParams(temperature=0.0),
            weight_dtype="F32",
            weight_bytes=1,
            parameter_count=1,
            kv_dtype="float32",
            kv_bytes_per_token=self.runner.page_bytes // 16,
            max_context_tokens=max_context_tokens,
        )
        self.limits = Limits(
            kv_budget_bytes=pages * self.runner.page_bytes,
            max_sessions=max_sessions,
            max_running_requests=max_running,
            max_queued_requests=max_queued,
            max_prompt_tokens=max_context_tokens,
            max_stop_sequences=4,
            max_stop_sequence_chars=64,
            max_logit_bias_count=16,
            max_top_logprobs=20,
            default_ttl=ttl,
            max_ttl=3600.0,
            tombstone_ttl=60.0,
            expiry_notice=expiry_notice,
            max_pinned_bytes=max_pinned_bytes,
            prefill_chunk_tokens=step_tokens,
            block_tokens=16,
        )
        self.service = Service(
            self.model,
            self.thread,
            self.limits,
            version="0",
            build="fake",
            queue_timeout=queue_timeout,
            observers=observers,
        )

    async def create(self, session_id: str = "chat-1", **fields: object) -> str:
        request = CreateSessionRequest(session_id=session_id, **fields)  # type: ignore[arg-type]
        return (await self.service.create_session(request, caller="me")).session_id

    def turn(
        self, prompt: Sequence[int] | None = (1, 2, 3), session_id: str = "chat-1", **fields: object
    ) -> AbstractAsyncContextManager[Turn]:
        """`async with` gives the Turn. `max_tokens` is for the stop conditions; the rest is GenerateRequest's."""
        stop = StopConditions(max_tokens=fields.pop("max_tokens", 8), ignore_eos=True)  # type: ignore[arg-type]
        left = fields.pop("time_remaining", lambda: None)
        values: dict[str, object] = {
            "session_id": session_id,
            "input": TokenInput(tuple(prompt)) if prompt is not None else None,
            "stop": stop,
            "output": OutputOptions(heartbeat_interval=0),
        }
        request = GenerateRequest(**(values | fields))  # type: ignore[arg-type]
        return self.service.generate(request, caller="me", time_remaining=left)  # type: ignore[arg-type]

    async def ask(
        self, prompt: Sequence[int] | None = (1, 2, 3), session_id: str = "chat-1", **fields: object
    ) -> Answer:
        """One turn, read to its end."""
        async with self.turn(prompt, session_id, **fields) as turn:
            return await read(turn)

    async def until(self, true: Callable[[], object]) -> None:
        """Poll: what the engine's thread does is told to nobody but the turn's reader."""
        async with asyncio.timeout(5.0):
            while not true():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def idle(self, session_id: str = "chat-1") -> None:
        """Until the session is free."""
        session = self.service._sessions.get(session_id)
        await self.until(lambda: session.state is SessionState.IDLE)

    def plain(self, tokens: Sequence[int], count: int) -> list[int]:
        return greedy(tokens, count, BYTE_VOCAB)

    def ledger(self, session_id: str = "chat-1") -> list[int]:
        return list(self.engine.tokens(session_id))

    @property
    def session_pages(self) -> int:
        """Pages that sessions hold; the prefix index may hold others."""
        return len({page for s in self.engine.holdings.sequences.values() for page in s.cache.pages})

    async def check(self) -> None:
        """Nothing is in flight and every page belongs to an idle session that the registry knows."""
        await self.until(lambda: not (self.service.load().running_requests or self.service.load().queued_requests))
        await self.thread.call(lambda: None)  # what was posted has been done
        assert not self.runner.faults, self.runner.faults
        self.engine.scheduler.check_integrity()
        assert not self.engine.scheduler.running
        assert not self.engine.scheduler.waiting
        load = self.service.load()
        assert (load.running_requests, load.queued_requests, load.kv_used_bytes) == (0, 0, 0)
        assert self.service.waiting_behind == 0
        assert len(self.engine.holdings.sequences) == load.sessions
        kv = self.engine.figures.kv_bytes()
        assert kv.held == self.engine.holdings.pool.held * self.runner.page_bytes
        assert load.kv_free_bytes == kv.capacity - kv.held


async def read(turn: Turn) -> Answer:
    answer = Answer()
    async for _, event in turn:
        answer.events.append(event)
    return answer


@asynccontextmanager
async def serving(folder: Path, **options: object) -> AsyncIterator[ServiceBench]:
    """Checks at the end that everything has been given back."""
    bench = ServiceBench(folder, **options)  # type: ignore[arg-type]
    bench.thread.start()
    try:
        yield bench
    finally:
        bench.gate.open()
        await bench.service.drain(5.0)
        if not bench.crashes:
            await bench.check()
            await bench.thread.call(bench.engine.holdings.prefixes.flush)
            assert bench.engine.holdings.pool.held == bench.session_pages
        await bench.thread.stop()
