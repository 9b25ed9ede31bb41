"""Traces: a span a turn, its phases as children, in the caller's trace; nothing of OpenTelemetry without the extra."""

import asyncio
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from tests.server.service_bench import ServiceBench, read, serving

from segue_server.app import serving as serving_app
from segue_server.cache.segments import Tier
from segue_server.config import ConfigError, ServerConfig
from segue_server.events import Tokens
from segue_server.mover import Offload
from segue_server.origin import Origin
from segue_server.requests import ChatMessage, ChatTurn, GenerateRequest, MoveCacheRequest, StopConditions, TokenInput
from segue_server.tracing import TurnTracer, open_tracer

DOC = Path(__file__).parents[2] / "docs" / "logs.md"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = Origin("ipv4:192.0.2.7:40000", {"traceparent": f"00-{TRACE}-{PARENT}-01"})
UNSAMPLED = Origin("", {"traceparent": f"00-{TRACE}-{PARENT}-00"})


class Traced:
    """A tracer whose spans stay here."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = TurnTracer(provider, "fake")

    @property
    def turns(self) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.kind is SpanKind.SERVER]

    def children(self, turn: ReadableSpan) -> Sequence[ReadableSpan]:
        spans = self.exporter.get_finished_spans()
        return [s for s in spans if s.parent and turn.context and s.parent.span_id == turn.context.span_id]


@pytest.fixture
def traced() -> Traced:
    return Traced()


async def ask_from(bench: ServiceBench, origin: Origin) -> None:
    request = GenerateRequest(session_id="chat-1", input=TokenInput((1, 2)), stop=StopConditions(max_tokens=3))
    async with bench.service.generate(request, caller="me", time_remaining=lambda: None, origin=origin) as turn:
        await read(turn)


async def test_a_turn_is_a_span_and_its_phases_lie_inside_one_after_the_other(tmp_path: Path, traced: Traced) -> None:
    async with serving(tmp_path, observers=[traced.tracer]) as bench:
        await bench.create()
        answer = await bench.ask(range(40), max_tokens=5)
        (span,) = traced.turns
        phases = traced.children(span)
        assert [phase.name for phase in phases] == ["queue", "prefill", "decode"]
        times = [time for phase in phases for time in (phase.start_time, phase.end_time)]
        assert [span.start_time, *times] == sorted([span.start_time, *times])  # type: ignore[type-var]
        assert span.end_time is not None
        assert times[-1] is not None
        assert times[-1] <= span.end_time + 1000, "a microsecond of rounding"
        timings = answer.finished.timings
        assert (times[-1] - times[-2]) / 1e9 == pytest.approx(timings.decode, abs=1e-6)  # type: ignore[operator]


async def test_attributes_are_those_of_the_genai_conventions(tmp_path: Path, traced: Traced) -> None:
    async with serving(tmp_path, observers=[traced.tracer]) as bench:
        await bench.create()
        await bench.ask(range(40), max_tokens=3)
        await bench.ask(input=ChatTurn((ChatMessage("user", "Hi"),)), request_id="second", max_tokens=2)
        first, second = traced.turns
        assert (first.name, second.name) == ("text_completion fake", "chat fake")
        assert second.attributes is not None
        expected = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "segue",
            "gen_ai.request.model": "fake",
            "gen_ai.response.id": "second",
            "gen_ai.response.finish_reasons": ("max_tokens",),
            "gen_ai.conversation.id": "chat-1",
            "gen_ai.usage.output_tokens": 2,
            "gen_ai.usage.cache_read.input_tokens": 42,
            "segue.turn": 1,
        }
        assert expected.items() <= dict(second.attributes).items()
        tokens = [second.attributes[f"segue.{name}_tokens"] for name in ("computed", "session_reused")]
        assert second.attributes["gen_ai.usage.input_tokens"] == sum(tokens)  # type: ignore[arg-type]
        assert "error.type" not in second.attributes
        assert not any("message" in name or "prompt" in name for name in second.attributes), "nothing of what was said"


async def test_the_span_belongs_to_the_trace_of_the_call_and_to_its_sampling(tmp_path: Path, traced: Traced) -> None:
    async with serving(tmp_path, observers=[traced.tracer]) as bench:
        await bench.create()
        for origin in (SAMPLED, UNSAMPLED, Origin("", {"traceparent": "nonsense"})):
            await ask_from(bench, origin)
        inside, alone = traced.turns
        assert inside.context is not None
        assert inside.parent is not None
        assert (f"{inside.context.trace_id:032x}", f"{inside.parent.span_id:016x}") == (TRACE, PARENT)
        assert {child.context.trace_id for child in traced.children(inside) if child.context} == {int(TRACE, 16)}
        assert alone.parent is None


async def test_restoring_is_a_phase_of_its_own(tmp_path: Path, traced: Traced) -> None:
    offload = Offload(host_bytes=1 << 20, segment_tokens=32)
    async with serving(tmp_path, offload=offload, observers=[traced.tracer]) as bench:
        await bench.create()
        await bench.ask([7] * 99, max_tokens=2)
        await bench.service.move_cache(MoveCacheRequest(session_id="chat-1", tier=Tier.HOST))
        await bench.ask([1], max_tokens=2)
        names = [child.name for child in traced.children(traced.turns[-1])]
        assert names == ["queue", "restore", "prefill", "decode"]


async def test_failures_have_a_type_and_a_status_and_cancels_a_cause(tmp_path: Path, traced: Traced) -> None:
    async with serving(tmp_path, observers=[traced.tracer]) as bench:
        await bench.create()
        async with bench.turn(max_tokens=1000) as turn:
            async for _, event in turn:
                if isinstance(event, Tokens):
                    break
        await bench.idle()
        bench.runner.failures.append(RuntimeError("a fault that was put there"))
        with pytest.raises(Exception, match="could not compute"):
            await bench.ask()
        left, failed = traced.turns
        assert left.attributes is not None
        assert failed.attributes is not None
        assert left.attributes["segue.cancel_cause"] == "disconnect"
        assert left.status.status_code is StatusCode.UNSET
        assert failed.attributes["error.type"] == "ENGINE_ERROR"
        assert failed.status.status_code is StatusCode.ERROR
        assert next(child.name for child in traced.children(failed)) == "queue"


def test_the_environment_names_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """OTEL_SERVICE_NAME over our own; without it the server has a name too."""
    for name in ("segue-server", "mine"):
        tracer = open_tracer("fake")
        assert tracer._provider.resource.attributes["service.name"] == name
        tracer.close()
        monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")


async def test_without_the_extra_traces_are_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "segue_server.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    config = ServerConfig(traces="otlp", runner="torch", port=0, admin_port=0, metrics_port=0)
    monkeypatch.setattr("segue_server.app.load", lambda *_: (_Served(), None))
    with pytest.raises(ConfigError, match=r"--traces otlp needs an extra: pip install 'segue\[otel\]'"):
        async with serving_app(config):
            pass


class _Served:
    model_id = "fake"


async def test_the_server_imports_nothing_of_opentelemetry_by_itself() -> None:
    program = "import sys, segue_server.app; sys.exit(any(m.startswith('opentelemetry') for m in sys.modules))"
    run = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", program], timeout=120, check=False)
    assert run.returncode == 0


async def test_every_attribute_is_documented(tmp_path: Path, traced: Traced) -> None:
    """docs/logs.md names each attribute that a span can have, and no other."""
    documented = set(re.findall(r"`((?:gen_ai|segue|network|error)\.[\w.]+)`", DOC.read_text(encoding="utf-8")))
    async with serving(tmp_path, observers=[traced.tracer]) as bench:
        await bench.create()
        await bench.ask()
        async with bench.turn(max_tokens=1000) as turn:
            async for _, event in turn:
                if isinstance(event, Tokens):
                    break
        await bench.idle()
        bench.runner.failures.append(RuntimeError("a fault that was put there"))
        with pytest.raises(Exception, match="could not compute"):
            await bench.ask()
        assert {name for span in traced.turns for name in span.attributes or ()} == documented
