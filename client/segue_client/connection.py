"""How calls travel: deadlines, metadata and errors, over a blocking or an asyncio channel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING
from weakref import WeakSet

import grpc
import grpc.experimental

from segue.v1.generation_pb2 import (
    AppendContextRequest,
    AttachGenerationRequest,
    GenerateEvent,
    GenerateRequest,
    GenerateResponse,
)
from segue.v1.session_pb2 import Session as SessionInfo
from segue_client import calls
from segue_client.calls import Call, RequestT, ResponseT, StreamCall
from segue_client.channel import SessionHeaders, Timeouts, channel_options
from segue_client.errors import SegueError, Unavailable
from segue_client.failures import from_rpc
from segue_client.ledger import Ledger
from segue_client.options import ConnectionOptions, check_names
from segue_client.snapshot import Upload

if TYPE_CHECKING:  # the names exist in the stubs only
    from segue_client.turn import AsyncTurn, Turn

    EventStream = grpc.CallIterator[GenerateEvent]
    AsyncEventStream = grpc.aio.UnaryStreamCall[
        GenerateRequest | AppendContextRequest | AttachGenerationRequest, GenerateEvent
    ]

# How a cancel may fail to get its answer; the last two say that the channel is closed, and the turn with it.
UNANSWERED = (SegueError, ValueError, grpc.aio.UsageError)

# gRPC's default reads all streams of a channel in one thread of its own. A Ctrl-C that lands inside a `with lock` of a
# stream leaves that lock taken (CPython raises between taking it and entering the block), and that thread waits for it
# for ever: every later stream hangs. Read by its caller, a stream shares its lock with nobody.
_READ_IN_CALLERS_THREAD = (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)


class _Connection:
    def __init__(self, target: str, options: ConnectionOptions) -> None:
        check_names(options, ConnectionOptions)
        self.target = target
        self.timeouts = options.get("timeouts") or Timeouts()
        self.headers = SessionHeaders(options.get("metadata", ()))

    @contextmanager
    def _failures(self, session_id: str) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise self.failed(from_rpc(error), session_id) from error

    def failed(self, error: SegueError, session_id: str) -> SegueError:
        """Takes note of what an error tells about the session's host."""
        if isinstance(error, Unavailable):
            self.headers.forget(session_id)
        return error


class Connection(_Connection):
    """A blocking channel; threads may share it."""

    def __init__(self, target: str, options: ConnectionOptions) -> None:
        super().__init__(target, options)
        self.turns: WeakSet[Turn] = WeakSet()  # that may still run
        settings = [_READ_IN_CALLERS_THREAD, *channel_options(options.get("channel_options", ()))]
        credentials = options.get("credentials")
        if credentials is None:
            self._channel = grpc.insecure_channel(target, settings)
        else:
            self._channel = grpc.secure_channel(target, credentials, settings)

    def send(self, call: Call[RequestT, ResponseT]) -> ResponseT:
        """Carries out a unary call.

        Raises:
            SegueError: it failed.
        """
        method = self._channel.unary_unary(call.method.path, call.method.serialize, call.method.parse)
        metadata = self.headers.of(call.session_id)
        response: ResponseT
        with self._failures(call.session_id):
            response, sent = method.with_call(call.request, timeout=call.deadline(self.timeouts), metadata=metadata)
        self.headers.learn(call.session_id, sent.initial_metadata())
        return response

    def run(self, call: Call[GenerateRequest, GenerateResponse]) -> GenerateResponse:
        """Carries out a turn that is one call; left by Ctrl-C it is cancelled, for it would outlive the call."""
        try:
            return self.send(call)
        except KeyboardInterrupt:
            with suppress(*UNANSWERED):
                self.send(calls.cancel(call.request.request_id, None, None, self.timeouts.cancel, call.session_id))
            raise

    def open(self, call: StreamCall) -> EventStream:
        """Opens the event stream of a turn."""
        method = self._channel.unary_stream(call.method.path, call.method.serialize, call.method.parse)
        metadata = self.headers.of(call.session_id)
        return method(call.request, timeout=call.deadline(self.timeouts), metadata=metadata)

    def begin(self, call: Call[RequestT, ResponseT]) -> grpc.CallIterator[ResponseT]:
        """Sends a call that answers with a stream of messages."""
        method = self._channel.unary_stream(call.method.path, call.method.serialize, call.method.parse)
        metadata = self.headers.of(call.session_id)
        return method(call.request, timeout=call.deadline(self.timeouts), metadata=metadata)

    def gather(self, call: Call[RequestT, ResponseT]) -> list[ResponseT]:
        """Carries out a call that answers with a stream, to its end.

        Raises:
            SegueError: it failed.
        """
        with self._failures(call.session_id):
            return list(self.begin(call))

    def iterate(self, call: Call[RequestT, ResponseT]) -> Iterator[ResponseT]:
        """The messages of a call that answers with a stream, as they come; left early, the call is cancelled.

        Raises:
            SegueError: it failed.
        """
        stream = self.begin(call)
        try:
            with self._failures(call.session_id):
                yield from stream
        finally:
            stream.cancel()  # type: ignore[no-untyped-call]  # a gap in grpc-stubs

    def upload(self, upload: Upload, session_id: str, timeout: float | None) -> SessionInfo:
        """Sends a snapshot.

        Raises:
            SegueError: it failed.
        """
        method = self._channel.stream_unary(
            calls.IMPORT_SESSION.path, calls.IMPORT_SESSION.serialize, calls.IMPORT_SESSION.parse
        )
        seconds = self.timeouts.turn if timeout is None else timeout
        try:
            with self._failures(session_id):
                answer: SessionInfo = method(upload, timeout=seconds, metadata=self.headers.of(session_id))
        except SegueError as error:
            raise upload.error or error from None
        return answer

    def settle(self, ledger: Ledger) -> None:
        """Asks where the session stands if that is not certain."""
        if ledger.uncertain:
            ledger.adopt(self.send(calls.get_session(ledger.info.session_id, None)))

    def close(self) -> None:
        """Cancels the turns that run, which would outlive the channel, and closes it."""
        for turn in list(self.turns):
            turn.close()
        self._channel.close()


