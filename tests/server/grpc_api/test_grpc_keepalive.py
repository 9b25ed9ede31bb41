"""Silence and vanished clients, in real time: one test of a minute that sleeps nearly all of it."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest
from grpc import aio

from segue.v1 import generation_pb2, generation_pb2_grpc
from segue_server.cache.segments import Tier
from segue_server.events import Finished, Started, Tokens
from segue_server.grpc_api.server import ServerOptions, bind, build_server
from segue_server.requests import FinishReason

NOTICE_BOUND = 15.0  # seconds from the freeze of a client to the end of its turn
SILENCE = 60.0
LATE = 45.0  # seconds of silence before a client freezes: the server's pings must not dry up without data
IMPATIENT = [("grpc.keepalive_time_ms", 10_000), ("grpc.http2.max_pings_without_data", 0)]

# Bytes in, bytes out: no protobuf, so that the process starts quickly.
CLIENT = """
import sys, grpc
channel = grpc.insecure_channel(sys.argv[1])
stream = channel.unary_stream("/segue.v1.GenerationService/GenerateStream")(bytes.fromhex(sys.argv[2]))
next(stream)
print("started", flush=True)
for _ in stream: pass
"""


async def script(request):
    """Sessions that begin with "silent" say nothing for a minute; others send a token every 50 ms."""
    yield Started("r", request.session_id, 0, 1, 1, Tier.DEVICE, 0)
    if request.session_id.startswith("silent"):
        await asyncio.sleep(SILENCE)
    for position in range(1, 2000):
        if request.session_id.startswith("silent"):
            break
        yield Tokens(position, (position,), "x")
        await asyncio.sleep(0.05)
    yield Finished(FinishReason.MAX_TOKENS, 1)


async def frozen(address, service, session_id, after):
    """Seconds from SIGSTOP of a client to the end of its turn."""
    request = generation_pb2.GenerateRequest(session_id=session_id).SerializeToString().hex()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, address, request, stdout=subprocess.PIPE
    )
    try:
        assert await process.stdout.readline() == b"started\n"
        await asyncio.sleep(after)
        os.kill(process.pid, signal.SIGSTOP)
        began = time.monotonic()
        while time.monotonic() - began < 2 * NOTICE_BOUND:
            left = [turn for turn in service.left if turn.session_id == session_id]
            if left:
                return left[0].at - began
            await asyncio.sleep(0.1)
        return float("inf")
    finally:
        process.kill()
        await process.wait()


async def silent(address):
    """Kinds of the events that a client gets who pings every 10 s of a silent minute."""
    async with aio.insecure_channel(address, options=IMPATIENT) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        stream = stub.GenerateStream(generation_pb2.GenerateRequest(session_id="silent-client"))
        return [event.WhichOneof("event") async for event in stream]


@pytest.fixture
async def mute_address(service, calls, health):
    """A server that never pings: its pings would count as traffic and keep the client from sending its own."""
    server = build_server(service, health=health, observer=calls, options=ServerOptions(keepalive_time=3600))
    port = bind(server, "127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def test_silence_survives_and_frozen_clients_are_noticed(address, mute_address, service):
    """A minute of silence breaks nobody's stream, and a frozen client ends its turn in under 15 s: while tokens are
    sent to it, while nothing is sent, and after a long silence."""
    service.script = script
    kinds, pinging_kinds, sending, quiet, late = await asyncio.gather(
        silent(address),
        silent(mute_address),
        frozen(address, service, "sending", 1.0),
        frozen(address, service, "silent-early", 1.0),
        frozen(address, service, "silent-late", LATE),
    )
    print(f"\nfrozen client noticed after {sending:.1f} s (sending), {quiet:.1f} s (silent), {late:.1f} s (late)")
    assert kinds == pinging_kinds == ["started", "finished"]
    assert max(sending, quiet, late) < NOTICE_BOUND
