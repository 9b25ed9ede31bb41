"""Everything that can happen to sessions, one operation at a time. After each of them everything must hold.

The operations are written once: hypothesis draws them where a failure should shrink, a seeded generator where many
should pass.
"""

import random
from collections.abc import Callable, Iterator

from tests.server.integer_engine import POSITION_BYTES, VOCAB, ids
from tests.server.session_model import Chance, Known, Talk, pick
from tests.server.session_world import (
    CONTEXT,
    PAGES,
    POLICIES,
    SEGMENT,
    SLOW_READER_LIMIT,
    Export,
    Snapshot,
    World,
    created,
)

from segue_model.paging import PAGE_TOKENS
from segue_server import page_claims, snapshots
from segue_server.cache.segments import LOWER, Tier
from segue_server.cache.session import pages_for
from segue_server.errors import FeatureDisabled, KvBudget
from segue_server.kv_control import Progress
from segue_server.ledger.records import SessionForked, Truncated
from segue_server.requests import CancelCause

SESSIONS = 12
SALTS = ("a", "a", "b", None)
SYSTEM = ([1] * 40, [2] * 16 + [3] * 20, [1] * 32 + [4] * 7)  # prompts that are equal in part
TIER_BUDGETS = (0, SEGMENT, 3 * SEGMENT, 6 * SEGMENT)  # positions

# What a caller does


def open_session(world: World, chance: Chance) -> None:
    """A session, sometimes pinned: one at a time, so that there is always room for the others."""
    if len(world.sessions) >= SESSIONS:
        return
    pinned = not chance.below(8) and not any(s.pinned for s in world.sessions.values())
    known = world.add(Known(world.new_name(), salt=pick(chance, SALTS), pinned=pinned))
    world.engine.open(known.name, priority=chance.below(2), pinned=pinned, salt=known.salt)
    world.record(created(known))


def generate(world: World, chance: Chance) -> None:
    if known := _find(world, chance, lambda s: s.idle):
        prompt = _prompt(world, chance, known)
        most = chance.below(24) + 1
        patience = 0.05 if not chance.below(16) else float("inf")
        if (known.tokens or prompt) and len(known.tokens) + len(prompt) + most <= CONTEXT:
            bypass = not chance.below(8)
            world.submit(chance, known, prompt, most=most, bypass=bypass, patience=patience)


def fill(world: World, chance: Chance) -> None:
    """A turn that may take all that a session can have. Open-ended ones are promised less, and may give way."""
    known = _find(world, chance, lambda s: s.idle and 0 < len(s.tokens) < CONTEXT)
    if known:
        world.submit(chance, known, [], most=CONTEXT - len(known.tokens))
        turn = world.holdings.sequences[known.name].turn
        assert turn
        if chance.below(3):
            turn.promise = min(turn.limit, turn.prompt_end + PAGE_TOKENS)


def append(world: World, chance: Chance) -> None:
    if known := _find(world, chance, lambda s: s.idle):
        prompt = _prompt(world, chance, known)
        if prompt and len(known.tokens) + len(prompt) <= CONTEXT:
            world.submit(chance, known, prompt, deferred=bool(chance.below(2)))


def cancel(world: World, chance: Chance) -> None:
    """With the turn's own commit policy, or another."""
    if known := _find(world, chance, lambda s: s.talk is not None):
        talk = _talk(known)
        talk.cancelled = pick(chance, (None, *POLICIES))
        assert world.engine.jobs.cancel(talk.request_id, pick(chance, tuple(CancelCause)), policy=talk.cancelled)


def fork(world: World, chance: Chance) -> None:
    """At any position, into several, of a session that may be talking."""
    count = 1 + chance.below(3)
    known = _find(world, chance, lambda _: True)
    if known is None or len(world.sessions) + count > SESSIONS:
        return
    at = chance.below(len(known.tokens) + 1)
    salt = known.salt if chance.below(3) else pick(chance, SALTS)
    children = [Known(world.new_name(), known.tokens[:at], salt, forged=known.forged) for _ in range(count)]
    held = world.holdings.pool.held
    assert world.engine.fork(known.name, [c.name for c in children], at, salt=salt) == at
    assert world.holdings.pool.held == held, "a fork takes no page"
    for child in children:
        world.add(child)
        world.record(SessionForked(created(child), known.name, at))


