"""grpc.health.v1: "" says that the process lives, "segue.v1.GenerationService" whether it takes turns.

Own code because grpcio-health-checking has no List, cannot start as NOT_SERVING, and drains liveness as well.
"""
# ruff: noqa: N802 - methods have the names of the proto

import asyncio
from collections.abc import AsyncIterator

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2

from segue.v1 import generation_pb2

LIVENESS = ""
READINESS = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
_Status = health_pb2.HealthCheckResponse
_Context = aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]


class Health:
    """Not ready at first (warm-up), then as told; after `drain` never ready again.

    Liveness stays SERVING in a drain: an orchestrator that restarts on it would cut the turns that still run.
    """

    def __init__(self) -> None:
        self._statuses = {LIVENESS: _Status.SERVING, READINESS: _Status.NOT_SERVING}
        self._draining = False
        self._closed = False
        self._changed = asyncio.Event()

    def set_ready(self, ready: bool) -> None:
        """Tell watchers whether turns are taken; without effect in a drain."""
        if not self._draining:
            self._statuses[READINESS] = _Status.SERVING if ready else _Status.NOT_SERVING
            self._announce()

    def drain(self) -> None:
        """NOT_SERVING for good. Give balancers a few seconds to see it before the listener closes."""
        self.set_ready(False)
        self._draining = True

    def close(self) -> None:
        """Ends the Watch streams, which `server.stop` would otherwise wait for until its grace is over."""
        self._closed = True
        self._announce()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: _Context) -> health_pb2.HealthCheckResponse:
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service!r}")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, _request: health_pb2.HealthListRequest, _context: object) -> health_pb2.HealthListResponse:
        statuses = {name: health_pb2.HealthCheckResponse(status=status) for name, status in self._statuses.items()}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, _context: object
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        told = None
        while not self._closed:
            changed = self._changed
            status = self._statuses.get(request.service, _Status.SERVICE_UNKNOWN)
            if status != told:
                yield health_pb2.HealthCheckResponse(status=status)
            told = status
            await changed.wait()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
