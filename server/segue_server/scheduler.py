"""Who computes what in the next step. Integers only; the clock is handed in.

Each step goes once through four questions: who may start, how many tokens does each running sequence get, who must
give way when the pool is short, and what is the batch. A waiting turn holds no claim on KV, so there is no
hold-and-wait; the oldest turn of the highest priority never gives way, so something always moves on.
"""

from bisect import insort_right
from collections.abc import Iterator
from dataclasses import dataclass, field

from segue_model.paging import PAGE_TOKENS
from segue_server.cache.pages import PagePool
from segue_server.cache.session import SessionCache
from segue_server.sequence import Sequence, Turn


@dataclass(frozen=True, slots=True)
class Work:
    """Compute `count` tokens of a sequence, from position `start` on."""

    sequence: Sequence
    start: int
    count: int

    @property
    def reaches_end(self) -> bool:
        """The pass computes the last token of the ledger, so its logits tell the next one."""
        return self.start + self.count == len(self.sequence.tokens)


@dataclass(slots=True)
class Plan:
    """One step."""

    work: list[Work] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


@dataclass(slots=True)
class Evictions:
    """What pressure on the pool has cost so far."""

    count: int = 0
    pages: int = 0
    tokens: int = 0


class Scheduler:
    """Owns the sequences, the queue and the pool. One thread only."""

    def __init__(self, pool: PagePool, *, max_running: int, step_tokens: int) -> None:
        """`step_tokens` bounds the tokens of a step, so that a long prompt never stalls the streams beside it."""
        self.pool = pool
        self.sequences: dict[str, Sequence] = {}
        self.waiting: list[Sequence] = []  # in the order of Turn.order
        self.running: list[Sequence] = []  # in the order of Turn.order
        self.evictions = Evictions()
        self.max_running = max_running
        self._step_tokens = step_tokens

    # Sessions

    def open(self, session_id: str, *, priority: int = 0, pinned: bool = False, now: float) -> Sequence:
        """A new, empty sequence. Raises KeyError when the id is taken."""
        if session_id in self.sequences:
            raise KeyError(session_id)
        cache = SessionCache(self.pool)
        sequence = Sequence(session_id=session_id, cache=cache, priority=priority, pinned=pinned, last_used=now)
        self.sequences[session_id] = sequence
        return sequence

    def close(self, session_id: str) -> int:
        """Forget a sequence; returns the pages that became free. Raises ValueError while it has a turn."""
        if self.sequences[session_id].turn is not None:
            raise ValueError(f"session {session_id} has a turn in flight")
        sequence = self.sequences.pop(session_id)
        return sequence.cache.evict(len(sequence.cache.pages))

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

    def schedule(self, now: float) -> Plan:
        """Decide the next step and take the pages it needs."""
        plan = Plan()
        self._admit(plan, now)
        counts = self._counts()
        for sequence in list(self.running):
            count = counts.get(sequence.session_id, 0)
            if count and sequence.running and self._reserve(sequence, sequence.cache.computed + count, plan):
                plan.work.append(Work(sequence, sequence.cache.computed, count))
        return plan

    # Admission

    def _admit(self, plan: Plan, now: float) -> None:
        """Start waiting turns, strictly in order: a turn that does not fit holds back those behind it."""
        while self.waiting and len(self.running) < self.max_running and self._fits(self.waiting[0]):
            sequence = self.waiting.pop(0)
            turn = _turn(sequence)
            if turn.admitted is None:
                turn.admitted = now
                sequence.cache.rewind(turn.reuse_limit)
                plan.admitted.append(sequence)
            turn.running = True
            _insert(self.running, sequence)

    def _fits(self, sequence: Sequence) -> bool:
        """Is there room for what the running turns and this one have been promised?"""
        promised = sum(_missing(s) for s in self.running) + _missing(sequence)
        return promised <= self.pool.free or promised <= self.pool.free + self.evictable_pages(sequence)

    # Budget

    def _counts(self) -> dict[str, int]:
        """Tokens each running sequence gets: one for whoever needs only one, the rest of the budget for prompts."""
        ready = [s for s in self.running if s.remaining and not _turn(s).paused]
        counts = {s.session_id: 1 for s in ready if s.remaining == 1}
        prompts = [s for s in ready if s.remaining > 1]
        budget = max(self._step_tokens - len(counts), PAGE_TOKENS)
        if len(prompts) > 1:  # the oldest moves on at half the pace at least, whatever arrives
            counts[prompts[0].session_id] = min(prompts[0].remaining, budget // 2)
            budget -= counts[prompts[0].session_id]
        for sequence in sorted(prompts, key=lambda s: s.remaining):  # short prompts first: the best mean TTFT
            given = counts.get(sequence.session_id, 0)
            more = min(sequence.remaining - given, budget)
            counts[sequence.session_id] = given + more
            budget -= more
        return counts

    # Pages

    def _reserve(self, sequence: Sequence, tokens: int, plan: Plan) -> bool:
        """Make room for `tokens` positions: from idle KV, then from the youngest turn. False: it gave way itself."""
        while (short := sequence.cache.missing_pages(tokens) - self.pool.free) > 0:
            if self._evict(short, keep=sequence):
                continue
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        sequence.cache.reserve(tokens)
        return True

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        """Send a running turn back to the queue. Its tokens stay; its KV is now evictable like any other."""
        self.running.remove(sequence)
        turn = _turn(sequence)
        turn.running = False
        turn.promise = max(turn.promise, min(turn.limit, len(sequence.tokens) + PAGE_TOKENS))
        _insert(self.waiting, sequence)
        plan.preempted.append(sequence)

    def _evict(self, pages: int, keep: Sequence) -> bool:
        """Drop up to `pages` pages of the session that is cheapest to lose, from its tail. False: there is none."""
        victim = min(self._evictable(keep), key=_eviction_order, default=None)
        if victim is None:
            return False
        before = victim.cache.computed
        freed = victim.cache.evict(pages)
        self.evictions.count += 1
        self.evictions.pages += freed
        self.evictions.tokens += before - victim.cache.computed
        return True

    def evictable_pages(self, keep: Sequence | None = None) -> int:
        """Pages that could be taken from sequences which are not running and not pinned."""
        return sum(len(s.cache.pages) for s in self._evictable(keep))

    def _evictable(self, keep: Sequence | None) -> Iterator[Sequence]:
        return (
            s for s in self.sequences.values() if s.cache.pages and not s.running and not s.pinned and s is not keep
        )

    def check_integrity(self) -> None:
        """Every page has the owners its count says, every turn is in one place. Raises AssertionError."""
        self.pool.check_integrity(s.cache.pages for s in self.sequences.values())
        for sequence in self.sequences.values():
            places = (sequence in self.running) + (sequence in self.waiting)
            if places != (sequence.turn is not None):
                raise AssertionError(f"session {sequence.session_id}: in {places} places, turn {sequence.turn}")
            if not sequence.cache.computed <= min(len(sequence.tokens), len(sequence.cache.pages) * PAGE_TOKENS):
                raise AssertionError(f"session {sequence.session_id}: computed {sequence.cache.computed} is too far")


def _turn(sequence: Sequence) -> Turn:
    if sequence.turn is None:
        raise AssertionError(f"session {sequence.session_id} has no turn")
    return sequence.turn


def _missing(sequence: Sequence) -> int:
    """Pages a sequence has been promised and does not hold yet."""
    return sequence.cache.missing_pages(_turn(sequence).promise)


def _eviction_order(sequence: Sequence) -> tuple[int, float]:
    return sequence.priority, sequence.last_used


def _insert(queue: list[Sequence], sequence: Sequence) -> None:
    """Keep a queue in the order of its turns; equal ones stay in the order of arrival."""
    insort_right(queue, sequence, key=lambda s: _turn(s).order)
