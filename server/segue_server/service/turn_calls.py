"""The turns of sessions: generate, append, attach, score, estimate, cancel.

A turn is held by `async with`: whoever leaves the block early leaves the turn to itself. Its session is freed by the
event that ends it, on every path, queued or running, and nowhere else.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from segue_model.sampling import TokenLogprob
from segue_server.errors import (
    EngineError,
    FieldInvalid,
    PositionMismatch,
    QueueTimeout,
    RequestNotFound,
    SegueError,
)
from segue_server.events import Event, Failed, Finished, Prefill
from segue_server.jobs import NoSink, TurnSpec
from segue_server.origin import UNKNOWN, Origin
from segue_server.requests import (
    AppendRequest,
    BusyPolicy,
    CancelCause,
    ChatTurn,
    CommitPolicy,
    ContextPolicy,
    GenerateRequest,
    Input,
    OutputOptions,
    ScoreTokensRequest,
    TextInput,
    TokenInput,
)
from segue_server.service.base import (
    LONG_TEXT,
    ServiceBase,
)
from segue_server.sessions import ActiveTurn, Claim, Session, new_session_id
from segue_server.turns import content_of
from segue_server.views import (
    Estimate,
    Scores,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn that a caller is reading."""

    request_id: str
    session_id: str
    output: OutputOptions
    events: AsyncIterator[tuple[int, Event]]

    def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        """(sequence, event) until Finished. Raises the SegueError of a turn that failed."""
        return self.events


