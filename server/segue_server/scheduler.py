"""Who computes what in the next step. Integers only; the clock is handed in.

Each step goes once through four questions: who may start, how many tokens does each running sequence get, who must
give way when the pool is short, and what is the batch. A waiting turn holds no claim on KV, so there is no
hold-and-wait; the oldest turn of the highest priority never gives way, so something always moves on.
"""

from bisect import insort_right
from dataclasses import dataclass

from segue_model.paging import PAGE_TOKENS
from segue_server import restoring
from segue_server.cache.pages import PageId
from segue_server.cache.session import pages_for
from segue_server.eviction import Evictor
from segue_server.holdings import Holdings
from segue_server.plan import Plan, Work
from segue_server.sequence import Sequence, Turn, turn_of

RESTORES_A_STEP = 4  # segments: together they take less time than the prompt chunk that a step may compute


@dataclass(frozen=True, slots=True)
class Preview:
    """What admission would say of a turn that is not in the queue."""

    reused: int  # positions whose KV is there, the session's own or a shared prefix
    claimed_pages: int  # that the turn could come to hold
    evicted_pages: int  # of idle KV, if it comes to hold them all
    fits: bool


class Scheduler:
    """Owns the queue and the batch. One thread only."""

    def __init__(
        self,
        holdings: Holdings,
        *,
        max_running: int,
        step_tokens: int,
        watermarks: tuple[float, float] = (0.9, 0.8),
    ) -> None:
        """`step_tokens` bounds the tokens of a step, so that a long prompt never stalls the streams beside it.

        The end of a prompt may exceed it by less than a page.

        `watermarks`: see Evictor.
        """
        self.holdings = holdings
        self.evictor = Evictor(holdings, watermarks=watermarks)
        self.waiting: list[Sequence] = []  # in the order of Turn.order
        self.running: list[Sequence] = []  # in the order of Turn.order
        self.max_running = max_running
        self._step_tokens = step_tokens
        self._pool, self._tiers = holdings.pool, holdings.tiers

    @property
    def promised(self) -> int:
        """Pages that the running turns have been promised and do not hold yet."""
        return sum(_missing(s) for s in self.running)

    # Turns

    def submit(self, sequence: Sequence, turn: Turn) -> int:
        """Queue a turn whose prompt is in the ledger already; returns its place in the queue, 0 = next."""
        sequence.turn = turn
        _insert(self.waiting, sequence)
        return self.waiting.index(sequence)

    def leave(self, sequence: Sequence, now: float) -> None:
        """Take a sequence's turn out of the queue or the batch; its KV stays, without a claim."""
        (self.running if sequence.running else self.waiting).remove(sequence)
        sequence.turn = None
        sequence.last_used = now
        sequence.cache.trim()
        self._tiers.unstage(sequence.session_id)
        self._tiers.touch(sequence.session_id)
        self.holdings.index(sequence)

    def schedule(self, now: float) -> Plan:
        """Decide the next step and take the pages it needs."""
        plan = Plan()
        self._admit(plan, now)
        self._restore(plan, now)
        counts = self._counts()
        for sequence in list(self.running):
            count = counts.get(sequence.session_id, 0)
            if count and sequence.running and self._reserve(sequence, sequence.cache.computed + count, plan, now):
                plan.work.append(Work(sequence, sequence.cache.computed, count))
        plan.relieved = self.evictor.relieve(now, pause=bool(self.waiting))
        return plan

    # Admission

    def _admit(self, plan: Plan, now: float) -> None:
        """Start waiting turns, strictly in order: a turn that does not fit holds back those behind it."""
        while self.waiting and len(self.running) < self.max_running:
            sequence = self.waiting[0]
            found = self._known_prefix(sequence, now)
            if not self._fits(sequence, found) and not self._spare_copy(sequence, found):
                return
            self.waiting.pop(0)
            self._start(sequence, found, now)
            if (turn := turn_of(sequence)).admitted is None:
                turn.admitted = now
                plan.admitted.append(sequence)

    def preview(self, sequence: Sequence) -> Preview:
        """What admission would say of a sequence with a turn that was never submitted. Changes nothing."""
        turn, own = turn_of(sequence), sequence.cache
        found = self._known_prefix(sequence, None)
        kept = own.glance(turn.reuse_limit)
        missing = pages_for(turn.promise) - len(found) if found else kept.missing_pages(turn.promise)
        left = own.pages[own.computed // PAGE_TOKENS if found else len(kept.pages) :]
        free = self._pool.free + sum(self._pool.references(page) == 1 for page in left)
        return Preview(
            reused=restoring.reach(self._tiers, sequence, len(found) * PAGE_TOKENS if found else kept.computed),
            claimed_pages=pages_for(turn.promise),
            evicted_pages=max(0, missing - max(0, free - self.promised)),
            fits=self._fits(sequence, found),
        )

    def _known_prefix(self, sequence: Sequence, now: float | None) -> list[PageId]:
        """Pages of others that take this turn further than its own do. Never the last token: its logits are needed."""
        turn = turn_of(sequence)
        if sequence.salt is None or not turn.reads_prefixes:
            return []
        limit = min(turn.reuse_limit, len(sequence.tokens) - 1)
        found = self.holdings.prefixes.match(sequence.salt, sequence.tokens[:limit], now)
        return found if len(found) * PAGE_TOKENS > sequence.cache.computed else []

    def _spare_copy(self, sequence: Sequence, found: list[PageId]) -> bool:
        """Let go of the shared page that is written next, to compute its part again. True: the turn fits now.

        While this sequence holds it, evicting the others that do sets nothing free.
        """
        if found or not sequence.cache.needs_copy:
            return False
        sequence.cache.rewind_to_page()
        return self._fits(sequence, found)

    def _start(self, sequence: Sequence, found: list[PageId], now: float) -> None:
        """Put a turn into the batch, on the pages that were found for it."""
        turn = turn_of(sequence)
        if turn.admitted is None:
            sequence.cache.rewind(turn.reuse_limit)
        turn.adopted = 0
        if found:
            turn.adopted = (len(found) - sequence.cache.computed // PAGE_TOKENS) * PAGE_TOKENS
            sequence.cache.adopt(found)
            sequence.seen = max(sequence.seen, sequence.cache.computed)
        restoring.begin(self._tiers, sequence)
        turn.running = True
        sequence.last_used = now
        _insert(self.running, sequence)

    def _fits(self, sequence: Sequence, found: list[PageId]) -> bool:
        """Is there room for what the running turns and this one have been promised?"""
        needed = self.promised
        needed += pages_for(turn_of(sequence).promise) - len(found) if found else _missing(sequence)
        return needed <= self._pool.free or needed <= self._pool.free + self.evictor.evictable_pages(sequence, found)

    # Restoring

    def _restore(self, plan: Plan, now: float) -> None:
        """The next segments of running turns that can be had now; the disk is asked for what comes after them."""
        for sequence in list(self.running):
            turn = turn_of(sequence)
            while turn.restoring(sequence.cache.computed + turn.restore_planned) and turn.running:
                if len(plan.restores) >= RESTORES_A_STEP or not self._restore_next(sequence, plan, now):
                    break
        for sequence in (*self.running, *self.waiting):
            restoring.read_ahead(self._tiers, sequence)

    def _restore_next(self, sequence: Sequence, plan: Plan, now: float) -> bool:
        """Plan one segment. False: it is still being read, it is gone, or the turn had to give way for it."""
        restore = restoring.next_segment(self._tiers, sequence)
        if restore is None or not self._reserve(sequence, restore.start + restore.count, plan, now):
            return False
        plan.restores.append(restore)
        turn_of(sequence).restore_planned += restore.count
        return True

    # Budget

    def _counts(self) -> dict[str, int]:
        """Tokens each running sequence gets: one for whoever needs only one, the rest of the budget for prompts."""
        ready = [s for s in self.running if s.remaining and not turn_of(s).paused and not s.restoring]
        counts = {s.session_id: 1 for s in ready if s.remaining == 1}
        prompts = [s for s in ready if s.remaining > 1]
        budget = max(self._step_tokens - len(counts), PAGE_TOKENS)
        if len(prompts) > 1:  # the oldest moves on at half the pace at least, whatever arrives
            counts[prompts[0].session_id] = min(prompts[0].remaining, budget // 2)
            budget -= counts[prompts[0].session_id]
        for sequence in sorted(prompts, key=lambda s: s.remaining):  # short prompts first: the best mean TTFT
            given = counts.get(sequence.session_id, 0)
            left = sequence.remaining - given
            more = min(left, budget)
            if more and left - more < PAGE_TOKENS:  # a step of their own for the last few would take longer
                more = left
            counts[sequence.session_id] = given + more
            budget = max(budget - more, 0)
        return counts

    # Pages

    def _reserve(self, sequence: Sequence, tokens: int, plan: Plan, now: float) -> bool:
        """Make room for `tokens` positions: from idle KV, then from the youngest turn. False: it gave way itself."""
        while (short := sequence.cache.missing_pages(tokens) - self._pool.free) > 0:
            if self.evictor.evict(short, keep=sequence, now=now):
                continue
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        if copied := sequence.cache.reserve(tokens):
            plan.copies.append(copied)
        return True

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        """Send a running turn back to the queue. Its tokens stay; its KV is now evictable like any other."""
        self.running.remove(sequence)
        turn = turn_of(sequence)
        turn.running = False
        turn.restore_end = turn.restore_planned = 0
        plan.restores = [restore for restore in plan.restores if restore.sequence is not sequence]
        turn.promise = max(turn.promise, min(turn.limit, len(sequence.tokens) + PAGE_TOKENS))
        _insert(self.waiting, sequence)
        plan.preempted.append(sequence)

    def check_integrity(self) -> None:
        """Every turn is in one place, and what is held is whole. Raises AssertionError."""
        self.holdings.check_integrity()
        for sequence in self.holdings.sequences.values():
            places = (sequence in self.running) + (sequence in self.waiting)
            if places != (sequence.turn is not None):
                raise AssertionError(f"session {sequence.session_id}: in {places} places, turn {sequence.turn}")
            if sequence.turn and sequence.turn.restore_planned:
                raise AssertionError(f"session {sequence.session_id}: a restore was planned and not made")


def _missing(sequence: Sequence) -> int:
    """Pages a sequence has been promised and does not hold yet."""
    return sequence.cache.missing_pages(turn_of(sequence).promise)


def _insert(queue: list[Sequence], sequence: Sequence) -> None:
    """Keep a queue in the order of its turns; equal ones stay in the order of arrival."""
    insort_right(queue, sequence, key=lambda s: turn_of(s).order)
