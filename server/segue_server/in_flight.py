"""The turns in the engine: how they come in, and how each one ends. Engine thread only."""

import time
from collections.abc import Callable

from segue_server.accountant import Accountant
from segue_server.cache.segments import Tier
from segue_server.cache.session import pages_for
from segue_server.errors import KvBudgetImpossible, QueueTimeout, Quota, SegueError, SessionNotFound
from segue_server.events import Event, Failed, Finished, Queued, Started, Tokens
from segue_server.jobs import Job, Sink, TurnSpec, excess, new_turn
from segue_server.kv_figures import KvFigures
from segue_server.ledger.journal import Journal, TurnRef
from segue_server.ledger.records import Record, Slid, TurnBegan, TurnEnded
from segue_server.requests import CancelCause, CommitPolicy, FinishReason
from segue_server.scheduler import Scheduler
from segue_server.sequence import Sequence
from segue_server.stats import EngineStats


class Jobs:
    """Owns the jobs and the events on their way out. The ledger hears of a change before a reader does."""

    def __init__(
        self,
        scheduler: Scheduler,
        stats: EngineStats,
        accounts: Accountant,
        figures: KvFigures,
        *,
        journal: Journal | None,
        slow_reader_limit: float,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._holdings = scheduler.holdings
        self._stats = stats
        self._accounts = accounts
        self._figures = figures
        self._journal = journal
        self._slow_reader_limit = slow_reader_limit
        self._clock = clock
        self._jobs: dict[str, Job] = {}  # by request id
        self._outbox: list[tuple[Sink, Event]] = []

    # In

    def submit(self, spec: TurnSpec) -> None:
        """Append the prompt to the ledger and queue the turn. The session has no other turn in flight."""
        sequence = self._holdings.sequences.get(spec.session_id)
        if sequence is None:
            gone = SessionNotFound(spec.session_id, f"session {spec.session_id!r} was deleted meanwhile")
            self.emit(spec.sink, Failed(gone, 0))
            return
        dropped = self.make_room(spec, sequence, len(spec.prompt) + spec.samples)
        turn = new_turn(spec, len(sequence.tokens))
        self.note(spec, turn.start, TurnBegan(spec.session_id, spec.request_id, turn.start, spec.prompt))
        sequence.tokens.extend(spec.prompt)
        job = Job(spec, sequence, turn, logprobs_from=max(turn.start, 1), dropped=dropped)
        self._jobs[spec.request_id] = job
        place = self._scheduler.submit(sequence, turn)
        if spec.defer_compute:
            self.start(job)
            self.finish(job, FinishReason.MAX_TOKENS)
        elif place or len(self._scheduler.running) >= self._scheduler.max_running:
            self.emit(spec.sink, Queued(place))

    def start(self, job: Job) -> None:
        """The turn has its place: say what it reuses and what it must compute."""
        turn, sequence = job.turn, job.sequence
        job.usage = self._accounts.opening(job)
        job.prefilled = job.reached = reused = sequence.cache.computed
        recomputed = max(0, min(sequence.seen, turn.start) - reused)
        lost = recomputed > 1  # running the last token again is no loss
        warm = "restored" if job.usage.restored_tokens else "warm"
        job.context = "new" if not turn.start else "recomputed" if lost else warm
        job.started = self._clock()
        self._accounts.turn_started(job, recomputed if lost else 0)
        source = Tier.NONE if lost else (job.usage.restored_tokens and turn.restored_from) or Tier.DEVICE
        prompt, computed, seed = job.usage.prompt_tokens, job.usage.computed_tokens, job.spec.sampling.seed
        told = Started(turn.request_id, sequence.session_id, turn.start, prompt, computed, source, seed)
        self.emit(job.spec.sink, told)

    # Out

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
        self._stats.cancellations.add(job.phase, cause.value)
        self.finish(job, reason, policy=policy or job.spec.commit_policy)
        return True

    def revoke(self, session_id: str, start: int) -> None:
        """Take back a turn that the ledger could not write: end it without an event and cut the session to `start`."""
        sequence = self._holdings.sequences.get(session_id)
        if sequence is None:
            return
        if sequence.turn is not None:
            job = self.of(sequence)
            self._leave(job, CommitPolicy.KEEP_PARTIAL, FinishReason.ERROR, cancelled=True)
            self._accounts.turn_ended(job, FinishReason.ERROR)
        self._holdings.rewind(sequence, min(start, len(sequence.tokens)))

    def refuse_impossible(self) -> None:
        """The pool has become smaller: end the waiting turns that it will never have room for."""
        for sequence in list(self._scheduler.waiting):
            turn = sequence.turn
            if turn is not None and pages_for(turn.promise) > self._holdings.pool.capacity:
                quota = Quota("kv_bytes", self._figures.kv_bytes().capacity)
                error = KvBudgetImpossible("the pool has become smaller than this turn", quota=quota)
                self.fail(self.of(sequence), error)

    def give_up(self) -> None:
        """The engine itself has failed: take every turn out, so that no figure says that one still runs."""
        for job in self._jobs.values():
            self._scheduler.leave(job.sequence, self._clock())
            self._accounts.turn_ended(job, FinishReason.ERROR)
        self._jobs.clear()

    def finish(
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
            self.emit(job.spec.sink, Tokens(len(job.sequence.tokens), (), rest))
        self._leave(job, policy, reason, cancelled=reason.cut_short)
        self._accounts.turn_ended(job, reason)
        self.emit(
            job.spec.sink,
            Finished(
                reason,
                len(job.sequence.tokens),
                usage=job.usage,
                timings=job.timings(self._clock()),
                cache=self._figures.usage_of(job.sequence),
                matched_token_id=token,
                matched_text=text,
                ledger_overhang_tokens=overhang,
                dropped_tokens=job.dropped,
            ),
        )

    def fail(self, job: Job, error: SegueError) -> None:
        """End a turn with an error. A turn that never started leaves no trace; another follows its commit policy."""
        started = job.turn.admitted is not None
        policy = job.spec.commit_policy if started else CommitPolicy.ROLLBACK
        self._leave(job, policy, FinishReason.ERROR, cancelled=True)
        self._accounts.turn_ended(job, FinishReason.ERROR)
        self.emit(job.spec.sink, Failed(error, len(job.sequence.tokens), job.usage, job.timings(self._clock())))

    def _leave(self, job: Job, policy: CommitPolicy, reason: FinishReason, *, cancelled: bool) -> None:
        """Take the turn out of the batch and bring the ledger to what its policy says."""
        del self._jobs[job.spec.request_id]
        turn, sequence = job.turn, job.sequence
        before = sequence.cache.computed
        if policy is CommitPolicy.ROLLBACK:
            self._holdings.rewind(sequence, turn.start)
        elif policy is CommitPolicy.KEEP_PROMPT:
            self._holdings.rewind(sequence, turn.prompt_end)
        if job.blocked_since is not None:
            self._stats.stream_blocked_seconds += self._clock() - job.blocked_since
        if cancelled:
            self._accounts.rolled_back(job, before, sequence.cache.computed)
        ended = TurnEnded(sequence.session_id, len(sequence.tokens), reason, time.time())
        self.note(job.spec, turn.start, ended)
        self._scheduler.leave(sequence, self._clock())

    # Out, by the clock

    def look_at_the_clock(self, now: float) -> None:
        """End what has run or blocked for too long."""
        for job in list(self._jobs.values()):
            turn = job.turn
            if turn.admitted is not None and now - turn.admitted >= turn.time_limit:
                self.finish(job, FinishReason.TIME_LIMIT)
            elif self._blocked_for(job, now) >= self._slow_reader_limit:
                self.cancel(turn.request_id, CancelCause.SLOW_CLIENT)

    def expire_queue(self, now: float) -> None:
        """End what has waited for too long. After admission: a turn without patience may take a place that is free."""
        for job in list(self._jobs.values()):
            if job.turn.admitted is None and now >= job.turn.queue_deadline:
                self.fail(job, QueueTimeout(f"no place in the batch within {job.spec.queue_timeout:g} s"))

    def _blocked_for(self, job: Job, now: float) -> float:
        """Seconds since the reader of a turn fell behind; the turn is paused as long as it lasts."""
        job.turn.paused = job.spec.sink.full
        if job.turn.paused:
            job.blocked_since = now if job.blocked_since is None else job.blocked_since
            return now - job.blocked_since
        if job.blocked_since is not None:
            self._stats.stream_blocked_seconds += now - job.blocked_since
            job.blocked_since = None
        return 0.0

    def next_deadline(self) -> float:
        """When, on the engine's clock, something is due although nothing can be computed."""
        return min((self._deadline(job) for job in self._jobs.values()), default=float("inf"))

    def _deadline(self, job: Job) -> float:
        if job.turn.admitted is None:
            return job.turn.queue_deadline
        slow = float("inf") if job.blocked_since is None else job.blocked_since + self._slow_reader_limit
        return min(job.turn.admitted + job.turn.time_limit, slow)

    # Who is in, and what is told of it

    def of(self, sequence: Sequence) -> Job:
        """The job of a sequence that is in the queue or in the batch."""
        if sequence.turn is None:
            raise AssertionError(f"session {sequence.session_id} runs without a turn")
        return self._jobs[sequence.turn.request_id]

    def find(self, sequence: Sequence) -> Job | None:
        """The job of a sequence, if it has one."""
        return self._jobs.get(sequence.turn.request_id) if sequence.turn else None

    def make_room(self, spec: TurnSpec, sequence: Sequence, incoming: int) -> int:
        """Slide the context if `incoming` tokens would pass its limit and its policy says so; returns what it lost."""
        dropped = excess(spec, len(sequence.tokens), incoming)
        if dropped:
            keep = spec.keep_tokens or 0
            self._holdings.slide(sequence, keep, dropped)
            start = sequence.turn.start if sequence.turn else len(sequence.tokens)
            self.note(spec, start, Slid(spec.session_id, keep, dropped))
            self._stats.recomputed_tokens.add("slid", amount=len(sequence.tokens) - keep)
        return dropped

    def note(self, spec: TurnSpec, start: int, record: Record) -> None:
        """Have the ledger know before the reader does. `start`: where the turn began, and what is left if it fails."""
        if self._journal:
            self._journal.append(record, TurnRef(spec.session_id, start, spec.sink))

    def emit(self, sink: Sink, event: Event) -> None:
        """Have the event loop deliver an event after this step."""
        self._outbox.append((sink, event))

    def take_outbox(self) -> list[tuple[Sink, Event]]:
        """The events since the last call, in order."""
        outbox, self._outbox = self._outbox, []
        return outbox
