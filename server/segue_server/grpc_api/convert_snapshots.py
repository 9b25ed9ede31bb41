"""Snapshots and moves, both ways."""

from collections.abc import AsyncIterator, Mapping

from segue.v1 import session_pb2
from segue_server.cache.segments import Tier
from segue_server.errors import FieldInvalid
from segue_server.grpc_api.convert_events import KV_DTYPE_VALUES
from segue_server.grpc_api.convert_requests import KV_DTYPES, settings_of
from segue_server.grpc_api.convert_views import settings_proto, turn_span
from segue_server.grpc_api.form import Form
from segue_server.requests import FinishReason, MoveCacheRequest
from segue_server.snapshots import ImportRequest, KvShape, SnapshotHeader, SnapshotPart, SnapshotTrailer
from segue_server.views import TurnSpan

TIERS: Mapping[int, Tier] = {tier.value: tier for tier in Tier}
_FINISH_REASONS: Mapping[int, FinishReason] = {reason.value: reason for reason in FinishReason}


def move_cache_request(form: Form, message: session_pb2.MoveSessionCacheRequest) -> MoveCacheRequest:
    tier = form.choice("tier", message.tier, TIERS)
    if not message.tier:
        form.refuse("tier", "must name a tier: DEVICE, HOST, DISK or NONE")
    return MoveCacheRequest(session_id=message.session_id, tier=tier or Tier.NONE, from_position=message.from_position)


def export_part(part: SnapshotPart) -> session_pb2.ExportSessionResponse:
    match part:
        case SnapshotHeader():
            return session_pb2.ExportSessionResponse(header=_header(part))
        case SnapshotTrailer(sha256):
            return session_pb2.ExportSessionResponse(trailer=session_pb2.SnapshotTrailer(sha256=sha256))
        case _:
            return session_pb2.ExportSessionResponse(chunk=part)


def import_request(form: Form, message: session_pb2.ImportSessionRequest) -> ImportRequest:
    """The first message of an import."""
    if message.WhichOneof("part") != "header":
        form.refuse("header", "must be the first message")
    header = message.header
    if not header.HasField("snapshot"):
        form.refuse("header.snapshot", "must be given, as it was exported")
    return ImportRequest(
        session_id=header.session_id,
        request_id=header.request_id,
        header=_header_of(form, header.snapshot),
        recompute_on_mismatch=header.recompute_on_mismatch,
    )


async def import_parts(
    messages: AsyncIterator[session_pb2.ImportSessionRequest],
) -> AsyncIterator[SnapshotPart | ImportRequest]:
    """The messages after the first one."""
    async for message in messages:
        match message.WhichOneof("part"):
            case "chunk":
                yield message.chunk
            case "trailer":
                yield SnapshotTrailer(message.trailer.sha256)
            case "header":
                raise FieldInvalid.one("header", "must come once, as the first message")
            case _:
                raise FieldInvalid.one("part", "must be a chunk or the trailer")


def _header(header: SnapshotHeader) -> session_pb2.SnapshotHeader:
    return session_pb2.SnapshotHeader(
        format_version=header.format_version,
        model_fingerprint=header.model_fingerprint,
        kv_dtype=KV_DTYPE_VALUES[header.kv.dtype],  # type: ignore[arg-type]  # enums are plain ints
        layer_count=header.kv.layers,
        kv_head_count=header.kv.kv_heads,
        head_dim=header.kv.head_dim,
        position=header.position,
        cached_tokens=header.cached_tokens,
        payload_bytes=header.payload_bytes,
        settings=settings_proto(header.settings),
        turns=[turn_span(turn) for turn in header.turns],
    )


def _header_of(form: Form, header: session_pb2.SnapshotHeader) -> SnapshotHeader:
    dtype = form.choice("snapshot.kv_dtype", header.kv_dtype, KV_DTYPES)
    return SnapshotHeader(
        format_version=header.format_version,
        model_fingerprint=header.model_fingerprint,
        kv=KvShape(dtype or "", header.layer_count, header.kv_head_count, header.head_dim),
        position=header.position,
        cached_tokens=header.cached_tokens,
        payload_bytes=header.payload_bytes,
        settings=settings_of(form, header.settings),
        turns=tuple(_turn_of(form, number, turn) for number, turn in enumerate(header.turns)),
    )


def _turn_of(form: Form, number: int, turn: session_pb2.TurnSpan) -> TurnSpan:
    return TurnSpan(
        turn=number,
        request_id=turn.request_id,
        start=turn.start_position,
        generated_start=turn.generated_start_position,
        end=turn.end_position,
        finish_reason=form.choice(f"snapshot.turns[{number}].finish_reason", turn.finish_reason, _FINISH_REASONS),
    )
