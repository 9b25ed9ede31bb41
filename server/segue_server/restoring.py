"""KV of a turn that comes back from below the pool before the turn computes. Integers only.

A restore is planned a segment at a time, made by whoever owns the bytes, and then settled here or postponed.
"""

from segue_server.cache.segments import Tier
from segue_server.cache.tiers import Tiers
from segue_server.plan import Restore
from segue_server.sequence import Sequence, turn_of


def begin(tiers: Tiers, sequence: Sequence) -> None:
    """What of the turn's context lies below the pool, beyond what is in it, shall come back before it computes."""
    turn, cache = turn_of(sequence), sequence.cache
    turn.restored, turn.restored_from = 0, None
    turn.restore_end = reach(tiers, sequence, cache.computed)
    if turn.restoring(cache.computed):
        tiers.need(sequence.session_id, cache.computed, turn.restore_end)
        cache.rewind_to_page()  # what is restored begins with a page, and it holds those tokens too


def reach(tiers: Tiers, sequence: Sequence, computed: int) -> int:
    """How far a turn gets with what lies below the pool, when it has `computed` positions in it."""
    limit = min(turn_of(sequence).reuse_limit, len(sequence.tokens) - 1)
    return max(computed, min(tiers.slots.reach(sequence.session_id, computed), limit))


def next_segment(tiers: Tiers, sequence: Sequence) -> Restore | None:
    """What could be restored next. None: it is still being read, or it is gone."""
    turn = turn_of(sequence)
    start = sequence.cache.computed + turn.restore_planned
    slot = tiers.slots.at(sequence.session_id, start)
    if slot is None:
        turn.restore_end = start  # the rest was lost on the way, and is computed
        return None
    segment = slot.segment
    if segment.tier is Tier.DISK and not segment.ready:
        return None
    count = min(slot.end, turn.restore_end) - start
    return Restore(sequence, start, count, segment.key, start - segment.start)


def read_ahead(tiers: Tiers, sequence: Sequence) -> None:
    """Ask the disk for what a turn will need, whether it has its place or still waits."""
    turn = turn_of(sequence)
    end = turn.restore_end if turn.running else min(turn.reuse_limit, len(sequence.tokens) - 1)
    tiers.stage(sequence.session_id, sequence.cache.computed, end, urgent=turn.running)


def postpone(restore: Restore) -> None:
    """A planned restore could not be made yet."""
    turn_of(restore.sequence).restore_planned -= restore.count


def settle(tiers: Tiers, restore: Restore, *, found: bool) -> None:
    """A planned restore has been made; or its bytes were not what they should be, and the rest is computed."""
    sequence, turn = restore.sequence, turn_of(restore.sequence)
    turn.restore_planned -= restore.count
    if not found:
        turn.restore_end = 0
        tiers.lost(restore.key)
    elif restore.start == sequence.cache.computed:
        slot = tiers.slots.at(sequence.session_id, restore.start)
        sequence.advance(restore.count)
        turn.restored += restore.count
        turn.restored_from = _lower(turn.restored_from, slot.segment.tier if slot else None)
        tiers.restored(sequence.session_id, restore.start)


def _lower(one: Tier | None, other: Tier | None) -> Tier | None:
    return max((tier for tier in (one, other) if tier), key=lambda tier: tier.value, default=None)
