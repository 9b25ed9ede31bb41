"""What surrounds the services: health, reflection, counting, options, the port."""

import asyncio
import socket

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from segue.v1 import generation_pb2, model_pb2, model_pb2_grpc, session_pb2, session_pb2_grpc
from segue_server.errors import SessionNotFound
from segue_server.grpc_api.form import caller_of
from segue_server.grpc_api.health import LIVENESS, READINESS, Health
from segue_server.grpc_api.server import ServerOptions, bind, build_server

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


async def check(channel, name):
    request = health_pb2.HealthCheckRequest(service=name)
    return (await health_pb2_grpc.HealthStub(channel).Check(request)).status


async def test_health_through_a_life(channel, health):
    """Warm-up, ready, not ready, drain; alive throughout, and nothing undoes a drain."""
    for change, ready in (
        (lambda: None, NOT_SERVING),
        (lambda: health.set_ready(True), SERVING),
        (lambda: health.set_ready(False), NOT_SERVING),
        (lambda: health.set_ready(True), SERVING),
        (health.drain, NOT_SERVING),
        (lambda: health.set_ready(True), NOT_SERVING),
    ):
        change()
        assert await check(channel, READINESS) == ready
        assert await check(channel, LIVENESS) == SERVING
    assert READINESS == "segue.v1.GenerationService"


async def test_health_of_an_unknown_service(channel):
    with pytest.raises(aio.AioRpcError) as caught:
        await check(channel, "nobody")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_list(channel, health):
    health.set_ready(True)
    answer = await health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest())
    assert {name: response.status for name, response in answer.statuses.items()} == {
        LIVENESS: SERVING,
        READINESS: SERVING,
    }


async def test_health_watch_tells_each_change(channel, health):
    """At once, and only changes; an unknown service is SERVICE_UNKNOWN; `close` ends the streams."""
    stub = health_pb2_grpc.HealthStub(channel)
    ready, unknown = (stub.Watch(health_pb2.HealthCheckRequest(service=name)) for name in (READINESS, "nobody"))
    assert ((await ready.read()).status, (await unknown.read()).status) == (NOT_SERVING, UNKNOWN)
    health.set_ready(False)
    for change, status in ((lambda: health.set_ready(True), SERVING), (health.drain, NOT_SERVING)):
        change()
        assert (await asyncio.wait_for(ready.read(), 1)).status == status
    health.close()
    assert await asyncio.wait_for(ready.read(), 1) is aio.EOF
    assert await asyncio.wait_for(unknown.read(), 1) is aio.EOF


async def test_stop_need_not_wait_for_watchers(service, calls, health):
    """After `close` a long grace ends with the last turn, not with its time."""
    server = build_server(service, health=health, observer=calls)
    port = bind(server, "127.0.0.1:0")
    await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=READINESS))
        await watch.read()
        health.drain()
        assert (await check(channel, READINESS)) == NOT_SERVING
        health.close()
        await asyncio.wait_for(server.stop(30), 2)


async def test_reflection_lists_and_describes_the_services(address):
    """With the library's own client over v1alpha: all services, and a method's input type."""

    def ask():
        with grpc.insecure_channel(address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            file = database.FindFileContainingSymbol("segue.v1.GenerationService")
            return set(database.get_services()), file.name

    services, file = await asyncio.to_thread(ask)
    assert services == {
        "segue.v1.SessionService",
        "segue.v1.GenerationService",
        "segue.v1.ModelService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert file == generation_pb2.DESCRIPTOR.name


async def test_reflection_v1(channel):
    """The name that newer tools ask for first; its messages are those of v1alpha."""
    stream = channel.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    [answer] = [response async for response in stream(iter([request]))]
    assert "segue.v1.ModelService" in {service.name for service in answer.list_services_response.service}


async def test_calls_are_counted(channel, service, calls):
    """By method and status; what nobody serves is "other", whatever its name."""
    models, sessions = model_pb2_grpc.ModelServiceStub(channel), session_pb2_grpc.SessionServiceStub(channel)
    await models.GetLoad(model_pb2.GetLoadRequest())
    service.error = SessionNotFound("s", "no such session")
    for call in (  # one after the other: a call that is made has begun
        lambda: sessions.GetSession(session_pb2.GetSessionRequest(session_id="s")),
        lambda: channel.unary_unary("/made.up/Name")(b""),
        lambda: channel.unary_unary("/segue.v1.ModelService/NoSuchMethod")(b""),
        lambda: check(channel, "nobody"),
    ):
        with pytest.raises(aio.AioRpcError):
            await call()
    assert calls.started_methods == [
        "segue.v1.ModelService/GetLoad",
        "segue.v1.SessionService/GetSession",
        "other",
        "other",
        "grpc.health.v1.Health/Check",
    ]
    statuses = ["OK", "NOT_FOUND", "UNIMPLEMENTED", "UNIMPLEMENTED", "NOT_FOUND"]
    assert sorted(await calls.all_ended()) == sorted(zip(calls.started_methods, statuses, strict=True))


async def test_a_taken_port_is_a_clear_error(address, service, calls):
    """Two servers must never share a port: sessions would be split between them."""
    second = build_server(service, health=Health(), observer=calls)
    with pytest.raises(OSError, match=f"cannot listen on '{address}': the port is taken"):
        bind(second, address)


async def test_a_port_taken_by_another_program(service, calls):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="the port is taken"):
            bind(build_server(service, health=Health(), observer=calls), f"127.0.0.1:{taken.getsockname()[1]}")


def test_channel_options():
    """The keys that gRPC knows; their effect is tested in real time elsewhere."""
    options = dict(ServerOptions(max_concurrent_streams=7).channel_arguments())
    assert options["grpc.max_concurrent_streams"] == 7
    assert options["grpc.http2.min_ping_interval_without_data_ms"] == 5000
    assert options["grpc.http2.max_ping_strikes"] == 0
    assert options["grpc.max_receive_message_length"] == 4 * 1024 * 1024
    assert options["grpc.so_reuseport"] == 0


def test_caller_is_the_first_identity_of_the_certificate():
    class Context:
        def __init__(self, identities):
            self.peer_identities = lambda: identities

    assert caller_of(Context((b"alice.example", b"second"))) == "alice.example"
    assert caller_of(Context(None)) == ""
    assert caller_of(Context(())) == ""
