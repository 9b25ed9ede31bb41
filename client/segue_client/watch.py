"""What happens to sessions, as it happens: for a loop that blocks and for one that awaits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

import grpc

from segue.v1.session_pb2 import SessionEvent, WatchSessionsRequest
from segue_client.calls import Call
from segue_client.connection import AsyncConnection, Connection
from segue_client.failures import from_rpc

if TYPE_CHECKING:  # the names exist in the stubs only
    Stream = grpc.CallIterator[SessionEvent]
    AsyncStream = grpc.aio.UnaryStreamCall[WatchSessionsRequest, SessionEvent]


class _Watch:
    def __init__(self, call: Call[WatchSessionsRequest, SessionEvent]) -> None:
        self._call = call
        self._over = False
        self.last_sequence = call.request.after_sequence if call.request.HasField("after_sequence") else None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} last_sequence={self.last_sequence}>"

    def _accept(self, event: SessionEvent) -> SessionEvent:
        self.last_sequence = event.sequence
        return event

    @contextmanager
    def _failures(self, connection: Connection | AsyncConnection) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as failure:
            if not self._over:
                self._over = True
                raise connection.failed(from_rpc(failure), self._call.session_id) from failure


class Watch(_Watch):
    """Events of one session, until it ends, or of all; made by `Client.watch` and `Session.watch`.

    What happens after the `with` block is entered is told, in order and once. `last_sequence` is the number of the last
    event: after a broken connection `watch(after_sequence=...)` goes on from there.

    Example:
        >>> with client.watch() as events:
        ...     for event in events:
        ...         print(event.sequence, event.session.session_id, event.reason)

    Raises:
        EventHistoryLost: the server does not keep the events after `after_sequence` any more, or this watch was too
            slow; list the sessions anew.
        SegueError: the call failed.
    """

    def __init__(self, connection: Connection, call: Call[WatchSessionsRequest, SessionEvent]) -> None:
        super().__init__(call)
        self._connection = connection
        self._stream: Stream | None = None

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __iter__(self) -> Generator[SessionEvent, None, None]:
        with self._failures(self._connection):
            for event in self._open():
                yield self._accept(event)

    def close(self) -> None:
        """Ends the watch; a loop over it in another thread ends too."""
        self._over = True
        if self._stream is not None:
            self._stream.cancel()  # type: ignore[no-untyped-call]  # a gap in grpc-stubs

    def _open(self) -> Stream:
        if self._stream is None:
            self._stream = self._connection.begin(self._call)
            self._stream.initial_metadata()  # they come when the server has begun to watch
        return self._stream


class AsyncWatch(_Watch):
    """`Watch` for asyncio: `async with`, `async for`."""

    def __init__(self, connection: AsyncConnection, call: Call[WatchSessionsRequest, SessionEvent]) -> None:
        super().__init__(call)
        self._connection = connection
        self._stream: AsyncStream | None = None

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncGenerator[SessionEvent, None]:
        with self._failures(self._connection), self._closed_elsewhere():
            async for event in await self._open():
                yield self._accept(event)

    async def close(self) -> None:
        """See `Watch.close`."""
        self._over = True
        if self._stream is not None:
            self._stream.cancel()

    async def _open(self) -> AsyncStream:
        if self._stream is None:
            self._stream = self._connection.begin(self._call)
            await self._stream.initial_metadata()  # they come when the server has begun to watch
        return self._stream

    @contextmanager
    def _closed_elsewhere(self) -> Iterator[None]:
        """grpc.aio raises CancelledError into the reader of a call that another task has cancelled."""
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not (self._over and task is not None and not task.cancelling()):
                raise
