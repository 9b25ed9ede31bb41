"""One streamed turn, for a loop that blocks and for one that awaits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager, suppress
from typing import TYPE_CHECKING, Self

import grpc

from segue.v1.generation_pb2 import (
    CancelGenerationRequest,
    CancelGenerationResponse,
    Finished,
    GenerateEvent,
    Tokens,
)
from segue.v1.types_pb2 import Usage
from segue_client import calls
from segue_client.calls import Call, TurnCall
from segue_client.connection import UNANSWERED, AsyncConnection, Connection
from segue_client.errors import Cancelled, ProtocolError, SegueError
from segue_client.events import Completion, Event, FinishReason, Timings, TurnRecord
from segue_client.failures import from_broken_stream, from_rpc
from segue_client.ledger import Ledger
from segue_client.resume import Resumption

if TYPE_CHECKING:
    from segue_client.connection import AsyncEventStream, EventStream


_CLOSED = "the turn was closed while it was read"


class _Turn:
    """What a turn knows and decides, however its events are waited for."""

    def __init__(
        self, connection: Connection | AsyncConnection, call: TurnCall, ledger: Ledger | None, check_position: bool
    ) -> None:
        self._call = call
        self._resumption = Resumption(call, connection.timeouts)
        self._ledger = ledger
        self._check_position = check_position
        self._record = TurnRecord(call.request.request_id, call.session_id)
        self._over = False  # nothing is left to read or to cancel

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.request_id} events={self._record.last_sequence}>"

    @property
    def request_id(self) -> str:
        """The turn's id, for `cancel` from elsewhere."""
        return self._record.request_id

    @property
    def session_id(self) -> str:
        """The session's id; of a turn without a session, the one the server gave it, once it has started."""
        return self._record.session_id

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._record.text)

    @property
    def token_ids(self) -> Sequence[int]:
        """The generated tokens so far."""
        return tuple(self._record.token_ids)

    @property
    def finished(self) -> Finished | None:
        """The server's closing event; None before it has come, and for a turn that failed."""
        return self._record.finished

    @property
    def completion(self) -> Completion:
        """The turn as one value.

        Raises:
            ValueError: it has not finished.
        """
        return self._record.completion()

    @property
    def finish_reason(self) -> FinishReason:
        """Why the turn ended. Raises ValueError before that, as `usage` and `timings` do."""
        return self.completion.finish_reason

    @property
    def usage(self) -> Usage:
        """Tokens: appended, generated, computed, reused."""
        return self.completion.usage

    @property
    def timings(self) -> Timings:
        """Seconds: queue, prefill, decode, time to first token."""
        return self.completion.timings

    def _begin(self) -> None:
        if self._ledger is not None:
            self._ledger.begin(self._call.request, self._check_position)
        self._resumption.begin()

    def _accept(self, message: GenerateEvent) -> Event | None:
        event = self._record.accept(message)
        self._resumption.progress()
        if isinstance(event, Finished):
            self._end(event)
        return event

    def _end(self, finished: Finished) -> None:
        self._record.finished = finished
        if self._ledger is not None:
            self._ledger.end(finished)

    @contextmanager
    def _failures(self, connection: Connection | AsyncConnection) -> Iterator[None]:
        """Raises this library's errors for those of the stream, and tells the ledger.

        The one place where a stream ends a turn with an error, be it the turn's own or a connection lost for good.
        """
        try:
            yield
        except grpc.RpcError as failure:
            if self._over:
                raise Cancelled(_CLOSED) from failure
            self._over = True
            begun = self._record.begun
            error = from_broken_stream(failure, self.request_id) if begun else from_rpc(failure)
            self._fail(error)
            raise connection.failed(error, self._call.session_id) from failure
        except ProtocolError as error:
            self._fail(error)
            raise

    def _pause(self, failure: grpc.RpcError) -> float:
        """Seconds until a stream that broke is taken up again. Raises `failure` when it is not."""
        if self._over:
            raise failure
        return self._resumption.pause(failure, self._record)

    def _refuse_closed(self) -> None:
        if self._over:
            raise Cancelled(_CLOSED)

    def _fail(self, error: SegueError) -> None:
        if self._ledger is not None:
            self._ledger.fail(error, started=self._record.position is not None)

    def _leave(self) -> bool:
        """Ends the turn on this side; whether the server has to be told."""
        running = not self._over and self._record.finished is None
        self._over = True
        return running

    def _cancel_call(self, timeout: float) -> Call[CancelGenerationRequest, CancelGenerationResponse]:
        return calls.cancel(self.request_id, None, None, timeout, self._call.session_id)

    def _cancelled(self, answer: CancelGenerationResponse) -> None:
        if answer.HasField("finished"):
            self._end(answer.finished)


