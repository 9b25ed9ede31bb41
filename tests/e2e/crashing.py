"""Servers that are killed, and users who remember exactly what they were told.

The model: one user owns a session, so at most one of its operations is unanswered when the server dies. Everything
that was answered must be there afterwards; the unanswered one may have happened, in part if it is a turn, or not.
"""

import multiprocessing
import os
import random
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import segue_server.app  # noqa: F401 - `main` imports it when it runs; here it is to be preloaded
from segue_client import Client, Finished, Session, SessionTokens, Tokens, TurnOptions, Unavailable
from segue_server.__main__ import main

START_TIMEOUT = 60.0  # seconds
OTHER_PORTS = ("--admin-port", 0, "--metrics-port", 0)
SMALL = ("--threads", 1, "--kv-bytes", "16MiB")
USERS = 4
SESSIONS_EACH = 3
LONGEST_LEDGER = 500
VOCABULARY = 256  # bytes: neither <s> nor </s>
QUICK: list[tuple[str, int | str]] = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),  # what is acknowledged is asked for once
    ("grpc.initial_reconnect_backoff_ms", 100),
]


class Forked:
    """`segue-server` with these words, in a process forked from one that has imported it already.

    A start then costs what the server itself does, and not its imports.
    """

    def __init__(self, log: Path, *words: object) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._log = log
        self.process = context.Process(target=_serve, args=([str(word) for word in words], str(log)))
        self.process.start()

    @property
    def target(self) -> str:
        """Its address, once it serves."""
        end = time.monotonic() + START_TIMEOUT
        while not (found := re.search(r"serving .* on (\S+)\n", self.text())):
            assert self.process.is_alive(), f"it does not serve:\n{self.text()}"
            assert time.monotonic() < end, "it does not serve in time"
            time.sleep(0.01)
        return found[1]

    def text(self) -> str:
        """All that it has said so far."""
        return self._log.read_text() if self._log.exists() else ""

    def stop(self) -> None:
        """SIGTERM, and the end that follows."""
        self.process.terminate()
        assert self.wait() == 0, self.text()

    def kill(self) -> None:
        """SIGKILL: nothing of the server runs after this."""
        self.process.kill()
        self.process.join()

    def wait(self) -> int | None:
        """The exit code; None if it still runs after a minute."""
        self.process.join(60)
        return self.process.exitcode


def _serve(words: list[str], log: str) -> None:
    os.dup2(os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600), sys.stderr.fileno())
    sys.exit(main(words))


class Host:
    """Where the same server dies and comes back: one address, one ledger file."""

    def __init__(self, model: Path, ledger: Path) -> None:
        port = _free_port()
        self.target = f"127.0.0.1:{port}"
        self._log = ledger.with_suffix(".log")
        self._words = ("--model", model, "--ledger", ledger, "--port", port, *OTHER_PORTS, *SMALL)
        self._server: Forked | None = None

    def start(self) -> None:
        self._server = Forked(self._log, *self._words)

    def kill(self) -> None:
        """SIGKILL."""
        if self._server:
            self._server.kill()

    @contextmanager
    def client(self) -> Iterator[Client]:
        """A connection of its own, to a server that is ready."""
        with Client(self.target, channel_options=QUICK) as client:
            client.wait_ready(START_TIMEOUT)
            yield client


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


# ---------------------------------------------------------------------------------------------- what a user was told


@dataclass(frozen=True)
class TurnInFlight:
    """The input that was sent, and the tokens that have come."""

    prompt: list[int]
    received: list[int] = field(default_factory=list)

    def may_have_left(self, before: list[int], found: list[int]) -> bool:
        """Nothing if nothing has come; else the prompt, and at least what has come."""
        if found == before and not self.received:
            return True
        known = [*before, *self.prompt, *self.received]
        return found[: len(known)] == known


@dataclass(frozen=True)
class Rewind:
    position: int

    def may_have_left(self, before: list[int], found: list[int]) -> bool:
        return found in (before, before[: self.position])


@dataclass(frozen=True)
class Delete:
    def may_have_left(self, before: list[int], found: list[int]) -> bool:
        return found == before


Operation = TurnInFlight | Rewind | Delete


