"""Handlers for all methods of a proto service, by its descriptor; what the servicer lacks is FEATURE_ABSENT."""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol, TypeAlias, cast

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from segue_server.errors import FeatureAbsent, FieldInvalid, FieldViolation

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in the stubs only
_LENGTH_DELIMITED = 2  # wire type of strings and messages
_HANDLER_KINDS: Mapping[tuple[bool, bool], Callable[..., _Handler]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def service_handler(service: ServiceDescriptor, servicer: object) -> "grpc.GenericRpcHandler[Any, Any]":
    """Serves `servicer`'s methods under the names of the proto; the others raise FeatureAbsent."""
    return grpc.method_handlers_generic_handler(
        service.full_name, {method.name: _method_handler(method, servicer) for method in service.methods}
    )


def _method_handler(method: MethodDescriptor, servicer: object) -> _Handler:
    request_class = message_factory.GetMessageClass(method.input_type)
    response_class = message_factory.GetMessageClass(method.output_type)
    return _HANDLER_KINDS[method.client_streaming, method.server_streaming](
        getattr(servicer, method.name, None) or _absent(method),
        request_deserializer=partial(parse, request_class),
        response_serializer=response_class.SerializeToString,
    )


def _absent(method: MethodDescriptor) -> Callable[[object, object], Awaitable[None]]:
    async def absent(_request: object, _context: object) -> None:
        raise FeatureAbsent(f"this server does not offer {method.full_name}", method=method.full_name)

    return absent


def parse(message_class: type[Message], data: bytes) -> Message:
    """A request message. Raises FieldInvalid where protobuf only says that parsing failed, with the fields at fault."""
    try:
        return message_class.FromString(data)
    except DecodeError as error:
        raise FieldInvalid(_faults(message_class, data)) from error


def _faults(message_class: type[Message], data: bytes) -> list[FieldViolation]:
    try:
        paths = list(_not_utf8(cast("Descriptor", message_class.DESCRIPTOR), data, ""))
    except DecodeError:
        paths = []
    faults = [FieldViolation(path, "is not valid UTF-8") for path in paths]
    return faults or [FieldViolation("request", f"is not a well-formed {message_class.DESCRIPTOR.full_name}")]


class _WireField(Protocol):
    """A member of UnknownFieldSet, whose iteration the stubs leave out."""

    field_number: int
    wire_type: int
    data: bytes


def _not_utf8(message: Descriptor, data: bytes, path: str) -> Iterator[str]:
    """Paths of the string fields that are not UTF-8, read from the wire without parsing strings."""
    for wire in cast("Iterable[_WireField]", UnknownFieldSet(Empty.FromString(data))):
        field = message.fields_by_number.get(wire.field_number)
        if field is None or wire.wire_type != _LENGTH_DELIMITED:
            continue
        if field.message_type:
            yield from _not_utf8(field.message_type, wire.data, f"{path}{field.name}.")
        elif field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(wire.data):
            yield path + field.name


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
