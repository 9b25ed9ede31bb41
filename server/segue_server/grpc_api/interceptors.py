"""What surrounds every call: it is counted, its request is parsed, and whatever it raises becomes a status."""

import asyncio
import inspect
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import grpc
from grpc import aio

from segue_server.errors import EngineError, SegueError
from segue_server.grpc_api.status import to_status

UNREGISTERED = "other"  # one label for all methods nobody serves, so that a scanner cannot make series (gRFC A66)

_logger = logging.getLogger(__name__)
_Context = aio.ServicerContext[Any, Any]
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in the stubs only
_HANDLER_KINDS: Mapping[tuple[bool, bool], tuple[str, Callable[..., _Handler]]] = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


class CallObserver(Protocol):
    """Counts calls (gRFC A66). Methods are "package.Service/Method" or UNREGISTERED, statuses as in "NOT_FOUND".

    A call whose request never arrives whole (cancelled at once, beyond the size limit) starts and does not finish.
    """

    def started(self, method: str) -> None: ...
    def finished(self, method: str, status: str, seconds: float) -> None: ...


class Guard(aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """The only interceptor of the server."""

    def __init__(self, observer: CallObserver) -> None:
        self._observer = observer

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method.removeprefix("/") if handler else UNREGISTERED
        self._observer.started(method)
        if handler:
            return _guarded(handler, method, self._observer)
        self._observer.finished(method, grpc.StatusCode.UNIMPLEMENTED.name, 0.0)
        return handler


def _guarded(handler: _Handler, method: str, observer: CallObserver) -> _Handler:
    kind, rebuild = _HANDLER_KINDS[handler.request_streaming, handler.response_streaming]
    # gRPC answers UNKNOWN with the exception's text where its own parsing fails, so single requests are parsed inside.
    parse, deserializer = handler.request_deserializer, None
    if handler.request_streaming:
        parse, deserializer = None, handler.request_deserializer
    call = _Method(method, getattr(handler, kind), parse, observer)
    return rebuild(call.serve, deserializer, handler.response_serializer)


@dataclass(frozen=True, slots=True)
class _Method:
    name: str
    behavior: Callable[[Any, Any], Any]  # a coroutine function, or an async generator function for streams
    parse: Callable[[bytes], Any] | None
    observer: CallObserver

    async def serve(self, request: Any, context: _Context) -> Any:
        """Counts one call, from its request to its status."""
        began = time.perf_counter()
        status = grpc.StatusCode.UNKNOWN
        try:
            response = await self._translate(request, context)
            status = grpc.StatusCode.OK
        except aio.AbortError:
            status = context.code()
            raise
        except (asyncio.CancelledError, aio.BaseError):  # BaseError: the peer left in the middle of a write
            status = _why_cancelled(context)
            raise
        finally:
            self.observer.finished(self.name, status.name, time.perf_counter() - began)
        return response

    async def _translate(self, request: Any, context: _Context) -> Any:
        """Answers errors with their status; a bug is logged with its traceback and tells the caller nothing of it."""
        request_id = ""
        try:
            message = self.parse(request) if self.parse else request
            request_id = getattr(message, "request_id", "")
            return await self._run(message, context)
        except SegueError as error:
            await _abort(context, error, request_id)
        except aio.BaseError:
            raise
        except Exception:
            request_id = request_id or str(uuid.uuid4())
            _logger.exception("%s failed, request %s", self.name, request_id)
            await _abort(context, EngineError("the server failed; its log tells why"), request_id)

    async def _run(self, message: Any, context: _Context) -> Any:
        """Streams are written here, so that a caller who leaves during a write closes the generator at once."""
        if not inspect.isasyncgenfunction(self.behavior):
            return await self.behavior(message, context)
        async with aclosing(self.behavior(message, context)) as responses:
            async for response in responses:
                await context.write(response)
        return None


async def _abort(context: _Context, error: SegueError, request_id: str) -> None:
    status = to_status(error, request_id)
    await context.abort(status.code, status.message, status.trailers)


def _why_cancelled(context: _Context) -> grpc.StatusCode:
    """gRPC cancels the handler in the same way for both."""
    remaining: float | None = context.time_remaining()
    return grpc.StatusCode.DEADLINE_EXCEEDED if remaining == 0 else grpc.StatusCode.CANCELLED
