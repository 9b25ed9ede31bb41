"""The durable ledger over a real server: a clean stop and restart, a file that cannot be used, a disk that is full."""

import contextlib
import resource
import shutil
import sqlite3
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.e2e.crashing import OTHER_PORTS, QUICK, SMALL, Forked
from transformers import LlamaForCausalLM

from segue_client import Client, FinishReason, LedgerUnavailable, SegueError, SessionExpired, SessionNotFound

GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture
def ledger(tmp_path):
    return tmp_path / "ledger.db"


@pytest.fixture
def serve_ledger(tiny_model, ledger, tmp_path):
    """Starts the tiny model on the test's ledger file; kills what is left of it after the test."""
    servers = []

    def start(*words, path=ledger, model=tiny_model):
        log = tmp_path / f"server-{len(servers)}.log"
        servers.append(Forked(log, "--model", model, "--ledger", path, "--port", 0, *OTHER_PORTS, *SMALL, *words))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


def connect(server):
    """A client that reports the first failure: no retries."""
    return Client(server.target, channel_options=QUICK)


def everything(client):
    """All that is durable of all sessions: what the server says of each, its tokens, and where its turns lie."""
    found = {}
    for listed in client.list_sessions():
        session = client.get_session(listed.session_id)
        info = session.info
        for name in ("cache", "last_used_time", "expire_time"):  # KV is not kept; times are compared on their own
            info.ClearField(name)
        tokens = session.read_tokens()
        found[session.id] = (info, tokens.token_ids, list(tokens.turns))
    return found


def used_times(client):
    return {info.session_id: info.last_used_time.ToNanoseconds() / 1e9 for info in client.list_sessions()}


# --------------------------------------------------------------------------------------------------- a clean restart


def converse(client):
    """Sessions of every kind of history."""
    plain = client.create_session(session_id="plain", text="You are terse.", labels={"team": "a"}, temperature=0.5)
    plain.stream(text="Hello", max_tokens=8).result()
    plain.generate(text="more", max_tokens=4, **GREEDY)
    plain.update(display_name="Ada", labels={"team": "b", "x": "y"}, ttl=1800, priority=3, pinned=True)

    cut = client.create_session(session_id="cut", display_name="cut twice")
    for text in ("one", "two", "three"):
        cut.generate(text=text, max_tokens=10, **GREEDY)
    cut.rewind(turn=-1)
    cut.rewind(position=cut.position - 4)

    slid = client.create_session(session_id="slid", max_context_tokens=64, context_policy="slide", keep_tokens=8)
    for text in ("a short one", "and one that makes it slide", "and another one"):
        slid.generate(text=text, max_tokens=40, **GREEDY)

    for policy in ("keep_partial", "rollback", "keep_prompt"):
        left = client.create_session(session_id=policy.replace("_", "-"), commit_policy=policy, tokens=[1, 2, 3])
        with left.stream(text="left early", max_tokens=4000, **GREEDY) as turn:
            next(iter(turn))
        left.append_context(text="context only", defer_compute=True)

    stopped = client.create_session(session_id="stopped")
    first = stopped.generate(text="find", max_tokens=6, **GREEDY)
    stopped.rewind(position=0)
    stopped.generate(text="find", stop_token_ids=[first.token_ids[2]], max_tokens=6, **GREEDY)
    client.create_session(session_id="empty", cache_salt="tenant", seed=3)

    plain.fork(new_session_id="fork", position=plain.position - 2, pinned=False)
    with client.get_session("empty").stream(text="busy", max_tokens=2000, **GREEDY) as turn:
        pieces = iter(turn)
        next(pieces)
        client.get_session("empty").fork(new_session_id="fork-of-busy")
    client.get_session("fork-of-busy").generate(text="goes on", max_tokens=3, **GREEDY)

    client.create_session(session_id="deleted").delete()
    client.create_session(session_id="expired", ttl=0.2)
    wait_for(lambda: raises(SessionExpired, client.get_session, "expired"))


def wait_for(condition, timeout=10.0):
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.05)


def raises(kind, call, *args):
    try:
        call(*args)
    except kind:
        return True
    return False


def expiry(client, name):
    with pytest.raises(SessionExpired) as caught:
        client.get_session(name)
    return caught.value.expire_time


def test_a_clean_stop_and_restart_changes_nothing(serve_ledger):
    """Positions, etags, turns, settings, labels, origins and tombstones are equal before and after SIGTERM."""
    server = serve_ledger()
    with connect(server) as client:
        converse(client)
        before, used, expired = everything(client), used_times(client), expiry(client, "expired")
    server.stop()
    server = serve_ledger()
    with connect(server) as client:
        after = everything(client)
        assert after.keys() == before.keys()
        for name in before:
            assert after[name] == before[name], name
        assert used_times(client) == pytest.approx(used, abs=1.0)
        assert expiry(client, "expired") == expired
        with pytest.raises(SessionNotFound):
            client.get_session("deleted")
        assert client.get_session("plain").generate(text="again", max_tokens=3).position > 0
    server.stop()


