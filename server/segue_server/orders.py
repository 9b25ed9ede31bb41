"""From a request and its session to the turn that the engine runs: defaults filled in, limits of the ledger checked."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from segue_model.paging import PAGE_TOKENS
from segue_model.sampling import Sampling
from segue_server.cache.session import pages_for
from segue_server.errors import ContextExceeded, FieldInvalid, KvBudgetImpossible, Quota
from segue_server.jobs import Sink, TurnSpec
from segue_server.requests import CommitPolicy, ContextPolicy, GenerateRequest, OutputOptions, SamplingParams
from segue_server.served import ServedModel
from segue_server.sessions import Session
from segue_server.text import OutputText


@dataclass(frozen=True, slots=True)
class Pool:
    """How much KV there is, for the check that a turn can run at all."""

    num_pages: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class Room:
    """What a turn may add to the ledger."""

    max_tokens: int
    open_ended: bool  # the caller gave no max_tokens


class Orders:
    """Makes the orders for one model and pool."""

    def __init__(self, model: ServedModel, pool: Pool) -> None:
        self._model = model
        self._pool = pool

    def pool_resized(self, num_pages: int) -> None:
        """The pool hands out more or fewer pages from now on."""
        self._pool = replace(self._pool, num_pages=num_pages)

    def generate(
        self,
        session: Session,
        request: GenerateRequest,
        prompt: Sequence[int],
        *,
        arrival: float,
        patience: float,
        sink: Sink,
    ) -> TurnSpec:
        """Raises FieldInvalid, ContextExceeded or KvBudgetImpossible."""
        if not session.position and not prompt:
            raise FieldInvalid.one("input", "must be given: the session's ledger is empty")
        stop = request.stop.over(session.settings.default_stop)
        sampling = request.sampling.over(session.settings.default_sampling.over(self._model.default_sampling))
        room = self._room(session, len(prompt), stop.max_tokens)
        return TurnSpec(
            request_id=request.request_id,
            session_id=session.session_id,
            prompt=prompt,
            arrival=arrival,
            sink=sink,
            max_tokens=room.max_tokens,
            open_ended=room.open_ended,
            max_context_tokens=self._context_limit(session),
            min_tokens=stop.min_tokens or 0,
            sampling=_resolved(sampling),
            penalty_window=sampling.penalty_last_tokens,
            eos_token_ids=frozenset() if stop.ignore_eos else self._model.eos_token_ids,
            stop_token_ids=frozenset(stop.stop_token_ids or ()),
            include_stop=bool(stop.include_stop),
            text=self._text(request.output, stop.stop_sequences or (), include_stop=bool(stop.include_stop)),
            top_logprobs=request.output.top_logprobs,
            prompt_logprobs=request.output.prompt_logprobs,
            commit_policy=request.commit_policy or session.settings.commit_policy or CommitPolicy.KEEP_PARTIAL,
            priority=(session.settings.priority or 0) if request.priority is None else request.priority,
            queue_timeout=patience,
            keep_tokens=_keep(session),
            reads_prefixes=not request.bypass_prefix_cache,
            time_limit=float("inf") if stop.time_limit is None else stop.time_limit,
        )

    def append(
        self,
        session: Session,
        request_id: str,
        prompt: Sequence[int],
        output: OutputOptions,
        *,
        defer_compute: bool,
        arrival: float,
        patience: float,
        sink: Sink,
    ) -> TurnSpec:
        """Raises FieldInvalid, ContextExceeded or KvBudgetImpossible."""
        if not prompt:
            raise FieldInvalid.one("input", "must hold at least one token")
        limit = self._context_limit(session)
        keep = _keep(session)
        needed = (session.position if keep is None else min(keep, session.position)) + len(prompt)
        if needed > limit:
            raise _exceeded(needed, limit)
        self._check_pool(needed)
        return TurnSpec(
            request_id=request_id,
            session_id=session.session_id,
            prompt=prompt,
            arrival=arrival,
            sink=sink,
            samples=False,
            keep_tokens=keep,
            max_tokens=0,
            max_context_tokens=limit,
            top_logprobs=output.top_logprobs,
            prompt_logprobs=output.prompt_logprobs,
            commit_policy=session.settings.commit_policy or CommitPolicy.KEEP_PARTIAL,
            priority=session.settings.priority or 0,
            queue_timeout=patience,
            defer_compute=defer_compute,
        )

    def _context_limit(self, session: Session) -> int:
        return session.settings.max_context_tokens or self._model.max_context_tokens

    def _room(self, session: Session, prompt: int, max_tokens: int | None) -> Room:
        """New tokens that fit, at least one. Without max_tokens a turn may take what context and pool have left.

        A context that slides always has room, for a prompt that fits behind the head it keeps.
        """
        limit, keep = self._context_limit(session), _keep(session)
        base = (session.position if keep is None else min(keep, session.position)) + prompt
        if base + 1 > limit:
            raise _exceeded(base + 1, limit)
        if keep is not None:
            self._check_pool(limit)
            return Room(limit if max_tokens is None else max_tokens, open_ended=max_tokens is None)
        if max_tokens is None:
            self._check_pool(base + 1)
            return Room(min(limit, self._pool_tokens) - base, open_ended=True)
        self._check_pool(min(base + max_tokens, limit))
        return Room(max_tokens, open_ended=False)

    @property
    def _pool_tokens(self) -> int:
        return self._pool.num_pages * PAGE_TOKENS

    def _check_pool(self, tokens: int) -> None:
        pages = pages_for(tokens)
        if pages > self._pool.num_pages:
            capacity = self._pool.num_pages * self._pool.page_bytes
            needed = pages * self._pool.page_bytes
            message = f"{tokens} tokens of context need {needed} bytes of KV; the whole pool has {capacity}"
            raise KvBudgetImpossible(message, quota=Quota("kv_bytes", capacity), neededBytes=str(needed))

    def _text(self, output: OutputOptions, stops: Sequence[str], *, include_stop: bool) -> OutputText | None:
        """None when nobody looks at the text, or the model has no tokenizer to make it with."""
        tokenizer = self._model.prompts.tokenizer
        if stops and tokenizer is None:
            raise FieldInvalid.one("stop.stop_sequences", "the served model has no tokenizer; use stop_token_ids")
        if tokenizer is None or not (output.return_text or stops):
            return None
        return OutputText(tokenizer.detokenizer(skip_special=True), stops, include_stop=include_stop)


def _resolved(given: SamplingParams) -> Sampling:
    """Concrete parameters; an unset seed is drawn here and told in Started."""
    plain = Sampling()

    def or_plain(value: float | None, default: float) -> float:
        return default if value is None else value

    return Sampling(
        temperature=or_plain(given.temperature, plain.temperature),
        top_k=given.top_k,
        top_p=or_plain(given.top_p, plain.top_p),
        min_p=or_plain(given.min_p, plain.min_p),
        repetition_penalty=or_plain(given.repetition_penalty, plain.repetition_penalty),
        frequency_penalty=or_plain(given.frequency_penalty, plain.frequency_penalty),
        presence_penalty=or_plain(given.presence_penalty, plain.presence_penalty),
        logit_bias=given.logit_bias or {},
        seed=secrets.randbits(63) if given.seed is None else given.seed,
    )


def _keep(session: Session) -> int | None:
    """The head that a sliding context keeps; None where the policy is to reject."""
    slides = session.settings.context_policy is ContextPolicy.SLIDE
    return (session.settings.keep_tokens or 0) if slides else None


def _exceeded(needed: int, limit: int) -> ContextExceeded:
    message = f"the context would hold {needed} tokens; this session's limit is {limit}"
    return ContextExceeded(message, maxContextTokens=str(limit), neededTokens=str(needed))
