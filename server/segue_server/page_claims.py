"""Pages for whoever has no turn: a move, a snapshot, a verification, a smaller pool.

They come from idle KV alone, and what the running turns have been promised stays theirs. Integers only.
"""

from segue_server.cache.session import SessionCache, pages_for
from segue_server.scheduler import Scheduler
from segue_server.sequence import Sequence


def claim(scheduler: Scheduler, sequence: Sequence, tokens: int, now: float) -> bool:
    """Make room for `tokens` positions of a sequence without a turn.

    False: there is not as much idle KV, or running turns have been promised it.
    """
    pool, evictor, cache = scheduler.holdings.pool, scheduler.evictor, sequence.cache
    needed = cache.missing_pages(tokens)
    if needed and needed + scheduler.promised > pool.free + evictor.evictable_pages(sequence):
        return False
    while (short := cache.missing_pages(tokens) - pool.free) > 0:
        if not evictor.evict(short, keep=sequence, now=now):
            return False
    cache.reserve(tokens)
    return True


def borrow(scheduler: Scheduler, tokens: int, now: float) -> SessionCache | None:
    """Pages for `tokens` positions that belong to no session, until `Holdings.give_back`; None: there are none."""
    pool, evictor, needed = scheduler.holdings.pool, scheduler.evictor, pages_for(tokens)
    if needed + scheduler.promised > pool.free + evictor.evictable_pages():
        return None
    while (short := needed - pool.free) > 0:
        if not evictor.evict(short, now=now):
            return None
    return scheduler.holdings.lend(tokens)


def resize(scheduler: Scheduler, pages: int, now: float) -> bool:
    """Hand out at most `pages` pages from now on; idle KV goes until that holds. False: others hold too many."""
    pool, evictor = scheduler.holdings.pool, scheduler.evictor
    if pool.held - evictor.evictable_pages() + scheduler.promised > pages:
        return False
    while pool.held > pages:
        if not evictor.evict(pool.held - pages, now=now):
            return False
    pool.resize(pages)
    return True


def unclaimed_pages(scheduler: Scheduler) -> int:
    """Free pages that no running turn has been promised."""
    return scheduler.holdings.pool.free - scheduler.promised
