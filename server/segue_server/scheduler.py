"""Who computes what in the next step. Integers only; the clock is handed in.

Each step goes once through four questions: who may start, how many tokens does each running sequence get, who must
give way when the pool is short, and what is the batch. A waiting turn holds no claim on KV, so there is no
hold-and-wait; the oldest turn of the highest priority never gives way, so something always moves on.
"""

from bisect import insort_right
from collections.abc import Iterator
from dataclasses import dataclass, field

from segue_model.paging import PAGE_TOKENS
from segue_server.cache.pages import PageId, PagePool
from segue_server.cache.prefix import Node, PrefixIndex
from segue_server.cache.segments import SegmentKey, Tier
from segue_server.cache.session import SessionCache, pages_for
from segue_server.cache.tiers import Tiers
from segue_server.sequence import Sequence, Turn

ATTENTION_TOKENS = 4096  # depth at which attention costs as much as everything else, roughly, for small models
RESTORES_A_STEP = 4  # segments: together they take less time than the prompt chunk that a step may compute


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


@dataclass(frozen=True, slots=True)
class Restore:
    """Bring back `count` positions of a sequence, from `start` on, which is the beginning of a page."""

    sequence: Sequence
    start: int
    count: int
    key: SegmentKey
    offset: int  # of `start` in the segment


@dataclass(slots=True)
class Plan:
    """One step."""

    work: list[Work] = field(default_factory=list)
    copies: list[tuple[PageId, PageId]] = field(default_factory=list)  # to be made before the pass
    restores: list[Restore] = field(default_factory=list)  # to be made before the pass
    relieved: bool = False  # idle KV went down a tier though nobody needed its pages yet
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Preview:
    """What admission would say of a turn that is not in the queue."""

    reused: int  # positions whose KV is there, the session's own or a shared prefix
    claimed_pages: int  # that the turn could come to hold
    evicted_pages: int  # of idle KV, if it comes to hold them all
    fits: bool


@dataclass(slots=True)
class Evictions:
    """What pressure on the pool has cost so far: what was dropped, and what could go down a tier."""

    count: int = 0
    pages: int = 0
    tokens: int = 0
    moved: int = 0  # positions


