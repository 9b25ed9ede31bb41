"""Every sequence and the KV it holds: in pages of the pool, in the prefix index, below the pool. Integers only."""

from segue_model.paging import PAGE_TOKENS
from segue_server.cache.pages import PagePool
from segue_server.cache.prefix import PrefixIndex
from segue_server.cache.segments import Tier
from segue_server.cache.session import SessionCache, pages_for
from segue_server.cache.tiers import Tiers
from segue_server.sequence import Sequence


class Holdings:
    """Owns the sequences, the pool and what lies beside and below it. One thread only."""

    def __init__(self, pool: PagePool, tiers: Tiers | None = None) -> None:
        self.pool = pool
        self.tiers = tiers or Tiers(segment_tokens=16 * PAGE_TOKENS, token_bytes=1)
        self.prefixes = PrefixIndex(pool)
        self.sequences: dict[str, Sequence] = {}
        self.spares: list[SessionCache] = []  # pages that are lent for a while, to no sequence

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

    def lend(self, tokens: int) -> SessionCache:
        """Pages for `tokens` positions that belong to no session. Raises OutOfPages."""
        spare = SessionCache(self.pool)
        spare.reserve(tokens)
        self.spares.append(spare)
        return spare

    def give_back(self, spare: SessionCache) -> None:
        """End a loan."""
        self.spares.remove(spare)
        spare.trim()

    def check_integrity(self) -> None:
        """Every page has the owners its count says, and no KV lies beyond a ledger. Raises AssertionError."""
        owners = [s.cache.pages for s in self.sequences.values()] + [spare.pages for spare in self.spares]
        self.pool.check_integrity([*owners, self.prefixes.owned()])
        self.prefixes.check_integrity()
        self.tiers.check_integrity()
        for sequence in self.sequences.values():
            sequence.cache.check_integrity(idle=sequence.turn is None)
            if sequence.cache.computed > len(sequence.tokens):
                raise AssertionError(f"session {sequence.session_id}: computed {sequence.cache.computed} is too far")
