"""A programmable service behind the real transport on a loopback socket."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from grpc import aio

from segue_model.sampling import TokenLogprob
from segue_server.cache.segments import Tier
from segue_server.events import CacheUsage, Event, Failed, Finished, Started, Tokens
from segue_server.grpc_api.health import Health
from segue_server.grpc_api.server import bind, build_server
from segue_server.origin import Origin
from segue_server.requests import AppendRequest, FinishReason, GenerateRequest, SamplingParams, SessionSettings
from segue_server.views import (
    Estimate,
    Latency,
    Limits,
    Load,
    ModelInfo,
    Scores,
    ServerInfo,
    SessionPage,
    SessionState,
    SessionView,
    TokenChunk,
    TurnSpan,
)
from segue_server.watch import EventHub

Script = Callable[[GenerateRequest | AppendRequest], AsyncIterator[Event]]


async def short_turn(request):
    """Two tokens and the end."""
    yield Started("r-1", request.session_id or "s-1", 3, 2, 5, Tier.DEVICE, 7)
    yield Tokens(5, (10, 11), "ab")
    yield Finished(FinishReason.EOS, 7)


@dataclass
class Left:
    """How and when a turn was left, and what was then left of the caller's deadline."""

    session_id: str
    by: type[BaseException] | None
    at: float
    time_remaining: float | None


@dataclass
class FakeTurn:
    request_id: str
    session_id: str
    events: AsyncIterator[Event]

    async def __aiter__(self):
        sequence = 0
        async for event in self.events:
            if isinstance(event, Failed):
                raise event.error
            sequence += 1
            yield sequence, event


