"""A Segue server over gRPC, through the library's own asyncio client.

Nothing is tried again behind the tester's back: a refusal is a refusal, a broken stream is a failure.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress

from segue.v1.generation_pb2 import Tokens
from segue.v1.types_pb2 import Usage
from segue_client.client import AsyncClient
from segue_client.errors import DeadlineExceeded, Draining, FeatureDisabled, Loading, ResourceExhausted, SegueError
from segue_client.load.prompts import PromptMaker
from segue_client.load.results import ContextKind, TargetInfo, TargetKind
from segue_client.load.target import (
    CONNECT_TIMEOUT,
    Clock,
    Conversation,
    Observation,
    Settings,
    TargetError,
    Unsupported,
)
from segue_client.load.transcript import MessageTranscript, TokenTranscript, Transcript
from segue_client.load.workload import Plan, Prompt, Turn
from segue_client.options import CacheTierName, InputOptions, TurnOptions
from segue_client.session import AsyncSession
from segue_client.turn import AsyncTurn

_NO_RETRIES = (("grpc.enable_retries", 0),)
_REFUSALS = (ResourceExhausted, Loading, Draining)


@asynccontextmanager
async def connected(address: str, settings: Settings, clock: Clock) -> AsyncIterator[SegueTarget]:
    """The server at host:port, once it takes turns.

    Raises:
        SegueError: it does not answer.
    """
    async with AsyncClient(address, channel_options=_NO_RETRIES) as client:
        await client.wait_ready(CONNECT_TIMEOUT)
        model, server = await client.model_info(), await client.server_info()
        info = TargetInfo(
            kind=TargetKind.SEGUE,
            address=address,
            model=model.model_id,
            server=f"{server.version} ({server.build})",
            context_limit=model.max_context_tokens,
        )
        maker = PromptMaker(uuid.uuid4().hex, model.vocab_size)
        yield SegueTarget(client, info, settings, clock, maker, model.has_chat_template)


class SegueTarget:
    """See `connected`."""

    def __init__(
        self,
        client: AsyncClient,
        info: TargetInfo,
        settings: Settings,
        clock: Clock,
        maker: PromptMaker,
        has_chat_template: bool,
    ) -> None:
        self.info = info
        self.client = client
        self.settings = settings
        self.clock = clock
        self._maker = maker
        self._has_chat_template = has_chat_template

    def conversation(self, plan: Plan) -> Conversation:
        """A session; a turn without a session where the plan has only one, or where turns shall not share one."""
        said = self._transcript(plan)
        if plan.system:
            said.ask(plan.system, "system")
        alone = len(plan.turns) == 1 and not plan.fork
        if alone or self.settings.reuse != "session":
            return ReplayedConversation(self, said)
        return SessionConversation(self, said)

    def _transcript(self, plan: Plan) -> Transcript:
        if all(turn.prompt.text is None for turn in plan.turns):
            return TokenTranscript(self._maker)
        return MessageTranscript(self._maker, self._has_chat_template)

    def options(self, turn: Turn, said: InputOptions, bypass: bool) -> TurnOptions:
        """What a turn is sent with."""
        options: TurnOptions = {
            "max_tokens": turn.max_tokens,
            "temperature": self.settings.temperature,
            "top_p": self.settings.top_p,
            "ignore_eos": self.settings.ignore_eos,
            "detach_grace": 0.0,  # or a broken stream would be taken up again
            "bypass_prefix_cache": bypass,
            "timeout": self.settings.timeout,
        }
        return {**options, **said}

    async def follow(self, turn: AsyncTurn, seen: Observation) -> None:
        """Reads a turn to its end."""
        async with turn:
            async for event in turn.events():
                if isinstance(event, Tokens) and event.token_ids:
                    seen.token_times.append(self.clock.now())
        seen.generated_tokens = len(turn.token_ids)
        seen.finish_reason = turn.finish_reason.value
        _take_usage(turn.usage, seen)


def _take_usage(usage: Usage, seen: Observation) -> None:
    seen.generated_tokens = usage.generated_tokens
    seen.computed_tokens = usage.computed_tokens
    seen.reused_tokens = usage.session_reused_tokens + usage.prefix_reused_tokens
    seen.restored_tokens = usage.restored_tokens
    if seen.history_tokens is None:  # a session's; a replayed one is part of the prompt
        seen.history_tokens = usage.context_tokens
    seen.prompt_tokens = usage.context_tokens + usage.prompt_tokens - seen.history_tokens
    seen.context = _context(seen.history_tokens, seen.reused_tokens, usage.restored_tokens)


def _context(history: int, reused: int, restored: int) -> ContextKind:
    """Where most of the history's KV came from."""
    if history == 0:
        return ContextKind.NEW
    recomputed = history - reused - restored
    return max((reused, ContextKind.WARM), (restored, ContextKind.RESTORED), (recomputed, ContextKind.RECOMPUTED))[1]


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except FeatureDisabled as error:
        raise Unsupported(str(error)) from error
    except DeadlineExceeded as error:
        raise TimeoutError from error
    except SegueError as error:
        raise TargetError(str(error), refused=isinstance(error, _REFUSALS)) from error