def test_a_turn_that_the_drain_ends_is_kept_as_its_reader_saw_it(serve_ledger):
    """SIGTERM in a turn: Finished{DRAINING} and the restarted server agree on position, tokens and reason."""
    server = serve_ledger("--drain-grace", 0.2)
    with connect(server) as client:
        session = client.create_session(session_id="long")
        with session.stream(text="on and on", max_tokens=8000, **GREEDY) as turn:
            pieces = iter(turn)
            next(pieces)
            server.process.terminate()
            for _ in pieces:
                pass
        assert turn.finish_reason is FinishReason.DRAINING
        etag = session.etag
    assert server.wait() == 0
    with connect(serve_ledger()) as client:
        session = client.get_session("long")
        found = session.read_tokens()
        assert session.position == turn.completion.position == len(found.token_ids)
        assert session.etag == etag
        assert found.token_ids[-len(turn.token_ids) :] == turn.token_ids
        (span,) = found.turns
        assert (span.request_id, span.finish_reason) == (turn.request_id, turn.finished.finish_reason)


# ----------------------------------------------------------------------------------------- files that cannot be used


def assert_refused(server, *words):
    """Exit code 2 and one line that says why."""
    code = server.wait()
    log = server.text()
    assert code == 2, log
    complaints = [line for line in log.splitlines() if line.startswith("segue-server: ")]
    assert len(complaints) == 1, log
    assert "Traceback" not in log
    for word in words:
        assert str(word) in complaints[0]


def unwritable_folder(tmp_path):
    """Permissions do not bind root: it gets a mount where no file can be made."""
    folder = tmp_path / "readonly"
    folder.mkdir(mode=0o500)
    try:
        (folder / "probe").touch()
    except OSError:
        return folder
    return Path("/sys")


def test_folders_without_place_for_a_file_are_refused(serve_ledger, tmp_path):
    """A read-only folder, a missing one, and a folder in the file's place."""
    readonly, missing, folder = unwritable_folder(tmp_path) / "l.db", tmp_path / "no" / "l.db", tmp_path
    servers = [(path, serve_ledger(path=path)) for path in (readonly, missing, folder)]
    for path, server in servers:
        assert_refused(server, path)


def test_a_second_server_does_not_get_the_file(serve_ledger, spawn, tiny_model, ledger):
    """It says that the file is in use; the first one does not notice, and after its end the file can be had."""
    first = serve_ledger()
    with connect(first) as client:
        session = client.create_session(session_id="mine")
        second = spawn("--model", tiny_model, "--ledger", ledger, "--port", 0, *OTHER_PORTS)
        assert_refused(second, ledger, "another process has it open")
        session.generate(text="undisturbed", max_tokens=3, **GREEDY)
    first.stop()
    with connect(serve_ledger()) as client:
        assert client.get_session("mine").position == session.position


@pytest.fixture
def used_ledger(serve_ledger, ledger):
    """A file that a server has left."""
    server = serve_ledger()
    with connect(server) as client:
        for number in range(8):
            client.create_session(session_id=f"session-{number}").append_context(tokens=[number] * 1000)
    server.stop()
    return ledger


def with_noise(path):
    """Noise over the middle pages."""
    data = bytearray(path.read_bytes())
    page = 4096
    for start in range(page, len(data), page):
        data[start : start + 512] = bytes((7 * i + start) % 251 for i in range(512))
    path.write_bytes(data)


def cut_in_half(path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def with_a_bad_header(path):
    path.write_bytes(b"x" * 100 + path.read_bytes()[100:])


def of_a_later_version(path):
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 99")


def test_damaged_files_are_refused_and_left_alone(serve_ledger, used_ledger, tmp_path):
    """Noise, a cut, a bad header, a later schema: exit code 2, the path, and not a byte of the file changed."""
    servers = []
    for damage in (with_noise, cut_in_half, with_a_bad_header, of_a_later_version):
        path = tmp_path / f"{damage.__name__}.db"
        shutil.copy(used_ledger, path)
        damage(path)
        servers.append((path, path.read_bytes(), serve_ledger(path=path)))
    for path, data, server in servers:
        assert_refused(server, path)
        assert path.read_bytes() == data, path


def test_a_ledger_of_another_model_is_refused_and_both_are_named(serve_ledger, used_ledger, tiny_model, tmp_path):
    """Tokens mean nothing to another model. The file can still be used with its own."""
    other = tmp_path / "other-model"
    model = LlamaForCausalLM.from_pretrained(tiny_model)
    torch.nn.init.normal_(model.lm_head.weight, std=0.3)
    model.save_pretrained(other)
    shutil.copy(tiny_model / "tokenizer.json", other)
    with connect(serve_ledger(path=tmp_path / "fresh.db", model=other)) as client:
        theirs = client.model_info().fingerprint
    refused = serve_ledger(model=other)
    assert_refused(refused, theirs)
    with connect(serve_ledger()) as client:
        ours = client.model_info().fingerprint
        assert len(list(client.list_sessions())) == 8
    assert ours in refused.text()


# ------------------------------------------------------------------------------------------------------ no room left


class SizeLimit:
    """RLIMIT_FSIZE of the serving process: no file may grow beyond what the log of the ledger takes now."""

    def __init__(self, path, server):
        self.log = path.with_name(path.name + "-wal")
        self.pid = server.process.pid

    def fill(self):
        size = self.log.stat().st_size
        _, self.hard = resource.prlimit(self.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (size, self.hard))

    def free(self):
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (self.hard, self.hard))


