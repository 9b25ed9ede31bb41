"""A conversation that stays on the server."""

# ruff: noqa: ASYNC109  timeout is the deadline of the call itself, which the server sees

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import BinaryIO, Self, Unpack, overload

from segue.v1.generation_pb2 import CancelGenerationResponse, EstimateGenerationResponse, ScoreTokensResponse
from segue.v1.session_pb2 import Session as SessionInfo
from segue.v1.session_pb2 import SnapshotHeader
from segue_client import calls, requests, snapshot
from segue_client.connection import AsyncConnection, Connection
from segue_client.events import Completion, SessionTokens
from segue_client.ledger import Ledger
from segue_client.options import AppendOptions, CacheTierName, CommitPolicy, ForkOptions, TurnOptions, UpdateOptions
from segue_client.turn import AsyncTurn, Turn
from segue_client.watch import AsyncWatch, Watch


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

    def estimate(self, **options: Unpack[TurnOptions]) -> EstimateGenerationResponse:
        """What `generate` with these options would meet now: whether it starts, computes and evicts what, and when.

        Nothing changes. An error that the turn would get is its `refusal_reason`.
        """
        call = calls.estimate(self.id, options)
        if _checks_position(options):
            call.request.expected_position = self.position
        return self._connection.send(call)

    def score(
        self, tokens: Sequence[int], *, top_logprobs: int | None = None, timeout: float | None = None
    ) -> ScoreTokensResponse:
        """The logprobs of tokens as if they came next; the session stays as it is.

        Example:
            >>> sum(entry.logprob for entry in session.score(tokens).logprobs)
        """
        return self._connection.send(calls.score(self.id, tokens, top_logprobs, timeout))

    def read_tokens(
        self, start: int = 0, end: int | None = None, *, text: bool = False, timeout: float | None = None
    ) -> SessionTokens:
        """The ledger as it is now, from `start` up to `end`, and where its turns lie.

        Raises:
            PositionBeyondEnd
        """
        return SessionTokens.from_chunks(self._connection.gather(calls.read_tokens(self.id, start, end, text, timeout)))

    def watch(self, *, after_sequence: int | None = None, timeout: float | None = None) -> Watch:
        """What happens to this session, until it ends; see `Client.watch`."""
        return Watch(self._connection, calls.watch(self.id, after_sequence, timeout))

    def update(self, **options: Unpack[UpdateOptions]) -> None:
        """Changes the session's settings, name or labels; what is not given stays. Its time to live runs on.

        Example:
            >>> session.update(ttl=24 * 3600, priority=10, labels={"team": "a"})

        Raises:
            KvBudget: it is to be pinned, and the server has no room for that.
            EtagMismatch: the session has changed since this object saw it; `refresh()` first.
        """
        self._connection.settle(self._ledger)
        self._ledger.adopt(self._connection.send(calls.update_session(self.id, self.etag, options)))

    @overload
    def fork(self, *, count: None = None, **options: Unpack[ForkOptions]) -> Session: ...
    @overload
    def fork(self, *, count: int, **options: Unpack[ForkOptions]) -> list[Session]: ...
    def fork(self, *, count: int | None = None, **options: Unpack[ForkOptions]) -> Session | list[Session]:
        """A new session that shares this one's ledger, up to `position` if given, and its KV copy-on-write.

        With `count` it is a list of as many, and `new_session_id` what their ids begin with.

        Example:
            >>> drafts = session.fork(count=8, temperature=1.0)
        """
        response = self._connection.send(calls.fork_session(self.id, count, options))
        children = [Session(self._connection, child) for child in response.sessions]
        return children[0] if count is None else children

    def rewind(self, *, position: int | None = None, turn: int | None = None, timeout: float | None = None) -> None:
        """Cuts the ledger back to `position`, or to the start of `turn` (-1 = the last one).

        Raises:
            PositionBeyondEnd, SessionBusy
            EtagMismatch: the session has changed since this object saw it; `refresh()` first.
        """
        self._connection.settle(self._ledger)
        call = calls.rewind_session(self.id, position, turn, self.etag, timeout)
        self._ledger.adopt(self._connection.send(call))

    def move(self, tier: CacheTierName, *, from_position: int | None = None, timeout: float | None = None) -> None:
        """Brings the session's KV into a tier: up ("device") or down ("host", "disk", "none"); the tokens stay.

        Raises:
            SessionBusy, KvBudget
            FeatureDisabled: the server has no such tier.
        """
        self._connection.settle(self._ledger)
        self._ledger.adopt(self._connection.send(calls.move_cache(self.id, tier, from_position, timeout)))

    def export(
        self, file: BinaryIO | str | PathLike[str], *, tokens_only: bool = False, timeout: float | None = None
    ) -> SnapshotHeader:
        """Writes the session, tokens and KV, to a file that `Client.import_session` reads; returns its header.

        A path becomes a file of mode 0600: it holds the conversation in the clear.

        Example:
            >>> session.export("chat.segue")
            >>> other.import_session("chat.segue").generate(text="Go on.")

        Raises:
            SessionBusy
        """
        if not isinstance(file, str | PathLike):
            return self._export(file, tokens_only, timeout)
        with snapshot.private(file) as opened:
            return self._export(opened, tokens_only, timeout)

    def _export(self, file: BinaryIO, tokens_only: bool, timeout: float | None) -> SnapshotHeader:
        header = SnapshotHeader()
        snapshot.begin(file)
        for message in self._connection.iterate(calls.export_session(self.id, tokens_only, "", timeout)):
            if message.HasField("header"):
                header = message.header
            snapshot.write(file, message)
        return header

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

    async def estimate(self, **options: Unpack[TurnOptions]) -> EstimateGenerationResponse:
        """See `Session.estimate`."""
        call = calls.estimate(self.id, options)
        if _checks_position(options):
            call.request.expected_position = self.position
        return await self._connection.send(call)

    async def score(
        self, tokens: Sequence[int], *, top_logprobs: int | None = None, timeout: float | None = None
    ) -> ScoreTokensResponse:
        """See `Session.score`."""
        return await self._connection.send(calls.score(self.id, tokens, top_logprobs, timeout))

    async def read_tokens(
        self, start: int = 0, end: int | None = None, *, text: bool = False, timeout: float | None = None
    ) -> SessionTokens:
        """See `Session.read_tokens`."""
        call = calls.read_tokens(self.id, start, end, text, timeout)
        return SessionTokens.from_chunks(await self._connection.gather(call))

    def watch(self, *, after_sequence: int | None = None, timeout: float | None = None) -> AsyncWatch:
        """See `Session.watch`."""
        return AsyncWatch(self._connection, calls.watch(self.id, after_sequence, timeout))

    async def update(self, **options: Unpack[UpdateOptions]) -> None:
        """See `Session.update`."""
        await self._connection.settle(self._ledger)
        self._ledger.adopt(await self._connection.send(calls.update_session(self.id, self.etag, options)))

    @overload
    async def fork(self, *, count: None = None, **options: Unpack[ForkOptions]) -> AsyncSession: ...
    @overload
    async def fork(self, *, count: int, **options: Unpack[ForkOptions]) -> list[AsyncSession]: ...
    async def fork(
        self, *, count: int | None = None, **options: Unpack[ForkOptions]
    ) -> AsyncSession | list[AsyncSession]:
        """See `Session.fork`."""
        response = await self._connection.send(calls.fork_session(self.id, count, options))
        children = [AsyncSession(self._connection, child) for child in response.sessions]
        return children[0] if count is None else children

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

    async def move(
        self, tier: CacheTierName, *, from_position: int | None = None, timeout: float | None = None
    ) -> None:
        """See `Session.move`."""
        await self._connection.settle(self._ledger)
        self._ledger.adopt(await self._connection.send(calls.move_cache(self.id, tier, from_position, timeout)))

    async def export(
        self, file: BinaryIO | str | PathLike[str], *, tokens_only: bool = False, timeout: float | None = None
    ) -> SnapshotHeader:
        """See `Session.export`. The file is written in the loop's thread."""
        if not isinstance(file, str | PathLike):
            return await self._export(file, tokens_only, timeout)
        with snapshot.private(file) as opened:
            return await self._export(opened, tokens_only, timeout)

    async def _export(self, file: BinaryIO, tokens_only: bool, timeout: float | None) -> SnapshotHeader:
        header = SnapshotHeader()
        snapshot.begin(file)
        async for message in self._connection.iterate(calls.export_session(self.id, tokens_only, "", timeout)):
            if message.HasField("header"):
                header = message.header
            snapshot.write(file, message)
        return header

    async def delete(self, *, force: bool = False, timeout: float | None = None) -> int:
        """See `Session.delete`."""
        response = await self._connection.send(calls.delete_session(self.id, "", force, False, timeout))
        self._connection.headers.forget(self.id)
        return response.freed_bytes
