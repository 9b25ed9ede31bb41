"""A conversation that stays on the server."""

# ruff: noqa: ASYNC109  timeout is the deadline of the call itself, which the server sees

from __future__ import annotations

from typing import Self, Unpack

from segue.v1.generation_pb2 import CancelGenerationResponse
from segue.v1.session_pb2 import Session as SessionInfo
from segue_client import calls, requests
from segue_client.connection import AsyncConnection, Connection
from segue_client.events import Completion
from segue_client.ledger import Ledger
from segue_client.options import AppendOptions, CommitPolicy, ForkOptions, TurnOptions
from segue_client.turn import AsyncTurn, Turn


class _Session:
    def __init__(self, info: SessionInfo) -> None:
        self._ledger = Ledger(info)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} position={self.position}>"

    @property
    def id(self) -> str:
        """The session's id."""
        return self._ledger.info.session_id

    @property
    def position(self) -> int:
        """The ledger's length, the position the next token gets, after the last turn whose end this object saw."""
        return self._ledger.position

    @property
    def etag(self) -> str:
        """Changes with every change of the session; of the same moment as `position`."""
        return self._ledger.etag

    @property
    def info(self) -> SessionInfo:
        """What the server said of the session when it was made or last refreshed: state, settings, cache."""
        return self._ledger.info


def _checks_position(options: TurnOptions | AppendOptions) -> bool:
    """Whoever gives an expected_position, None included, has chosen."""
    return "expected_position" not in options


class Session(_Session):
    """A conversation that stays on the server; made by `Client.create_session` and `Client.get_session`.

    It follows the ledger's length in `position` and sends it with each turn, so that a second writer or a lost answer
    is found out (`PositionMismatch`) instead of spoiling the conversation; `refresh()` then accepts what is there.
    After a turn whose end was not seen (a broken connection, a deadline) the next turn refreshes by itself.

    Example:
        >>> session = client.create_session(system="You are terse.")
        >>> session.generate(text="Hello", max_tokens=16).text
        >>> session.position
    """

    def __init__(self, connection: Connection, info: SessionInfo) -> None:
        super().__init__(info)
        self._connection = connection

    def refresh(self, *, timeout: float | None = None) -> Self:
        """Reads the session again: position, etag, state, cache."""
        self._ledger.adopt(self._connection.send(calls.get_session(self.id, timeout)))
        return self

    def chat(self, content: str, **options: Unpack[TurnOptions]) -> Turn:
        """One turn that answers a user's message, as it comes.

        Example:
            >>> with session.chat("And in winter?", max_tokens=200) as turn:
            ...     for piece in turn:
            ...         print(piece, end="", flush=True)
        """
        return self.stream(**requests.user_turn(content, options))

    def stream(self, **options: Unpack[TurnOptions]) -> Turn:
        """One turn of text, tokens or messages, as it comes; without any of them it goes on from the last token.

        Args:
            options: the input, sampling, stop conditions, output and handling of the turn; see `TurnOptions`.
        """
        return Turn(self._connection, calls.stream(self.id, options), self._ledger, _checks_position(options))

    def generate(self, **options: Unpack[TurnOptions]) -> Completion:
        """One turn, all at once.

        Example:
            >>> session.generate(text="Once upon a time", max_tokens=32).text
        """
        call = calls.generate(self.id, options)
        self._connection.settle(self._ledger)
        with self._ledger.turn(call.request, _checks_position(options)):
            response = self._connection.run(call)
            self._ledger.end(response.finished)
        return Completion.from_response(response)

    def append_context(self, **options: Unpack[AppendOptions]) -> Completion:
        """Appends text, tokens or messages without sampling; returns when they are prefilled."""
        call = calls.append_context(self.id, options)
        with Turn(self._connection, call, self._ledger, _checks_position(options)) as turn:
            return turn.result()

    def cancel(
        self, *, commit_policy: CommitPolicy | None = None, timeout: float | None = None
    ) -> CancelGenerationResponse:
        """Ends whatever turn is in flight in this session, another client's included."""
        return self._connection.send(calls.cancel(None, self.id, commit_policy, timeout))

    def fork(self, **options: Unpack[ForkOptions]) -> Session:
        """A new session that shares this one's ledger, up to `position` if given, and its KV copy-on-write."""
        response = self._connection.send(calls.fork_session(self.id, options))
        return Session(self._connection, response.sessions[0])

    def rewind(self, *, position: int | None = None, turn: int | None = None, timeout: float | None = None) -> None:
        """Cuts the ledger back to `position`, or to the start of `turn` (-1 = the last one).

        Raises:
            PositionBeyondEnd, SessionBusy
            EtagMismatch: the session has changed since this object saw it; `refresh()` first.
        """
        self._connection.settle(self._ledger)
        call = calls.rewind_session(self.id, position, turn, self.etag, timeout)
        self._ledger.adopt(self._connection.send(call))

    def delete(self, *, force: bool = False, timeout: float | None = None) -> int:
        """Deletes the session, cancelling a turn in flight if `force`; returns the KV bytes that became free."""
        response = self._connection.send(calls.delete_session(self.id, "", force, False, timeout))
        self._connection.headers.forget(self.id)
        return response.freed_bytes


