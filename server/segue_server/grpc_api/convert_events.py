"""What a turn reports -> protos. Runs once a token, so each event costs one dictionary look-up and its messages."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from google.protobuf.duration_pb2 import Duration

from segue.v1 import generation_pb2, types_pb2
from segue_model.sampling import TokenLogprob
from segue_server import events
from segue_server.grpc_api.convert_requests import KV_DTYPES
from segue_server.requests import OutputOptions

KV_DTYPE_VALUES: Mapping[str, int] = {name: value for value, name in KV_DTYPES.items()}
_NANOS = 1_000_000_000
_Proto = generation_pb2.GenerateEvent


def generate_event(sequence: int, event: events.Event, output: OutputOptions) -> generation_pb2.GenerateEvent:
    """One message of a stream, with what the caller asked for in it. Raises the error of a Failed."""
    return _CONVERTERS[type(event)](sequence, event, output)


def finished(event: events.Finished) -> generation_pb2.Finished:
    return generation_pb2.Finished(
        finish_reason=event.finish_reason.value,  # type: ignore[arg-type]  # the values are those of the proto enum
        matched_stop=_matched_stop(event),
        usage=_usage(event.usage),
        timings=_timings(event.timings),
        position=event.position,
        etag=event.etag,
        ledger_overhang_tokens=event.ledger_overhang_tokens,
        dropped_tokens=event.dropped_tokens,
        cache=cache_usage(event.cache),
    )


def logprobs(logprobs: Iterable[TokenLogprob]) -> list[types_pb2.TokenLogprob]:
    return [
        types_pb2.TokenLogprob(
            token_id=logprob.token_id,
            logprob=logprob.logprob,
            top=[types_pb2.TopLogprob(token_id=token_id, logprob=value) for token_id, value in logprob.top],
        )
        for logprob in logprobs
    ]


def cache_usage(cache: events.CacheUsage) -> types_pb2.CacheUsage:
    return types_pb2.CacheUsage(
        tier=cache.tier.value,  # type: ignore[arg-type]  # the values are those of the proto enum
        used_bytes=cache.used_bytes,
        reserved_bytes=cache.reserved_bytes,
        shared_bytes=cache.shared_bytes,
        cached_tokens=cache.cached_tokens,
        estimated_rebuild=duration(cache.estimated_rebuild),
        kv_dtype=KV_DTYPE_VALUES.get(cache.kv_dtype),  # type: ignore[arg-type]  # the same
    )


def duration(seconds: float | None) -> Duration | None:
    """Seconds as a Duration; None where there is no number (yet): None and infinity."""
    if seconds is None or not math.isfinite(seconds):
        return None
    whole, nanos = divmod(round(seconds * _NANOS), _NANOS)
    return Duration(seconds=whole, nanos=nanos)


def _queued(sequence: int, event: events.Queued, _: OutputOptions) -> _Proto:
    return _Proto(sequence=sequence, queued=generation_pb2.Queued(queue_position=event.queue_position))


def _started(sequence: int, event: events.Started, _: OutputOptions) -> _Proto:
    started = generation_pb2.Started(
        request_id=event.request_id,
        session_id=event.session_id,
        position=event.position,
        prompt_tokens=event.prompt_tokens,
        to_compute_tokens=event.to_compute_tokens,
        restored_from=event.restored_from.value,  # type: ignore[arg-type]  # the values are those of the proto enum
        seed=event.seed,
    )
    return _Proto(sequence=sequence, started=started)


def _prefill(sequence: int, event: events.Prefill, _: OutputOptions) -> _Proto:
    progress = generation_pb2.PrefillProgress(
        processed_tokens=event.processed_tokens,
        total_tokens=event.total_tokens,
        prompt_logprobs=logprobs(event.prompt_logprobs),
    )
    return _Proto(sequence=sequence, prefill=progress)


def _tokens(sequence: int, event: events.Tokens, output: OutputOptions) -> _Proto:
    tokens = generation_pb2.Tokens(
        position=event.position,
        token_ids=event.token_ids if output.return_token_ids else (),
        text=event.text if output.return_text else "",
        logprobs=logprobs(event.logprobs) if event.logprobs else (),
    )
    return _Proto(sequence=sequence, tokens=tokens)


def _heartbeat(sequence: int, event: events.Heartbeat, _: OutputOptions) -> _Proto:
    return _Proto(sequence=sequence, heartbeat=generation_pb2.Heartbeat(elapsed=duration(event.elapsed)))


def _finished(sequence: int, event: events.Finished, _: OutputOptions) -> _Proto:
    return _Proto(sequence=sequence, finished=finished(event))


def _failed(_sequence: int, event: events.Failed, _: OutputOptions) -> _Proto:
    raise event.error


def _matched_stop(event: events.Finished) -> types_pb2.MatchedStop | None:
    if event.matched_token_id is not None:
        return types_pb2.MatchedStop(token_id=event.matched_token_id)
    return types_pb2.MatchedStop(text=event.matched_text) if event.matched_text is not None else None


def _usage(usage: events.Usage) -> types_pb2.Usage:
    return types_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        generated_tokens=usage.generated_tokens,
        context_tokens=usage.context_tokens,
        computed_tokens=usage.computed_tokens,
        session_reused_tokens=usage.session_reused_tokens,
        prefix_reused_tokens=usage.prefix_reused_tokens,
        restored_tokens=usage.restored_tokens,
        reuse_enabled=True,  # there is no switch to turn reuse off
    )


def _timings(timings: events.Timings) -> types_pb2.Timings:
    return types_pb2.Timings(
        queue=duration(timings.queue),
        restore=duration(timings.restore),
        prefill=duration(timings.prefill),
        decode=duration(timings.decode),
        time_to_first_token=duration(timings.time_to_first_token),
        max_inter_token=duration(timings.max_inter_token),
    )


# Each converter takes its own event type, which a mapping from types cannot express.
_CONVERTERS: Mapping[type, Callable[[int, Any, OutputOptions], _Proto]] = {
    events.Queued: _queued,
    events.Started: _started,
    events.Prefill: _prefill,
    events.Tokens: _tokens,
    events.Heartbeat: _heartbeat,
    events.Finished: _finished,
    events.Failed: _failed,
}
