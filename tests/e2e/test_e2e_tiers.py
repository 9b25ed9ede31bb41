"""KV below the pool and between machines, over real sockets: what is moved, exported or restored answers the same."""

import io
import json
import random
import resource
import signal
import stat
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.e2e.rescoring import check_greedy
from typer.testing import CliRunner

from segue.v1 import types_pb2
from segue_client import (
    AdminClient,
    AsyncClient,
    Client,
    FeatureDisabled,
    SessionBusy,
    SnapshotCorrupt,
    SnapshotIncompatible,
)
from segue_client.cli.app import app

FREE_PORTS = ("--port", "0", "--admin-port", "0", "--metrics-port", "0")
MIB = 1 << 20
START_BOUND = 10.0  # seconds in which every turn must have its first token, whatever has to be restored for it


def greedy(session, **options):
    return session.generate(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **options})


def test_a_conversation_goes_on_on_another_server_after_the_first_was_killed(spawn, tmp_path):
    """The real model. With its KV only the last token and the new ones are computed; without it, everything."""
    words = ("--threads", 1, "--kv-bytes", "256MiB", *FREE_PORTS)
    first = spawn(*words)
    snapshot, tokens_only = tmp_path / "chat.segue", tmp_path / "tokens.segue"
    with Client(first.target) as client:
        session = client.create_session(system="You are a helpful assistant.")
        session.chat("What is the capital of France?", temperature=0, max_tokens=16).result()
        session.export(snapshot)
        session.export(tokens_only, tokens_only=True)
        position = session.position
        expected = session.chat("And of Italy?", temperature=0, max_tokens=16).result()
    first.send(signal.SIGKILL)
    first.wait()
    assert stat.S_IMODE(snapshot.stat().st_mode) == 0o600
    second = spawn(*words)
    with Client(second.target) as client:
        moved = client.import_session(snapshot, session_id="moved")
        assert (moved.position, moved.info.cache.cached_tokens) == (position, position - 1)
        got = moved.chat("And of Italy?", temperature=0, max_tokens=16).result()
        assert got.token_ids == expected.token_ids
        assert got.text == expected.text
        assert got.usage.computed_tokens == got.usage.prompt_tokens + 1
        plain = client.import_session(tokens_only)
        again = plain.chat("And of Italy?", temperature=0, max_tokens=16).result()
        assert again.usage.computed_tokens + again.usage.prefix_reused_tokens >= position
        assert again.text == expected.text
    print(f"\n{position} tokens: {snapshot.stat().st_size} bytes with KV, {tokens_only.stat().st_size} without")