class Scheduler:
    """Owns the sequences, the queue and the pool. One thread only."""

    def __init__(
        self,
        pool: PagePool,
        *,
        max_running: int,
        step_tokens: int,
        tiers: Tiers | None = None,
        watermarks: tuple[float, float] = (0.9, 0.8),
    ) -> None:
        """`step_tokens` bounds the tokens of a step, so that a long prompt never stalls the streams beside it.

        With `tiers` below the pool, idle KV goes down from the moment when more of the pool is held than the upper
        watermark says, until it is no more than the lower one.
        """
        self.pool = pool
        self.tiers = tiers or Tiers(segment_tokens=16 * PAGE_TOKENS, token_bytes=1)
        self._high, self._low = watermarks
        self._relieving = False
        self.prefixes = PrefixIndex(pool)
        self.sequences: dict[str, Sequence] = {}
        self.waiting: list[Sequence] = []  # in the order of Turn.order
        self.running: list[Sequence] = []  # in the order of Turn.order
        self.evictions = Evictions()
        self.spares: list[SessionCache] = []  # pages that are lent for a while, to no sequence
        self.shrunk: set[str] = set()  # sessions that have lost KV to others since `take_shrunk`
        self.max_running = max_running
        self._step_tokens = step_tokens

    # Sessions

    def open(
        self, session_id: str, *, priority: int = 0, pinned: bool = False, salt: str | None = None, now: float
    ) -> Sequence:
        """A new, empty sequence. Raises KeyError when the id is taken."""
        if session_id in self.sequences:
            raise KeyError(session_id)
        sequence = Sequence(
            session_id=session_id,
            cache=SessionCache(self.pool),
            priority=priority,
            pinned=pinned,
            salt=salt,
            last_used=now,
        )
        self.sequences[session_id] = sequence
        return sequence

    def fork(self, parent: Sequence, session_id: str, position: int, now: float) -> Sequence:
        """A new sequence, not pinned, with the first `position` tokens of another and their KV. Raises KeyError."""
        child = self.open(session_id, priority=parent.priority, salt=parent.salt, now=now)
        child.tokens = parent.tokens[:position]
        child.private = parent.private
        child.cache.share_from(parent.cache, position)
        self.tiers.share(parent.session_id, session_id, position)
        child.seen = max(child.cache.computed, min(parent.seen, position))
        return child

    def rewind(self, sequence: Sequence, position: int) -> None:
        """Cut the ledger back to `position`. Pages that others own are left to them."""
        sequence.truncate(position)
        self.tiers.truncate(sequence.session_id, position)

    def slide(self, sequence: Sequence, keep: int, drop: int) -> None:
        """Drop `drop` tokens after the first `keep`; a turn in flight moves with them."""
        sequence.slide(keep, drop)
        self.tiers.truncate(sequence.session_id, keep)
        if (turn := sequence.turn) is not None:
            turn.start, turn.prompt_end = max(keep, turn.start - drop), max(keep, turn.prompt_end - drop)

    def close(self, session_id: str) -> int:
        """Forget a sequence; returns the pages that became free. Raises ValueError while it has a turn."""
        if self.sequences[session_id].turn is not None:
            raise ValueError(f"session {session_id} has a turn in flight")
        sequence = self.sequences.pop(session_id)
        self.tiers.close(session_id)
        return self.drop(sequence)

    def drop(self, sequence: Sequence, pages: int | None = None) -> int:
        """Forget KV of a sequence from its tail, all of it unless `pages` says how much; returns the pages freed.

        What the prefix index knows of it stays there until it is evicted.
        """
        return sequence.cache.evict(len(sequence.cache.pages) if pages is None else pages)

    def index(self, sequence: Sequence) -> None:
        """Make the whole pages of a sequence known to others of its salt."""
        if sequence.salt is not None and not sequence.private:
            known = sequence.tokens[: sequence.cache.computed]
            self.prefixes.insert(sequence.salt, known, sequence.cache.pages, sequence.last_used)

    def shed(self, sequence: Sequence, pages: int, tier: Tier | None = None) -> int:
        """Take KV from a sequence's tail: a segment goes down a tier if there is room, else `pages` are dropped.

        Returns the pages that became free.
        """
        cache = sequence.cache
        start = max(0, cache.computed - 1) // self.tiers.segment_tokens * self.tiers.segment_tokens
        table = cache.pages[start // PAGE_TOKENS : pages_for(cache.computed)]
        if table and self.tiers.keep(sequence.session_id, start, cache.computed - start, table, tier):
            pages = len(cache.pages) - start // PAGE_TOKENS
        return self.drop(sequence, pages)

    def shared_pages(self, sequence: Sequence) -> int:
        """Pages of a sequence that other sequences hold too. A reader: safe from any thread."""
        pages = list(sequence.cache.pages)
        return sum(self.pool.references(page) > 1 + (page in self.prefixes) for page in pages)

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
        self.tiers.unstage(sequence.session_id)
        self.tiers.touch(sequence.session_id)
        self.index(sequence)

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
        plan.relieved = self._relieve(now)
        return plan

    # Admission

    def _admit(self, plan: Plan, now: float) -> None:
        """Start waiting turns, strictly in order: a turn that does not fit holds back those behind it."""
        while self.waiting and len(self.running) < self.max_running:
            sequence = self.waiting[0]
            found = self._known_prefix(sequence, now)
            if not found:
                self._spare_copy(sequence)
            if not self._fits(sequence, found):
                return
            self.waiting.pop(0)
            self._start(sequence, found, now)
            if (turn := _turn(sequence)).admitted is None:
                turn.admitted = now
                plan.admitted.append(sequence)

    def preview(self, sequence: Sequence) -> Preview:
        """What admission would say of a sequence with a turn that was never submitted. Changes nothing."""
        turn, own = _turn(sequence), sequence.cache
        found = self._known_prefix(sequence, None)
        kept = own.glance(turn.reuse_limit)
        missing = pages_for(turn.promise) - len(found) if found else kept.missing_pages(turn.promise)
        left = own.pages[own.computed // PAGE_TOKENS if found else len(kept.pages) :]
        free = self.pool.free + sum(self.pool.references(page) == 1 for page in left)
        promised = sum(_missing(s) for s in self.running)
        return Preview(
            reused=self._reach(sequence, len(found) * PAGE_TOKENS if found else kept.computed),
            claimed_pages=pages_for(turn.promise),
            evicted_pages=max(0, missing - max(0, free - promised)),
            fits=self._fits(sequence, found),
        )

    def _known_prefix(self, sequence: Sequence, now: float | None) -> list[PageId]:
        """Pages of others that take this turn further than its own do. Never the last token: its logits are needed."""
        turn = _turn(sequence)
        if sequence.salt is None or not turn.reads_prefixes:
            return []
        limit = min(turn.reuse_limit, len(sequence.tokens) - 1)
        found = self.prefixes.match(sequence.salt, sequence.tokens[:limit], now)
        return found if len(found) * PAGE_TOKENS > sequence.cache.computed else []

    def _spare_copy(self, sequence: Sequence) -> None:
        """Where the whole pool has no room for a copy of the page that is written next, its part is computed again."""
        cache = sequence.cache
        if cache.needs_copy and len(cache.pages) + cache.missing_pages(_turn(sequence).promise) > self.pool.capacity:
            self.rewind_pages(sequence)

    def _start(self, sequence: Sequence, found: list[PageId], now: float) -> None:
        """Put a turn into the batch, on the pages that were found for it."""
        turn = _turn(sequence)
        if turn.admitted is None:
            sequence.cache.rewind(turn.reuse_limit)
        turn.adopted = 0
        if found:
            turn.adopted = (len(found) - sequence.cache.computed // PAGE_TOKENS) * PAGE_TOKENS
            sequence.cache.adopt(found)
            sequence.seen = max(sequence.seen, sequence.cache.computed)
        self._plan_restore(sequence)
        turn.running = True
        sequence.last_used = now
        _insert(self.running, sequence)

    def _fits(self, sequence: Sequence, found: list[PageId]) -> bool:
        """Is there room for what the running turns and this one have been promised?"""
        needed = sum(_missing(s) for s in self.running)
        needed += pages_for(_turn(sequence).promise) - len(found) if found else _missing(sequence)
        return needed <= self.pool.free or needed <= self.pool.free + self.evictable_pages(sequence, found)

    # Restoring

    def _plan_restore(self, sequence: Sequence) -> None:
        """What of the turn's context lies below the pool, beyond what is in it, shall come back before it computes."""
        turn, cache = _turn(sequence), sequence.cache
        turn.restored, turn.restored_from = 0, None
        turn.restore_end = self._reach(sequence, cache.computed)
        if turn.restoring(cache.computed):
            self.tiers.need(sequence.session_id, cache.computed, turn.restore_end)
            self.rewind_pages(sequence)

    def _reach(self, sequence: Sequence, computed: int) -> int:
        """How far a turn gets with what lies below the pool, when it has `computed` positions in it."""
        limit = min(_turn(sequence).reuse_limit, len(sequence.tokens) - 1)
        return max(computed, min(self.tiers.slots.reach(sequence.session_id, computed), limit))

    def rewind_pages(self, sequence: Sequence) -> None:
        """Give up a partly filled last page: what is restored begins with a page, and it holds those tokens too."""
        sequence.cache.rewind(sequence.cache.computed // PAGE_TOKENS * PAGE_TOKENS)

    def _restore(self, plan: Plan, now: float) -> None:
        """The next segments of running turns that can be had now; the disk is asked for what comes after them."""
        for sequence in list(self.running):
            turn = _turn(sequence)
            while turn.restoring(sequence.cache.computed + turn.restore_planned) and turn.running:
                if len(plan.restores) >= RESTORES_A_STEP or not self._restore_next(sequence, plan, now):
                    break
        for sequence in (*self.running, *self.waiting):
            turn = _turn(sequence)
            end = turn.restore_end if turn.running else min(turn.reuse_limit, len(sequence.tokens) - 1)
            self.tiers.stage(sequence.session_id, sequence.cache.computed, end, urgent=turn.running)

    def _restore_next(self, sequence: Sequence, plan: Plan, now: float) -> bool:
        """Plan one segment. False: it is still being read, or it is gone."""
        turn = _turn(sequence)
        start = sequence.cache.computed + turn.restore_planned
        slot = self.tiers.slots.at(sequence.session_id, start)
        if slot is None:
            turn.restore_end = start  # the rest was lost on the way, and is computed
            return False
        segment = slot.segment
        if segment.tier is Tier.DISK and not segment.ready:
            return False
        count = min(slot.end, turn.restore_end) - start
        if not self._reserve(sequence, start + count, plan, now):
            return False
        plan.restores.append(Restore(sequence, start, count, segment.key, start - segment.start))
        turn.restore_planned += count
        return True

    def postpone(self, restore: Restore) -> None:
        """A planned restore could not be made yet."""
        _turn(restore.sequence).restore_planned -= restore.count

    def restored(self, restore: Restore, *, found: bool) -> None:
        """A planned restore has been made; or its bytes were not what they should be, and the rest is computed."""
        sequence, turn = restore.sequence, _turn(restore.sequence)
        turn.restore_planned -= restore.count
        if not found:
            turn.restore_end = 0
            self.tiers.lost(restore.key)
        elif restore.start == sequence.cache.computed:
            slot = self.tiers.slots.at(sequence.session_id, restore.start)
            sequence.advance(restore.count)
            turn.restored += restore.count
            turn.restored_from = _lower(turn.restored_from, slot.segment.tier if slot else None)
            self.tiers.restored(sequence.session_id, restore.start)

    # Budget

    def _counts(self) -> dict[str, int]:
        """Tokens each running sequence gets: one for whoever needs only one, the rest of the budget for prompts."""
        ready = [s for s in self.running if s.remaining and not _turn(s).paused and not s.restoring]
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

    def _reserve(self, sequence: Sequence, tokens: int, plan: Plan, now: float) -> bool:
        """Make room for `tokens` positions: from idle KV, then from the youngest turn. False: it gave way itself."""
        while (short := sequence.cache.missing_pages(tokens) - self.pool.free) > 0:
            if self._evict(short, keep=sequence, now=now):
                continue
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        if copied := sequence.cache.reserve(tokens):
            plan.copies.append(copied)
        return True

    def claim(self, sequence: Sequence, tokens: int, now: float) -> bool:
        """Make room for `tokens` positions of a sequence without a turn, from idle KV alone.

        False: there is not as much of it, or running turns have been promised it.
        """
        needed = sequence.cache.missing_pages(tokens)
        promised = sum(_missing(s) for s in self.running)
        if needed and needed + promised > self.pool.free + self.evictable_pages(sequence):
            return False
        while (short := sequence.cache.missing_pages(tokens) - self.pool.free) > 0:
            if not self._evict(short, sequence, now):
                return False
        sequence.cache.reserve(tokens)
        return True

    @property
    def unclaimed_pages(self) -> int:
        """Free pages that no running turn has been promised."""
        return self.pool.free - sum(_missing(s) for s in self.running)

    def borrow(self, tokens: int, now: float) -> SessionCache | None:
        """Pages for `tokens` positions that belong to no session, at the cost of idle KV; None: there are none."""
        needed = pages_for(tokens)
        promised = sum(_missing(s) for s in self.running)
        if needed + promised > self.pool.free + self.evictable_pages():
            return None
        while (short := needed - self.pool.free) > 0:
            if not self._evict(short, None, now):
                return None
        spare = SessionCache(self.pool)
        spare.reserve(tokens)
        self.spares.append(spare)
        return spare

    def give_back(self, spare: SessionCache) -> None:
        """End a loan."""
        self.spares.remove(spare)
        spare.trim()

    def resize(self, pages: int, now: float) -> bool:
        """Hand out at most `pages` pages from now on; idle KV goes until that holds. False: others hold too many."""
        claimed = self.pool.held - self.evictable_pages() + sum(_missing(s) for s in self.running)
        if claimed > pages:
            return False
        while self.pool.held > pages:
            if not self._evict(self.pool.held - pages, None, now):
                return False
        self.pool.resize(pages)
        return True

    def in_eviction_order(self, now: float) -> list[Sequence | Node]:
        """Idle sessions, and prefix pages that no session holds: the first one goes next."""
        keyed: list[tuple[tuple[float, float, int], Sequence | Node]] = [
            ((*_eviction_order(s, now), 1), s) for s in self._evictable(None)
        ]
        unheld = [n for n in reversed(self.prefixes.entries()) if self.pool.references(n.page) == 1]
        keyed += [((0, node.last_used - now, 0), node) for node in unheld]
        return [entry for _, entry in sorted(keyed, key=lambda pair: pair[0])]

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        """Send a running turn back to the queue. Its tokens stay; its KV is now evictable like any other."""
        self.running.remove(sequence)
        turn = _turn(sequence)
        turn.running = False
        turn.restore_end = turn.restore_planned = 0
        plan.restores = [restore for restore in plan.restores if restore.sequence is not sequence]
        turn.promise = max(turn.promise, min(turn.limit, len(sequence.tokens) + PAGE_TOKENS))
        _insert(self.waiting, sequence)
        plan.preempted.append(sequence)

    def _relieve(self, now: float) -> bool:
        """Between the watermarks idle KV goes down a segment a step, before anybody has to wait for its pages."""
        limit = (self._low if self._relieving else self._high) * self.pool.capacity
        self._relieving = self.tiers.enabled and self.pool.held > limit and not self.waiting
        if not self._relieving:
            return False
        pages, moved, before = self.tiers.segment_tokens // PAGE_TOKENS, self.evictions.moved, self.pool.held
        while self._evict(pages, None, now, subtrees=False):
            if self.evictions.moved > moved or self.pool.held <= max(limit, before - pages):
                return True
        return self.pool.held < before

    def _evict(self, pages: int, keep: Sequence | None, now: float, *, subtrees: bool = True) -> bool:
        """Drop up to `pages` pages of whatever is cheapest to lose. False: there is nothing left.

        Sessions lose their tail first. A page that only the prefix index holds counts as an idle session of priority
        0 that was last used when the page was.
        """
        victim = min(self._evictable(keep), key=lambda s: _eviction_order(s, now), default=None)
        orphan = self.prefixes.oldest()
        if victim is None and orphan is None:
            return subtrees and self._evict_subtree()
        if victim is None or (orphan is not None and (0, orphan - now) <= _eviction_order(victim, now)):
            self.prefixes.evict_one()
            self._count_eviction(1, PAGE_TOKENS)
        else:
            before = victim.cache.computed
            freed = self.shed(victim, pages)
            self.shrunk.add(victim.session_id)
            if (kept := self.tiers.slots.reach(victim.session_id, victim.cache.computed)) >= before:
                self.evictions.moved += kept - victim.cache.computed
            else:
                self._count_eviction(freed, before - victim.cache.computed)
        return True

    def take_shrunk(self) -> set[str]:
        """Sessions that have lost KV to others since the last call."""
        shrunk, self.shrunk = self.shrunk, set()
        return shrunk

    def _evict_subtree(self) -> bool:
        """The last resort: a prefix page that pages of running turns follow."""
        if dropped := self.prefixes.evict_subtree():
            self._count_eviction(1, PAGE_TOKENS)
        return dropped

    def _count_eviction(self, pages: int, tokens: int) -> None:
        self.evictions.count += 1
        self.evictions.pages += pages
        self.evictions.tokens += tokens

    def evictable_pages(self, keep: Sequence | None = None, found: list[PageId] | None = None) -> int:
        """Pages that could be had: all but those of running and pinned sequences, and of what `keep` would go on from.

        With `found` that is its own whole pages and then those: a copy of its own that it would give up is no claim.
        """
        kept: set[PageId] = {page for spare in self.spares for page in spare.pages}
        for sequence in self.sequences.values():
            if sequence.running or sequence.pinned or sequence.guards:
                kept.update(sequence.cache.pages)
        if keep is not None:
            whole = keep.cache.computed // PAGE_TOKENS
            kept.update([*keep.cache.pages[:whole], *found[whole:]] if found else keep.cache.pages)
        return self.pool.held - len(kept)

    def _evictable(self, keep: Sequence | None) -> Iterator[Sequence]:
        return (
            s
            for s in self.sequences.values()
            if s.cache.pages and not s.running and not s.pinned and not s.guards and s is not keep
        )

    def check_integrity(self) -> None:
        """Every page has the owners its count says, every turn is in one place. Raises AssertionError."""
        owners = [s.cache.pages for s in self.sequences.values()] + [spare.pages for spare in self.spares]
        self.pool.check_integrity([*owners, self.prefixes.owned()])
        self.prefixes.check_integrity()
        self.tiers.check_integrity()
        for sequence in self.sequences.values():
            places = (sequence in self.running) + (sequence in self.waiting)
            if places != (sequence.turn is not None):
                raise AssertionError(f"session {sequence.session_id}: in {places} places, turn {sequence.turn}")
            if sequence.turn and sequence.turn.restore_planned:
                raise AssertionError(f"session {sequence.session_id}: a restore was planned and not made")
            sequence.cache.check_integrity(idle=sequence.turn is None)
            if sequence.cache.computed > len(sequence.tokens):
                raise AssertionError(f"session {sequence.session_id}: computed {sequence.cache.computed} is too far")


def _turn(sequence: Sequence) -> Turn:
    if sequence.turn is None:
        raise AssertionError(f"session {sequence.session_id} has no turn")
    return sequence.turn


def _missing(sequence: Sequence) -> int:
    """Pages a sequence has been promised and does not hold yet."""
    return sequence.cache.missing_pages(_turn(sequence).promise)


def _eviction_order(sequence: Sequence, now: float) -> tuple[int, float]:
    """Least first: low priority, then long idle and cheap to rebuild per byte.

    A position costs its share of the linear layers, and attention to all before it: twice as much at
    ATTENTION_TOKENS of depth. The tail goes first, so its depth is what counts.
    """
    idle = now - sequence.last_used
    return sequence.priority, -idle / (1 + sequence.cache.computed / ATTENTION_TOKENS)


def _insert(queue: list[Sequence], sequence: Sequence) -> None:
    """Keep a queue in the order of its turns; equal ones stay in the order of arrival."""
    insort_right(queue, sequence, key=lambda s: _turn(s).order)


def _lower(one: Tier | None, other: Tier | None) -> Tier | None:
    return max((tier for tier in (one, other) if tier), key=lambda tier: tier.value, default=None)
