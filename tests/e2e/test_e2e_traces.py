"""Traces over the wire: from a caller's traceparent, through the server, to a collector that the environment names."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from tests.e2e.conftest import wait_until

from segue.v1 import generation_pb2, generation_pb2_grpc, types_pb2

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """What an OTLP collector receives."""

    def __init__(self) -> None:
        self.resources = []

    def Export(self, request, _context):  # noqa: N802 - the name of the proto
        self.resources.extend(request.resource_spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> dict:
        return {span.name: span for r in self.resources for scope in r.scope_spans for span in scope.spans}


@pytest.fixture
def collector(monkeypatch) -> Iterator[Collector]:
    server, collector = grpc.server(ThreadPoolExecutor(1)), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "segue-under-test")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # milliseconds
    yield collector
    server.stop(None)


def test_a_callers_trace_reaches_the_collector_with_the_phases_of_its_turn(serve, collector) -> None:
    live = serve(traces="otlp")
    message = generation_pb2.GenerateRequest(
        token_ids=types_pb2.TokenIds(ids=[1, 2, 3]), stop=types_pb2.StopConditions(max_tokens=3, ignore_eos=True)
    )
    with grpc.insecure_channel(live.target) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        metadata = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
        list(stub.GenerateStream(message, metadata=metadata, timeout=30))
    wait_until(lambda: len(collector.spans) == 4, "four spans have come", 30)
    name = next(name for name in collector.spans if name.startswith("text_completion "))
    phases = collector.spans
    turn = phases.pop(name)
    assert (turn.trace_id.hex(), turn.parent_span_id.hex()) == (TRACE, PARENT)
    assert phases.keys() == {"queue", "prefill", "decode"}
    assert {span.parent_span_id for span in phases.values()} == {turn.span_id}
    resource = {pair.key: pair.value.string_value for pair in collector.resources[0].resource.attributes}
    assert resource["service.name"] == "segue-under-test"
