"""A session as the engine sees it: its tokens, how far they are computed, and at most one turn. Integers only.

There is no prefill phase and no decode phase: `computed` catches up with `len(tokens)`.
"""

from array import array
from dataclasses import dataclass, field

from segue_server.cache.segments import Tier
from segue_server.cache.session import SessionCache


@dataclass(slots=True, kw_only=True)
class Turn:
    """One request's claim on a sequence, from its arrival until it leaves. Times are of the engine's clock."""

    request_id: str
    start: int  # ledger length before the turn
    prompt_end: int  # ledger length after its prompt
    limit: int  # ledger length at which it ends; == prompt_end when nothing is sampled
    promise: int  # ledger length that admission must find room for
    reuse_limit: int  # KV from this position on is computed again: the logits that come with it are needed
    arrival: float
    priority: int = 0
    queue_deadline: float = float("inf")
    time_limit: float = float("inf")  # seconds from admission
    reads_prefixes: bool = True  # may take over pages that other sessions computed
    adopted: int = 0  # positions that it took over in its last admission
    restore_end: int = 0  # KV up to here comes from a lower tier before anything is computed
    restore_planned: int = 0  # positions whose restore the step in progress makes
    restored: int = 0  # positions that came from lower tiers in its last admission
    restored_from: Tier | None = None  # the lowest of those tiers
    paused: bool = False  # its reader is too slow
    admitted: float | None = None  # None while it waits for its first admission
    running: bool = False

    def restoring(self, computed: int) -> bool:
        """KV still has to come from a lower tier."""
        return computed < self.restore_end

    @property
    def order(self) -> tuple[int, float]:
        """Who goes first, in the queue and in the pool: priority, then age."""
        return -self.priority, self.arrival


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """The ledger of a session, in memory, and the KV that belongs to it."""

    session_id: str
    cache: SessionCache
    tokens: "array[int]" = field(default_factory=lambda: array("i"))  # 4 bytes a token
    turn: Turn | None = None
    priority: int = 0  # of the session, for eviction
    pinned: bool = False
    guards: int = 0  # who reads its KV just now: nothing of it goes
    salt: str | None = None  # pages are shared with sequences of the same salt only; None = with nobody
    last_used: float = 0.0
    private: bool = False  # its KV came from a caller, who is believed for this session and its forks alone
    lost_by: str = "evicted"  # how it lost KV that it has seen; a label of the counter of recomputed tokens
    seen: int = 0  # positions that have been computed at some time, though their KV may be gone

    @property
    def remaining(self) -> int:
        """Positions that are in the ledger and have no KV yet."""
        return len(self.tokens) - self.cache.computed

    @property
    def running(self) -> bool:
        return self.turn is not None and self.turn.running

    @property
    def restoring(self) -> bool:
        return self.turn is not None and self.turn.restoring(self.cache.computed)

    def advance(self, tokens: int) -> None:
        """Note that a forward pass has computed the next positions."""
        self.cache.advance(tokens)
        self.seen = max(self.seen, self.cache.computed)

    def slide(self, keep: int, drop: int) -> None:
        """Drop `drop` tokens after the first `keep`. What follows has new positions, so its KV is computed again."""
        del self.tokens[keep : keep + drop]
        self.cache.rewind(keep)
        self.seen = min(self.seen, keep)

    def truncate(self, position: int) -> None:
        """Cut the ledger back to `position`, KV included."""
        del self.tokens[position:]
        self.cache.rewind(position)
        self.seen = min(self.seen, position)


def turn_of(sequence: Sequence) -> Turn:
    """The turn of a sequence that is in the queue or in the batch."""
    if sequence.turn is None:
        raise AssertionError(f"session {sequence.session_id} has no turn")
    return sequence.turn
