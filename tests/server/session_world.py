"""A server without its service, its one caller, and everything that must hold between the two.

The engine, the scheduler, the pool, the prefix index, the tiers and the ledger's file are the real ones; below them are
integers (integer_engine.py), above them plain lists (session_model.py).
"""

from dataclasses import dataclass, field
from pathlib import Path

from tests.server.integer_engine import POSITION_BYTES, IntegerEngine, IntegerRunner, MemoryOffload
from tests.server.session_model import EOS, Chance, Known, Talk, pick

from segue_model.arrays import Floats
from segue_model.paging import PAGE_TOKENS
from segue_model.sampling import Sampling
from segue_server.cache.segments import Tier
from segue_server.cache.session import SessionCache
from segue_server.cache_admin import CacheAdmin
from segue_server.jobs import TurnSpec
from segue_server.kv_control import Guarded, KvControl
from segue_server.ledger.journal import Journal
from segue_server.ledger.records import Record, SessionCreated, SessionDeleted
from segue_server.ledger.store import LedgerStore
from segue_server.requests import CommitPolicy, SessionSettings

PAGES = 18
SEGMENT = 2 * PAGE_TOKENS
CONTEXT = 8 * PAGE_TOKENS  # tokens of a ledger at most; what the smallest pool holds
POLICIES = tuple(CommitPolicy)
GREEDY = Sampling(temperature=0.0)
SLOW_READER_LIMIT = 30.0  # seconds
END_STEPS = 600  # in which every turn ends once nothing is in its way


@dataclass(frozen=True)
class Snapshot:
    """What an export has read."""

    tokens: list[int]
    forged: bool
    blocks: list[Floats] = field(default_factory=list)  # a segment each


@dataclass
class Export:
    """A snapshot that is being read."""

    session: Known
    guarded: Guarded
    snapshot: Snapshot