def rewind(world: World, chance: Chance) -> None:
    if known := _find(world, chance, lambda s: s.idle):
        at = chance.below(len(known.tokens) + 1)
        world.engine.rewind(known.name, at)
        del known.tokens[at:]
        world.record(Truncated(known.name, at))


def delete(world: World, chance: Chance) -> None:
    """Also while it is being exported."""
    if known := _find(world, chance, lambda s: s.talk is None):
        world.delete(known)


def pause(world: World, chance: Chance) -> None:
    """A reader falls behind, or catches up."""
    if known := _find(world, chance, lambda s: s.talk is not None):
        talk = _talk(known)
        talk.full = not talk.full


# What goes out and comes in


def export_begins(world: World, chance: Chance) -> None:
    if known := _find(world, chance, lambda s: s.idle and len(s.tokens) > PAGE_TOKENS and len(world.exports) < 2):
        known.guarded = True
        snapshot = Snapshot(list(known.tokens), forged=known.forged)
        export = Export(known, world.control.guard(known.name), snapshot)
        world.exports.append(export)


def export_goes_on(world: World, chance: Chance) -> None:
    """Reads a segment; at the end the snapshot is kept, in the place of an older one."""
    if not world.exports:
        return
    export = pick(chance, world.exports)
    blocks = export.snapshot.blocks
    start = len(blocks) * SEGMENT
    block = world.control.read(export.guarded, start) if start < export.guarded.tokens else None
    if block is None:
        world.end_export(export)
        world.snapshots = [*world.snapshots[-3:], export.snapshot]
        return
    kv = block.kv if block.key is None or block.kv is not None else world.engine.memory.load(block.key)
    if kv is None:
        world.end_export(export)  # its bytes were lost
        return
    blocks.append(kv[:, :, :, : block.tokens])


def import_(world: World, chance: Chance) -> None:
    """With the tokens only or with KV, which is believed for this session and its forks alone: it may be forged."""
    if not world.snapshots or len(world.sessions) >= SESSIONS:
        return
    snapshot = pick(chance, world.snapshots)
    known = world.add(Known(world.new_name(), list(snapshot.tokens), pick(chance, SALTS)))
    blocks = snapshot.blocks if chance.below(3) else []
    known.forged = bool(blocks) and (snapshot.forged or not chance.below(2))
    if known.forged:
        blocks = [kv + 1 for kv in blocks]
    world.engine.restore(known.name, ids(known.tokens), priority=0, pinned=False, salt=known.salt)
    world.control.arrived(known.name, private=bool(blocks), mismatch=False)
    for number, kv in enumerate(blocks):
        if not world.control.adopt(known.name, number * SEGMENT, kv):
            break
    world.record(created(known), *snapshots.records(known.name, known.tokens, [], world.now))


# What an operator does


def move(world: World, chance: Chance) -> None:
    """Up, down, or out of every tier: that is eviction. A disk that is too slow ends it half way."""
    known = _find(world, chance, lambda s: s.idle)
    if known is None:
        return
    tier, start = pick(chance, tuple(Tier)), pick(chance, (0, 0, SEGMENT))
    waits = 0
    try:
        while waits < 3 and (progress := world.control.move(known.name, tier, start)) is not Progress.DONE:
            waits += progress is Progress.WAIT
    except (KvBudget, FeatureDisabled):
        pass
    finally:
        world.control.moved(known.name)


def flush(world: World, chance: Chance) -> None:
    what = chance.below(3)
    world.admin.flush(idle_sessions=what != 1, prefixes=what != 0, salt=pick(chance, (None, "a", "b")))