def test_moving_up_and_down_changes_no_answer(serve, tmp_path):
    server = serve(kv_host_bytes=8 * MIB, kv_disk_bytes=8 * MIB, kv_disk_dir=tmp_path)
    client = server.client()
    session = client.create_session(text="Once upon a time " * 30)
    expected = [greedy(session.fork(), text="there was").token_ids for _ in range(2)]
    assert expected[0] == expected[1]
    for tier in ("host", "disk", "host", "device", "disk"):
        session.move(tier)
        assert session.info.cache.tier == types_pb2.CacheTier.Value(f"CACHE_TIER_{tier.upper()}")
    assert len([path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"]) == 2
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in tmp_path.rglob("*") if path.is_file())
    got = greedy(session, text="there was", bypass_prefix_cache=True)  # the forks' KV is still in the pool
    assert got.token_ids == expected[0]
    assert got.usage.restored_tokens == got.usage.context_tokens
    assert got.timings.restore > 0
    metrics = server.metrics()
    assert metrics["segue_kv_moved_bytes_total", "disk", "host"] > 0
    with server.client(), pytest.raises(FeatureDisabled):
        serve().client().create_session(text="a").move("host")


def test_a_running_session_cannot_be_moved_or_exported(serve):
    client = serve(kv_host_bytes=MIB).client()
    session = client.create_session(text="Once")
    with session.stream(text="upon", max_tokens=4000, ignore_eos=True) as turn:
        events = turn.events()
        next(events)
        with pytest.raises(SessionBusy):
            client.get_session(session.id).move("host")
        with pytest.raises(SessionBusy):
            client.get_session(session.id).export(io.BytesIO())


def test_damaged_and_foreign_files_are_refused_and_leave_nothing(serve, tmp_path):
    client = serve().client()
    session = client.create_session(text="Once upon a time")
    path = tmp_path / "s"
    session.export(path)
    data = path.read_bytes()
    flipped = data[:-60] + bytes([data[-60] ^ 1]) + data[-59:]
    for name, content in {"empty": b"", "text": b"hello" * 9, "cut": data[:-1], "half": data[:400]}.items():
        with pytest.raises(SnapshotCorrupt):
            client.import_session(io.BytesIO(content), session_id=f"copy-{name}")
    with pytest.raises(SnapshotCorrupt):
        client.import_session(io.BytesIO(flipped))
    assert [info.session_id for info in client.list_sessions()] == [session.id]
    other = serve(dtype="bfloat16").client()
    with pytest.raises(SnapshotIncompatible):
        other.import_session(path)
    assert other.import_session(path, recompute_on_mismatch=True).position == session.position
    with pytest.raises(FileNotFoundError):
        client.import_session(tmp_path / "missing")
    with pytest.raises(OSError, match="nowhere"):
        session.export(tmp_path / "nowhere" / "s")


async def test_the_async_client_moves_exports_and_imports(serve, tmp_path):
    target = serve(kv_host_bytes=MIB).target
    async with AsyncClient(target) as client:
        session = await client.create_session(text="Once upon a time")
        await session.move("host")
        header = await session.export(tmp_path / "s")
        assert header.cached_tokens == session.position
        copy = await client.import_session(tmp_path / "s")
        assert copy.position == session.position
        with pytest.raises(SnapshotCorrupt):
            await client.import_session(io.BytesIO(b"no"))


def test_an_imported_session_is_in_the_durable_ledger_like_any_other(spawn, tiny_model, tmp_path):
    words = ("--model", tiny_model, "--threads", 1, "--ledger", tmp_path / "ledger.db", *FREE_PORTS)
    first = spawn(*words)
    with Client(first.target) as client:
        session = client.create_session(text="Once upon a time")
        greedy(session, text="there")
        session.export(tmp_path / "s")
        copy = client.import_session(tmp_path / "s", session_id="copy")
        before = copy.read_tokens()
        expected = greedy(copy.fork(), text="was").token_ids
    first.send(signal.SIGKILL)
    first.wait()
    second = spawn(*words)
    with Client(second.target) as client:
        found = client.get_session("copy")
        after = found.read_tokens()
        assert after.token_ids == before.token_ids
        assert after.turns == before.turns
        assert [span.end_position for span in after.turns] == [16, found.position]
        assert found.etag == copy.etag
        assert greedy(found, text="was").token_ids == expected


# Operators


@pytest.fixture
def segue():
    """Runs the command, in this process, as it takes longer to start than to run; returns what it printed."""

    def run(*words, admin="", target="", code=0):
        env = {"SEGUE_ADMIN_TARGET": admin, "SEGUE_TARGET": target}
        done = CliRunner().invoke(app, [*map(str, words)], env=env)
        assert done.exit_code == code, done.output
        return done.stdout

    return run


def test_the_command_exports_imports_and_administers(serve, segue, tmp_path):
    server = serve(runner="native", kv_host_bytes=8 * MIB)
    client = server.client()
    admin = f"127.0.0.1:{server.running.ports.admin}"
    where = {"admin": admin, "target": server.target}
    client.create_session(session_id="one", text="Once upon a time " * 20)
    path = tmp_path / "one.segue"
    assert "wrote" in segue("sessions", "export", "one", path, **where)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(segue("sessions", "import", path, "--id", "two", "--json", **where))["session_id"] == "two"
    segue("sessions", "import", __file__, code=1, **where)
    segue("sessions", "import", tmp_path / "none", code=2, **where)
    assert json.loads(segue("sessions", "move", "one", "host", "--json", **where))["tier"] == "CACHE_TIER_HOST"
    stats = json.loads(segue("cache", "stats", "--json", **where))
    assert {tier["tier"] for tier in stats["tiers"]} == {"CACHE_TIER_DEVICE", "CACHE_TIER_HOST"}
    assert "device" in segue("cache", "stats", **where)
    listed = json.loads(segue("cache", "entries", "--json", **where))
    assert ["one"] in [entry["session_ids"] for entry in listed]
    verified = json.loads(segue("cache", "verify", "two", "--json", **where))
    assert verified["bit_equal"]
    assert verified["argmax_equal"]
    assert verified["compared_tokens"] == 340
    shrunk = json.loads(segue("cache", "budget", "device", "1MiB", "--json", **where))
    assert int(shrunk["tiers"][0]["capacity_bytes"]) <= MIB
    segue("cache", "budget", "device", "1", code=2, **where)
    assert json.loads(segue("cache", "flush", "--idle-sessions", "--prefixes", "--json", **where))["sessions"] == 2
    with AdminClient(admin) as operator:
        batches = operator.events(include_snapshot=True)
        assert not next(batches).events, "nothing is left"
        greedy(client.get_session("one"), text="there was")
        assert next(batches).events[0].stored.block_tokens == 16
    assert json.loads(segue("cache", "drain", "--grace", "1", "--json", **where)) == {"running_requests": 0}
    segue("sessions", "list", **where)
    segue("generate", "x", code=5, **where)


# A pool for a few of the sessions


class Crowd:
    """Sessions that take turns at random through a few threads; what each was asked and answered."""

    def __init__(self, server, sessions, seed):
        self.server = server
        self.chance = random.Random(seed)
        self.locks = [threading.Lock() for _ in range(sessions)]
        self.lives = [0] * sessions
        self.log = defaultdict(list)  # (session, life) -> [(prompt, answer)]
        self.firsts = []
        self.restored = 0
        self.computed = 0
        self.errors = []

    def run(self, seconds, threads=6):
        end = time.monotonic() + seconds
        workers = [threading.Thread(target=self._work, args=(end, self.chance.random())) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not self.errors, self.errors[0]

    def _work(self, end, seed):
        chance = random.Random(seed)
        client = Client(self.server.target)
        try:
            while time.monotonic() < end:
                number = chance.randrange(len(self.locks))
                if self.locks[number].acquire(blocking=False):
                    try:
                        self._turn(client, number, chance)
                    finally:
                        self.locks[number].release()
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            self.errors.append(error)
        finally:
            client.close()

    def _turn(self, client, number, chance):
        life = self.lives[number]
        key = number, life
        name = f"s{number:03}-{life:04}"
        if not self.log[key]:
            client.create_session(session_id=name, cache_salt=f"salt-{number}")
        prompt = [chance.randrange(256) for _ in range(chance.randint(5, 60))]
        answer = client.generate(name, tokens=prompt, temperature=0, max_tokens=8, ignore_eos=True)
        self.log[key].append((prompt, answer.token_ids))
        self.firsts.append(answer.timings.time_to_first_token)
        self.restored += answer.usage.restored_tokens
        self.computed += answer.usage.computed_tokens
        if answer.position > 420:
            client.delete_session(name)
            self.lives[number] += 1

    def compare(self, reference):
        """Every token of every answer, each life by one prefill in a pool that never has to evict; returns how many."""
        client = reference.client()

        def check(life):
            ledger, answered = [], []
            for prompt, answer in self.log[life]:
                start = len(ledger) + len(prompt)
                ledger += [*prompt, *answer]
                answered += range(start, len(ledger))
            return check_greedy(client, ledger, answered, f"session {life[0]}, life {life[1]}")

        with ThreadPoolExecutor(4) as pool:
            return sum(pool.map(check, list(self.log)))


def crowded(serve, tmp_path, *, sessions, places, seconds):
    """`sessions` in a pool for `places` of them, and twice, then eight times as many below it."""
    page = 4096  # bytes of the tiny model's page in bfloat16
    pool = places * 28 * page  # 28 pages: one session of 448 tokens
    offload = {"kv_host_bytes": 2 * pool, "kv_disk_bytes": 8 * pool, "kv_disk_dir": tmp_path}
    server = serve(runner="native", kv_bytes=pool, **offload)
    assert server.page_bytes == page
    crowd = Crowd(server, sessions, seed=7)
    crowd.run(seconds / 2)
    middle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    crowd.run(seconds / 2)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - middle) / 1024
    turns = sum(map(len, crowd.log.values()))
    evictions = server.metrics()["segue_kv_evictions_total", "pressure", "device"]
    firsts = sorted(crowd.firsts)
    print(
        f"\n{sessions} sessions in a pool for {places}: {turns} turns, {crowd.restored} positions restored, "
        f"{crowd.computed} computed, {evictions:.0f} evictions; first token after {firsts[len(firsts) // 2]:.3f} s, "
        f"{firsts[len(firsts) * 99 // 100]:.3f} s (p99), {firsts[-1]:.2f} s at most; "
        f"peak memory grew {grown:.0f} MiB in the second half"
    )
    assert firsts[-1] < START_BOUND
    assert crowd.restored > 0
    assert grown < 64
    server.leave_nothing()
    began = time.monotonic()
    compared = crowd.compare(serve(runner="native", kv_bytes=64 * MIB))
    print(f"{compared} tokens of {len(crowd.log)} lives compared in {time.monotonic() - began:.0f} s")
    assert compared == 8 * turns


def test_sixteen_sessions_share_a_pool_for_four_and_answer_as_if_it_had_no_end(serve, tmp_path):
    crowded(serve, tmp_path, sessions=16, places=4, seconds=6)


@pytest.mark.soak
def test_sixty_four_sessions_share_a_pool_for_four_for_five_minutes(serve, tmp_path):
    crowded(serve, tmp_path, sessions=64, places=4, seconds=300)
