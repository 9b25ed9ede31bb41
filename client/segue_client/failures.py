"""From a failed gRPC call to an error of the tree: the server's reason decides, else the status code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar, cast

import grpc
from google.protobuf.message import DecodeError, Message

# googleapis-common-protos ships .pyi files without the py.typed marker.
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from segue_client.errors import ConnectionLost, ErrorDetails, FieldViolation, SegueError

ERROR_DOMAIN = "segue"


def from_rpc(call: grpc.RpcError) -> SegueError:
    """The error for a failed call, by the server's reason, else by its status code."""
    details = _details(_rich_status(call))
    code = call.code()
    error_type = _BY_REASON.get(details.reason) or _BY_CODE.get(code, SegueError)
    return error_type(call.details() or code.name, details, code)


# What stands between client and server decides the code of a broken connection: none of them says more than another.
_BROKEN_STREAM_CODES = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.CANCELLED,
    }
)


# What a server answers to an attach that does not have the turn, or no turns at all to attach to.
_TURN_GONE_REASONS = frozenset({"REQUEST_NOT_FOUND", "POSITION_BEYOND_END", "EVENT_HISTORY_LOST", "FEATURE_ABSENT"})


def is_broken(call: grpc.RpcError) -> bool:
    """Whether it was the connection that failed, not the turn: the server has given no reason."""
    error = from_rpc(call)
    return not error.reason and error.code in _BROKEN_STREAM_CODES


def from_broken_stream(call: grpc.RpcError, request_id: str) -> SegueError:
    """The error for a stream that failed after its first event: `ConnectionLost` unless the turn itself failed."""
    error = from_rpc(call)
    if error.reason in _TURN_GONE_REASONS:
        message = f"the stream broke, and the server does not have the turn any more ({error.reason})"
    elif is_broken(call):
        message = f"the stream broke ({error.code.name}: {error.message})"
    else:
        return error
    return ConnectionLost(message, ErrorDetails(request_id=request_id))


def _rich_status(call: grpc.RpcError) -> status_pb2.Status | None:
    """The google.rpc.Status in the trailers; None when there is none or a proxy has replaced the status around it."""
    try:
        # Declared for `grpc.Call`; what it reads (code, details, trailers) the errors of both APIs have as well.
        return rpc_status.from_call(cast("grpc.Call", call))
    except (ValueError, DecodeError):
        return None


def _details(status: status_pb2.Status | None) -> ErrorDetails:
    if status is None:
        return ErrorDetails()
    info = _unpack(status, error_details_pb2.ErrorInfo)
    retry = _unpack(status, error_details_pb2.RetryInfo)
    request = _unpack(status, error_details_pb2.RequestInfo)
    bad_request = _unpack(status, error_details_pb2.BadRequest)
    ours = info.domain == ERROR_DOMAIN
    return ErrorDetails(
        reason=info.reason if ours else "",
        metadata=dict(info.metadata) if ours else {},
        violations=[FieldViolation(entry.field, entry.description) for entry in bad_request.field_violations],
        retry_after=retry.retry_delay.ToTimedelta().total_seconds() if retry.HasField("retry_delay") else None,
        request_id=request.request_id,
    )


MessageT = TypeVar("MessageT", bound=Message)


def _unpack(status: status_pb2.Status, message_type: type[MessageT]) -> MessageT:
    """The status's detail of this type, empty when it has none."""
    message = message_type()
    for packed in status.details:
        if packed.Unpack(message):
            break
    return message


def _tree(root: type[SegueError]) -> Iterator[type[SegueError]]:
    for child in root.__subclasses__():
        yield child
        yield from _tree(child)


_BY_REASON: Mapping[str, type[SegueError]] = {
    error.default_reason: error for error in _tree(SegueError) if "default_reason" in vars(error)
}
_BY_CODE: Mapping[grpc.StatusCode, type[SegueError]] = {
    error.code: error for error in SegueError.__subclasses__() if "code" in vars(error)
}
