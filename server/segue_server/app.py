"""Puts the server together and runs it from start to drain."""

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from wsgiref.simple_server import WSGIServer

from grpc_health.v1 import health_pb2
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from segue.v1 import cache_pb2, generation_pb2, model_pb2, session_pb2
from segue_model.paging import PAGE_TOKENS
from segue_model.runner.base import Runner
from segue_server.admin import Admin
from segue_server.aliases import Aliased
from segue_server.config import ConfigError, ServerConfig
from segue_server.engine import Engine
from segue_server.engine_thread import EngineThread
from segue_server.errors import Draining
from segue_server.grpc_api.health import Health
from segue_server.grpc_api.server import bind, build_admin_server, build_server
from segue_server.ledger.gate import LedgerGate
from segue_server.ledger.journal import Journal
from segue_server.ledger.store import LedgerStore, open_ledger
from segue_server.loading import Loading, begin_loading
from segue_server.metrics import Build, SegueCollector
from segue_server.mover import Offload
from segue_server.reports import TurnObserver
from segue_server.runners import keep_on_cores
from segue_server.served import ServedModel
from segue_server.service import Service
from segue_server.stats import CallStats
from segue_server.turn_log import TurnLog, totals
from segue_server.views import Limits

log = logging.getLogger(__name__)

