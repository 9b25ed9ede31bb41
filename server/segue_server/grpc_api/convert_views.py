"""The service's snapshots -> protos. Names agree on both sides; what is not a plain value is converted one by one."""

import math
from dataclasses import fields
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from segue.v1 import generation_pb2, model_pb2, session_pb2, types_pb2
from segue_server.grpc_api.convert_events import KV_DTYPE_VALUES, cache_usage, duration, logprobs
from segue_server.requests import SamplingParams, SessionSettings, StopConditions
from segue_server.views import (
    Estimate,
    Latency,
    Limits,
    Load,
    ModelInfo,
    Scores,
    ServerInfo,
    SessionPage,
    SessionView,
    TokenChunk,
    TurnSpan,
)
from segue_server.watch import SessionEvent

_NANOS = 1_000_000_000
_LIMIT_DURATIONS = ("default_ttl", "max_ttl", "tombstone_ttl", "expiry_notice")


def session(view: SessionView) -> session_pb2.Session:
    return session_pb2.Session(
        session_id=view.session_id,
        display_name=view.display_name,
        labels=view.labels,
        state=view.state.value,  # type: ignore[arg-type]  # the values are those of the proto enum
        position=view.position,
        etag=view.etag,
        turn_count=view.turn_count,
        active_request_id=view.active_request_id,
        cache=_cache(view),
        settings=settings_proto(view.settings),
        create_time=timestamp(view.create_time),
        last_used_time=timestamp(view.last_used_time),
        expire_time=timestamp(view.expire_time),
        forked_from=_fork_origin(view.forked_from),
        model_fingerprint=view.model_fingerprint,
    )


def session_page(page: SessionPage) -> session_pb2.ListSessionsResponse:
    return session_pb2.ListSessionsResponse(
        sessions=[session(view) for view in page.sessions], next_page_token=page.next_page_token
    )


def token_chunk(chunk: TokenChunk) -> session_pb2.ReadSessionTokensResponse:
    return session_pb2.ReadSessionTokensResponse(
        start_position=chunk.start_position,
        token_ids=chunk.token_ids,
        text=chunk.text,
        turns=[turn_span(span) for span in chunk.turns],
    )


def session_event(event: SessionEvent) -> session_pb2.SessionEvent:
    return session_pb2.SessionEvent(
        sequence=event.sequence,
        type=event.type.value,  # type: ignore[arg-type]  # the values are those of the proto enum
        time=timestamp(event.time),
        session=session(event.session),
        reason=event.reason,
    )


def scores(scores: Scores) -> generation_pb2.ScoreTokensResponse:
    return generation_pb2.ScoreTokensResponse(logprobs=logprobs(scores.logprobs), position=scores.position)


def estimate(estimate: Estimate) -> generation_pb2.EstimateGenerationResponse:
    return generation_pb2.EstimateGenerationResponse(
        admissible=estimate.admissible,
        refusal_reason=estimate.refusal_reason,
        to_compute_tokens=estimate.to_compute_tokens,
        needed_bytes=estimate.needed_bytes,
        would_evict_bytes=estimate.would_evict_bytes,
        estimated_time_to_first_token=duration(estimate.time_to_first_token),
    )


def model_info(info: ModelInfo) -> model_pb2.ModelInfo:
    return model_pb2.ModelInfo(**_set_fields(info) | {"default_sampling": _sampling(info.default_sampling)})


def server_info(info: ServerInfo) -> model_pb2.ServerInfo:
    return model_pb2.ServerInfo(
        version=info.version,
        build=info.build,
        capabilities=info.capabilities,
        limits=_limits(info.limits),
        uptime=duration(info.uptime),
    )


def load(load: Load) -> model_pb2.Load:
    converted = {
        "since_last_step": duration(load.since_last_step),
        "time_to_first_token": _latency(load.time_to_first_token),
        "inter_token": _latency(load.inter_token),
    }
    return model_pb2.Load(**_set_fields(load) | converted)


def _latency(latency: Latency) -> model_pb2.Latency:
    return model_pb2.Latency(
        count=latency.count,
        total=duration(latency.total),
        median=duration(latency.median),
        p95=duration(latency.p95),
    )


def _limits(limits: Limits) -> model_pb2.Limits:
    durations = {name: duration(getattr(limits, name)) for name in _LIMIT_DURATIONS}
    return model_pb2.Limits(**_set_fields(limits) | durations)


def _cache(view: SessionView) -> types_pb2.CacheUsage:
    usage = cache_usage(view.cache)
    usage.kv_dtype = _kv_dtype(view.settings.kv_dtype)  # type: ignore[assignment]  # enums are plain ints
    return usage


def settings_proto(settings: SessionSettings) -> session_pb2.SessionSettings:
    converted = {
        "ttl": duration(settings.ttl),
        "kv_dtype": _kv_dtype(settings.kv_dtype),
        "context_policy": settings.context_policy and settings.context_policy.value,
        "commit_policy": settings.commit_policy and settings.commit_policy.value,
        "default_sampling": _sampling(settings.default_sampling),
        "default_stop": _stop(settings.default_stop),
    }
    return session_pb2.SessionSettings(**_set_fields(settings) | converted)


def _sampling(sampling: SamplingParams) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(**_set_fields(sampling))


def _stop(stop: StopConditions) -> types_pb2.StopConditions:
    return types_pb2.StopConditions(**_set_fields(stop) | {"time_limit": duration(stop.time_limit)})


def _fork_origin(origin: tuple[str, int] | None) -> session_pb2.ForkOrigin | None:
    return session_pb2.ForkOrigin(session_id=origin[0], position=origin[1]) if origin else None


def turn_span(span: TurnSpan) -> session_pb2.TurnSpan:
    return session_pb2.TurnSpan(
        turn=span.turn,
        start_position=span.start,
        generated_start_position=span.generated_start,
        end_position=span.end,
        finish_reason=span.finish_reason and span.finish_reason.value,  # type: ignore[arg-type]  # the same
        request_id=span.request_id,
    )


def _kv_dtype(name: str | None) -> int:
    return types_pb2.KV_DTYPE_UNSPECIFIED if name is None else KV_DTYPE_VALUES[name]


def timestamp(unix_seconds: float) -> Timestamp | None:
    """None for infinity: the time will never come."""
    if not math.isfinite(unix_seconds):
        return None
    seconds, nanos = divmod(round(unix_seconds * _NANOS), _NANOS)
    return Timestamp(seconds=seconds, nanos=nanos)


def _set_fields(view: SamplingParams | StopConditions | SessionSettings | ModelInfo | Limits | Load) -> dict[str, Any]:
    """The fields of a dataclass that are not None, by name."""
    return {field.name: value for field in fields(view) if (value := getattr(view, field.name)) is not None}