@dataclass
class Told:
    """One session as its user knows it."""

    tokens: list[int] = field(default_factory=list)
    ended: list[tuple[str, int, int]] = field(default_factory=list)  # (request id, start, end) of each turn
    unanswered: Operation | None = None

    def cut(self, position: int) -> None:
        del self.tokens[position:]
        self.ended = [(name, start, min(end, position)) for name, start, end in self.ended if start < position]

    def check(self, session_id: str, found: SessionTokens) -> None:
        """Is `found` what this user may find after a crash? Raises AssertionError."""
        tokens = list(found.token_ids)
        what = f"session {session_id}, {self.unanswered} unanswered, {len(self.tokens)} tokens known"
        if self.unanswered is None:
            assert tokens == self.tokens, f"{what}: found {len(tokens)} tokens, {tokens}"
        else:
            assert self.unanswered.may_have_left(self.tokens, tokens), f"{what}: {self.tokens} became {tokens}"
        spans = [(span.request_id, span.start_position, span.end_position) for span in found.turns]
        in_flight = int(isinstance(self.unanswered, TurnInFlight) and len(tokens) > len(self.tokens))
        if isinstance(self.unanswered, Rewind) and len(tokens) < len(self.tokens):
            self.cut(self.unanswered.position)
        assert spans[: len(self.ended)] == self.ended, f"{what}: turns {self.ended} became {spans}"
        assert len(spans) == len(self.ended) + in_flight, f"{what}: turns {self.ended} became {spans}"

    def adopt(self, found: SessionTokens) -> None:
        """What is there after a crash is what holds from now on."""
        self.tokens = list(found.token_ids)
        self.ended = [(span.request_id, span.start_position, span.end_position) for span in found.turns]
        self.unanswered = None


# ------------------------------------------------------------------------------------------------------------ a user


class User(threading.Thread):
    """Does one thing after another in sessions of its own until the server is gone."""

    def __init__(self, number: int, client: Client, sessions: dict[str, Told], gone: threading.Event) -> None:
        super().__init__(name=f"user-{number}")
        self.client = client
        self.sessions = sessions
        self.gone = gone
        self.random = random.Random(time.monotonic_ns() + number)
        self.opening: tuple[str, list[int]] | None = None  # a session whose creation or fork is unanswered
        self.deleted: set[str] = set()
        self.done = 0
        self.error: BaseException | None = None
        self._number = number

    def run(self) -> None:
        try:
            while True:
                self.act()
                self.done += 1
        except Unavailable as error:
            self.error = None if self.gone.is_set() else error
        except BaseException as error:  # noqa: BLE001 - shown by the test
            self.error = error

    def act(self) -> None:
        if not self.sessions:
            self.create()
            return
        session_id = self.random.choice(list(self.sessions))
        session = self.client.get_session(session_id)
        told = self.sessions[session_id]
        if len(self.sessions) > SESSIONS_EACH:
            self.delete(session)
        elif len(told.tokens) > LONGEST_LEDGER:
            self.rewind(session, told)
        else:
            acts = (self.talk, self.talk, self.talk, self.talk, self.fork, self.rewind, self.append)
            self.random.choice(acts)(session, told)
            if self.random.random() < 0.2:
                self.create()

    def prompt(self) -> list[int]:
        return self.random.choices(range(VOCABULARY), k=self.random.randint(1, 40))

    def create(self) -> None:
        name, prefix = self.new_name(), self.prompt() if self.random.random() < 0.5 else []
        self.opening = name, prefix
        session = self.client.create_session(session_id=name, tokens=prefix or None)
        found = session.read_tokens() if prefix else None
        self.sessions[name] = Told(prefix, [(turn.request_id, 0, len(prefix)) for turn in found.turns] if found else [])
        self.opening = None

    def talk(self, session: Session, told: Told) -> None:
        start = len(told.tokens)
        turn = told.unanswered = TurnInFlight(self.prompt())
        length = self.random.choice((1, 3, 8, 40, 200))
        options = TurnOptions(tokens=turn.prompt, max_tokens=length, temperature=0.0, ignore_eos=True, detach_grace=0.0)
        with session.stream(**options) as stream:
            for event in stream.events():
                if isinstance(event, Tokens):
                    turn.received.extend(event.token_ids)
                elif isinstance(event, Finished):
                    told.tokens += [*turn.prompt, *turn.received]
                    told.ended.append((stream.request_id, start, event.position))
                    told.unanswered = None
                    assert event.position == len(told.tokens)

    def append(self, session: Session, told: Told) -> None:
        start, turn = len(told.tokens), TurnInFlight(self.prompt())
        told.unanswered = turn
        done = session.append_context(tokens=turn.prompt, defer_compute=self.random.random() < 0.5)
        told.tokens += turn.prompt
        told.ended.append((done.request_id, start, done.position))
        told.unanswered = None

    def rewind(self, session: Session, told: Told) -> None:
        position = self.random.randint(0, len(told.tokens))
        told.unanswered = Rewind(position)
        session.rewind(position=position)
        told.cut(position)
        told.unanswered = None

    def fork(self, session: Session, told: Told) -> None:
        position = self.random.randint(0, len(told.tokens))
        name = self.new_name()
        child = Told(list(told.tokens), list(told.ended))
        child.cut(position)
        self.opening = name, child.tokens
        session.fork(position=position, new_session_id=name)
        self.sessions[name] = child
        self.opening = None

    def delete(self, session: Session) -> None:
        self.sessions[session.id].unanswered = Delete()
        session.delete()
        del self.sessions[session.id]
        self.deleted.add(session.id)

    def new_name(self) -> str:
        return f"u{self._number}-{self.random.getrandbits(64):x}"