DRAIN_NOTICE = 0.5  # seconds between NOT_SERVING and the end of new work, for balancers that watch


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Where the server listens, after the operating system has chosen for port 0."""

    grpc: int
    admin: int
    metrics: int


@dataclass(frozen=True, slots=True)
class Running:
    """A server that serves, for embedding and tests."""

    ports: Ports
    service: Service
    engine: Engine
    health: Health
    crashed: asyncio.Event


def load(config: ServerConfig, loading: Loading | None = None) -> tuple[ServedModel, Runner]:
    """The model and what computes it. Raises CheckpointError and what `make_runner` raises."""
    checkpoint, digest, built = loading or begin_loading(config)
    runner, kv_dtype = built.result()
    limit = checkpoint.config.max_context_tokens
    served = ServedModel.of(
        checkpoint,
        fingerprint=digest.result(),
        kv_dtype=kv_dtype,
        kv_bytes_per_token=runner.page_bytes // PAGE_TOKENS,
        max_context_tokens=min(limit, config.max_context_tokens or limit),
    )
    return served, runner


def limits_of(config: ServerConfig, served: ServedModel, runner: Runner) -> Limits:
    """What the server declares and validates against."""
    capacity = runner.num_pages * runner.page_bytes
    return Limits(
        kv_budget_bytes=capacity,
        max_sessions=config.max_sessions,
        max_running_requests=config.max_running,
        max_queued_requests=config.max_queued,
        max_prompt_tokens=served.max_context_tokens,
        max_stop_sequences=16,
        max_stop_sequence_chars=256,
        max_logit_bias_count=1024,
        max_top_logprobs=20,
        default_ttl=config.default_ttl,
        max_ttl=config.max_ttl,
        tombstone_ttl=config.tombstone_ttl,
        expiry_notice=config.expiry_notice,
        max_pinned_bytes=capacity // 4 if config.max_pinned_bytes is None else config.max_pinned_bytes,
        prefill_chunk_tokens=config.prefill_chunk_tokens,
        block_tokens=PAGE_TOKENS,
    )


@contextlib.asynccontextmanager
async def serving(config: ServerConfig, loading: Loading | None = None) -> AsyncIterator[Running]:
    """A server that answers on its ports for as long as the block lasts, and is drained at its end.

    `loading`: of its model, where that has begun.

    Raises OSError, naming the address, when a port is taken, LedgerError, and what `load` and `restore` raise.
    """
    with _ledger(config.ledger) as store:
        served, runner = await asyncio.to_thread(load, config, loading)
        with _observers(config, served.model_id) as observers:
            async with _serving(config, store, served, runner, observers) as running:
                yield running


@contextlib.asynccontextmanager
async def _serving(
    config: ServerConfig,
    store: LedgerStore | None,
    served: ServedModel,
    runner: Runner,
    observers: Sequence[TurnObserver],
) -> AsyncIterator[Running]:
    crashed = asyncio.Event()
    journal = Journal() if store else None
    limits = limits_of(config, served, runner)
    engine = Engine(
        runner,
        max_running=config.max_running,
        step_tokens=config.prefill_chunk_tokens,
        draft_tokens=config.draft_tokens,
        slow_reader_limit=config.slow_reader_limit,
        kv_dtype=served.kv_dtype,
        offload=Offload(
            host_bytes=config.kv_host_bytes,
            disk_bytes=config.kv_disk_bytes,
            disk_dir=config.kv_disk_dir,
            high_watermark=config.kv_high_watermark,
            low_watermark=config.kv_low_watermark,
        ),
        journal=journal,
    )
    gate = LedgerGate(store, journal, revoke=engine.jobs.revoke) if store and journal else None
    thread = EngineThread(engine, on_crash=lambda _: crashed.set(), ledger=gate, prepare=lambda: keep_on_cores(runner))
    service = Service(
        served,
        thread,
        limits,
        version=version("segue"),
        build=runner.name,
        queue_timeout=config.queue_timeout,
        observers=observers,
    )
    if store:
        log.info("ledger %s: %d sessions", store.path, service.restore(store.recover(), store.tombstones()))
    calls = CallStats(_methods())
    build = Build(
        version=version("segue"),
        runner=runner.name,
        kv_dtype=served.kv_dtype,
        kv_bytes_per_token=served.kv_bytes_per_token,
        sessions_limit=config.max_sessions,
    )
    health = Health()
    server = build_server(service, health=health, observer=calls)
    operators = Admin(service, thread, on_drain=health.drain, drain_grace=config.drain_grace)
    admin = build_admin_server(operators, health=health, observer=calls)
    grpc_port = bind(server, f"{config.host}:{config.port}")
    admin_port = bind(admin, f"127.0.0.1:{config.admin_port}")
    collector = SegueCollector(served.model_id, engine, service, calls, build)
    with _metrics_server(config, Aliased(collector, config.metrics_aliases, served.model_id)) as metrics_port:
        thread.start()
        reaper = asyncio.create_task(service.reap())
        await server.start()
        await admin.start()
        health.set_ready(True)
        try:
            ports = Ports(grpc=grpc_port, admin=admin_port, metrics=metrics_port)
            yield Running(ports, service, engine, health, crashed)
        finally:
            health.drain()
            await service.drain(config.drain_grace)
            log.info("drained", extra=totals(engine))
            health.close()
            operators.events.close(Draining("the server is shutting down"))
            await server.stop(1.0)
            await admin.stop(0)
            reaper.cancel()
            await thread.stop()


async def run(config: ServerConfig, loading: Loading | None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code, 1 if the engine failed.

    Once it serves, garbage is looked for, but not among what a start leaves behind for good: a pass over all of that
    would hold every stream for a tenth of a second.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serving(config, loading) as running:
        ports = running.ports
        model = running.service.model_info()
        kv = running.service.limits.kv_budget_bytes
        gc.freeze()
        gc.enable()
        log.info("serving %s on %s:%d", model.model_id, config.host, ports.grpc)
        log.info("metrics on http://%s:%d/metrics", config.metrics_host, ports.metrics)
        log.info("admin on 127.0.0.1:%d", ports.admin)
        if config.log_prompts:
            log.warning("prompts and answers are written to this log: --log-prompts")
        log.info("runner %s, KV pool %.0f MiB", running.service.server_info().build, kv / 2**20)
        waits = [asyncio.create_task(event.wait()) for event in (stop, running.crashed)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        log.info("draining: running turns get %g s", config.drain_grace)
        running.health.drain()
        await asyncio.sleep(DRAIN_NOTICE)
    return int(running.crashed.is_set())


@contextlib.contextmanager
def _ledger(path: str) -> Iterator[LedgerStore | None]:
    """The durable ledger, if there is to be one; closed at the end, also where the server never starts."""
    store = open_ledger(path)
    try:
        yield store
    finally:
        if store:
            store.close()


@contextlib.contextmanager
def _observers(config: ServerConfig, model_id: str) -> Iterator[Sequence[TurnObserver]]:
    """Who is told of every turn that has ended: the log, and a tracer if there is to be one. Raises ConfigError."""
    turn_log = TurnLog(prompts=config.log_prompts)
    if config.traces == "none":
        yield [turn_log]
        return
    try:
        from segue_server.tracing import open_tracer  # noqa: PLC0415 - only here, since it needs an extra
    except ImportError as error:
        raise ConfigError(f"--traces otlp needs an extra: pip install 'segue[otel]' ({error})") from error
    with contextlib.closing(open_tracer(model_id)) as tracer:
        yield [turn_log, tracer]


@contextlib.contextmanager
def _metrics_server(config: ServerConfig, collector: Collector) -> Iterator[int]:
    """/metrics on a thread of its own; yields its port."""
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    try:
        server, thread = start_http_server(config.metrics_port, addr=config.metrics_host, registry=registry)
    except OSError as error:
        address = f"{config.metrics_host}:{config.metrics_port}"
        raise OSError(f"cannot listen on {address!r} for metrics: {error.strerror}") from error
    try:
        yield _port(server)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _methods() -> list[str]:
    """Every RPC of the contract, as the interceptor names them."""
    files = (session_pb2, generation_pb2, model_pb2, cache_pb2, health_pb2)
    services = [service for file in files for service in file.DESCRIPTOR.services_by_name.values()]
    return [f"{service.full_name}/{method.name}" for service in services for method in service.methods]


def _port(server: WSGIServer) -> int:
    return int(server.server_address[1])