class Turn(_Turn):
    """One streamed turn; made by `Session.chat`, `Session.stream` and `Client.stream`.

    Iterating gives pieces of text; `events()` gives the typed events. The call starts on entering the `with` block, or
    with the first event asked for. Leaving the block or the loop early, also by an exception or Ctrl-C, cancels the
    turn; the session keeps what its commit policy says and stays usable.

    A connection that breaks does not end the turn: it is taken up again where it broke, for `detach_grace` seconds, and
    each event still comes once. If it cannot be, `ConnectionLost` is raised.

    Example:
        >>> with session.stream(text="Once upon a time", max_tokens=64) as turn:
        ...     for event in turn.events():
        ...         match event:
        ...             case PrefillProgress():
        ...                 print(f"{event.processed_tokens} of {event.total_tokens}")
        ...             case Tokens():
        ...                 print(event.text, end="")
        >>> turn.finish_reason, turn.usage.generated_tokens, turn.timings.time_to_first_token
    """

    def __init__(
        self, connection: Connection, call: TurnCall, ledger: Ledger | None = None, check_position: bool = False
    ) -> None:
        super().__init__(connection, call, ledger, check_position)
        self._connection = connection
        self._stream: EventStream | None = None

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[str]:
        with closing(self.events()) as events:
            for event in events:
                if isinstance(event, Tokens) and event.text:
                    yield event.text

    def events(self) -> Generator[Event, None, None]:
        """The typed events, as `segue/v1/generation.proto` describes them.

        Raises:
            SegueError: the turn failed; `ConnectionLost` and `ProtocolError` after it had begun.
        """
        stream = self._open()
        if stream is None:
            return
        try:
            with self._failures(self._connection):
                while True:
                    try:
                        yield from self._read(stream)
                        break
                    except grpc.RpcError as failure:
                        if self._record.finished is not None:
                            break  # everything is here; only the goodbye is missing
                        time.sleep(self._pause(failure))
                    stream = self._reopen()
        finally:
            self.close()

    def _read(self, stream: EventStream) -> Generator[Event, None, None]:
        for message in stream:
            if not self._record.begun:
                self._connection.headers.learn(self._call.session_id, stream.initial_metadata())
            event = self._accept(message)
            if event is not None:
                yield event
        self._record.end()

    def result(self) -> Completion:
        """Waits for the end and returns the whole turn."""
        for _ in self.events():
            pass
        return self.completion

    def close(self) -> None:
        """Cancels the turn if it is running, and learns from the server where the session stands then.

        Waits at most `Timeouts.cancel`; without an answer the session asks again before its next turn.
        """
        if self._leave() and self._stream is not None:
            self._stream.cancel()  # type: ignore[no-untyped-call]  # a gap in grpc-stubs
            with suppress(*UNANSWERED):
                self._cancelled(self._connection.send(self._cancel_call(self._connection.timeouts.cancel)))

    def _reopen(self) -> EventStream:
        """The stream that goes on where the last one broke; another thread or task may close the turn meanwhile."""
        self._refuse_closed()
        self._stream = self._connection.open(self._resumption.call(self._record))
        if self._over:
            self._stream.cancel()  # type: ignore[no-untyped-call]  # a gap in grpc-stubs
        self._refuse_closed()
        return self._stream

    def _open(self) -> EventStream | None:
        """The stream, sent for on first use; None when the turn is over."""
        if self._stream is None and not self._over:
            if self._ledger is not None:
                self._connection.settle(self._ledger)
            self._begin()
            self._stream = self._connection.open(self._call)
            self._connection.turns.add(self)
        return None if self._over else self._stream


class AsyncTurn(_Turn):
    """`Turn` for asyncio: `async with`, `async for`; cancelling the task cancels the turn.

    Example:
        >>> async with session.chat("Hello") as turn:
        ...     async for piece in turn:
        ...         print(piece, end="", flush=True)
    """

    def __init__(
        self, connection: AsyncConnection, call: TurnCall, ledger: Ledger | None = None, check_position: bool = False
    ) -> None:
        super().__init__(connection, call, ledger, check_position)
        self._connection = connection
        self._stream: AsyncEventStream | None = None

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[str]:
        async with aclosing(self.events()) as events:
            async for event in events:
                if isinstance(event, Tokens) and event.text:
                    yield event.text

    async def events(self) -> AsyncGenerator[Event, None]:
        """See `Turn.events`."""
        stream = await self._open()
        if stream is None:
            return
        try:
            with self._failures(self._connection), self._closed_elsewhere():
                while True:
                    try:
                        async with aclosing(self._read(stream)) as events:
                            async for event in events:
                                yield event
                        break
                    except grpc.RpcError as failure:
                        if self._record.finished is not None:
                            break  # everything is here; only the goodbye is missing
                        await asyncio.sleep(self._pause(failure))
                    stream = self._reopen()
        finally:
            await self.close()

    async def _read(self, stream: AsyncEventStream) -> AsyncGenerator[Event, None]:
        async for message in stream:
            if not self._record.begun:
                self._connection.headers.learn(self._call.session_id, await stream.initial_metadata())
            event = self._accept(message)
            if event is not None:
                yield event
        self._record.end()

    async def result(self) -> Completion:
        """See `Turn.result`."""
        async for _ in self.events():
            pass
        return self.completion

    async def close(self) -> None:
        """See `Turn.close`."""
        if self._leave() and self._stream is not None:
            self._stream.cancel()
            with suppress(*UNANSWERED):
                self._cancelled(await self._connection.send(self._cancel_call(self._connection.timeouts.cancel)))

    def _reopen(self) -> AsyncEventStream:
        """The stream that goes on where the last one broke; another thread or task may close the turn meanwhile."""
        self._refuse_closed()
        self._stream = self._connection.open(self._resumption.call(self._record))
        if self._over:
            self._stream.cancel()
        self._refuse_closed()
        return self._stream

    async def _open(self) -> AsyncEventStream | None:
        """The stream, sent for on first use; None when the turn is over."""
        if self._stream is None and not self._over:
            if self._ledger is not None:
                await self._connection.settle(self._ledger)
            self._begin()
            self._stream = self._connection.open(self._call)
            self._connection.turns.add(self)
        return None if self._over else self._stream

    @contextmanager
    def _closed_elsewhere(self) -> Iterator[None]:
        """grpc.aio raises CancelledError into the reader of a call that another task has cancelled."""
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._over and task is not None and not task.cancelling():
                raise Cancelled(_CLOSED) from None
            raise