def set_pool(world: World, chance: Chance) -> None:
    """Never smaller than what one turn may be promised."""
    pages = pick(chance, (pages_for(CONTEXT), pages_for(CONTEXT) + 4, PAGES))
    _budget(world, Tier.DEVICE, pages * PAGE_TOKENS)


def set_tier(world: World, chance: Chance) -> None:
    _budget(world, pick(chance, LOWER), pick(chance, TIER_BUDGETS))


def _budget(world: World, tier: Tier, positions: int) -> None:
    try:
        world.admin.set_budget(tier, positions * POSITION_BYTES)
    except KvBudget:
        return


def borrow(world: World, chance: Chance) -> None:
    """Pages of no session, as a verification takes them."""
    if len(world.spares) < 2:
        spare = page_claims.borrow(world.scheduler, 1 + chance.below(3 * PAGE_TOKENS), world.now)
        world.engine.mover.carry_out()
        world.spares += [spare] if spare else []


def give_back(world: World, chance: Chance) -> None:
    if world.spares:
        world.holdings.give_back(world.spares.pop(chance.below(len(world.spares))))


# What happens by itself


def step(world: World, chance: Chance) -> None:
    world.step()


def wait(world: World, chance: Chance) -> None:
    """Readers that are behind lose their turn, turns without patience their place."""
    world.now += SLOW_READER_LIMIT / 2
    world.step()


def disk_is_slow(world: World, chance: Chance) -> None:
    world.engine.memory.slow = not world.engine.memory.slow


def disk_fails(world: World, chance: Chance) -> None:
    """A file is damaged."""
    if files := sorted(world.engine.memory.disk):
        world.engine.memory.damaged.add(pick(chance, files))


def step_fails(world: World, chance: Chance) -> None:
    world.engine.integers.fails_next = True
    world.step()
    world.engine.integers.fails_next = False


def come_to_rest(world: World, chance: Chance) -> None:
    world.rest()


def crash(world: World, chance: Chance) -> None:
    world.crash()


def _prompt(world: World, chance: Chance, known: Known) -> list[int]:
    """New words, or those that others went on with from here."""
    here = len(known.tokens)
    others = [s.tokens for s in world.sessions.values() if len(s.tokens) > here and s.tokens[:here] == known.tokens]
    if not here:
        others += SYSTEM
    if others and chance.below(2):
        return pick(chance, others)[here : here + 2 * SEGMENT]
    return [1 + chance.below(VOCAB - 1) for _ in range(chance.below(20))]


def _find(world: World, chance: Chance, which: Callable[[Known], bool]) -> Known | None:
    found = [known for known in world.sessions.values() if which(known)]
    return pick(chance, found) if found else None


def _talk(known: Known) -> Talk:
    assert known.talk
    return known.talk


Operation = Callable[[World, Chance], None]

WEIGHTS: dict[Operation, int] = {  # of the seeded generator
    step: 500,
    generate: 120,
    fill: 40,
    append: 40,
    open_session: 60,
    fork: 30,
    rewind: 30,
    delete: 50,
    cancel: 20,
    pause: 10,
    export_begins: 20,
    export_goes_on: 50,
    import_: 30,
    move: 40,
    flush: 10,
    set_pool: 10,
    set_tier: 10,
    borrow: 5,
    give_back: 10,
    wait: 5,
    disk_is_slow: 5,
    disk_fails: 5,
    step_fails: 5,
    come_to_rest: 5,
    crash: 2,
}


class Seeded(random.Random):
    """Choices of a generator."""

    def below(self, count: int) -> int:
        return int(self.random() * count)


def histories(world: World, seed: int, steps: int) -> Iterator[Operation]:
    """Drive a world through `steps` operations, each looked at; yields what was done."""
    chance = Seeded(seed)
    operations = list(WEIGHTS)
    for operation in chance.choices(operations, list(WEIGHTS.values()), k=steps):
        operation(world, chance)
        world.settle()
        yield operation
