"""Builds the gRPC servers: options, services, health and reflection. Whoever starts them also stops them."""

from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc import aio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from segue.v1 import cache_pb2, generation_pb2, model_pb2, session_pb2
from segue_server.admin import Admin
from segue_server.grpc_api.admin import AdminServicer
from segue_server.grpc_api.generation import GenerationServicer
from segue_server.grpc_api.handlers import service_handler
from segue_server.grpc_api.health import Health
from segue_server.grpc_api.interceptors import CallObserver, Guard
from segue_server.grpc_api.models import ModelServicer
from segue_server.grpc_api.port import Service
from segue_server.grpc_api.sessions import SessionServicer


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How the server treats connections. Durations in seconds.

    A client that froze or vanished without a word is noticed after keepalive_time + ping_timeout. The usual 20 s + 10 s
    would generate half a minute of tokens for nobody; 5 s + 5 s costs one ping per connection every 5 s of silence.
    """

    keepalive_time: float = 5.0
    ping_timeout: float = 5.0
    max_concurrent_streams: int = 512  # calls in flight per connection; more wait in the client
    max_receive_bytes: int = 4 * 1024 * 1024  # of one message

    def channel_arguments(self) -> list[tuple[str, int]]:
        """gRPC ignores unknown keys in silence, so those about pings are tested by their effect."""
        return [
            ("grpc.keepalive_time_ms", round(self.keepalive_time * 1000)),
            # gRPC core reads grpc.keepalive_timeout_ms and never arms it; this is the timeout that counts.
            ("grpc.http2.ping_timeout_ms", round(self.ping_timeout * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            # No client is sent away ("Too many pings") for pinging in a silence.
            ("grpc.http2.min_ping_interval_without_data_ms", 5000),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.max_concurrent_streams", self.max_concurrent_streams),
            ("grpc.max_receive_message_length", self.max_receive_bytes),
            # Two servers on one port would split the sessions between them without a word.
            ("grpc.so_reuseport", 0),
        ]


def build_server(
    service: Service, *, health: Health, observer: CallObserver, options: ServerOptions | None = None
) -> aio.Server:
    """The server of callers: sessions, generation, models, health, reflection. To be called on its event loop."""
    servicers: dict[ServiceDescriptor, object] = {
        session_pb2.DESCRIPTOR.services_by_name["SessionService"]: SessionServicer(service),
        generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]: GenerationServicer(service),
        model_pb2.DESCRIPTOR.services_by_name["ModelService"]: ModelServicer(service),
    }
    return _server(servicers, health, observer, options or ServerOptions())


def build_admin_server(
    admin: Admin, *, health: Health, observer: CallObserver, options: ServerOptions | None = None
) -> aio.Server:
    """The server of operators, for a loopback port. To be called on its event loop."""
    servicers: dict[ServiceDescriptor, object] = {
        cache_pb2.DESCRIPTOR.services_by_name["CacheAdminService"]: AdminServicer(admin)
    }
    return _server(servicers, health, observer, options or ServerOptions())


def bind(server: aio.Server, address: str) -> int:
    """The port listened on, which gRPC chooses for port 0. Raises OSError when `address` cannot be had."""
    try:
        return server.add_insecure_port(address)
    except RuntimeError as error:
        message = f"cannot listen on {address!r}: the port is taken or the address is not one of this machine"
        raise OSError(message) from error


def _server(
    servicers: dict[ServiceDescriptor, object], health: Health, observer: CallObserver, options: ServerOptions
) -> aio.Server:
    server = aio.server(interceptors=[Guard(observer)], options=options.channel_arguments())
    served = servicers | {health_pb2.DESCRIPTOR.services_by_name["Health"]: health}
    server.add_generic_rpc_handlers([service_handler(service, servicer) for service, servicer in served.items()])
    server.add_generic_rpc_handlers(_reflection([service.full_name for service in served]))
    return server


def _reflection(names: list[str]) -> "list[grpc.GenericRpcHandler[Any, Any]]":
    """Under both names that clients ask for: v1 has the messages of v1alpha, and grpcio-reflection only the latter."""
    alpha = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
    servicer = reflection.aio.ReflectionServicer([*names, alpha.full_name])  # type: ignore[attr-defined]  # not in stubs
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return [
        grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler})
        for name in (alpha.full_name, "grpc.reflection.v1.ServerReflection")
    ]
