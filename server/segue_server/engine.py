"""The engine: make every sequence's computed position catch up with its tokens, one ragged batch a step.

One thread owns everything in here (see engine_thread.py). Callers never see a tensor: they hand in integers and get
events.
"""

import logging
import time
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from segue_model.runner.base import PAGE_TOKENS, Runner, Slice, Want
from segue_model.sampling import Sampled, SampleRequest, SamplingError, TokenLogprob, sample, token_logprobs
from segue_server.accountant import Accountant
from segue_server.cache.accounting import pool_use
from segue_server.cache.pages import PagePool
from segue_server.cache.segments import Tier
from segue_server.cache.session import pages_for
from segue_server.errors import (
    EngineError,
    KvBudgetImpossible,
    QueueTimeout,
    Quota,
    SegueError,
    SessionExists,
    SessionNotFound,
    beyond_end,
)
from segue_server.events import CacheUsage, Event, Failed, Finished, Prefill, Queued, Started, Tokens
from segue_server.foresight import Foresight, Speeds, foresee
from segue_server.holdings import Holdings
from segue_server.jobs import Job, Sink, TurnSpec, excess, new_turn
from segue_server.ledger.journal import Journal, TurnRef
from segue_server.ledger.records import Record, Slid, TokensAppended, TurnBegan, TurnEnded
from segue_server.mover import KvMover, Offload
from segue_server.plan import Plan, Work
from segue_server.requests import CancelCause, CommitPolicy, FinishReason
from segue_server.scheduler import Scheduler
from segue_server.sequence import Sequence
from segue_server.stats import EngineStats

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KvBytes:
    """Bytes of the pool by class; their sum is what the allocator has given out."""

    active: int
    pinned: int
    idle: int
    prefix: int
    slack: int
    capacity: int
    tokens: int

    @property
    def held(self) -> int:
        return self.active + self.pinned + self.idle + self.prefix + self.slack


