"""Servers whose latencies are known: they follow a schedule, and write down when they really did what.

They run on the test's own event loop, over a real socket. A tester's figures are compared with what was performed, not
with what was planned, so that a busy machine shifts both.
"""

# ruff: noqa: ARG002, N802  handlers have gRPC's signature and the contract's names

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import HealthServicer
from grpc_status import rpc_status

from segue.v1 import (
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
    types_pb2,
)

VOCABULARY, CONTEXT = 1000, 2048


@dataclass
class Performed:
    """One request as the server saw it; moments of `time.perf_counter`."""

    request: Any
    size: int  # of the prompt, in tokens; of the last message
    tokens: list[float] = field(default_factory=list)


@dataclass
class Schedule:
    """How long each step takes, in seconds; drawn by the server's own generator."""

    first: Callable[[Random], float]
    gap: Callable[[Random], float]
    rng: Random = field(default_factory=lambda: Random(11))
    performed: list[Performed] = field(default_factory=list)
    running: asyncio.Event = field(default_factory=asyncio.Event)  # cleared, the server stands still
    resumed: float = 0.0  # when it last went on

    def __post_init__(self) -> None:
        self.running.set()

    async def stall(self, after: float, length: float) -> None:
        """Stands still for a while; `resumed` tells when that was over."""
        await asyncio.sleep(after)
        self.running.clear()
        await asyncio.sleep(length)
        self.resumed = time.perf_counter()
        self.running.set()

    async def tokens(self, request: Any, size: int, count: int) -> AsyncIterator[int]:
        """The numbers of tokens, each when it is due."""
        mine = Performed(request, size)
        self.performed.append(mine)
        pauses = [self.first(self.rng), *(self.gap(self.rng) for _ in range(count - 1))]
        for number, pause in enumerate(pauses):
            await asyncio.sleep(pause)
            await self.running.wait()
            mine.tokens.append(time.perf_counter())
            yield number


