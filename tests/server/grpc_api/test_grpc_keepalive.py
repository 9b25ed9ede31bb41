"""Silence and vanished clients, in real time: tests that sleep nearly all of it."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from grpc import aio

from segue.v1 import generation_pb2, generation_pb2_grpc
from segue_server.cache.segments import Tier
from segue_server.events import Finished, Started, Tokens
from segue_server.grpc_api.server import ServerOptions, bind, build_server
from segue_server.requests import FinishReason

NOTICE_BOUND = 15.0  # seconds from the freeze of a client to the end of its turn


@dataclass(frozen=True)
class Times:
    """Seconds."""

    silence: float
    late: float  # of silence before a client freezes: the server's pings must not dry up without data
    client_ping: float  # how often an impatient client pings
    noticing: ServerOptions  # of the server whose clients freeze


# A server with the usual options pings twice in this silence, so a peer that does not answer would be cut off.
SHORT = Times(silence=12.0, late=6.0, client_ping=2.0, noticing=ServerOptions(keepalive_time=1.0, ping_timeout=2.0))
REAL = Times(silence=60.0, late=45.0, client_ping=10.0, noticing=ServerOptions())

# Bytes in, bytes out: no protobuf, so that the process starts quickly.
CLIENT = """
import sys, grpc
channel = grpc.insecure_channel(sys.argv[1])
stream = channel.unary_stream("/segue.v1.GenerationService/GenerateStream")(bytes.fromhex(sys.argv[2]))
next(stream)
print("started", flush=True)
for _ in stream: pass
"""


def script(silence):
    """Session "silent" says nothing for so long, "silent-..." far longer; others send a token every 50 ms."""

    async def turn(request):
        yield Started("r", request.session_id, 0, 1, 1, Tier.DEVICE, 0)
        if request.session_id.startswith("silent"):
            await asyncio.sleep(silence if request.session_id == "silent" else silence + 4 * NOTICE_BOUND)
        else:
            for position in range(1, 2000):
                yield Tokens(position, (position,), "x")
                await asyncio.sleep(0.05)
        yield Finished(FinishReason.MAX_TOKENS, 1)

    return turn


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


async def silent(address, ping):
    """Kinds of the events that a client gets who pings every `ping` seconds of a silence."""
    impatient = [("grpc.keepalive_time_ms", round(ping * 1000)), ("grpc.http2.max_pings_without_data", 0)]
    async with aio.insecure_channel(address, options=impatient) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        stream = stub.GenerateStream(generation_pb2.GenerateRequest(session_id="silent"))
        return [event.WhichOneof("event") async for event in stream]


@asynccontextmanager
async def serving(service, calls, health, options):
    """The address of a server with these options."""
    server = build_server(service, health=health, observer=calls, options=options)
    port = bind(server, "127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.fixture
async def mute_address(service, calls, health):
    """A server that never pings: its pings would count as traffic and keep the client from sending its own."""
    async with serving(service, calls, health, ServerOptions(keepalive_time=3600)) as mute:
        yield mute


@pytest.mark.parametrize(
    "times", [pytest.param(SHORT, id="short"), pytest.param(REAL, id="a minute", marks=pytest.mark.soak)]
)
async def test_silence_survives_and_frozen_clients_are_noticed(address, mute_address, service, calls, health, times):
    """Silence breaks nobody's stream, and a frozen client ends its turn soon: while tokens are sent to it, while
    nothing is sent, and after a long silence."""
    service.script = script(times.silence)
    async with serving(service, calls, health, times.noticing) as noticing:
        kinds, pinging_kinds, sending, quiet, late = await asyncio.gather(
            silent(address, times.client_ping),
            silent(mute_address, times.client_ping),
            frozen(noticing, service, "sending", 1.0),
            frozen(noticing, service, "silent-early", 1.0),
            frozen(noticing, service, "silent-late", times.late),
        )
    print(f"\nfrozen client noticed after {sending:.1f} s (sending), {quiet:.1f} s (silent), {late:.1f} s (late)")
    assert kinds == pinging_kinds == ["started", "finished"]
    assert max(sending, quiet, late) < NOTICE_BOUND


def test_the_usual_options_notice_a_frozen_client_within_the_bound():
    """What the short test scales down: a ping after a silence, and the wait for its answer."""
    usual = ServerOptions()
    assert usual.keepalive_time + usual.ping_timeout < NOTICE_BOUND