# ---------------------------------------------------------------------------------------------------------- the check


@dataclass
class Crowd:
    """All users over all lives of the server."""

    host: Host
    known: list[dict[str, Told]] = field(default_factory=lambda: [{} for _ in range(USERS)])
    deleted: set[str] = field(default_factory=set)
    operations: int = 0
    turns_cut: int = 0
    tokens_unseen: int = 0  # in the ledger after a crash, and never received

    def live_and_die(self, seconds: float) -> list[User]:
        """One life of the server: users work in it until it is killed after `seconds`."""
        gone = threading.Event()
        with self.host.client() as client:
            users = [User(number, client, sessions, gone) for number, sessions in enumerate(self.known)]
            for user in users:
                user.start()
            time.sleep(seconds)
            gone.set()
            self.host.kill()
            for user in users:
                user.join(60)
        for user in users:
            if user.error:
                raise AssertionError(f"{user.name} failed") from user.error
            self.deleted |= user.deleted
            self.operations += user.done
        return users

    def check(self, client: Client, users: Sequence[User]) -> list[str]:
        """Everything that was acknowledged is there, and nothing else. Returns the sessions cut in a turn."""
        there = {info.session_id: info.position for info in client.list_sessions()}
        assert not self.deleted & there.keys(), "deleted sessions are back"
        cut = [name for user in users for name in self._check_user(client, user, there)]
        known = {name for sessions in self.known for name in sessions}
        assert there.keys() == known, f"sessions that nobody asked for: {there.keys() - known}"
        self.turns_cut += len(cut)
        return cut

    def _check_user(self, client: Client, user: User, there: dict[str, int]) -> Iterator[str]:
        if user.opening and user.opening[0] in there:
            name, tokens = user.opening
            found = client.get_session(name).read_tokens()
            assert list(found.token_ids) in ([], tokens), f"new session {name} with other tokens"
            user.sessions[name] = Told(list(found.token_ids))
            user.sessions[name].adopt(found)
        for name, told in list(user.sessions.items()):
            if name not in there and isinstance(told.unanswered, Delete):
                del user.sessions[name]
                continue
            assert name in there, f"session {name} is lost"
            found = client.get_session(name).read_tokens()
            assert there[name] == len(found.token_ids)
            told.check(name, found)
            if isinstance(told.unanswered, TurnInFlight) and len(found.token_ids) > len(told.tokens):
                sent = len(told.tokens) + len(told.unanswered.prompt) + len(told.unanswered.received)
                self.tokens_unseen += len(found.token_ids) - sent
                yield name
            told.adopt(found)