class FullVolume:
    """A small file system, filled by somebody else."""

    def __init__(self, path):
        self.ballast = path.with_name("ballast")

    def fill(self):
        with contextlib.suppress(OSError), self.ballast.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass

    def free(self):
        self.ballast.unlink()


@pytest.fixture
def volume(tmp_path):
    """A tmpfs of 16 MiB, where the rights suffice to mount one."""
    folder = tmp_path / "volume"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "none", folder], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("no rights to mount a tmpfs")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_the_server_outlives_a_file_that_may_not_grow(serve_ledger, ledger):
    """EFBIG in the middle of a turn; see `outlive`."""
    server = serve_ledger()
    assert server.target
    outlive(serve_ledger, server, SizeLimit(ledger, server), ledger)


def test_the_server_outlives_a_full_volume(serve_ledger, volume, request):
    """ENOSPC in the middle of a turn; see `outlive`."""
    path = volume / "ledger.db"
    server = serve_ledger(path=path)
    request.addfinalizer(server.kill)
    outlive(serve_ledger, server, FullVolume(path), path)


def outlive(serve_ledger, server, disk, path):
    """While nothing can be written every turn and call gets LEDGER_FAILED and leaves no trace; then all goes on.

    What the server says when there is room again is what the next process finds after a SIGKILL.
    """
    with connect(server) as client:
        kept, changed, renamed = (client.create_session(session_id=name) for name in ("kept", "changed", "renamed"))
        expected = kept.generate(text="the one before", max_tokens=20, **GREEDY)
        changed.generate(text="will be rewound", max_tokens=5, **GREEDY)
        before = kept.read_tokens()
        read = fail_in_a_turn(kept, disk)
        print(f"the turn failed after {read} tokens")
        assert kept.refresh().position == expected.position
        assert kept.read_tokens() == before
        refuse_all(client, kept, changed, renamed)
        disk.free()
        wait_for(lambda: not raises(LedgerUnavailable, lambda: kept.generate(max_tokens=3)))
        kept.rewind(position=expected.position)
        again = kept.generate(text="the one before", max_tokens=20, **GREEDY)
        client.create_session(session_id="later").append_context(tokens=[1, 2, 3])
        now = everything(client)
        assert now.keys() >= {"kept", "later"}
        assert not now.keys() & {"new", "child", "prefixed"}
    server.kill()
    survivor = serve_ledger(path=path)
    with connect(survivor) as client:
        found = everything(client)
        assert found.keys() == now.keys()
        for name in now:
            assert found[name] == now[name], name
        assert client.get_session("kept").position == again.position
    survivor.stop()


def fail_in_a_turn(session, disk):
    """Fill the disk while the turn runs; returns the tokens that came before it failed."""
    filling = threading.Timer(0.1, disk.fill)
    with session.stream(text="cut short", max_tokens=7000, **GREEDY) as turn:
        events = turn.events()
        next(events)
        filling.start()
        with pytest.raises(LedgerUnavailable, match="LEDGER_FAILED: the server cannot write its ledger") as caught:
            for _ in events:
                pass
    filling.join()
    assert str(session) not in str(caught.value)
    return len(turn.token_ids)


def refuse_all(client, kept, changed, renamed):
    """Every call that changes something."""
    calls = {
        "turn": lambda: kept.generate(text="x", max_tokens=3),
        "append": lambda: kept.append_context(text="x"),
        "create": lambda: client.create_session(session_id="new"),
        "create with a prefix": lambda: client.create_session(session_id="prefixed", text="x"),
        "fork": lambda: kept.fork(new_session_id="child"),
        "update": lambda: renamed.update(labels={"a": "b"}),
        "rewind": lambda: changed.refresh().rewind(position=1),
    }
    for name, call in calls.items():
        with pytest.raises(SegueError) as caught:
            call()
        assert isinstance(caught.value, LedgerUnavailable), f"{name}: {caught.value!r}"
