"""OpenTelemetry traces: a span for each turn that has ended, with what it waited for and computed as children.

The only module that imports OpenTelemetry (the extra `otel`). Spans are made when a turn is over, from what was
measured anyway: tracing costs the path of a token nothing. Names and attributes: semantic-conventions, docs/gen-ai.
"""

from collections.abc import Iterator
from importlib.metadata import version
from typing import NamedTuple

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from segue_server.reports import TurnReport
from segue_server.requests import ChatTurn

_NANOS = 1e9


class Phase(NamedTuple):
    """A part of a turn; seconds from the arrival of the call on."""

    name: str
    start: float
    end: float


class TurnTracer:
    """A TurnObserver."""

    def __init__(self, provider: TracerProvider, model_id: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("segue_server", version("segue"))
        self._model = model_id
        self._propagator = TraceContextTextMapPropagator()

    def __call__(self, report: TurnReport) -> None:
        operation = "chat" if isinstance(report.given, ChatTurn) else "text_completion"
        began = report.ended - report.total
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=self._propagator.extract(report.origin.trace),
            kind=SpanKind.SERVER,
            attributes={"gen_ai.operation.name": operation} | attributes_of(report, self._model),
            start_time=round(began * _NANOS),
        )
        if report.error:
            span.set_status(Status(StatusCode.ERROR, report.error))
        inside = set_span_in_context(span)
        for phase in phases_of(report):
            child = self._tracer.start_span(phase.name, inside, start_time=round((began + phase.start) * _NANOS))
            child.end(round((began + phase.end) * _NANOS))
        span.end(round(report.ended * _NANOS))

    def close(self) -> None:
        """Send what has not been sent yet."""
        self._provider.shutdown()


def open_tracer(model_id: str) -> TurnTracer:
    """A tracer that sends spans by OTLP over gRPC, as the standard OTEL_* variables of the environment say."""
    ours = Resource({SERVICE_NAME: "segue-server", SERVICE_VERSION: version("segue")})
    provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return TurnTracer(provider, model_id)


def phases_of(report: TurnReport) -> Iterator[Phase]:
    """Those that the turn has come to, one after the other."""
    timings = report.timings
    lengths = {"queue": timings.queue, "restore": timings.restore, "prefill": timings.prefill, "decode": timings.decode}
    if not report.usage.restored_tokens:  # the moment between admission and the first pass is none
        lengths["prefill"] += lengths.pop("restore")
    at = 0.0
    for name, length in lengths.items():
        if length > 0:
            yield Phase(name, at, at + length)
        at += length


def attributes_of(report: TurnReport, model_id: str) -> dict[str, AttributeValue]:
    usage = report.usage
    reused = usage.session_reused_tokens + usage.prefix_reused_tokens + usage.restored_tokens
    attributes: dict[str, AttributeValue] = {
        "gen_ai.provider.name": "segue",
        "gen_ai.request.model": model_id,
        "gen_ai.response.model": model_id,
        "gen_ai.response.id": report.request_id,
        "gen_ai.response.finish_reasons": [report.finish_reason.name.lower()],
        "gen_ai.conversation.id": report.session_id,
        "gen_ai.usage.input_tokens": usage.context_tokens + usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.generated_tokens,
        "gen_ai.usage.cache_read.input_tokens": reused,
        "segue.turn": report.turn,
        "segue.position": report.position,
        "segue.computed_tokens": usage.computed_tokens,
        "segue.session_reused_tokens": usage.session_reused_tokens,
        "segue.prefix_reused_tokens": usage.prefix_reused_tokens,
        "segue.restored_tokens": usage.restored_tokens,
        "network.peer.address": report.origin.peer,
    }
    if (first := report.timings.time_to_first_token) is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = first
    if report.error:
        attributes["error.type"] = report.error
    if report.cause:
        attributes["segue.cancel_cause"] = report.cause
    return attributes