class SessionConversation:
    """Turns go on in a session of the server."""

    def __init__(self, target: SegueTarget, said: Transcript) -> None:
        self._target = target
        self._said = said
        self._session: AsyncSession | None = None
        self._bypass = False

    async def turn(self, turn: Turn, seen: Observation) -> None:
        """See `Conversation`."""
        with _failures():
            session = await self._open()
            mark = len(self._said)
            self._said.ask(turn.prompt)
            options = self._target.options(turn, self._said.input(mark), self._bypass)
            running = session.stream(**options)
            await self._target.follow(running, seen)
            self._said.answer(running)

    async def fork(self, count: int) -> Sequence[Conversation]:
        """See `Conversation`."""
        with _failures():
            session = await self._open()
            children = await session.fork(count=count)
        return [self._child(session) for session in children]

    def _child(self, session: AsyncSession) -> SessionConversation:
        child = SessionConversation(self._target, self._said.copy())
        child._session = session
        return child

    async def give_history(self, prompt: Prompt) -> None:
        """See `Conversation`."""
        with _failures():
            session = await self._open()
            mark = len(self._said)
            self._said.ask(prompt)
            await session.append_context(**self._said.input(mark), timeout=self._target.settings.timeout)

    async def place(self, context: ContextKind) -> None:
        """See `Conversation`."""
        tier = self._target.settings.restore_from if context is ContextKind.RESTORED else _TIERS[context]
        # What leaves the pool stays known to the prefix index for a while, and would be found there.
        self._bypass = context is not ContextKind.WARM
        with _failures():
            await (await self._open()).move(tier, timeout=self._target.settings.timeout)

    async def take_back(self) -> None:
        """See `Conversation`."""
        with _failures():
            await (await self._open()).rewind(turn=-1)

    async def close(self) -> None:
        """See `Conversation`."""
        if self._session is not None:
            with suppress(SegueError):
                await self._session.delete(force=True)

    async def _open(self) -> AsyncSession:
        if self._session is None:
            prefix = self._said.input() if len(self._said) else InputOptions()
            self._session = await self._target.client.create_session(**prefix)
        return self._session


_TIERS: Mapping[ContextKind, CacheTierName] = {ContextKind.WARM: "device", ContextKind.RECOMPUTED: "none"}


class ReplayedConversation:
    """Each turn is a request of its own and brings the whole history along."""

    def __init__(self, target: SegueTarget, said: Transcript) -> None:
        self._target = target
        self._said = said
        self._history = 0

    async def turn(self, turn: Turn, seen: Observation) -> None:
        """See `Conversation`."""
        self._said.ask(turn.prompt)
        seen.history_tokens = self._history
        options = self._target.options(turn, self._said.input(), self._target.settings.reuse == "none")
        running = self._target.client.stream(**options)
        with _failures():
            await self._target.follow(running, seen)
        self._said.answer(running)
        self._history += (seen.prompt_tokens or 0) + len(running.token_ids)

    async def fork(self, count: int) -> Sequence[Conversation]:
        """See `Conversation`."""
        return [self._child() for _ in range(count)]

    def _child(self) -> ReplayedConversation:
        child = ReplayedConversation(self._target, self._said.copy())
        child._history = self._history
        return child

    async def _unsupported(self, *_: object) -> None:
        raise Unsupported("a conversation that is replayed with every turn has no KV of its own")

    give_history = place = take_back = _unsupported

    async def close(self) -> None:
        """See `Conversation`. The server has forgotten it already."""
