"""The engine: make every sequence's computed position catch up with its tokens, one ragged batch a step.

One thread owns everything in here (see engine_thread.py). Callers never see a tensor: they hand in integers and get
events.
"""

import logging
import time
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq

from segue_model.arrays import Logits
from segue_model.runner.base import PAGE_TOKENS, Runner, Slice, Want
from segue_model.sampling import Sampled, SamplingError
from segue_server.accountant import Accountant
from segue_server.answers import Answers
from segue_server.cache.pages import PagePool
from segue_server.drafter import Drafter
from segue_server.errors import EngineError, SessionExists, beyond_end
from segue_server.foresight import Foresight, Speeds, foresee
from segue_server.holdings import Holdings
from segue_server.in_flight import Jobs
from segue_server.jobs import Job, TurnSpec
from segue_server.kv_figures import KvFigures
from segue_server.ledger.journal import Journal
from segue_server.mover import KvMover, Offload
from segue_server.plan import Plan, Work
from segue_server.scheduler import Scheduler
from segue_server.sequence import Sequence
from segue_server.stats import EngineStats

log = logging.getLogger(__name__)


class Engine:
    """The step, and the sessions that it is made over. Engine thread only, but for `figures` and `tokens`.

    `holdings` has the sequences and their KV, `scheduler` the queue and the batch, `jobs` the turns with their events.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        max_running: int,
        step_tokens: int,
        draft_tokens: int = 0,
        slow_reader_limit: float = 30.0,
        kv_dtype: str = "",
        offload: Offload | None = None,
        journal: Journal | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`journal` is told of every change of a ledger. `draft_tokens` bounds those that a sequence guesses in a step,
        if the runner is batch-invariant. Raises OSError when a disk tier's directory cannot be made.
        """
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
        self._accounts = Accountant(self.stats, clock)
        self.figures = KvFigures(
            self.scheduler, self.stats, self._accounts, page_bytes=runner.page_bytes, kv_dtype=kv_dtype
        )
        self.jobs = Jobs(
            self.scheduler,
            self.stats,
            self._accounts,
            self.figures,
            journal=journal,
            slow_reader_limit=slow_reader_limit,
            clock=clock,
        )
        self._answers = Answers(self.jobs, self._accounts, clock)
        self.drafter = Drafter(self.jobs, self.stats, draft_tokens if runner.batch_invariant else 0)

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

    def tokens(self, session_id: str) -> Seq[int]:
        """The ledger of a session without a turn in flight; empty when it is unknown. Not to be changed."""
        sequence = self.holdings.sequences.get(session_id)
        return () if sequence is None else sequence.tokens

    # What is coming

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
        self.jobs.look_at_the_clock(now)
        self.mover.take_news()
        plan = self.scheduler.schedule(now)
        self.mover.carry_out()
        self._announce(plan)
        self.jobs.expire_queue(now)
        self.mover.restore(plan.restores)
        if not plan.work:
            return plan.relieved or bool(plan.restores)
        self.drafter.extend(plan)
        try:
            logits = self._forward(plan)
            self._answers.update(plan, logits, self._sample(plan, logits))
            self._follow(plan, logits)
        except Exception as error:  # noqa: BLE001 - whatever the arithmetic raises must not end the engine
            self._abandon(plan.work, error)
        return True

    def shut_down(self) -> None:
        """Give back what outlives the thread: files, and the thread that reads them."""
        self.mover.close()

    # Stages of a step

    def _announce(self, plan: Plan) -> None:
        for sequence in (*plan.admitted, *self.scheduler.running):
            job = self.jobs.of(sequence)
            if job.started is None and not sequence.restoring:
                self.jobs.start(job)
        self.stats.preemptions += len(plan.preempted)
        for sequence in plan.preempted:
            log.info("turn %s gave way: the pool is short", self.jobs.of(sequence).spec.request_id)

    def _forward(self, plan: Plan) -> list[Logits | None]:
        began = self.clock()
        if plan.copies:
            self.runner.copy_pages(plan.copies)
        logits = self.runner.forward([self._slice(work) for work in plan.work])
        for work in plan.work:
            self._advance(work.sequence, work.count)
        self._accounts.step(plan, self.clock() - began)
        return logits

    def _advance(self, sequence: Sequence, count: int) -> None:
        """The next `count` tokens of a ledger have been computed: cache.pos moves on here and nowhere else."""
        start, job = sequence.cache.computed, self.jobs.of(sequence)
        sequence.advance(count)
        self._accounts.computed(job, start, start + count)
        if start < job.turn.prompt_end <= start + count:
            self.holdings.index(sequence)  # others with the same prompt need not wait for the answer

    def _sample(self, plan: Plan, logits: Seq[Logits | None]) -> dict[str, Sampled]:
        """Draw the next token of each sequence whose last token has just been computed."""
        rows: list[tuple[Job, Logits]] = []
        for work, out in zip(plan.work, logits, strict=True):
            job = self.jobs.of(work.sequence)
            if out is not None and work.reaches_end and job.spec.samples:
                rows.append((job, out[-1 - len(work.drafts)]))
        return self._draw(rows)

    def _follow(self, plan: Plan, logits: Seq[Logits | None]) -> None:
        """Draw on along the drafts, row by row, as long as what was drawn is what was guessed."""
        for work, out in zip(plan.work, logits, strict=True):
            if out is None or not work.drafts or not (job := self.jobs.find(work.sequence)):
                continue
            accepted = 0
            while work.came_true(accepted):
                self._advance(work.sequence, 1)
                accepted += 1
                for token in self._draw([(job, out[accepted])]).values():
                    self._answers.take(job, token, self.clock())
            self.drafter.learn(job, len(work.drafts), accepted)

    def _draw(self, rows: Seq[tuple[Job, Logits]]) -> dict[str, Sampled]:
        """A token from each row, by request id; a turn that none can be drawn for fails."""
        if not rows:
            return {}
        began = self.clock()
        drawn = self.runner.sample([row for _, row in rows], [job.sample_request() for job, _ in rows])
        self.stats.busy_seconds.add("sample", amount=self.clock() - began)
        tokens: dict[str, Sampled] = {}
        for (job, _), token in zip(rows, drawn, strict=True):
            if isinstance(token, SamplingError):
                self.jobs.fail(job, EngineError(f"no token can be drawn: {token}"))
            else:
                tokens[job.spec.request_id] = token
        return tokens

    def _abandon(self, failed: Seq[Work], error: Exception) -> None:
        """A step raised: its turns end with an error, and KV that it may have spoilt is forgotten."""
        log.error("a step over %d sequences failed", len(failed), exc_info=error)
        for work in failed:
            # Whole pages only: the page at `start` may be a copy on write that was not made.
            work.sequence.cache.rewind(work.start - work.start % PAGE_TOKENS)
            if job := self.jobs.find(work.sequence):
                self.jobs.fail(job, EngineError("the model could not compute this step; the session is kept"))

    def _slice(self, work: Work) -> Slice:
        job = self.jobs.of(work.sequence)
        want = Want.NOTHING
        if work.drafts or (job.spec.prompt_logprobs and work.start < job.turn.prompt_end):
            want = Want.ALL
        elif work.reaches_end and job.spec.samples:
            want = Want.LAST
        tokens = work.sequence.tokens[work.start : work.start + work.count]
        return Slice([*tokens, *work.drafts] if work.drafts else tokens, work.start, work.sequence.cache.pages, want)
