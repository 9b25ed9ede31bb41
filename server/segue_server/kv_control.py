"""KV of single sessions on order: moved, read for a snapshot, taken in from one. Engine thread only.

Everything is done a segment a call, so that the caller lets steps of the batch pass in between. The session has no
turn; its caller sees to that, and this looks again.
"""

from dataclasses import dataclass
from enum import Enum

from segue_model.arrays import Floats
from segue_model.paging import PAGE_TOKENS
from segue_server.cache.segments import Tier
from segue_server.cache.session import pages_for
from segue_server.engine import Engine
from segue_server.errors import FeatureDisabled, KvBudget, Quota, SessionBusy, SessionNotFound
from segue_server.mover import Block
from segue_server.page_claims import claim, unclaimed_pages
from segue_server.sequence import Sequence


class Progress(Enum):
    """How a portion of a move went."""

    DONE = "nothing is left to move"
    AGAIN = "a portion is done"
    WAIT = "the disk is being read"


@dataclass(frozen=True, slots=True)
class Guarded:
    """A session that is being read, and how many of its positions have KV."""

    sequence: Sequence
    tokens: int


class KvControl:
    """One per engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._scheduler = engine.scheduler
        self._holdings = engine.holdings
        self._tiers = engine.holdings.tiers
        self._mover = engine.mover

    # Moving

    def move(self, session_id: str, tier: Tier, start: int) -> Progress:
        """A portion of what brings the KV from `start` on into `tier`.

        Raises FeatureDisabled for a tier that this server does not have, KvBudget when it has no room.
        """
        sequence = self._idle(session_id)
        self._mover.take_news()
        try:
            return self._up(sequence) if tier is Tier.DEVICE else self._down(sequence, tier, start)
        finally:
            self._mover.carry_out()

    def _down(self, sequence: Sequence, tier: Tier, start: int) -> Progress:
        if tier in self._tiers.use and not self._tiers.use[tier].budget:
            option = f"--kv-{tier.name.lower()}-bytes"
            raise FeatureDisabled(f"this server has no {tier.name} tier: {option} is 0", capability=option)
        keep = pages_for(start)
        if len(sequence.cache.pages) > keep:
            self._out_of_pool(sequence, tier, keep)
            return Progress.AGAIN
        if tier is Tier.NONE:
            self._tiers.truncate(sequence.session_id, start)
            return Progress.DONE
        if tier is Tier.DISK:
            moved = self._tiers.push_down(sequence.session_id, start)
            if moved is None:
                raise self._no_room(tier)
            return Progress.AGAIN if moved else Progress.DONE
        return self._up_to_host(sequence, start)

    def _out_of_pool(self, sequence: Sequence, tier: Tier, keep: int) -> None:
        """The last segment leaves the pool; for NONE all of them do."""
        cache, size = sequence.cache, self._tiers.segment_tokens
        first = 0 if tier is Tier.NONE else max(0, cache.computed - 1) // size * size
        tokens = cache.computed - first
        if tier is not Tier.NONE and tokens:
            table = cache.pages[first // PAGE_TOKENS : pages_for(cache.computed)]
            if not self._tiers.keep(sequence.session_id, first, tokens, table, tier):
                raise self._no_room(tier)
        known = sequence.tokens[: cache.computed]
        left = max(keep, first // PAGE_TOKENS)
        self._holdings.drop(sequence, len(cache.pages) - left)
        if sequence.salt is not None:
            self._holdings.prefixes.forget(sequence.salt, known, left)

    def _up_to_host(self, sequence: Sequence, start: int) -> Progress:
        segment = self._tiers.first_on_disk(sequence.session_id, start)
        if segment is None:
            return Progress.DONE
        if not segment.ready:
            self._tiers.stage(sequence.session_id, segment.start, segment.start + 1, urgent=True)
            return Progress.WAIT
        if not self._tiers.promote(segment):
            raise self._no_room(Tier.HOST)
        return Progress.AGAIN

    def _up(self, sequence: Sequence) -> Progress:
        """The next segment comes back into the pool."""
        cache = sequence.cache
        if self._tiers.slots.reach(sequence.session_id, cache.computed) <= cache.computed:
            return Progress.DONE
        cache.rewind_to_page()
        start = cache.computed
        slot = self._tiers.slots.at(sequence.session_id, start)
        if slot is None:
            return Progress.DONE
        segment = slot.segment
        if segment.tier is Tier.DISK and not segment.ready:
            self._tiers.stage(sequence.session_id, start, slot.end, urgent=True)
            return Progress.WAIT
        if not claim(self._scheduler, sequence, slot.end, self._engine.clock()):
            raise self._no_room(Tier.DEVICE)
        self._mover.carry_out()  # what made room is copied down before its pages are written
        count = slot.end - start
        if self._mover.bring(sequence, start, count, segment.key, start - segment.start):
            sequence.advance(count)
            self._tiers.restored(sequence.session_id, start)
        else:
            self._tiers.lost(segment.key)
        cache.trim()
        return Progress.AGAIN

    def moved(self, session_id: str) -> None:
        """A move has ended, one way or the other: let go of what was read for it."""
        self._tiers.unstage(session_id)
        self._mover.carry_out()

    # Reading and taking in

    def guard(self, session_id: str) -> Guarded:
        """Keep what there is of a session's KV where it is, until `unguard`."""
        sequence = self._idle(session_id)
        sequence.guards += 1
        self._tiers.guard(session_id)
        return Guarded(sequence, self._tiers.slots.reach(session_id, sequence.cache.computed))

    def unguard(self, guarded: Guarded) -> None:
        """The session may be gone by now."""
        self._tiers.unguard(guarded.sequence.session_id)
        guarded.sequence.guards -= 1

    def read(self, guarded: Guarded, start: int) -> Block | None:
        """KV from `start` on, a multiple of a segment; None: it is gone, and its session with it."""
        sequence = guarded.sequence
        if self._holdings.sequences.get(sequence.session_id) is not sequence:
            return None
        return self._mover.block(sequence, start)

    def arrived(self, session_id: str, *, private: bool, mismatch: bool) -> None:
        """A session has come in with its tokens; with KV, which is believed for this session alone, it is private."""
        sequence = self._idle(session_id)
        sequence.private = private
        sequence.lost_by = "mismatch" if mismatch else "restarted"

    def adopt(self, session_id: str, start: int, kv: Floats) -> bool:
        """Take in up to a segment of KV from elsewhere, in order from 0 on. False: there is no room for it.

        Into the pool while pages are free, else into a tier below it, else into the pool in place of idle KV.
        """
        sequence, tokens = self._idle(session_id), kv.shape[3]
        cache = sequence.cache
        end, pages = start + tokens, pages_for(start + tokens) - len(cache.pages)
        into_pool = cache.computed == start
        if not (into_pool and pages <= unclaimed_pages(self._scheduler)):
            key = self._tiers.add(session_id, start, tokens)
            if key is not None:
                self._mover.store.put(key, kv)
                self._mover.carry_out()
                return True
        if not into_pool or not claim(self._scheduler, sequence, end, self._engine.clock()):
            return False
        self._mover.carry_out()
        self._engine.runner.import_pages(cache.pages[start // PAGE_TOKENS :], kv)
        sequence.advance(tokens)
        return True

    # Helpers

    def _idle(self, session_id: str) -> Sequence:
        sequence = self._holdings.sequences.get(session_id)
        if sequence is None:
            raise SessionNotFound(session_id, f"session {session_id!r} was deleted meanwhile")
        if sequence.turn is not None:
            message = f"session {session_id!r} has a turn in flight"
            raise SessionBusy(message, activeRequestId=sequence.turn.request_id)
        return sequence

    def _no_room(self, tier: Tier) -> KvBudget:
        if tier is Tier.DEVICE:
            size = self._holdings.pool.capacity * self._engine.runner.page_bytes
            return KvBudget("the pool is held by running and pinned sessions", quota=Quota("kv_bytes", size))
        budget = self._tiers.use[tier].budget
        message = f"the {tier.name} tier of {budget} bytes has no room that could be made free"
        return KvBudget(message, quota=Quota(f"kv_{tier.name.lower()}_bytes", budget))
