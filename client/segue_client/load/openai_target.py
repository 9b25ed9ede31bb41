"""Any server that speaks OpenAI's chat completions, streamed as server-sent events.

It has no sessions: every request brings the whole conversation along, and whether KV of it is found again is the
server's affair. Prompts are made of words; how many make a token is asked of the server first.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

import httpx2
import msgspec

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
from segue_client.load.workload import Plan, Prompt, Turn

_BUSY = (429, 503)
_DONE = "[DONE]"
_PROBE_WORDS = (50, 250)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None  # tokens as well, of models that think aloud


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    """What is read of a chunk; the rest is skipped."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None  # vLLM's


class _Models(msgspec.Struct):
    data: list[_Model]


_CHUNKS = msgspec.json.Decoder(_Chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where the server is.

    Attributes:
        url: of the server, with or without /v1.
        model: which of its models; empty = the first that it lists.
        api_key: sent as a bearer token, if any.
    """

    url: str
    model: str = ""
    api_key: str = ""

    @property
    def base(self) -> str:
        """The URL below which the API lies."""
        url = self.url.rstrip("/")
        return url if url.endswith("/v1") else f"{url}/v1"


@asynccontextmanager
async def connected(endpoint: Endpoint, settings: Settings, clock: Clock) -> AsyncIterator[OpenAiTarget]:
    """The server, once it has answered a first request.

    Raises:
        TargetError: it does not answer, or has no such model.
    """
    headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
    limits = httpx2.Limits(max_connections=None)  # a pool that is full would make requests wait in the tester
    async with httpx2.AsyncClient(
        base_url=endpoint.base,
        headers=headers,
        timeout=settings.timeout,
        limits=limits,
        trust_env=False,  # a proxy would be measured, too
    ) as client:
        with _connecting(endpoint.base):
            model = await _model(client, endpoint.model, min(CONNECT_TIMEOUT, settings.timeout))
        info = TargetInfo(
            kind=TargetKind.OPENAI, address=endpoint.base, model=model.id, context_limit=model.max_model_len
        )
        target = OpenAiTarget(client, info, settings, clock, PromptMaker(uuid.uuid4().hex))
        with _connecting(endpoint.base):
            await target.calibrate()
        yield target


@contextmanager
def _connecting(address: str) -> Iterator[None]:
    """Before there is a turn to count it for, a failure ends the test, and names who has failed."""
    try:
        yield
    except TimeoutError:
        raise TargetError(f"{address} does not answer in time") from None
    except TargetError as error:
        raise TargetError(f"{address}: {error}") from error


async def _model(client: httpx2.AsyncClient, wanted: str, patience: float) -> _Model:
    with _failures():
        answer = await client.get("models", timeout=patience)
        _check_status(answer.status_code, answer.content)
    try:
        models = msgspec.json.decode(answer.content, type=_Models).data
    except msgspec.MsgspecError as error:
        raise TargetError(f"GET /models answered with something else than a list of models: {error}") from None
    found = next((model for model in models if wanted in ("", model.id)), None)
    if found is None:
        known = ", ".join(model.id for model in models) or "none"
        raise TargetError(f"there is no model {wanted!r}; the server has {known}")
    return found


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except httpx2.TimeoutException as error:
        raise TimeoutError from error
    except httpx2.HTTPError as error:
        raise TargetError(f"{type(error).__name__}: {error}") from error


def _check_status(status: int, body: bytes) -> None:
    if status >= 400:
        raise TargetError(f"HTTP {status}: {_one_line(body)}", refused=status in _BUSY)


def _one_line(body: bytes) -> str:
    return " ".join(body.decode(errors="replace").split())[:300]


class OpenAiTarget:
    """See `connected`."""

    def __init__(
        self, client: httpx2.AsyncClient, info: TargetInfo, settings: Settings, clock: Clock, maker: PromptMaker
    ) -> None:
        self.info = info
        self.settings = settings
        self.maker = maker
        self._client = client
        self._clock = clock

    def conversation(self, plan: Plan) -> Conversation:
        """A list of messages, which is sent with every turn."""
        conversation = ChatConversation(self)
        if plan.system:
            conversation.say("system", self.maker.text(plan.system))
        return conversation

    async def calibrate(self) -> None:
        """Learns how many of our words make a token: the difference between two prompts, so that no template counts."""
        counts = [await self._prompt_tokens(words) for words in _PROBE_WORDS]
        tokens, words = counts[1] - counts[0], _PROBE_WORDS[1] - _PROBE_WORDS[0]
        if tokens > 0:  # else the server does not count, and a word is taken for a token
            self.maker.words_per_token = words / tokens

    async def _prompt_tokens(self, words: int) -> int:
        seen = Observation()
        said = self.maker.text(Prompt(f"calibration/{words}", words))
        await self.complete([{"role": "user", "content": said}], 1, seen)
        return seen.prompt_tokens or 0

    async def complete(self, messages: Sequence[Mapping[str, str]], max_tokens: int, seen: Observation) -> str:
        """Streams one answer to its end; returns its text."""
        body = {
            "model": self.info.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": self.settings.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.settings.top_p is not None:
            body["top_p"] = self.settings.top_p
        if self.settings.ignore_eos:
            body["ignore_eos"] = True
        with _failures():
            async with self._client.sse("chat/completions", method="POST", json=body) as source:
                if source.response.status_code >= 400:
                    _check_status(source.response.status_code, await source.response.aread())
                return await self._read(source, seen)

    async def _read(self, source: httpx2.EventSource, seen: Observation) -> str:
        text: list[str] = []
        async for event in source:
            now = self._clock.now()
            if event.data == _DONE:
                break
            piece = _take(_chunk(event.data), seen)
            if piece:
                seen.token_times.append(now)
                text.append(piece)
        if not seen.finish_reason:
            raise TargetError("the stream ended without a finish_reason")
        return "".join(text)


def _chunk(data: str) -> _Chunk:
    try:
        chunk = _CHUNKS.decode(data)
    except msgspec.MsgspecError as error:
        raise TargetError(f"a chunk is not what chat completions send: {error}") from None
    if chunk.error is not None:
        raise TargetError(_one_line(bytes(chunk.error)))
    return chunk


def _take(chunk: _Chunk, seen: Observation) -> str:
    """Notes what a chunk tells; returns its text."""
    text = ""
    for choice in chunk.choices:
        text += (choice.delta.reasoning_content or "") + (choice.delta.content or "")
        seen.finish_reason = choice.finish_reason or seen.finish_reason
    if chunk.usage is not None:
        seen.prompt_tokens = chunk.usage.prompt_tokens
        seen.generated_tokens = chunk.usage.completion_tokens
        details = chunk.usage.prompt_tokens_details
        if details is not None and details.cached_tokens is not None:
            seen.reused_tokens = details.cached_tokens
            seen.computed_tokens = chunk.usage.prompt_tokens - details.cached_tokens
    return text


class ChatConversation:
    """The messages so far."""

    def __init__(self, target: OpenAiTarget) -> None:
        self._target = target
        self._messages: list[dict[str, str]] = []
        self._history = 0  # tokens, as the server counts them
        self._given: Prompt | None = None
        self._renewed = 0

    def say(self, role: str, content: str) -> None:
        """Adds a message."""
        self._messages.append({"role": role, "content": content})

    async def turn(self, turn: Turn, seen: Observation) -> None:
        """See `Conversation`."""
        self.say("user", self._target.maker.text(turn.prompt))
        seen.history_tokens = self._history
        answer = await self._target.complete(self._messages, turn.max_tokens, seen)
        self.say("assistant", answer)
        whole = seen.prompt_tokens or 0
        seen.context = _context(self._history, seen.reused_tokens)
        seen.prompt_tokens = whole - self._history if whole else None
        self._history = whole + (seen.generated_tokens or 0)

    async def fork(self, count: int) -> Sequence[Conversation]:
        """See `Conversation`."""
        return [self._child() for _ in range(count)]

    def _child(self) -> ChatConversation:
        child = ChatConversation(self._target)
        child._messages, child._history = list(self._messages), self._history
        return child

    async def give_history(self, prompt: Prompt) -> None:
        """See `Conversation`. Nothing is sent before a turn needs it."""
        self._given = prompt
        self._put_history(prompt)

    def _put_history(self, prompt: Prompt) -> None:
        self._messages = []
        self.say("user", self._target.maker.text(prompt))
        self.say("assistant", "Go on.")
        self._history = prompt.tokens

    async def place(self, context: ContextKind) -> None:
        """See `Conversation`. A history that must be computed is one that the server has never seen."""
        if context is ContextKind.RESTORED:
            raise Unsupported("an OpenAI-compatible server has no call that moves KV")
        if self._given is None:
            return
        if context is ContextKind.RECOMPUTED:
            self._renewed += 1
            self._put_history(replace(self._given, name=f"{self._given.name}/{self._renewed}"))
        else:
            await self._target.complete([*self._messages, {"role": "user", "content": "Go on."}], 1, Observation())

    async def take_back(self) -> None:
        """See `Conversation`."""
        del self._messages[-2:]
        if self._given is not None:
            self._history = self._given.tokens

    async def close(self) -> None:
        """See `Conversation`. The server holds nothing."""


def _context(history: int, reused: int | None) -> ContextKind:
    if history == 0:
        return ContextKind.NEW
    if reused is None:
        return ContextKind.UNKNOWN
    return ContextKind.WARM if 2 * reused >= history else ContextKind.RECOMPUTED
