"""A Segue server that does what a test tells it to, on a real loopback socket.

It knows every RPC of the contract from the descriptors. A test gives handlers by the RPC's name; sessions, turns and
their cancellation have small defaults: a ledger is counted, a turn appends a prompt of two tokens and says "w0 w1 w2 ".
"""

# ruff: noqa: ARG002, ARG005, N802  handlers have gRPC's signature and the contract's names

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as PackedAny
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from segue.v1 import generation_pb2, model_pb2, session_pb2, types_pb2

SERVING = b"\x08\x01"  # HealthCheckResponse{status: SERVING}


@dataclass
class Received:
    """One call as the server saw it."""

    method: str
    request: Any
    metadata: dict[str, str]
    time_remaining: float


@dataclass
class FakeServer:
    handlers: dict[str, Callable[..., Any]] = field(default_factory=dict)
    received: list[Received] = field(default_factory=list)
    positions: dict[str, int] = field(default_factory=dict)
    cancelled: dict[str, generation_pb2.Finished] = field(default_factory=dict)
    health: bytes = SERVING
    target: str = ""

    # What a test programs.

    def on(self, method: str, handler: Callable[..., Any]) -> None:
        """`handler(request, context)`; of a streaming method it returns an iterator."""
        self.handlers[method] = handler

    def calls(self, method: str) -> list[Received]:
        return [call for call in self.received if call.method == method]

    def fail(
        self,
        context: grpc.ServicerContext,
        code: grpc.StatusCode,
        reason: str = "",
        message: str = "refused",
        metadata: dict[str, str] | None = None,
        details: Sequence[Any] = (),
        retry_after: float | None = None,
        pushback_ms: int | None = None,
        domain: str = "segue",
    ) -> None:
        """Ends the call with a rich status, as the server's error mapping does."""
        status = status_pb2.Status(code=code.value[0], message=message)
        packed = list(details)
        if reason:
            packed.append(error_details_pb2.ErrorInfo(reason=reason, domain=domain, metadata=metadata or {}))
        if retry_after is not None:
            delay = Duration()
            delay.FromNanoseconds(int(retry_after * 1e9))
            packed.append(error_details_pb2.RetryInfo(retry_delay=delay))
        for detail in packed:
            wrapped = PackedAny()
            wrapped.Pack(detail)
            status.details.append(wrapped)
        rich = rpc_status.to_status(status)
        if pushback_ms is not None:
            pushback = ("grpc-retry-pushback-ms", str(pushback_ms))
            rich = rich._replace(trailing_metadata=(*rich.trailing_metadata, pushback))
        context.abort_with_status(rich)

    @staticmethod
    def events(*events: Any, first: int = 1) -> Iterator[generation_pb2.GenerateEvent]:
        """Messages around these events with the sequence numbers first, first + 1, ..."""
        names = {type_.message_type.name: type_.name for type_ in generation_pb2.GenerateEvent.DESCRIPTOR.fields[1:]}
        for sequence, event in enumerate(events, first):
            yield generation_pb2.GenerateEvent(sequence=sequence, **{names[event.DESCRIPTOR.name]: event})

    # What it does by itself.

    def CreateSession(self, request: Any, _: Any) -> session_pb2.Session:
        prefix = getattr(request, request.WhichOneof("prefix") or "", None)
        self.positions[request.session_id] = 0 if prefix is None else 4
        return self._session(request.session_id, settings=request.settings)

    def GetSession(self, request: Any, context: Any) -> session_pb2.Session:
        if request.session_id not in self.positions:
            self.fail(context, grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND", f"no session {request.session_id}")
        return self._session(request.session_id)

    def ListSessions(self, request: Any, _: Any) -> session_pb2.ListSessionsResponse:
        size = request.page_size or 50
        start = int(request.page_token or 0)
        ids = list(self.positions)[start : start + size]
        following = str(start + size) if start + size < len(self.positions) else ""
        return session_pb2.ListSessionsResponse(sessions=map(self._session, ids), next_page_token=following)

    def DeleteSession(self, request: Any, context: Any) -> session_pb2.DeleteSessionResponse:
        self.GetSession(request, context)
        del self.positions[request.session_id]
        return session_pb2.DeleteSessionResponse(freed_bytes=4096)

    def GenerateStream(self, request: Any, context: Any) -> Iterator[generation_pb2.GenerateEvent]:
        return self.events(*self.turn(request, words=3))

    def Generate(self, request: Any, context: Any) -> generation_pb2.GenerateResponse:
        *_, finished = self.turn(request, words=3)
        return generation_pb2.GenerateResponse(
            request_id=request.request_id,
            session_id=request.session_id,
            token_ids=[0, 1, 2],
            text="w0 w1 w2 ",
            finished=finished,
        )

    def AttachGeneration(self, request: Any, context: Any) -> Iterator[generation_pb2.GenerateEvent]:
        self.fail(context, grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND", f"no turn {request.request_id}")

    def CancelGeneration(self, request: Any, context: Any) -> generation_pb2.CancelGenerationResponse:
        deadline = time.monotonic() + 2
        while request.request_id not in self.cancelled and time.monotonic() < deadline:
            time.sleep(0.002)  # answers when the turn has left the batch
        if request.request_id not in self.cancelled:
            self.fail(context, grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND")
        return generation_pb2.CancelGenerationResponse(finished=self.cancelled[request.request_id], was_running=True)

    def GetModelInfo(self, request: Any, _: Any) -> model_pb2.ModelInfo:
        return model_pb2.ModelInfo(model_id="tiny", vocab_size=512, max_context_tokens=2048, kv_bytes_per_token=1024)

    def GetServerInfo(self, request: Any, _: Any) -> model_pb2.ServerInfo:
        return model_pb2.ServerInfo(version="0.1.0", capabilities=["fork", "rewind"])

    def GetLoad(self, request: Any, _: Any) -> model_pb2.Load:
        return model_pb2.Load(sessions=len(self.positions), kv_free_bytes=1 << 20)

    def Tokenize(self, request: Any, _: Any) -> model_pb2.TokenizeResponse:
        return model_pb2.TokenizeResponse(token_ids=request.text.encode(), pieces=list(request.text))

    def Detokenize(self, request: Any, _: Any) -> model_pb2.DetokenizeResponse:
        return model_pb2.DetokenizeResponse(text=bytes(request.token_ids).decode())

    def turn(self, request: Any, words: int) -> Iterator[Any]:
        """The events of a turn that says so many words; the ledger grows by them and by the prompt."""
        start = self.positions.get(request.session_id, 0)
        prompt = 2 if request.WhichOneof("input") else 0
        yield self.started(request, prompt)
        for index in range(words):
            yield generation_pb2.Tokens(position=start + prompt + index, token_ids=[index], text=f"w{index} ")
        yield self.finished(request, prompt, words, types_pb2.FINISH_REASON_EOS)

    def slow_turn(self, request: Any, context: grpc.ServicerContext) -> Iterator[generation_pb2.GenerateEvent]:
        """A turn without end, a word each 10 ms, until it is cancelled; it then keeps what it has said."""
        gone = threading.Event()
        start, words = self.positions.get(request.session_id, 0), 0

        def leave() -> None:  # gRPC drops the generator of a call that is over, without resuming it
            self.cancelled[request.request_id] = self.finished(request, 2, words, types_pb2.FINISH_REASON_CANCELLED)
            gone.set()

        context.add_callback(leave)
        yield from self.events(self.started(request, 2))
        while not gone.wait(0.01):
            token = generation_pb2.Tokens(position=start + 2 + words, token_ids=[words], text=f"w{words} ")
            words += 1
            yield from self.events(token, first=words + 1)

    def started(self, request: Any, prompt: int) -> generation_pb2.Started:
        return generation_pb2.Started(
            request_id=request.request_id,
            session_id=request.session_id,
            position=self.positions.get(request.session_id, 0),
            prompt_tokens=prompt,
            to_compute_tokens=prompt,
        )

    def finished(self, request: Any, prompt: int, words: int, reason: int) -> generation_pb2.Finished:
        before = self.positions.get(request.session_id, 0)
        self.positions[request.session_id] = before + prompt + words
        finished = generation_pb2.Finished(
            finish_reason=reason,
            position=before + prompt + words,
            etag=f"e{before + prompt + words}",
            usage=types_pb2.Usage(
                prompt_tokens=prompt,
                generated_tokens=words,
                context_tokens=before,
                computed_tokens=prompt,
                session_reused_tokens=before,
            ),
        )
        finished.timings.time_to_first_token.FromMilliseconds(125)
        finished.timings.decode.FromMilliseconds(500)
        return finished

    def _session(self, session_id: str, **fields: Any) -> session_pb2.Session:
        position = self.positions[session_id]
        return session_pb2.Session(
            session_id=session_id,
            position=position,
            etag=f"e{position}",
            state=session_pb2.SESSION_STATE_IDLE,
            cache=types_pb2.CacheUsage(tier=types_pb2.CACHE_TIER_DEVICE, used_bytes=position * 1024),
            **fields,
        )


class _Handlers(grpc.GenericRpcHandler):
    """Every method of the contract, led to the fake."""

    def __init__(self, fake: FakeServer) -> None:
        self._fake = fake
        services = [
            service
            for file in (generation_pb2, session_pb2, model_pb2)
            for service in file.DESCRIPTOR.services_by_name.values()
        ]
        self._methods = {f"/{s.full_name}/{m.name}": m for s in services for m in s.methods}

    def service(self, handler_call_details: Any) -> Any:
        if handler_call_details.method == "/grpc.health.v1.Health/Check":
            return grpc.unary_unary_rpc_method_handler(lambda request, context: self._fake.health)
        method = self._methods[handler_call_details.method]
        kind = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        return kind(
            self._behaviour(method.name),
            request_deserializer=method.input_type._concrete_class.FromString,
            response_serializer=method.output_type._concrete_class.SerializeToString,
        )

    def _behaviour(self, name: str) -> Callable[..., Any]:
        def behaviour(request: Any, context: grpc.ServicerContext) -> Any:
            metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
            self._fake.received.append(Received(name, request, metadata, context.time_remaining()))
            return (self._fake.handlers.get(name) or getattr(self._fake, name))(request, context)

        return behaviour


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    grpc_server = grpc.server(ThreadPoolExecutor(8), handlers=[_Handlers(fake)], options=[("grpc.so_reuseport", 0)])
    fake.target = f"127.0.0.1:{grpc_server.add_insecure_port('127.0.0.1:0')}"
    grpc_server.start()
    yield fake
    grpc_server.stop(None).wait()


@pytest.fixture
def unused_target() -> str:
    """An address where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