class TurnCalls(ServiceBase):
    """Calls of GenerationService."""

    @contextlib.asynccontextmanager
    async def generate(
        self,
        request: GenerateRequest,
        *,
        caller: str,
        time_remaining: Callable[[], float | None],
        origin: Origin = UNKNOWN,
    ) -> AsyncIterator[Turn]:
        """One turn; the same request again reads the same turn. Leaving the block early leaves the turn to itself."""
        arrival = self._engine.engine.clock()
        checker = self._checker()
        checker.generate(request)
        checker.done()
        request = replace(request, request_id=request.request_id or str(uuid.uuid4()))
        claim = self._claim(request, caller, arrival, origin)

        def order(prompt: list[int], turn: ActiveTurn) -> TurnSpec:
            patience = claim.patience
            return self._orders.generate(
                turn.session, request, prompt, arrival=arrival, patience=patience, sink=turn.stream
            )

        turn = self._turns.known(claim) or await self._begin(request, claim, order)
        with self._reading(turn, 0, time_remaining) as reading:
            yield reading

    @contextlib.asynccontextmanager
    async def append(
        self,
        request: AppendRequest,
        *,
        caller: str,
        time_remaining: Callable[[], float | None],
        origin: Origin = UNKNOWN,
    ) -> AsyncIterator[Turn]:
        """Append tokens and compute them without sampling; the same request again reads the same turn."""
        arrival = self._engine.engine.clock()
        checker = self._checker()
        checker.append(request)
        checker.done()
        request = replace(request, request_id=request.request_id or str(uuid.uuid4()))
        claim = Claim(
            request_id=request.request_id,
            caller=caller,
            content=content_of(request),
            output=request.output,
            policy=BusyPolicy.REJECT,
            patience=self._queue_timeout,
            detach_grace=0.0,
            arrival=arrival,
            origin=origin,
        )

        def order(prompt: list[int], turn: ActiveTurn) -> TurnSpec:
            return self._orders.append(
                turn.session,
                turn.request_id,
                prompt,
                request.output,
                defer_compute=request.defer_compute,
                arrival=arrival,
                patience=claim.patience,
                sink=turn.stream,
            )

        turn = self._turns.known(claim) or await self._begin(request, claim, order)
        with self._reading(turn, 0, time_remaining) as reading:
            yield reading

    @contextlib.asynccontextmanager
    async def attach(
        self, request_id: str, after_sequence: int, *, caller: str, time_remaining: Callable[[], float | None]
    ) -> AsyncIterator[Turn]:
        """The events of a turn from `after_sequence + 1` on, while it runs and for ten minutes after its end.

        Raises RequestNotFound, of another caller's turn too, or PositionBeyondEnd.
        """
        turn = self._turns.find(request_id)
        if turn is None or turn.claim.caller != caller:
            raise RequestNotFound(f"there is no turn with request id {request_id!r}, or it ended too long ago")
        with self._reading(turn, after_sequence, time_remaining) as reading:
            yield reading

    async def score_tokens(
        self,
        request: ScoreTokensRequest,
        *,
        caller: str,
        time_remaining: Callable[[], float | None],
        origin: Origin = UNKNOWN,
    ) -> Scores:
        """Logprobs of tokens as if they came next, after the turns that have ended; the session stays as it is.

        A fork that nobody sees takes them as a turn of its own, on the session's pages, and goes.
        """
        self._refuse_when_draining()
        checker = self._checker()
        checker.score(request)
        checker.done()
        child = await self._fork_unseen(self._sessions.get(request.session_id))
        output = OutputOptions(
            prompt_logprobs=True, top_logprobs=request.top_logprobs, return_text=False, heartbeat_interval=0.0
        )
        tokens = TokenInput(request.token_ids)
        turn = AppendRequest(session_id=child.session_id, input=tokens, output=output)
        logprobs: list[TokenLogprob] = []
        position = child.position
        try:
            async with self.append(turn, caller=caller, time_remaining=time_remaining, origin=origin) as events:
                async for _, event in events:
                    logprobs += event.prompt_logprobs if isinstance(event, Prefill) else ()
        except BaseException:
            self._forget(child)  # its turn may not have begun, and then has no end that would do it
            raise
        return Scores(tuple(logprobs), position)

    async def estimate(self, request: GenerateRequest, *, caller: str) -> Estimate:
        """What `generate` would meet now. Changes nothing. Raises FieldInvalid; other errors are its answer."""
        checker = self._checker()
        checker.generate(request)
        checker.done()
        try:
            return await self._estimate(request, caller)
        except FieldInvalid:
            raise
        except SegueError as error:
            return Estimate(refusal_reason=error.reason)

    async def cancel(
        self, *, request_id: str = "", session_id: str = "", commit_policy: CommitPolicy | None = None
    ) -> tuple[bool, Finished | None]:
        """Cancel a turn and wait until it has left the batch.

        (False, how it ended) when it had ended before; (False, None) when that is not known any more.
        """
        turn = self._turns.find(request_id) if request_id else self._sessions.get(session_id).active
        if turn is None:
            return False, None
        if turn.ended.is_set():
            return False, turn.finished
        self._turns.leave(turn, CancelCause.RPC, policy=commit_policy)
        await turn.ended.wait()
        return True, turn.finished

    def _claim(self, request: GenerateRequest, caller: str, arrival: float, origin: Origin) -> Claim:
        return Claim(
            request_id=request.request_id,
            caller=caller,
            content=content_of(request),
            output=request.output,
            policy=request.busy_policy,
            patience=self._queue_timeout if request.queue_timeout is None else request.queue_timeout,
            detach_grace=request.detach_grace,
            arrival=arrival,
            origin=origin,
        )

    async def _estimate(self, request: GenerateRequest, caller: str) -> Estimate:
        """The path of a turn up to the engine's queue, in the same order. Raises what the turn would."""
        claim = self._claim(request, caller, self._engine.engine.clock(), UNKNOWN)
        if request.request_id and self._turns.known(claim):
            return Estimate(admissible=True)  # that very turn runs or has run: it is read
        self._refuse_when_draining()
        session = self._sessions.get(request.session_id) if request.session_id else self._ephemeral(caller)
        if session.ephemeral:
            self._sessions.check_room([session.session_id])
        self._waiting_room.check_wait(session, claim)
        self._check_position(session, request.expected_position)
        prompt = await self._encode(session, request.input)
        spec = self._orders.generate(
            *(session, request, prompt), arrival=claim.arrival, patience=claim.patience, sink=NoSink()
        )
        foresee = partial(self._engine.engine.foresee, spec, session.position, session.settings.cache_salt)
        seen = await self._engine.call(foresee)
        starts = seen.starts and not session.active
        return Estimate(
            admissible=starts,
            refusal_reason="" if starts or claim.patience else QueueTimeout.reason,
            to_compute_tokens=seen.to_compute,
            needed_bytes=seen.claimed_pages * self._engine.engine.runner.page_bytes,
            would_evict_bytes=seen.evicted_pages * self._engine.engine.runner.page_bytes,
            time_to_first_token=seen.time_to_first_token,
        )

    async def _begin(
        self,
        request: GenerateRequest | AppendRequest,
        claim: Claim,
        order: Callable[[list[int], ActiveTurn], TurnSpec],
    ) -> ActiveTurn:
        """A new turn, once its session is free; or the one that a twin of this call has begun meanwhile."""
        self._refuse_when_draining()
        known = request.session_id
        session = self._sessions.get(known) if known else await self._open_ephemeral(claim.caller)
        try:
            await self._waiting_room.wait_free(session, claim)
            if twin := self._turns.known(claim):
                return twin
            self._check_open(session)
            self._check_position(session, request.expected_position)
        except BaseException:
            if session.ephemeral:
                self._end_ephemeral(session)
            raise
        turn = self._turns.begin(session, claim)
        turn.given = request.input
        preparing = self._prepare(turn, request.input, order)
        if _is_long(request.input):
            turn.preparing = asyncio.create_task(preparing)  # not cancelled with the call: a twin may read the turn
        else:
            await preparing
        return turn

    @contextlib.contextmanager
    def _reading(self, turn: ActiveTurn, after: int, time_remaining: Callable[[], float | None]) -> Iterator[Turn]:
        with self._turns.reading(turn, after, time_remaining) as events:
            yield Turn(turn.request_id, turn.session.session_id, turn.claim.output, events)

    def _check_position(self, session: Session, expected: int | None) -> None:
        if expected is not None and expected != session.position:
            message = f"the ledger holds {session.position} tokens, not {expected}"
            raise PositionMismatch(message, actualPosition=str(session.position))

    async def _prepare(
        self, turn: ActiveTurn, given: Input, order: Callable[[list[int], ActiveTurn], TurnSpec]
    ) -> None:
        """Submit the turn; what goes wrong is its end, for everybody who reads it."""
        try:
            await self._submit(turn, given, order)
        except SegueError as error:
            turn.stream.deliver(Failed(error, turn.start))
        except Exception:
            log.exception("turn %s could not be submitted", turn.request_id)
            turn.stream.deliver(Failed(EngineError("the server failed; its log tells why"), turn.start))

    async def _submit(self, turn: ActiveTurn, given: Input, order: Callable[[list[int], ActiveTurn], TurnSpec]) -> None:
        """Encode the input and hand the turn to the engine."""
        session = turn.session
        prompt = await self._encode(session, given)
        if turn.ended.is_set():
            return  # cancelled while it was encoded; its stream says so
        spec = order(prompt, turn)
        self._engine.check()
        if session.turns:
            self.stats.session_idle.observe(time.time() - session.last_used_time)
        session.touch()
        turn.prompt_end = turn.start + len(prompt)
        turn.submitted = True
        self._engine.post(partial(self._engine.engine.jobs.submit, spec))

    async def _encode(self, session: Session, given: Input) -> list[int]:
        """What an input adds to a session's ledger; a long text is tokenized beside the event loop."""
        encode = partial(
            self._model.prompts.encode,
            given,
            ledger=self._engine.engine.tokens(session.session_id)[: session.position],
            reply_open=session.reply_open,
        )
        return await asyncio.to_thread(encode) if _is_long(given) else encode()

    async def _fork_unseen(self, parent: Session) -> Session:
        """A session that nobody is told of, with the ledger of another up to its turn in flight; gone after a turn."""
        settings = replace(parent.settings, pinned=False, context_policy=ContextPolicy.REJECT)
        if parent.settings.context_policy is ContextPolicy.SLIDE:
            self._refuse_if_busy(parent)  # its turn may have moved what came before
        position = parent.active.start if parent.active else parent.position
        if not position:
            raise FieldInvalid.one("session_id", "the session's ledger is empty: the first token follows nothing")
        child = Session(session_id=new_session_id(), settings=settings, position=position, ephemeral=True, hidden=True)
        with self._limit_counted():
            self._sessions.open(child)
        fork = partial(
            self._engine.engine.fork,
            *(parent.session_id, [child.session_id], position),
            priority=settings.priority or 0,
            salt=settings.cache_salt,
        )
        try:
            await self._engine.call(fork)
        except BaseException:
            self._forget(child)
            raise
        return child


def _is_long(given: Input) -> bool:
    match given:
        case TextInput(text):
            return len(text) >= LONG_TEXT
        case ChatTurn(messages):
            return sum(len(message.content) for message in messages) >= LONG_TEXT
        case _:
            return False