class ScheduledSegue(
    generation_pb2_grpc.GenerationServiceServicer,
    session_pb2_grpc.SessionServiceServicer,
    model_pb2_grpc.ModelServiceServicer,
):
    """Turns that follow a schedule, in sessions that count their tokens and remember where their KV lies."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.positions: dict[str, int] = {}
        self.tiers: dict[str, int] = {}
        self.refusing = False
        self.created = 0

    async def GenerateStream(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        if self.refusing:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
        start, prompt = self.positions.get(request.session_id, 0), len(request.token_ids.ids)
        yield self._event(1, started=generation_pb2.Started(position=start, prompt_tokens=prompt))
        count = request.stop.max_tokens
        async for number in self.schedule.tokens(request, prompt, count):
            token = generation_pb2.Tokens(position=start + prompt + number, token_ids=[number], text="w ")
            yield self._event(number + 2, tokens=token)
        end = self._end(request, start, prompt, count)
        yield self._event(count + 2, finished=end)

    def _event(self, sequence: int, **kind: Any) -> generation_pb2.GenerateEvent:
        return generation_pb2.GenerateEvent(sequence=sequence, **kind)

    def _end(self, request: Any, start: int, prompt: int, count: int) -> generation_pb2.Finished:
        tier = self.tiers.pop(request.session_id, types_pb2.CACHE_TIER_DEVICE)
        found = not request.bypass_prefix_cache  # in the prefix index, although it was moved away
        restored = start if tier == types_pb2.CACHE_TIER_HOST and not found else 0
        computed = start if tier == types_pb2.CACHE_TIER_NONE else 0
        usage = types_pb2.Usage(
            prompt_tokens=prompt,
            generated_tokens=count,
            context_tokens=start,
            computed_tokens=prompt + computed,
            session_reused_tokens=start - restored - computed,
            restored_tokens=restored,
        )
        if request.session_id:
            self.positions[request.session_id] = start + prompt + count
        reason = types_pb2.FINISH_REASON_MAX_TOKENS
        return generation_pb2.Finished(finish_reason=reason, usage=usage, position=start + prompt + count, etag="e")

    async def AppendContext(self, request: Any, _: Any) -> AsyncIterator[Any]:
        start, prompt = self.positions[request.session_id], len(request.token_ids.ids)
        self.positions[request.session_id] += prompt
        yield self._event(1, started=generation_pb2.Started(position=start, prompt_tokens=prompt))
        yield self._event(2, finished=generation_pb2.Finished(position=start + prompt, etag="e"))

    async def CancelGeneration(self, request: Any, _: Any) -> generation_pb2.CancelGenerationResponse:
        return generation_pb2.CancelGenerationResponse(finished=generation_pb2.Finished())

    async def CreateSession(self, request: Any, _: Any) -> session_pb2.Session:
        self.created += 1
        session_id = request.session_id or f"session-{self.created}"
        self.positions[session_id] = len(request.token_ids.ids)
        return self._session(session_id)

    async def ForkSession(self, request: Any, _: Any) -> session_pb2.ForkSessionResponse:
        children = [f"{request.session_id}-{number}" for number in range(request.count)]
        self.positions |= dict.fromkeys(children, self.positions[request.session_id])
        return session_pb2.ForkSessionResponse(sessions=map(self._session, children))

    async def RewindSession(self, request: Any, _: Any) -> session_pb2.Session:
        taken_back = self.schedule.performed[-1].request
        self.positions[request.session_id] -= len(taken_back.token_ids.ids) + taken_back.stop.max_tokens
        return self._session(request.session_id)

    async def MoveSessionCache(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> session_pb2.Session:
        if request.tier == types_pb2.CACHE_TIER_DISK:
            await context.abort_with_status(_feature_disabled())
        self.tiers[request.session_id] = request.tier
        return self._session(request.session_id)

    async def DeleteSession(self, request: Any, _: Any) -> session_pb2.DeleteSessionResponse:
        del self.positions[request.session_id]
        return session_pb2.DeleteSessionResponse()

    def _session(self, session_id: str) -> session_pb2.Session:
        return session_pb2.Session(session_id=session_id, position=self.positions[session_id], etag="e")

    async def GetModelInfo(self, request: Any, _: Any) -> model_pb2.ModelInfo:
        return model_pb2.ModelInfo(model_id="scheduled", vocab_size=VOCABULARY, max_context_tokens=CONTEXT)

    async def GetServerInfo(self, request: Any, _: Any) -> model_pb2.ServerInfo:
        return model_pb2.ServerInfo(version="0", build="fake")


def _feature_disabled() -> grpc.Status:
    status = status_pb2.Status(code=grpc.StatusCode.FAILED_PRECONDITION.value[0], message="there is no disk tier")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="FEATURE_DISABLED", domain="segue"))
    rich: grpc.Status = rpc_status.to_status(status)
    return rich


@asynccontextmanager
async def serving_segue(servicer: ScheduledSegue) -> AsyncIterator[str]:
    """The address of a Segue server that follows a schedule."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    session_pb2_grpc.add_SessionServiceServicer_to_server(servicer, server)
    model_pb2_grpc.add_ModelServiceServicer_to_server(servicer, server)
    health = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    for service in ("", "segue.v1.GenerationService"):
        health.set(service, health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


class ScheduledOpenAi:
    """Chat completions as server-sent events, by the bytes: what a client library would hide is seen here."""

    def __init__(self, schedule: Schedule, cached: bool = True) -> None:
        self.schedule = schedule
        self.status = 200
        self.broken = False  # end the stream before finish_reason
        self._cached = cached
        self._seen: set[str] = set()  # conversations whose KV it has

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(
                (int(line.split(":")[1]) for line in head.lower().split("\r\n") if "content-length" in line), 0
            )
            body = await reader.readexactly(length)
            if head.startswith("GET /v1/models "):
                answer = json.dumps({"object": "list", "data": [{"id": "peer", "object": "model"}]})
                writer.write(self._head(200, "application/json") + answer.encode())
            else:
                await self._complete(json.loads(body), writer)
            await writer.drain()
        finally:
            writer.close()

    def _head(self, status: int, kind: str) -> bytes:
        return f"HTTP/1.1 {status} x\r\ncontent-type: {kind}\r\nconnection: close\r\n\r\n".encode()

    async def _complete(self, request: Any, writer: asyncio.StreamWriter) -> None:
        if self.status != 200:
            writer.write(self._head(self.status, "application/json") + b'{"error": {"message": "slow down"}}')
            return
        writer.write(self._head(200, "text/event-stream"))
        self._send(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        count = request["max_tokens"]
        async for number in self.schedule.tokens(request, _tokens(request["messages"][-1]), count):
            last = number == count - 1 and not self.broken
            delta = {"content": f"w{number} "}
            self._send(writer, {"choices": [{"delta": delta, "finish_reason": "length" if last else None}]})
            await writer.drain()
        self._send(writer, {"choices": [], "usage": self._usage(request)})
        writer.write(b"data: [DONE]\n\n")

    def _usage(self, request: Any) -> dict[str, Any]:
        messages = request["messages"]
        sizes = [_tokens(message) for message in messages]
        known = max((n for n in range(len(messages)) if json.dumps(messages[:n]) in self._seen), default=0)
        self._seen.add(json.dumps(messages))
        self._seen.add(json.dumps(messages[:-1]))
        usage: dict[str, Any] = {"prompt_tokens": sum(sizes), "completion_tokens": request["max_tokens"]}
        if self._cached:
            usage["prompt_tokens_details"] = {"cached_tokens": sum(sizes[:known])}
        return usage

    def _send(self, writer: asyncio.StreamWriter, chunk: dict[str, Any]) -> None:
        writer.write(f"data: {json.dumps(chunk)}\n\n".encode())


def _tokens(message: dict[str, str]) -> int:
    """Half a token a word, and five for the template."""
    return 5 + len(message["content"].split()) // 2


@asynccontextmanager
async def serving_openai(peer: ScheduledOpenAi) -> AsyncIterator[str]:
    """The URL of an OpenAI-compatible server that follows a schedule."""
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