class AsyncSession(_Session):
    """`Session` for asyncio; made by `AsyncClient.create_session` and `AsyncClient.get_session`."""

    def __init__(self, connection: AsyncConnection, info: SessionInfo) -> None:
        super().__init__(info)
        self._connection = connection

    async def refresh(self, *, timeout: float | None = None) -> Self:
        """See `Session.refresh`."""
        self._ledger.adopt(await self._connection.send(calls.get_session(self.id, timeout)))
        return self

    def chat(self, content: str, **options: Unpack[TurnOptions]) -> AsyncTurn:
        """See `Session.chat`."""
        return self.stream(**requests.user_turn(content, options))

    def stream(self, **options: Unpack[TurnOptions]) -> AsyncTurn:
        """See `Session.stream`."""
        return AsyncTurn(self._connection, calls.stream(self.id, options), self._ledger, _checks_position(options))

    async def generate(self, **options: Unpack[TurnOptions]) -> Completion:
        """See `Session.generate`."""
        call = calls.generate(self.id, options)
        await self._connection.settle(self._ledger)
        with self._ledger.turn(call.request, _checks_position(options)):
            response = await self._connection.run(call)
            self._ledger.end(response.finished)
        return Completion.from_response(response)

    async def append_context(self, **options: Unpack[AppendOptions]) -> Completion:
        """See `Session.append_context`."""
        call = calls.append_context(self.id, options)
        async with AsyncTurn(self._connection, call, self._ledger, _checks_position(options)) as turn:
            return await turn.result()

    async def cancel(
        self,
        *,
        commit_policy: CommitPolicy | None = None,
        timeout: float | None = None,
    ) -> CancelGenerationResponse:
        """See `Session.cancel`."""
        return await self._connection.send(calls.cancel(None, self.id, commit_policy, timeout))

    async def fork(self, **options: Unpack[ForkOptions]) -> AsyncSession:
        """See `Session.fork`."""
        response = await self._connection.send(calls.fork_session(self.id, options))
        return AsyncSession(self._connection, response.sessions[0])

    async def rewind(
        self,
        *,
        position: int | None = None,
        turn: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """See `Session.rewind`."""
        await self._connection.settle(self._ledger)
        call = calls.rewind_session(self.id, position, turn, self.etag, timeout)
        self._ledger.adopt(await self._connection.send(call))

    async def delete(self, *, force: bool = False, timeout: float | None = None) -> int:
        """See `Session.delete`."""
        response = await self._connection.send(calls.delete_session(self.id, "", force, False, timeout))
        self._connection.headers.forget(self.id)
        return response.freed_bytes