class AsyncConnection(_Connection):
    """An asyncio channel; belongs to the loop that was running when it was made."""

    def __init__(self, target: str, options: ConnectionOptions) -> None:
        super().__init__(target, options)
        self.turns: WeakSet[AsyncTurn] = WeakSet()  # that may still run
        settings = channel_options(options.get("channel_options", ()))
        credentials = options.get("credentials")
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(target, settings)
        else:
            self._channel = grpc.aio.secure_channel(target, credentials, settings)

    async def send(self, call: Call[RequestT, ResponseT]) -> ResponseT:
        """Carries out a unary call.

        Raises:
            SegueError: it failed.
        """
        method = self._channel.unary_unary(call.method.path, call.method.serialize, call.method.parse)
        metadata = self.headers.of(call.session_id)
        with self._failures(call.session_id):
            sent = method(call.request, timeout=call.deadline(self.timeouts), metadata=metadata)
            response: ResponseT = await sent
            self.headers.learn(call.session_id, await sent.initial_metadata())
        return response

    async def run(self, call: Call[GenerateRequest, GenerateResponse]) -> GenerateResponse:
        """Carries out a turn that is one call; with its task it is cancelled, for it would outlive the call."""
        try:
            return await self.send(call)
        except asyncio.CancelledError:
            cancel = calls.cancel(call.request.request_id, None, None, self.timeouts.cancel, call.session_id)
            with suppress(*UNANSWERED):
                await self.send(cancel)
            raise

    def open(self, call: StreamCall) -> AsyncEventStream:
        """Opens the event stream of a turn."""
        method = self._channel.unary_stream(call.method.path, call.method.serialize, call.method.parse)
        metadata = self.headers.of(call.session_id)
        return method(call.request, timeout=call.deadline(self.timeouts), metadata=metadata)

    def begin(self, call: Call[RequestT, ResponseT]) -> grpc.aio.UnaryStreamCall[RequestT, ResponseT]:
        """Sends a call that answers with a stream of messages."""
        method = self._channel.unary_stream(call.method.path, call.method.serialize, call.method.parse)
        metadata = self.headers.of(call.session_id)
        return method(call.request, timeout=call.deadline(self.timeouts), metadata=metadata)

    async def gather(self, call: Call[RequestT, ResponseT]) -> list[ResponseT]:
        """Carries out a call that answers with a stream, to its end.

        Raises:
            SegueError: it failed.
        """
        with self._failures(call.session_id):
            return [message async for message in self.begin(call)]

    async def iterate(self, call: Call[RequestT, ResponseT]) -> AsyncGenerator[ResponseT, None]:
        """See `Connection.iterate`."""
        stream = self.begin(call)
        try:
            with self._failures(call.session_id):
                async for message in stream:
                    yield message
        finally:
            stream.cancel()

    async def upload(self, upload: Upload, session_id: str, seconds: float | None) -> SessionInfo:
        """See `Connection.upload`."""
        method = self._channel.stream_unary(
            calls.IMPORT_SESSION.path, calls.IMPORT_SESSION.serialize, calls.IMPORT_SESSION.parse
        )
        deadline = self.timeouts.turn if seconds is None else seconds
        try:
            with self._failures(session_id):
                answer: SessionInfo = await method(upload, timeout=deadline, metadata=self.headers.of(session_id))
        except SegueError as error:
            raise upload.error or error from None
        return answer

    async def settle(self, ledger: Ledger) -> None:
        """Asks where the session stands if that is not certain."""
        if ledger.uncertain:
            ledger.adopt(await self.send(calls.get_session(ledger.info.session_id, None)))

    async def close(self) -> None:
        """Cancels the turns that run, which would outlive the channel, and closes it."""
        await asyncio.gather(*(turn.close() for turn in list(self.turns)))
        await self._channel.close(None)
