"""The clients: where sessions come from, and the calls that need none."""

# ruff: noqa: ASYNC109  timeout is the deadline of the call itself, which the server sees

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import BinaryIO, Self, Unpack

from segue.v1.generation_pb2 import CancelGenerationResponse, EstimateGenerationResponse
from segue.v1.model_pb2 import Load, ModelInfo, ServerInfo, TokenizeResponse
from segue.v1.session_pb2 import ListSessionsRequest, ListSessionsResponse
from segue.v1.session_pb2 import Session as SessionInfo
from segue_client import calls, requests
from segue_client.calls import Call
from segue_client.channel import DEFAULT_TARGET
from segue_client.connection import AsyncConnection, Connection
from segue_client.events import Completion
from segue_client.options import (
    CommitPolicy,
    ConnectionOptions,
    ImportOptions,
    ListOptions,
    Message,
    SessionOptions,
    TurnOptions,
)
from segue_client.readiness import NOT_YET, ReadyWait
from segue_client.session import AsyncSession, Session
from segue_client.turn import AsyncTurn, Turn
from segue_client.watch import AsyncWatch, Watch


class Client:
    """A connection to a Segue server. Threads may share it; a session is for one turn at a time.

    Args:
        target: host:port, or any gRPC target.
        options: `credentials`, `timeouts`, `metadata`, `channel_options`; see `ConnectionOptions`.

    Example:
        >>> with Client("127.0.0.1:50051") as client:
        ...     session = client.create_session(system="You are terse.")
        ...     with session.chat("Hello") as turn:
        ...         for piece in turn:
        ...             print(piece, end="", flush=True)
        ...     print(turn.usage, turn.timings, turn.finish_reason, session.position)
    """

    def __init__(self, target: str = DEFAULT_TARGET, **options: Unpack[ConnectionOptions]) -> None:
        self._connection = Connection(target, options)

    def __repr__(self) -> str:
        return f"<Client {self._connection.target}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancels the turns that run and closes the connection. Sessions stay on the server."""
        self._connection.close()

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Returns when the server takes turns: it is up, has loaded its model, and is not draining.

        Raises:
            DeadlineExceeded: not within `timeout` seconds; the message says why.
        """
        wait = ReadyWait(self._connection.target, timeout)
        while True:
            try:
                if wait.is_ready(self._connection.send(wait.call())):
                    return
            except NOT_YET as error:
                wait.failed(error)
            time.sleep(wait.pause())

    def create_session(self, **options: Unpack[SessionOptions]) -> Session:
        """Opens a session, and prefills its prefix if it is given one (`system`, `text`, `tokens` or `messages`).

        Args:
            options: prefix, settings, and defaults for the session's turns; see `SessionOptions`.

        Example:
            >>> session = client.create_session(system="You are terse.", ttl=3600, temperature=0)

        Raises:
            SessionExists, KvBudget, SessionLimit, InvalidArgument
        """
        return Session(self._connection, self._connection.send(calls.create_session(options)))

    def get_session(self, session_id: str, *, timeout: float | None = None) -> Session:
        """A session that is there already.

        Raises:
            SessionNotFound, SessionExpired
        """
        return Session(self._connection, self._connection.send(calls.get_session(session_id, timeout)))

    def import_session(self, file: BinaryIO | str | PathLike[str], **options: Unpack[ImportOptions]) -> Session:
        """A new session from a file that `Session.export` wrote; its KV comes along, so nothing is computed again.

        Raises:
            SnapshotCorrupt: the file is damaged; nothing was changed.
            SnapshotIncompatible: it is of another model, KV dtype or shape, and `recompute_on_mismatch` is not set.
            SessionExists
        """
        if isinstance(file, str | PathLike):
            with Path(file).open("rb") as opened:
                return self.import_session(opened, **options)
        upload, session_id = requests.upload(file, options)
        return Session(self._connection, self._connection.upload(upload, session_id, options.get("timeout")))

    def list_sessions(self, **options: Unpack[ListOptions]) -> Iterator[SessionInfo]:
        """The sessions the caller may see, fetched page by page as they are read.

        Example:
            >>> [info.session_id for info in client.list_sessions(states=["idle"], order_by="last_used_time desc")]
        """
        return self._pages(calls.list_sessions(options))

    def _pages(self, call: Call[ListSessionsRequest, ListSessionsResponse] | None) -> Iterator[SessionInfo]:
        while call is not None:
            page = self._connection.send(call)
            yield from page.sessions
            call = calls.next_page(call, page)

    def delete_session(
        self,
        session_id: str,
        *,
        etag: str = "",
        force: bool = False,
        allow_missing: bool = False,
        timeout: float | None = None,
    ) -> int:
        """Deletes a session; returns the KV bytes that became free.

        Args:
            session_id: which.
            etag: only if the session has not changed since.
            force: cancel a turn in flight instead of raising SessionBusy.
            allow_missing: no error when there is no such session.
            timeout: seconds.
        """
        response = self._connection.send(calls.delete_session(session_id, etag, force, allow_missing, timeout))
        self._connection.headers.forget(session_id)
        return response.freed_bytes

    def generate(self, session_id: str = "", **options: Unpack[TurnOptions]) -> Completion:
        """One turn, all at once. Without a session id, of a session that lives for this turn only.

        Example:
            >>> client.generate(text="The capital of France is", max_tokens=8, temperature=0).text
        """
        return Completion.from_response(self._connection.run(calls.generate(session_id, options)))

    def stream(self, session_id: str = "", **options: Unpack[TurnOptions]) -> Turn:
        """One turn as it comes; see `Turn`. Without a session id, of a session that lives for this turn only."""
        return Turn(self._connection, calls.stream(session_id, options))

    def estimate(self, session_id: str = "", **options: Unpack[TurnOptions]) -> EstimateGenerationResponse:
        """What `generate` would meet now; see `Session.estimate`."""
        return self._connection.send(calls.estimate(session_id, options))

    def watch(self, session_id: str = "", *, after_sequence: int | None = None, timeout: float | None = None) -> Watch:
        """What happens to one session, or to all, from now on or after an event that was seen; see `Watch`.

        Args:
            session_id: which; empty = all the caller may see.
            after_sequence: the last event seen; 0 = from the first one on.
            timeout: seconds; default: Timeouts.turn.
        """
        return Watch(self._connection, calls.watch(session_id, after_sequence, timeout))

    def cancel(
        self,
        *,
        request_id: str | None = None,
        session_id: str | None = None,
        commit_policy: CommitPolicy | None = None,
        timeout: float | None = None,
    ) -> CancelGenerationResponse:
        """Ends a turn by its request id, or whatever turn is in flight in a session; returns when it has ended."""
        return self._connection.send(calls.cancel(request_id, session_id, commit_policy, timeout))

    def model_info(self, *, timeout: float | None = None) -> ModelInfo:
        """The model: shape, vocabulary, context length, KV bytes per token, default sampling."""
        return self._connection.send(calls.model_info(timeout))

    def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """The server: version, capabilities, limits."""
        return self._connection.send(calls.server_info(timeout))

    def load(self, *, timeout: float | None = None) -> Load:
        """What the server is doing now."""
        return self._connection.send(calls.load(timeout))

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        add_special_tokens: bool = False,
        timeout: float | None = None,
    ) -> TokenizeResponse:
        """Tokens and their pieces, of a text or of messages through the chat template."""
        return self._connection.send(calls.tokenize(text, messages, add_special_tokens, timeout))

    def detokenize(
        self, tokens: Sequence[int], *, skip_special_tokens: bool = False, timeout: float | None = None
    ) -> str:
        """The text of tokens."""
        return self._connection.send(calls.detokenize(tokens, skip_special_tokens, timeout)).text


class AsyncClient:
    """`Client` for asyncio, made inside the running loop.

    Example:
        >>> async with AsyncClient("127.0.0.1:50051") as client:
        ...     session = await client.create_session(system="You are terse.")
        ...     async with session.chat("Hello") as turn:
        ...         async for piece in turn:
        ...             print(piece, end="", flush=True)
    """

    def __init__(self, target: str = DEFAULT_TARGET, **options: Unpack[ConnectionOptions]) -> None:
        self._connection = AsyncConnection(target, options)

    def __repr__(self) -> str:
        return f"<AsyncClient {self._connection.target}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """See `Client.close`."""
        await self._connection.close()

    async def wait_ready(self, timeout: float = 60.0) -> None:
        """See `Client.wait_ready`."""
        wait = ReadyWait(self._connection.target, timeout)
        while True:
            try:
                if wait.is_ready(await self._connection.send(wait.call())):
                    return
            except NOT_YET as error:
                wait.failed(error)
            await asyncio.sleep(wait.pause())

    async def create_session(self, **options: Unpack[SessionOptions]) -> AsyncSession:
        """See `Client.create_session`."""
        return AsyncSession(self._connection, await self._connection.send(calls.create_session(options)))

    async def get_session(self, session_id: str, *, timeout: float | None = None) -> AsyncSession:
        """See `Client.get_session`."""
        return AsyncSession(self._connection, await self._connection.send(calls.get_session(session_id, timeout)))

    async def import_session(
        self, file: BinaryIO | str | PathLike[str], **options: Unpack[ImportOptions]
    ) -> AsyncSession:
        """See `Client.import_session`. The file is read in the loop's thread."""
        if isinstance(file, str | PathLike):
            with Path(file).open("rb") as opened:  # noqa: ASYNC230  a chunk at a time, from the page cache
                return await self.import_session(opened, **options)
        upload, session_id = requests.upload(file, options)
        info = await self._connection.upload(upload, session_id, options.get("timeout"))
        return AsyncSession(self._connection, info)

    def list_sessions(self, **options: Unpack[ListOptions]) -> AsyncIterator[SessionInfo]:
        """See `Client.list_sessions`."""
        return self._pages(calls.list_sessions(options))

    async def _pages(self, call: Call[ListSessionsRequest, ListSessionsResponse] | None) -> AsyncIterator[SessionInfo]:
        while call is not None:
            page = await self._connection.send(call)
            for info in page.sessions:
                yield info
            call = calls.next_page(call, page)

    async def delete_session(
        self,
        session_id: str,
        *,
        etag: str = "",
        force: bool = False,
        allow_missing: bool = False,
        timeout: float | None = None,
    ) -> int:
        """See `Client.delete_session`."""
        response = await self._connection.send(calls.delete_session(session_id, etag, force, allow_missing, timeout))
        self._connection.headers.forget(session_id)
        return response.freed_bytes

    async def generate(self, session_id: str = "", **options: Unpack[TurnOptions]) -> Completion:
        """See `Client.generate`."""
        return Completion.from_response(await self._connection.run(calls.generate(session_id, options)))

    def stream(self, session_id: str = "", **options: Unpack[TurnOptions]) -> AsyncTurn:
        """See `Client.stream`."""
        return AsyncTurn(self._connection, calls.stream(session_id, options))

    async def estimate(self, session_id: str = "", **options: Unpack[TurnOptions]) -> EstimateGenerationResponse:
        """See `Client.estimate`."""
        return await self._connection.send(calls.estimate(session_id, options))

    def watch(
        self, session_id: str = "", *, after_sequence: int | None = None, timeout: float | None = None
    ) -> AsyncWatch:
        """See `Client.watch`."""
        return AsyncWatch(self._connection, calls.watch(session_id, after_sequence, timeout))

    async def cancel(
        self,
        *,
        request_id: str | None = None,
        session_id: str | None = None,
        commit_policy: CommitPolicy | None = None,
        timeout: float | None = None,
    ) -> CancelGenerationResponse:
        """See `Client.cancel`."""
        return await self._connection.send(calls.cancel(request_id, session_id, commit_policy, timeout))

    async def model_info(self, *, timeout: float | None = None) -> ModelInfo:
        """See `Client.model_info`."""
        return await self._connection.send(calls.model_info(timeout))

    async def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """See `Client.server_info`."""
        return await self._connection.send(calls.server_info(timeout))

    async def load(self, *, timeout: float | None = None) -> Load:
        """See `Client.load`."""
        return await self._connection.send(calls.load(timeout))

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        add_special_tokens: bool = False,
        timeout: float | None = None,
    ) -> TokenizeResponse:
        """See `Client.tokenize`."""
        return await self._connection.send(calls.tokenize(text, messages, add_special_tokens, timeout))

    async def detokenize(
        self, tokens: Sequence[int], *, skip_special_tokens: bool = False, timeout: float | None = None
    ) -> str:
        """See `Client.detokenize`."""
        return (await self._connection.send(calls.detokenize(tokens, skip_special_tokens, timeout))).text
