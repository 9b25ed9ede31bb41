"""Random histories over a socket, with kill -9 between them: the server says what a plain list of tokens says.

One client does one thing after another; the server is a process with its ledger on disk, on the native runner, whose
bits do not depend on what was cached. Every greedy answer is proved by one prefill of its ledger in a session of its
own.
"""

import random
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.crashing import OTHER_PORTS, QUICK, START_TIMEOUT, Forked
from tests.e2e.rescoring import check_greedy

from segue_client import AdminClient, Client, KvBudget, Session, Tokens, TurnOptions
from segue_client.options import CommitPolicy

KIB = 1 << 10
PAGE = 4 * KIB  # bytes of the tiny model's page in bfloat16
POOL = 96 * PAGE
SMALL_POOL = 48 * PAGE
WORDS = ("--runner", "native", "--threads", 1, "--kv-bytes", POOL, *OTHER_PORTS)
TIERS = ("--kv-host-bytes", POOL, "--kv-disk-bytes", 4 * POOL)
SESSIONS = 8
LONGEST = 480  # tokens of a ledger; two of them fit the small pool
LONG_ANSWER = 240  # tokens
VOCABULARY = 256  # bytes: neither <s> nor </s>
POLICIES: tuple[CommitPolicy, ...] = ("keep_partial", "rollback", "keep_prompt")


def greedy(prompt: list[int], most: int, policy: CommitPolicy = "keep_partial") -> TurnOptions:
    return {
        "tokens": prompt or None,
        "max_tokens": most,
        "temperature": 0.0,
        "ignore_eos": True,
        "commit_policy": policy,
    }


@dataclass
class Known:
    """A session as it was told."""

    tokens: list[int] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)  # positions that the model chose

    def cut(self, position: int) -> "Known":
        return Known(self.tokens[:position], [p for p in self.answered if p < position])

    def says(self, tokens: list[int]) -> None:
        self.tokens += tokens

    def answers(self, tokens: list[int]) -> None:
        self.answered += range(len(self.tokens), len(self.tokens) + len(tokens))
        self.tokens += tokens