class Engine:
    """Sequences, turns and the runner. Every method runs on the engine thread, except those marked as readers."""

    def __init__(
        self,
        runner: Runner,
        *,
        max_running: int,
        step_tokens: int,
        slow_reader_limit: float = 30.0,
        kv_dtype: str = "",
        offload: Offload | None = None,
        journal: Journal | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`journal` is told of every change of a ledger. Raises OSError when a disk tier's directory cannot be made."""
        offload = offload or Offload()
        self.runner = runner
        self.stats = EngineStats()
        self.holdings = Holdings(PagePool(runner.num_pages), offload.tiers(runner))
        self.scheduler = Scheduler(
            self.holdings,
            max_running=max_running,
            step_tokens=step_tokens,
            watermarks=(offload.high_watermark, offload.low_watermark),
        )
        self.mover = KvMover(runner, self.holdings.tiers, offload.store(), self.stats, offload.disk_dir)
        self.clock = clock
        self._slow_reader_limit = slow_reader_limit
        self._kv_dtype = kv_dtype
        self._journal = journal
        self._jobs: dict[str, Job] = {}  # by request id
        self._outbox: list[tuple[Sink, Event]] = []
        self._accounts = Accountant(self.stats, clock)

    # Sessions

    def open(self, session_id: str, *, priority: int, pinned: bool, salt: str | None = None) -> None:
        """Begin an empty ledger."""
        self.holdings.open(session_id, priority=priority, pinned=pinned, salt=salt, now=self.clock())

    def restore(
        self, session_id: str, tokens: "array[int]", *, priority: int, pinned: bool, salt: str | None = None
    ) -> None:
        """Take over the ledger of an earlier process. Its KV is computed again when it is needed."""
        self.open(session_id, priority=priority, pinned=pinned, salt=salt)
        sequence = self.holdings.sequences[session_id]
        sequence.tokens = tokens
        sequence.seen, sequence.lost_by = len(tokens), "restarted"

    def close(self, session_id: str, reason: str = "caller") -> int:
        """Forget a ledger that has no turn in flight; returns the KV bytes that became free, 0 when it was unknown."""
        if session_id not in self.holdings.sequences:
            return 0
        below = self.holdings.tiers.slots.bytes_of(session_id)
        freed = self.holdings.close(session_id) * self.runner.page_bytes
        self.stats.evicted("device", reason, freed)
        for tier, size in below.items():
            self.stats.evicted(tier.name.lower(), reason, size)
        return freed

    def adjust(self, session_id: str, *, priority: int, pinned: bool) -> None:
        """How much a session is worth keeping in the pool; nothing when it is unknown."""
        if sequence := self.holdings.sequences.get(session_id):
            sequence.priority, sequence.pinned = priority, pinned

    def fork(
        self,
        session_id: str,
        children: Seq[str],
        position: int | None,
        *,
        priority: int = 0,
        pinned: bool = False,
        salt: str | None = None,
    ) -> int:
        """New ledgers that share the first `position` tokens of one, all of them when None; returns how many.

        The session may have a turn in flight: then what it has put on its stream so far is shared. Raises
        PositionBeyondEnd, or SessionExists before anything is made.
        """
        parent = self.holdings.sequences[session_id]
        length = len(parent.tokens)
        if position is not None and position > length:
            raise beyond_end(position, length)
        for child in children:
            if child in self.holdings.sequences:
                raise SessionExists(child, f"session {child!r} exists already")
        for child in children:
            made = self.holdings.fork(parent, child, length if position is None else position, self.clock())
            made.priority, made.pinned, made.salt = priority, pinned, salt
        return length if position is None else position

    def rewind(self, session_id: str, position: int) -> None:
        """Cut the ledger of a session without a turn back to `position`."""
        self.holdings.rewind(self.holdings.sequences[session_id], position)

    # Turns

    def submit(self, spec: TurnSpec) -> None:
        """Append the prompt to the ledger and queue the turn. The session has no other turn in flight."""
        sequence = self.holdings.sequences.get(spec.session_id)
        if sequence is None:
            gone = SessionNotFound(spec.session_id, f"session {spec.session_id!r} was deleted meanwhile")
            self._outbox.append((spec.sink, Failed(gone, 0)))
            return
        dropped = self._make_room(spec, sequence, len(spec.prompt) + spec.samples)
        turn = new_turn(spec, len(sequence.tokens))
        self._note(spec, turn.start, TurnBegan(spec.session_id, spec.request_id, turn.start, spec.prompt))
        sequence.tokens.extend(spec.prompt)
        job = Job(spec, sequence, turn, logprobs_from=max(turn.start, 1), dropped=dropped)
        self._jobs[spec.request_id] = job
        place = self.scheduler.submit(sequence, turn)
        if spec.defer_compute:
            self._start(job)
            self._finish(job, FinishReason.MAX_TOKENS)
        elif place or len(self.scheduler.running) >= self.scheduler.max_running:
            self._emit(job, Queued(place))

    def cancel(
        self,
        request_id: str,
        cause: CancelCause,
        *,
        policy: CommitPolicy | None = None,
        reason: FinishReason = FinishReason.CANCELLED,
    ) -> bool:
        """End a turn between two steps. False: it had ended before."""
        job = self._jobs.get(request_id)
        if job is None:
            return False
        self.stats.cancellations.add(job.phase, cause.value)
        self._finish(job, reason, policy=policy or job.spec.commit_policy)
        return True

    def revoke(self, session_id: str, start: int) -> None:
        """Take back a turn that the ledger could not write: end it without an event and cut the session to `start`."""
        sequence = self.holdings.sequences.get(session_id)
        if sequence is None:
            return
        if sequence.turn is not None:
            job = self._job(sequence)
            self._leave(job, CommitPolicy.KEEP_PARTIAL, FinishReason.ERROR, cancelled=True)
            self._accounts.turn_ended(job, FinishReason.ERROR)
        self.holdings.rewind(sequence, min(start, len(sequence.tokens)))

    def foresee(self, spec: TurnSpec, position: int, salt: str | None) -> Foresight:
        """What a turn would meet if it were submitted now, after `position` tokens of its session. Changes nothing."""
        speeds = Speeds(self.seconds_per_token, self.stats.step["decode"].mean)
        return foresee(self.scheduler, spec, position=position, salt=salt, speeds=speeds)

    @property
    def seconds_per_token(self) -> float:
        """Of prefill, smoothed; 0 before the first."""
        return self._accounts.seconds_per_token

    # The step

    def step(self) -> bool:
        """One pass over the model, and what KV is to be moved between two. False: there was nothing to do."""
        now = self.clock()
        self._look_at_the_clock(now)
        self.mover.take_news()
        plan = self.scheduler.schedule(now)
        self.mover.carry_out()
        self._announce(plan)
        self._expire_queue(now)
        self.mover.restore(plan.restores)
        if not plan.work:
            return plan.relieved or bool(plan.restores)
        try:
            logits = self._forward(plan)
            self._update(plan, logits, self._sample(plan, logits))
        except Exception as error:  # noqa: BLE001 - whatever the arithmetic raises must not end the engine
            self._abandon(plan.work, error)
        return True

    def refuse_impossible(self) -> None:
        """The pool has become smaller: end the waiting turns that it will never have room for."""
        for sequence in list(self.scheduler.waiting):
            turn, capacity = sequence.turn, self.holdings.pool.capacity
            if turn is not None and pages_for(turn.promise) > capacity:
                size = capacity * self.runner.page_bytes
                error = KvBudgetImpossible("the pool has become smaller than this turn", quota=Quota("kv_bytes", size))
                self._fail(self._job(sequence), error)

    def shut_down(self) -> None:
        """Give back what outlives the thread: files, and the thread that reads them."""
        self.mover.close()

    def give_up(self) -> None:
        """The engine itself has failed: take every turn out, so that no figure says that one still runs."""
        for job in self._jobs.values():
            self.scheduler.leave(job.sequence, self.clock())
            self._accounts.turn_ended(job, FinishReason.ERROR)
        self._jobs.clear()

    def take_outbox(self) -> list[tuple[Sink, Event]]:
        """The events since the last call, in order."""
        outbox, self._outbox = self._outbox, []
        return outbox

    def next_deadline(self) -> float:
        """When, on the engine's clock, something is due although nothing can be computed."""
        return min((self._deadline(job) for job in self._jobs.values()), default=float("inf"))

    def _deadline(self, job: Job) -> float:
        if job.turn.admitted is None:
            return job.turn.queue_deadline
        slow = float("inf") if job.blocked_since is None else job.blocked_since + self._slow_reader_limit
        return min(job.turn.admitted + job.turn.time_limit, slow)

    # Readers: plain integers, safe from any thread, at worst one step old

    def cache_usage(self, session_id: str) -> CacheUsage:
        """KV of one session; zeros when it is unknown."""
        sequence = self.holdings.sequences.get(session_id)
        return CacheUsage() if sequence is None else self._usage_of(sequence)

    def kv_tiers(self) -> dict[str, KvBytes]:
        """Every tier by its label, those without a budget too."""
        tiers = {"device": self.kv_bytes()}
        return tiers | {tier.name.lower(): self.kv_below(tier) for tier in self.holdings.tiers.use}

    def evictions(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(how often, how many bytes) of KV was dropped, by tier and reason."""
        counted, pool = self.stats.evictions.values, self.scheduler.evictor.cost
        sizes = self.stats.evicted_bytes.values
        dropped = {(tier, reason): (round(n), round(sizes[tier, reason])) for (tier, reason), n in counted.items()}
        dropped["device", "pressure"] = pool.count, pool.pages * self.runner.page_bytes
        for tier, use in self.holdings.tiers.use.items():
            dropped[tier.name.lower(), "pressure"] = use.dropped, use.dropped_bytes
        return dropped

    @property
    def lower_tiers(self) -> tuple[str, ...]:
        """What the server declares of its tiers below the pool."""
        return tuple(f"tier:{tier.name.lower()}" for tier, use in self.holdings.tiers.use.items() if use.budget)

    def tokens(self, session_id: str) -> Seq[int]:
        """The ledger of a session without a turn in flight; empty when it is unknown. Not to be changed."""
        sequence = self.holdings.sequences.get(session_id)
        return () if sequence is None else sequence.tokens

    def kv_bytes(self) -> KvBytes:
        """The pool by class."""
        sequences = list(self.holdings.sequences.values())
        idle = [s for s in sequences if not s.running]
        use = pool_use(
            active=(*(s.cache for s in sequences if s.running), *self.holdings.spares),
            pinned=(s.cache for s in idle if s.pinned),
            idle=(s.cache for s in idle if not s.pinned),
            held_pages=self.holdings.pool.held,
        )
        each = self._position_bytes
        return KvBytes(
            active=use.active * each,
            pinned=use.pinned * each,
            idle=use.idle * each,
            prefix=use.prefix * each,
            slack=use.slack * each,
            capacity=self.holdings.pool.capacity * self.runner.page_bytes,
            tokens=use.tokens,
        )

    def kv_below(self, tier: Tier) -> KvBytes:
        """A tier below the pool by class; a segment of several sessions counts with the busiest of them."""
        use = self.holdings.tiers.use[tier]
        sizes = dict.fromkeys(("active", "pinned", "idle"), 0)
        for segment in self.holdings.tiers.segments(tier):
            owners = [self.holdings.sequences.get(owner) for owner in list(segment.owners)]
            running = any(s.running for s in owners if s)
            pinned = any(s.pinned for s in owners if s)
            sizes["active" if running else "pinned" if pinned else "idle"] += segment.size
        return KvBytes(**sizes, prefix=0, slack=0, capacity=use.budget, tokens=use.tokens)

    @property
    def _position_bytes(self) -> int:
        return self.runner.page_bytes // PAGE_TOKENS

    # Stages of a step

    def _look_at_the_clock(self, now: float) -> None:
        """End what has run or blocked for too long."""
        for job in list(self._jobs.values()):
            turn = job.turn
            if turn.admitted is not None and now - turn.admitted >= turn.time_limit:
                self._finish(job, FinishReason.TIME_LIMIT)
            elif self._blocked_for(job, now) >= self._slow_reader_limit:
                self.cancel(turn.request_id, CancelCause.SLOW_CLIENT)

    def _expire_queue(self, now: float) -> None:
        """End what has waited for too long. After admission: a turn without patience may take a place that is free."""
        for job in list(self._jobs.values()):
            if job.turn.admitted is None and now >= job.turn.queue_deadline:
                self._fail(job, QueueTimeout(f"no place in the batch within {job.spec.queue_timeout:g} s"))

    def _blocked_for(self, job: Job, now: float) -> float:
        """Seconds since the reader of a turn fell behind; the turn is paused as long as it lasts."""
        job.turn.paused = job.spec.sink.full
        if job.turn.paused:
            job.blocked_since = now if job.blocked_since is None else job.blocked_since
            return now - job.blocked_since
        if job.blocked_since is not None:
            self.stats.stream_blocked_seconds += now - job.blocked_since
            job.blocked_since = None
        return 0.0

    def _announce(self, plan: Plan) -> None:
        for sequence in (*plan.admitted, *self.scheduler.running):
            job = self._job(sequence)
            if job.started is None and not sequence.restoring:
                self._start(job)
        self.stats.preemptions += len(plan.preempted)
        for sequence in plan.preempted:
            log.info("turn %s gave way: the pool is short", self._job(sequence).spec.request_id)

    def _forward(self, plan: Plan) -> list[torch.Tensor | None]:
        began = self.clock()
        if plan.copies:
            self.runner.copy_pages(plan.copies)
        logits = self.runner.forward([self._slice(work) for work in plan.work])
        for work in plan.work:
            work.sequence.advance(work.count)  # cache.pos moves on here and nowhere else
            job, end = self._job(work.sequence), work.start + work.count
            self._accounts.computed(job, work.start, end)
            if work.start < job.turn.prompt_end <= end:
                self.holdings.index(work.sequence)  # others with the same prompt need not wait for the answer
        self._accounts.step(plan, self.clock() - began)
        return logits

    def _sample(self, plan: Plan, logits: Seq[torch.Tensor | None]) -> dict[str, Sampled]:
        """Draw the next token of each sequence whose last token has just been computed."""
        began = self.clock()
        rows: list[torch.Tensor] = []
        requests: list[SampleRequest] = []
        jobs: list[Job] = []
        for work, out in zip(plan.work, logits, strict=True):
            job = self._job(work.sequence)
            if out is not None and work.reaches_end and job.spec.samples:
                rows.append(out[-1:])
                requests.append(job.sample_request())
                jobs.append(job)
        if not rows:
            return {}
        drawn = [self._draw(row, request) for row, request in zip(rows, requests, strict=True)]
        self.stats.busy_seconds.add("sample", amount=self.clock() - began)
        for job, token in zip(jobs, drawn, strict=True):
            if isinstance(token, SamplingError):
                self._fail(job, EngineError(f"no token can be drawn: {token}"))
        return {
            job.spec.request_id: token
            for job, token in zip(jobs, drawn, strict=True)
            if not isinstance(token, SamplingError)
        }

    def _draw(self, row: torch.Tensor, request: SampleRequest) -> Sampled | SamplingError:
        """One token. Row by row: putting rows together copies the vocabulary, and one that nothing can be drawn from
        is the fault of its own request, not of the others."""
        try:
            return sample(row, [request])[0]
        except SamplingError as error:
            return error

    def _update(self, plan: Plan, logits: Seq[torch.Tensor | None], drawn: dict[str, Sampled]) -> None:
        now = self.clock()
        for work, out in zip(plan.work, logits, strict=True):
            if work.sequence.turn is None:
                continue  # no token could be drawn for it
            job = self._job(work.sequence)
            if work.start < job.turn.prompt_end - 1:
                self._report_prefill(job, work, out)
            if token := drawn.get(job.spec.request_id):
                self._accept(job, token, now)
            elif not job.spec.samples and not work.sequence.remaining:
                self._finish(job, FinishReason.MAX_TOKENS)

    def _abandon(self, failed: Seq[Work], error: Exception) -> None:
        """A step raised: its turns end with an error, and KV that it may have spoilt is forgotten."""
        log.error("a step over %d sequences failed", len(failed), exc_info=error)
        for work in failed:
            # Whole pages only: the page at `start` may be a copy on write that was not made.
            work.sequence.cache.rewind(work.start - work.start % PAGE_TOKENS)
            if job := self._jobs.get(work.sequence.turn.request_id if work.sequence.turn else ""):
                self._fail(job, EngineError("the model could not compute this step; the session is kept"))

    # One turn

    def _start(self, job: Job) -> None:
        """The turn has its place: say what it reuses and what it must compute."""
        turn, sequence = job.turn, job.sequence
        job.usage = self._accounts.opening(job)
        job.prefilled = job.reached = reused = sequence.cache.computed
        recomputed = max(0, min(sequence.seen, turn.start) - reused)
        lost = recomputed > 1  # running the last token again is no loss
        warm = "restored" if job.usage.restored_tokens else "warm"
        job.context = "new" if not turn.start else "recomputed" if lost else warm
        job.started = self.clock()
        self._accounts.turn_started(job, recomputed if lost else 0)
        source = Tier.NONE if lost else (job.usage.restored_tokens and turn.restored_from) or Tier.DEVICE
        prompt, computed, seed = job.usage.prompt_tokens, job.usage.computed_tokens, job.spec.sampling.seed
        self._emit(job, Started(turn.request_id, sequence.session_id, turn.start, prompt, computed, source, seed))

    def _report_prefill(self, job: Job, work: Work, out: torch.Tensor | None) -> None:
        """Tell how far the prompt is. One chunk that is the whole prompt needs no progress, unless logprobs are due.

        What is computed again after a preemption has been reported before.
        """
        done = min(work.start + work.count, job.turn.prompt_end)
        if done <= job.prefilled:
            return
        job.prefilled = done
        logprobs = self._prompt_logprobs(job, work, out)
        if logprobs or done < job.turn.prompt_end:
            base = job.turn.prompt_end - job.usage.computed_tokens
            self._emit(job, Prefill(done - base, job.usage.computed_tokens, logprobs))

    def _prompt_logprobs(self, job: Job, work: Work, out: torch.Tensor | None) -> tuple[TokenLogprob, ...]:
        """Logprobs of the prompt tokens that follow a position of this chunk; the row of p - 1 tells about token p."""
        if not job.spec.prompt_logprobs or out is None:
            return ()
        first = max(work.start + 1, job.logprobs_from)
        end = min(work.start + work.count + 1, job.turn.prompt_end)
        if first >= end:
            return ()
        job.logprobs_from = end
        rows = out[first - 1 - work.start : end - 1 - work.start]
        return tuple(token_logprobs(rows, job.sequence.tokens[first:end], job.spec.top_logprobs or 0))

    def _accept(self, job: Job, drawn: Sampled, now: float) -> None:
        """Append a sampled token to the ledger, put it on the stream, and end the turn if it says so."""
        spec, token = job.spec, drawn.token_id
        self._accounts.token(job, now)
        if token in spec.stop_token_ids and token not in spec.eos_token_ids and not spec.include_stop:
            self._finish(job, FinishReason.STOP_TOKEN, token=token)  # neither in the output nor in the ledger
            return
        position = len(job.sequence.tokens)
        self._note(spec, job.turn.start, TokensAppended(spec.session_id, position, (token,)))
        job.sequence.tokens.append(token)
        step = spec.text.push(token) if spec.text else None
        logprobs = (drawn.logprob,) if drawn.logprob else ()
        self._emit(job, Tokens(position, (token,), step.text if step else "", logprobs))
        if token in spec.eos_token_ids:
            self._finish(job, FinishReason.EOS, token=token)
        elif token in spec.stop_token_ids:
            self._finish(job, FinishReason.STOP_TOKEN, token=token)
        elif step and step.stop is not None:
            self._finish(job, FinishReason.STOP_SEQUENCE, text=step.stop, overhang=step.overhang_tokens)
        elif job.generated >= spec.max_tokens:
            self._finish(job, FinishReason.MAX_TOKENS if not spec.open_ended else FinishReason.CONTEXT_FULL)
        elif len(job.sequence.tokens) >= job.turn.limit:
            dropped = self._make_room(spec, job.sequence, 1)
            job.dropped += dropped
            job.reached = job.sequence.cache.computed
            if not dropped:
                self._finish(job, FinishReason.CONTEXT_FULL)

    def _make_room(self, spec: TurnSpec, sequence: Sequence, incoming: int) -> int:
        """Slide the context if `incoming` tokens would pass its limit and its policy says so; returns what it lost."""
        dropped = excess(spec, len(sequence.tokens), incoming)
        if dropped:
            keep = spec.keep_tokens or 0
            self.holdings.slide(sequence, keep, dropped)
            start = sequence.turn.start if sequence.turn else len(sequence.tokens)
            self._note(spec, start, Slid(spec.session_id, keep, dropped))
            self.stats.recomputed_tokens.add("slid", amount=len(sequence.tokens) - keep)
        return dropped

    def _finish(
        self,
        job: Job,
        reason: FinishReason,
        *,
        token: int | None = None,
        text: str | None = None,
        overhang: int = 0,
        policy: CommitPolicy = CommitPolicy.KEEP_PARTIAL,
    ) -> None:
        """End a turn with Finished. `policy` is for ends that did not come by themselves."""
        if text is None and job.spec.text and (rest := job.spec.text.finish()):
            self._emit(job, Tokens(len(job.sequence.tokens), (), rest))
        self._leave(job, policy, reason, cancelled=reason in (FinishReason.CANCELLED, FinishReason.DRAINING))
        self._accounts.turn_ended(job, reason)
        self._emit(
            job,
            Finished(
                reason,
                len(job.sequence.tokens),
                usage=job.usage,
                timings=job.timings(self.clock()),
                cache=self._usage_of(job.sequence),
                matched_token_id=token,
                matched_text=text,
                ledger_overhang_tokens=overhang,
                dropped_tokens=job.dropped,
            ),
        )

    def _fail(self, job: Job, error: SegueError) -> None:
        """End a turn with an error. A turn that never started leaves no trace; another follows its commit policy."""
        started = job.turn.admitted is not None
        policy = job.spec.commit_policy if started else CommitPolicy.ROLLBACK
        self._leave(job, policy, FinishReason.ERROR, cancelled=True)
        self._accounts.turn_ended(job, FinishReason.ERROR)
        self._emit(job, Failed(error, len(job.sequence.tokens), job.usage, job.timings(self.clock())))

    def _leave(self, job: Job, policy: CommitPolicy, reason: FinishReason, *, cancelled: bool) -> None:
        """Take the turn out of the batch and bring the ledger to what its policy says."""
        del self._jobs[job.spec.request_id]
        turn, sequence = job.turn, job.sequence
        before = sequence.cache.computed
        if policy is CommitPolicy.ROLLBACK:
            self.holdings.rewind(sequence, turn.start)
        elif policy is CommitPolicy.KEEP_PROMPT:
            self.holdings.rewind(sequence, turn.prompt_end)
        if job.blocked_since is not None:
            self.stats.stream_blocked_seconds += self.clock() - job.blocked_since
        if cancelled:
            self._accounts.rolled_back(job, before, sequence.cache.computed)
        ended = TurnEnded(sequence.session_id, len(sequence.tokens), reason, time.time())
        self._note(job.spec, turn.start, ended)
        self.scheduler.leave(sequence, self.clock())

    # Small helpers

    def _job(self, sequence: Sequence) -> Job:
        if sequence.turn is None:
            raise AssertionError(f"session {sequence.session_id} runs without a turn")
        return self._jobs[sequence.turn.request_id]

    def _slice(self, work: Work) -> Slice:
        job = self._job(work.sequence)
        want = Want.NOTHING
        if job.spec.prompt_logprobs and work.start < job.turn.prompt_end:
            want = Want.ALL
        elif work.reaches_end and job.spec.samples:
            want = Want.LAST
        tokens = work.sequence.tokens[work.start : work.start + work.count]
        return Slice(tokens, work.start, work.sequence.cache.pages, want)

    def _note(self, spec: TurnSpec, start: int, record: Record) -> None:
        """Have the ledger know before the reader does. `start`: where the turn began, and what is left if it fails."""
        if self._journal:
            self._journal.append(record, TurnRef(spec.session_id, start, spec.sink))

    def _emit(self, job: Job, event: Event) -> None:
        self._outbox.append((job.spec.sink, event))

    def _usage_of(self, sequence: Sequence) -> CacheUsage:
        cache, page_bytes, tiers = sequence.cache, self.runner.page_bytes, self.holdings.tiers
        cached = tiers.slots.reach(sequence.session_id, cache.computed)
        below = tiers.slots.lowest(sequence.session_id, cache.computed, cached)
        return CacheUsage(
            used_bytes=cache.computed * self._position_bytes + (cached - cache.computed) * tiers.token_bytes,
            reserved_bytes=len(cache.pages) * page_bytes,
            shared_bytes=self.holdings.shared_pages(sequence) * page_bytes,
            kv_dtype=self._kv_dtype,
            cached_tokens=cached,
            estimated_rebuild=cached * self.seconds_per_token,
            tier=below or (Tier.DEVICE if cached else Tier.NONE),
        )