@dataclass
class FakeService:
    """Answers as told and remembers what it was asked. `error` is raised by every method."""

    script: Script = short_turn
    error: Exception | None = None
    asked: list[object] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    cancelled: tuple[bool, Finished | None] = (True, Finished(FinishReason.CANCELLED, 4))
    views: tuple[SessionView, ...] = ()
    settings: SessionSettings = field(default_factory=SessionSettings)
    hub: EventHub = field(default_factory=EventHub)
    estimated: Estimate = field(default_factory=Estimate)

    def _note(self, *asked):
        self.asked.append(asked)
        if self.error:
            raise self.error

    async def create_session(self, request, *, caller, origin):
        self.origins.append(origin)
        self._note("create_session", request, caller)
        return self.view(request.session_id or "assigned")

    async def get_session(self, session_id):
        self._note("get_session", session_id)
        return self.view(session_id)

    async def list_sessions(self, request):
        self._note("list_sessions", request)
        return SessionPage((self.view("a"), self.view("b")), "next")

    async def delete_session(self, session_id, *, etag="", force=False, allow_missing=False):
        self._note("delete_session", session_id, etag, force, allow_missing)
        return 4096

    @asynccontextmanager
    async def _turn(self, name, request, caller, time_remaining):
        self._note(name, request, caller)
        by = None
        try:
            yield FakeTurn("r-1", request.session_id or "s-1", self.script(request))
        except BaseException as error:
            by = type(error)
            raise
        finally:
            self.left.append(Left(request.session_id, by, time.monotonic(), time_remaining()))

    def generate(self, request, *, caller, time_remaining, origin):
        self.origins.append(origin)
        return self._turn("generate", request, caller, time_remaining)

    def append(self, request, *, caller, time_remaining, origin):
        self.origins.append(origin)
        return self._turn("append", request, caller, time_remaining)

    async def update_session(self, request):
        self._note("update_session", request)
        return self.view(request.session_id)

    async def read_tokens(self, request):
        self._note("read_tokens", request)
        yield TokenChunk(3, (10, 11), "ab")
        spans = (
            TurnSpan(turn=0, request_id="r-1", start=0, generated_start=2, end=5, finish_reason=FinishReason.EOS),
            TurnSpan(turn=1, request_id="r-2", start=5, generated_start=6, end=7, finish_reason=None),
        )
        yield TokenChunk(5, (12,), "c", spans)

    def watch_sessions(self, request):
        self._note("watch_sessions", request)
        return self.hub.watch(self.hub.place(request.after_sequence), request.session_id)

    async def score_tokens(self, request, *, caller, time_remaining, origin):
        self.origins.append(origin)
        self._note("score_tokens", request, caller, time_remaining())
        return Scores((TokenLogprob(5, -0.5, ((5, -0.5), (6, -1.5))), TokenLogprob(7, -2.0)), 40)

    async def estimate(self, request, *, caller):
        self._note("estimate", request, caller)
        return self.estimated

    async def cancel(self, *, request_id="", session_id="", commit_policy=None):
        self._note("cancel", request_id, session_id, commit_policy)
        return self.cancelled

    def model_info(self):
        self._note("model_info")
        return ModelInfo(
            model_id="tiny",
            fingerprint="f",
            layer_count=2,
            head_count=4,
            kv_head_count=2,
            head_dim=8,
            vocab_size=100,
            max_context_tokens=512,
            eos_token_ids=(1, 2),
            bos_token_id=0,
            rope_theta=1e4,
            weight_dtype="float32",
            weight_bytes=1 << 40,
            parameter_count=1000,
            kv_bytes_per_token=256,
            default_sampling=SamplingParams(temperature=0.0, logit_bias={3: -1.5}),
            has_chat_template=True,
        )

    def server_info(self):
        self._note("server_info")
        limits = Limits(
            kv_budget_bytes=1 << 33,
            max_sessions=10,
            max_running_requests=4,
            max_queued_requests=8,
            max_prompt_tokens=500,
            max_stop_sequences=4,
            max_stop_sequence_chars=64,
            max_logit_bias_count=300,
            max_top_logprobs=20,
            default_ttl=600.0,
            max_ttl=3600.5,
            tombstone_ttl=60.0,
            expiry_notice=30.0,
            max_pinned_bytes=1 << 30,
            prefill_chunk_tokens=256,
            block_tokens=16,
        )
        return ServerInfo(version="0.1.0", build="b", capabilities=("fork",), limits=limits, uptime=1.25)

    def load(self):
        self._note("load")
        return Load(
            running_requests=1,
            queued_requests=2,
            kv_used_bytes=3,
            kv_evictable_bytes=4,
            kv_free_bytes=1 << 40,
            sessions=6,
            generated_tokens_per_second=7.5,
            since_last_step=float("inf"),
            draining=True,
            prefilled_tokens=8,
            generated_tokens=9,
            time_to_first_token=Latency(count=2, total=0.75, median=0.25, p95=0.5),
            inter_token=Latency(count=0, total=0.0, median=None, p95=None),
        )

    def tokenize(self, text, *, add_special_tokens):
        self._note("tokenize", text, add_special_tokens)
        return [5, 6], ["he", "llo"]

    def detokenize(self, ids, *, skip_special_tokens):
        self._note("detokenize", ids, skip_special_tokens)
        return "héllo"

    def view(self, session_id):
        return SessionView(
            session_id=session_id,
            display_name="name",
            labels={"team": "x"},
            state=SessionState.RUNNING,
            position=12,
            etag="e1",
            turn_count=3,
            active_request_id="r-9",
            cache=CacheUsage(1000, 2000, 500, 11, 0.25, tier=Tier.DEVICE),
            settings=self.settings,
            create_time=1_700_000_000.5,
            last_used_time=1_700_000_001.0,
            expire_time=float("inf"),
            model_fingerprint="f",
            forked_from=("parent", 5),
        )


@dataclass
class Calls:
    """A CallObserver that remembers."""

    started_methods: list[str] = field(default_factory=list)
    ended: list[tuple[str, str]] = field(default_factory=list)

    def started(self, method):
        self.started_methods.append(method)

    def finished(self, method, status, seconds):
        assert seconds >= 0
        self.ended.append((method, status))

    async def all_ended(self):
        """The ended calls, once each started one is among them: a client may see a status before it is counted."""
        for _ in range(400):
            if len(self.ended) == len(self.started_methods):
                break
            await asyncio.sleep(0.005)
        return self.ended


@pytest.fixture
def service():
    return FakeService()


@pytest.fixture
def calls():
    return Calls()


@pytest.fixture
async def health():
    return Health()


@pytest.fixture
async def address(service, calls, health):
    server = build_server(service, health=health, observer=calls)
    port = bind(server, "127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    health.close()
    await server.stop(None)


@pytest.fixture
async def channel(address):
    async with aio.insecure_channel(address) as channel:
        yield channel