class Server:
    """The same ledger through several processes."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._folder = folder
        where = ("--ledger", folder / "ledger.db", "--kv-disk-dir", folder / "kv")
        self._words = ("--model", model, *where, *TIERS, *WORDS)
        self.lives = 0
        self.start()

    def start(self) -> None:
        self.lives += 1
        self.process = Forked(self._folder / f"log-{self.lives}", *self._words)
        self.client = Client(self.process.target, channel_options=QUICK)
        self.client.wait_ready(START_TIMEOUT)
        admin = re.search(r"admin on (\S+)\n", self.process.text())
        assert admin
        self.admin = AdminClient(admin[1])

    def kill(self) -> None:
        self.process.kill()
        self.client.close()
        self.admin.close()


class History:
    """What one client does, and what it knows."""

    def __init__(self, server: Server, folder: Path, seed: int) -> None:
        self.server = server
        self.chance = random.Random(seed)
        self.known: dict[str, Known] = {}
        self.done: Counter[str] = Counter()
        self.proved = 0
        self.usage: Counter[str] = Counter()
        self._folder = folder
        self._snapshots: list[tuple[Path, Known]] = []
        self._names = 0

    def go_on(self, steps: int) -> None:
        operations = {
            self.create: 4,
            self.generate: 10,
            self.leave: 3,
            self.append: 4,
            self.fork: 3,
            self.rewind: 3,
            self.delete: 2,
            self.move: 4,
            self.export: 2,
            self.import_: 2,
            self.verify: 1,
            self.flush: 1,
            self.resize: 1,
        }
        for operation in self.chance.choices(list(operations), list(operations.values()), k=steps):
            operation()
            self.done[operation.__name__] += 1

    # Operations

    def create(self) -> None:
        if len(self.known) < SESSIONS:
            name, prompt = self._name(), self._prompt()
            self.server.client.create_session(session_id=name, tokens=prompt or None, cache_salt="shared")
            self.known[name] = Known(prompt)

    def generate(self) -> None:
        if not (session := self._any(room=80)):
            return
        known, prompt = self.known[session.id], self._prompt()
        answer = session.generate(**greedy(prompt, self.chance.randint(1, 32)))
        usage = answer.usage
        assert usage.context_tokens == len(known.tokens)
        assert usage.prompt_tokens == len(prompt)
        assert usage.generated_tokens == len(answer.token_ids)
        reused = usage.session_reused_tokens + usage.prefix_reused_tokens + usage.restored_tokens
        assert usage.computed_tokens + reused == usage.context_tokens + usage.prompt_tokens
        self.usage.update(
            generated=usage.generated_tokens,
            computed=usage.computed_tokens,
            session=usage.session_reused_tokens,
            prefix=usage.prefix_reused_tokens,
            restored=usage.restored_tokens,
        )
        known.says(prompt)
        known.answers(list(answer.token_ids))
        self._compare(session)

    def leave(self) -> None:
        """Cancelled on the way; what stays is what the policy says."""
        if not (session := self._any(room=300)):
            return
        before, prompt = self.known[session.id], self._prompt()
        policy = self.chance.choice(POLICIES)
        with session.stream(**greedy(prompt, LONG_ANSWER, policy)) as turn:
            for count, event in enumerate(turn.events()):
                if isinstance(event, Tokens) and count > 2:
                    break
        self._adopt(session, before, prompt, at_least=0 if policy == "rollback" else len(prompt))
        kept = len(self.known[session.id].tokens) - len(before.tokens)
        if policy != "keep_partial" and kept != len(prompt) + LONG_ANSWER:  # the turn was over before it was cancelled
            assert kept == (len(prompt) if policy == "keep_prompt" else 0)

    def append(self) -> None:
        if (session := self._any(room=40)) and (prompt := self._prompt()):
            session.append_context(tokens=prompt, defer_compute=self.chance.random() < 0.5)
            self.known[session.id].says(prompt)
            self._compare(session)

    def fork(self) -> None:
        count = self.chance.randint(1, 3)
        if (session := self._any()) and len(self.known) + count <= SESSIONS:
            position = self.chance.randint(0, len(self.known[session.id].tokens))
            for child in session.fork(count=count, position=position, new_session_id=self._name()):
                self.known[child.id] = self.known[session.id].cut(position)
                self._compare(child)

    def rewind(self) -> None:
        if session := self._any():
            self._prove(session.id)
            position = self.chance.randint(0, len(self.known[session.id].tokens))
            session.rewind(position=position)
            self.known[session.id] = self.known[session.id].cut(position)
            self._compare(session)

    def delete(self) -> None:
        if session := self._any():
            self._prove(session.id)
            session.delete()
            del self.known[session.id]

    def move(self) -> None:
        if session := self._any():
            session.move(self.chance.choice(("device", "host", "disk", "none")))
            self._compare(session)

    def export(self) -> None:
        if session := self._any():
            path = self._folder / f"{session.id}-{len(self._snapshots)}.segue"
            session.export(path, tokens_only=self.chance.random() < 0.3)
            self._snapshots.append((path, self.known[session.id].cut(LONGEST * 2)))

    def import_(self) -> None:
        if self._snapshots and len(self.known) < SESSIONS:
            path, known = self.chance.choice(self._snapshots)
            session = self.server.client.import_session(path, session_id=self._name())
            self.known[session.id] = known.cut(LONGEST * 2)
            self._compare(session)

    def verify(self) -> None:
        """Every logit from the cache against one computed afresh."""
        if session := self._any():
            try:
                assert self.server.admin.verify(session.id).bit_equal
            except KvBudget:
                return

    def flush(self) -> None:
        self.server.admin.flush(idle_sessions=self.chance.random() < 0.5, prefixes=True)

    def resize(self) -> None:
        self.server.admin.set_budget("device", self.chance.choice((SMALL_POOL, POOL)))

    def crash(self) -> None:
        """kill -9 in the middle of a turn; the ledger has at least what was received."""
        session = self._any(room=300) or self.server.client.create_session(session_id=self._name())
        self.known.setdefault(session.id, Known())
        before, prompt, received = self.known[session.id], [7, *self._prompt()], 0
        with session.stream(**greedy(prompt, LONG_ANSWER)) as turn:
            for event in turn.events():
                received += len(event.token_ids) if isinstance(event, Tokens) else 0
                if received > 20:
                    break
            self.server.kill()
        self.server.start()
        self._adopt(self.server.client.get_session(session.id), before, prompt, at_least=len(prompt) + received)
        self.compare_all()

    # What must hold

    def compare_all(self) -> None:
        there = {info.session_id: info.position for info in self.server.client.list_sessions()}
        assert there == {name: len(known.tokens) for name, known in self.known.items()}
        for name in self.known:
            self._compare(self.server.client.get_session(name))

    def end(self) -> None:
        """Every answer is proved, and when all sessions are gone no page has an owner."""
        self.compare_all()
        for name in list(self.known):
            self._prove(name)
            self.server.client.delete_session(name)
        self.server.admin.flush(prefixes=True)
        for tier in self.server.admin.stats().tiers:
            assert tier.free_bytes == tier.capacity_bytes, tier
        assert not list(self.server.admin.entries())

    def _compare(self, session: Session) -> None:
        assert list(session.read_tokens().token_ids) == self.known[session.id].tokens, session.id

    def _prove(self, name: str) -> None:
        known = self.known[name]
        self.proved += check_greedy(self.server.client, known.tokens, [p for p in known.answered if p], name)

    def _adopt(self, session: Session, before: Known, prompt: list[int], *, at_least: int) -> None:
        """After a turn whose end was not seen: its prompt and the beginning of its answer, if anything."""
        found = list(session.refresh().read_tokens().token_ids)
        known = self.known[session.id] = before.cut(len(before.tokens))
        assert len(found) >= len(before.tokens) + at_least
        if len(found) > len(before.tokens):
            known.says(prompt)
            known.answers(found[len(known.tokens) :])
        assert found == known.tokens

    def _any(self, *, room: int = 0) -> Session | None:
        """A session whose ledger has room for so many tokens, and is not empty."""
        names = [name for name, known in self.known.items() if 0 < len(known.tokens) <= LONGEST - room]
        return self.server.client.get_session(self.chance.choice(names)) if names else None

    def _prompt(self) -> list[int]:
        words = [self.chance.randrange(VOCABULARY) for _ in range(self.chance.randint(0, 20))]
        return [1, 2, 3] * 12 + words if self.chance.random() < 0.2 else words

    def _name(self) -> str:
        self._names += 1
        return f"s-{self._names:03}"


def test_the_server_says_what_a_list_of_tokens_says(tiny_model: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    server = Server(tiny_model, tmp_path)
    try:
        history = History(server, tmp_path, seed=1)
        for _ in range(2):
            history.go_on(300)
            history.crash()
        history.go_on(200)
        history.end()
    finally:
        server.kill()
    took, kills = time.monotonic() - began, server.lives - 1
    print(f"\n{history.done.total()} operations and {kills} kills in {took:.0f} s; {history.proved} tokens proved")
    print(dict(history.done), dict(history.usage))
    assert history.proved > 1000
    assert min(history.usage.values()) > 0, "not every source of KV was used"
