"""SegueError -> gRPC status with google.rpc details. The one place where errors get their wire form."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import grpc
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped]  # no py.typed
from grpc_status import rpc_status

from segue_server.errors import NEVER_RETRY, FieldViolation, Quota, SegueError
from segue_server.grpc_api.convert_events import duration

DOMAIN = "segue"
PUSHBACK_HEADER = "grpc-retry-pushback-ms"
# gRPC replaces an error whose trailers pass 8 KiB by "Stream removed"; details stay below half of that.
MAX_DETAIL_BYTES = 4096
_MAX_MESSAGE_BYTES = 512
_MAX_TEXT_BYTES = 128
_MAX_METADATA_ENTRIES = 8
_MAX_VIOLATION_BYTES = 2048  # of all together

Trailers = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, slots=True)
class WireStatus:
    """What `context.abort` takes."""

    code: grpc.StatusCode
    message: str
    trailers: Trailers


def to_status(error: SegueError, request_id: str) -> WireStatus:
    """ErrorInfo always, and whatever else the error has to say, in at most MAX_DETAIL_BYTES.

    `request_id` goes with INTERNAL errors, so that a caller's report leads to the server's log.
    """
    message = _cut(str(error), _MAX_MESSAGE_BYTES)
    status = status_pb2.Status(code=code_pb2.Code.Value(error.code), message=message)
    for detail in _details(error, request_id):
        status.details.add().Pack(detail)
    rich = rpc_status.to_status(status)
    return WireStatus(rich.code, message, (*(rich.trailing_metadata or ()), *_pushback(error)))


def _details(error: SegueError, request_id: str) -> Iterator[Message]:
    yield _error_info(error)
    if error.violations:
        yield error_details_pb2.BadRequest(field_violations=_within_budget(error.violations))
    if error.resource:
        kind, name = error.resource
        yield error_details_pb2.ResourceInfo(resource_type=kind, resource_name=_cut(name))
    if error.code == "FAILED_PRECONDITION":
        yield _precondition_failure(error)
    if error.quota:
        yield _quota_failure(error.quota)
    if error.retry_after is not None and error.retry_after != NEVER_RETRY:
        yield error_details_pb2.RetryInfo(retry_delay=duration(error.retry_after))
    if error.code == "INTERNAL":
        yield error_details_pb2.RequestInfo(request_id=_cut(error.metadata.get("requestId", request_id)))


def _error_info(error: SegueError) -> error_details_pb2.ErrorInfo:
    metadata = {key: _cut(value) for key, value in islice(error.metadata.items(), _MAX_METADATA_ENTRIES)}
    return error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)


def _within_budget(violations: Sequence[FieldViolation]) -> Iterator[error_details_pb2.BadRequest.FieldViolation]:
    """As many as fit, then how many more there are."""
    spent = 0
    for index, violation in enumerate(violations):
        proto = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(violation.field), description=_cut(violation.description)
        )
        spent += proto.ByteSize()
        if spent > _MAX_VIOLATION_BYTES:
            more = f"and {len(violations) - index} more violations"
            yield error_details_pb2.BadRequest.FieldViolation(field="...", description=more)
            return
        yield proto


def _precondition_failure(error: SegueError) -> error_details_pb2.PreconditionFailure:
    subject = next(iter(error.metadata), "")
    violation = error_details_pb2.PreconditionFailure.Violation(
        type=error.reason, subject=_cut(subject), description=_cut(str(error))
    )
    return error_details_pb2.PreconditionFailure(violations=[violation])


def _quota_failure(quota: Quota) -> error_details_pb2.QuotaFailure:
    violation = error_details_pb2.QuotaFailure.Violation(quota_metric=quota.metric, quota_value=quota.value)
    return error_details_pb2.QuotaFailure(violations=[violation])


def _pushback(error: SegueError) -> Trailers:
    """gRPC's own retry policy obeys this trailer; -1 stops it (gRFC A6)."""
    if error.retry_after is None:
        return ()
    milliseconds = -1 if error.retry_after == NEVER_RETRY else round(error.retry_after * 1000)
    return ((PUSHBACK_HEADER, str(milliseconds)),)


def _cut(text: str, limit: int = _MAX_TEXT_BYTES) -> str:
    """At most `limit` bytes of UTF-8, cut between characters."""
    data = text.encode(errors="replace")
    return data.decode() if len(data) <= limit else data[: limit - 3].decode(errors="ignore") + "…"
