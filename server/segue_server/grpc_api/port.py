"""What the transport asks of the service; `service.py` answers, and so does the fake of the tests."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from segue_server.events import Event, Finished
from segue_server.requests import (
    AppendRequest,
    CommitPolicy,
    CreateSessionRequest,
    ForkSessionRequest,
    GenerateRequest,
    Input,
    ListSessionsRequest,
    OutputOptions,
    RewindSessionRequest,
)
from segue_server.views import Load, ModelInfo, ServerInfo, SessionPage, SessionView

TimeRemaining = Callable[[], float | None]  # seconds until the caller's deadline; None: it set none


class Turn(Protocol):
    """A turn that is read: yields (sequence, event), ends after Finished, raises the SegueError of a failed turn."""

    @property
    def request_id(self) -> str: ...
    @property
    def session_id(self) -> str: ...
    @property
    def output(self) -> OutputOptions: ...
    def __aiter__(self) -> AsyncIterator[tuple[int, Event]]: ...


class Service(Protocol):
    """Everything the RPCs need. Whatever goes wrong with a call is a SegueError."""

    async def create_session(self, request: CreateSessionRequest, *, caller: str) -> SessionView: ...
    async def get_session(self, session_id: str) -> SessionView: ...
    async def list_sessions(self, request: ListSessionsRequest) -> SessionPage: ...
    async def delete_session(
        self, session_id: str, *, etag: str = "", force: bool = False, allow_missing: bool = False
    ) -> int: ...
    async def fork_session(self, request: ForkSessionRequest) -> tuple[SessionView, ...]: ...
    async def rewind_session(self, request: RewindSessionRequest) -> SessionView: ...
    def generate(
        self, request: GenerateRequest, *, caller: str, time_remaining: TimeRemaining
    ) -> AbstractAsyncContextManager[Turn]: ...
    def append(
        self, request: AppendRequest, *, caller: str, time_remaining: TimeRemaining
    ) -> AbstractAsyncContextManager[Turn]: ...
    def attach(
        self, request_id: str, after_sequence: int, *, caller: str, time_remaining: TimeRemaining
    ) -> AbstractAsyncContextManager[Turn]: ...
    async def cancel(
        self, *, request_id: str = "", session_id: str = "", commit_policy: CommitPolicy | None = None
    ) -> tuple[bool, Finished | None]: ...
    def model_info(self) -> ModelInfo: ...
    def server_info(self) -> ServerInfo: ...
    def load(self) -> Load: ...
    def tokenize(self, input: Input, *, add_special_tokens: bool) -> tuple[list[int], list[str]]: ...  # noqa: A002
    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...
