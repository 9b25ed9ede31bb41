"""However a caller leaves, its turn is left at once; and a turn knows where its call came from."""

import asyncio
import threading
import time

import grpc
import pytest
from grpc import aio

from segue.v1 import generation_pb2, generation_pb2_grpc
from segue_server.cache.segments import Tier
from segue_server.events import Started, Tokens
from segue_server.grpc_api.server import bind, build_server

PROMPT = 3.0  # seconds in which a turn must be left, on a busy machine; measured: about a millisecond


async def endless(request):
    """A token every 5 ms, for ever."""
    yield Started("r", request.session_id, 0, 1, 1, Tier.DEVICE, 0)
    while True:
        yield Tokens(1, (1,), "x")
        await asyncio.sleep(0.005)


async def stuck(request):
    """One event, then silence: a long prefill."""
    yield Started("r", request.session_id, 0, 1, 1, Tier.DEVICE, 0)
    await asyncio.sleep(3600)


async def flood(request):
    """Big events as fast as they are taken: soon the server waits in a write."""
    yield Started("r", request.session_id, 0, 1, 1, Tier.DEVICE, 0)
    while True:
        yield Tokens(1, (1,), "x" * 10_000)


async def left(service):
    """The turn that was left, once it is."""
    for _ in range(1000):
        if service.left:
            return service.left[0]
        await asyncio.sleep(0.005)
    pytest.fail("the turn was not left within 5 s")


@pytest.mark.parametrize("script", [endless, stuck, flood], ids=lambda script: script.__name__)
@pytest.mark.parametrize("method", ["GenerateStream", "AppendContext"])
async def test_cancel_leaves_the_turn(channel, service, calls, script, method):
    """While tokens flow, while nothing comes, and while the server waits in a write to a reader who stopped."""
    service.script = script
    kind = generation_pb2.AppendContextRequest if method == "AppendContext" else generation_pb2.GenerateRequest
    stream = getattr(generation_pb2_grpc.GenerationServiceStub(channel), method)(kind(session_id="s"))
    await stream.read()
    await asyncio.sleep(0.2 if script is flood else 0.02)
    began = time.monotonic()
    stream.cancel()
    turn = await left(service)
    print(f"\nleft {(turn.at - began) * 1000:.2f} ms after the cancel")
    assert turn.at - began < PROMPT
    assert turn.by in (asyncio.CancelledError, GeneratorExit)
    assert turn.time_remaining is None
    assert await calls.all_ended() == [(f"segue.v1.GenerationService/{method}", "CANCELLED")]


async def test_cancel_of_a_unary_call_leaves_the_turn(channel, service):
    begun = asyncio.Event()

    async def script(request):
        begun.set()
        async for event in stuck(request):
            yield event

    service.script = script
    call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(generation_pb2.GenerateRequest())
    await begun.wait()
    began = time.monotonic()
    call.cancel()
    assert (await left(service)).at - began < PROMPT
    with pytest.raises(asyncio.CancelledError):
        await call


@pytest.mark.parametrize("script", [endless, stuck], ids=lambda script: script.__name__)
async def test_disconnect_leaves_the_turn(address, service, script):
    """A closed channel, without a cancel of the call."""
    service.script = script
    channel = aio.insecure_channel(address)
    stream = generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(generation_pb2.GenerateRequest())
    await stream.read()
    began = time.monotonic()
    await channel.close()
    assert (await left(service)).at - began < PROMPT


@pytest.mark.parametrize("script", [endless, stuck], ids=lambda script: script.__name__)
async def test_deadline_leaves_the_turn(channel, service, calls, script):
    """The service can tell it from a cancel: no time remains."""
    service.script = script
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    began = time.monotonic()
    with pytest.raises(aio.AioRpcError) as caught:
        async for _ in stub.GenerateStream(generation_pb2.GenerateRequest(), timeout=0.2):
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    turn = await left(service)
    assert 0.15 < turn.at - began < 0.2 + PROMPT
    assert turn.time_remaining == 0
    assert await calls.all_ended() == [("segue.v1.GenerationService/GenerateStream", "DEADLINE_EXCEEDED")]


async def test_server_stop_leaves_the_turn(service, calls, health):
    """After the grace the server takes the calls that still run with it."""
    service.script = stuck
    server = build_server(service, health=health, observer=calls)
    port = bind(server, "127.0.0.1:0")
    await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stream = generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(generation_pb2.GenerateRequest())
        await stream.read()
        began = time.monotonic()
        await server.stop(0.1)
        turn = await left(service)
        assert 0.05 < turn.at - began < 0.1 + 2 * PROMPT
        with pytest.raises(aio.AioRpcError):
            await stream.read()


async def test_blocking_client_leaves_the_turn(address, service):
    """The blocking stub's cancel reaches the turn as well."""
    service.script = endless
    read = threading.Event()

    def talk():
        with grpc.insecure_channel(address) as channel:
            stream = generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(generation_pb2.GenerateRequest())
            next(stream)
            read.set()
            stream.cancel()

    await asyncio.to_thread(talk)
    assert read.is_set()
    await left(service)


async def test_the_transport_does_not_read_ahead_of_a_slow_reader(channel, service):
    """Nothing is buffered here: only what gRPC's own window holds is taken from the service's queue."""
    taken = 0

    async def counting(request):
        nonlocal taken
        async for event in flood(request):
            taken += 1
            yield event

    service.script = counting
    stream = generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(generation_pb2.GenerateRequest())
    await stream.read()
    await asyncio.sleep(0.3)
    first = taken
    await asyncio.sleep(0.3)
    print(f"\n{first} events of 10 KB ahead of a stalled reader")
    assert taken == first, "the server went on without a reader"
    stream.cancel()


async def test_a_turn_knows_where_its_call_came_from(channel, service):
    """The caller's address and its trace, and no other header."""
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    await stub.Generate(generation_pb2.GenerateRequest(), metadata=(("traceparent", trace), ("other", "x")))
    (origin,) = service.origins
    assert origin.peer.startswith(("ipv4:", "ipv6:"))
    assert origin.trace == {"traceparent": trace}