class World:
    """A server without its service, and what its one caller knows."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "ledger.db"
        self.sessions: dict[str, Known] = {}
        self.snapshots: list[Snapshot] = []
        self.now = 1000.0
        self._names = 0
        self._requests = 0
        self._boot()

    def _boot(self) -> None:
        """A process begins: it has the ledger's file, and no KV."""
        self.exports: list[Export] = []
        self.spares: list[SessionCache] = []
        self.journal = Journal()
        self.ledger = LedgerStore(self._path)
        memory = MemoryOffload(
            host_bytes=3 * SEGMENT * POSITION_BYTES, disk_bytes=6 * SEGMENT * POSITION_BYTES, segment_tokens=SEGMENT
        )
        self.engine = IntegerEngine(
            IntegerRunner(PAGES),
            max_running=5,
            step_tokens=3 * PAGE_TOKENS,
            slow_reader_limit=SLOW_READER_LIMIT,
            offload=memory,
            journal=self.journal,
            clock=lambda: self.now,
        )
        self.scheduler, self.holdings = self.engine.scheduler, self.engine.holdings
        self.tiers = self.holdings.tiers
        self.control = KvControl(self.engine)
        self.admin = CacheAdmin(self.engine)

    def close(self) -> None:
        self.ledger.close()

    def crash(self) -> None:
        """kill -9: what was said is in the file, everything else is gone."""
        self.settle()
        self.ledger.close()
        self._boot()
        found = {session.session_id: session for session in self.ledger.recover()}
        assert found.keys() == self.sessions.keys()
        for name, known in self.sessions.items():
            session = found[name]
            assert session.tokens.tolist() == known.tokens, f"{name}: the file has another ledger"
            known.talk, known.guarded, known.forged = None, False, False
            salt = session.settings.cache_salt
            assert salt == known.salt
            self.engine.restore(name, session.tokens, priority=0, pinned=known.pinned, salt=salt)

    # What must hold

    def settle(self) -> None:
        """What has been noted goes into the file, then events to their readers; then everything is looked at."""
        if entries := self.journal.take():
            self.ledger.apply([entry.record for entry in entries])
        for sink, event in self.engine.jobs.take_outbox():
            sink.deliver(event)
        self.check()

    def check(self) -> None:
        """No page without an owner, no count that is wrong, every byte in one class, every ledger as it was said."""
        self.scheduler.check_integrity()
        assert self.engine.figures.kv_bytes().held == self.holdings.pool.held * self.engine.runner.page_bytes
        for tier, held in ((Tier.HOST, self.engine.memory.host), (Tier.DISK, self.engine.memory.disk)):
            pending = {order.key for order in self.tiers._orders}
            assert self.engine.figures.kv_below(tier).held == self.tiers.use[tier].used
            assert held.keys() ^ self.tiers.use[tier].segments.keys() <= pending, f"{tier}: bytes of no segment"
        assert self.holdings.sequences.keys() == self.sessions.keys()
        for name, known in self.sessions.items():
            assert self.holdings.sequences[name].tokens.tolist() == known.tokens, f"{name} has other tokens"

    def rest(self) -> None:
        """With nothing in its way, every turn ends."""
        self._unblock()
        for _ in range(END_STEPS):
            if not any(s.talk for s in self.sessions.values()):
                return
            self.step()
            self.settle()
        waiting = [s.name for s in self.sessions.values() if s.talk]
        raise AssertionError(f"turns that do not end, with nobody in their way: {waiting}")

    def drain(self) -> None:
        """When all sessions are gone nothing is left."""
        self.rest()
        for known in list(self.sessions.values()):
            self.delete(known)
        self.holdings.prefixes.flush()
        self.engine.mover.carry_out()
        self.settle()
        assert self.holdings.pool.held == 0
        assert not self.engine.memory.host | self.engine.memory.disk

    def _unblock(self) -> None:
        for export in list(self.exports):
            self.end_export(export)
        while self.spares:
            self.holdings.give_back(self.spares.pop())
        self.engine.memory.slow = False
        for known in self.sessions.values():
            known.pinned = False
            self.engine.adjust(known.name, priority=0, pinned=False)
            if known.talk:
                known.talk.full = False

    # Helpers

    def step(self) -> None:
        self.now += 0.01
        self.engine.step()

    def submit(
        self,
        chance: Chance,
        known: Known,
        prompt: list[int],
        *,
        most: int = 0,
        deferred: bool = False,
        bypass: bool = False,
        patience: float = float("inf"),
    ) -> None:
        self._requests += 1
        start, prompt_end = len(known.tokens), len(known.tokens) + len(prompt)
        policy = pick(chance, POLICIES)
        talk = known.talk = Talk(known, f"r{self._requests}", start, prompt_end, most, deferred, policy)
        known.tokens += prompt
        self.engine.jobs.submit(
            TurnSpec(
                request_id=talk.request_id,
                session_id=known.name,
                prompt=prompt,
                arrival=self.now,
                sink=talk,
                samples=most > 0,
                max_tokens=most,
                max_context_tokens=CONTEXT,
                sampling=GREEDY,
                eos_token_ids=frozenset([EOS]),
                commit_policy=policy,
                priority=chance.below(2),
                queue_timeout=patience,
                reads_prefixes=not bypass,
                defer_compute=deferred,
            )
        )

    def delete(self, known: Known) -> None:
        for export in [e for e in self.exports if e.session is known]:
            self.end_export(export)
        self.engine.close(known.name)
        del self.sessions[known.name]
        self.record(SessionDeleted(known.name))

    def end_export(self, export: Export) -> None:
        self.exports.remove(export)
        self.control.unguard(export.guarded)
        export.session.guarded = False

    def add(self, known: Known) -> Known:
        self.sessions[known.name] = known
        return known

    def new_name(self) -> str:
        self._names += 1
        return f"s{self._names}"

    def record(self, *records: Record) -> None:
        for record in records:
            self.journal.append(record)


def created(known: Known) -> SessionCreated:
    settings = SessionSettings(cache_salt=known.salt)
    return SessionCreated(session_id=known.name, settings=settings, create_time=0.0, last_used_time=0.0)
