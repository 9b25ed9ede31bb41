"""What a ledger does when the file, the disk or the process fails: a clear error, or every token that was delivered."""

import multiprocessing
import os
import random
import resource
import shutil
import signal
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from segue_server.ledger.records import Record, SessionCreated, TokensAppended, TurnBegan, TurnEnded
from segue_server.ledger.schema import LedgerError
from segue_server.ledger.store import LedgerStore
from segue_server.requests import FinishReason, SessionSettings

KILLS = 30
STREAMS = 4
TURN = 12  # tokens


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def created(session_id: str) -> SessionCreated:
    return SessionCreated(session_id=session_id, settings=SessionSettings(), create_time=1.0, last_used_time=1.0)


def token(session: int, position: int) -> int:
    return (session * 7919 + position * 104729) % 2**31


def filled(path: Path, *, sessions: int = 20, tokens: int = 3000) -> None:
    store = LedgerStore(path)
    for n in range(sessions):
        ids = [token(n, position) for position in range(tokens)]
        store.apply([created(f"s{n}"), TurnBegan(f"s{n}", "r", 0, ids)])
        store.apply([TurnEnded(f"s{n}", tokens, FinishReason.EOS, 2.0)])
    store.close()


# kill -9


def generate(path: Path, pipe: int) -> None:
    """For ever: append a token to each of some sessions, then say so; end a turn now and then. Runs in a child."""
    store = LedgerStore(path)
    lengths = {int(s.session_id): len(s.tokens) for s in store.recover()}
    if not lengths:
        lengths = dict.fromkeys(range(STREAMS), 0)
        store.apply([created(str(n)) for n in lengths])
    store.apply([TurnBegan(str(n), f"r{length}", length, [token(n, length)]) for n, length in lengths.items()])
    began = dict(lengths)
    lengths = {n: length + 1 for n, length in lengths.items()}
    while True:
        store.apply([TokensAppended(str(n), length, [token(n, length)]) for n, length in lengths.items()])
        lengths = {n: length + 1 for n, length in lengths.items()}
        os.write(pipe, b"".join(b"%d %d t\n" % item for item in lengths.items()))
        for n in [n for n in lengths if lengths[n] - began[n] > TURN + n]:
            end = lengths[n]
            store.apply([TurnEnded(str(n), end, FinishReason.EOS, 1.0), TurnBegan(str(n), f"r{end}", end, [])])
            began[n] = end
            os.write(pipe, b"%d %d e\n" % (n, end))


def run_until_killed(path: Path, seconds: float) -> list[tuple[int, int, str]]:
    """What the child had said, (session, length, token or end), when it was killed after its first word."""
    reads, writes = os.pipe()
    child = multiprocessing.get_context("fork").Process(target=generate, args=(path, writes))
    child.start()
    os.close(writes)
    said = os.read(reads, 1)
    time.sleep(seconds)
    assert child.pid
    os.kill(child.pid, signal.SIGKILL)
    with os.fdopen(reads, "rb") as pipe:
        said += pipe.read()
    child.join()
    lines = said.decode().splitlines()
    return [(int(n), int(length), kind) for n, length, kind in (line.split() for line in lines)]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_kill_9_at_any_moment_loses_nothing_that_was_delivered(path: Path) -> None:
    """30 kills at random moments, each on the file the last one left: every token that came out is in it, every turn
    that had ended is a turn, the turn in flight is a prefix, and nothing is half."""
    moments = random.Random(0)
    delivered = dict.fromkeys(range(STREAMS), 0)
    ended: dict[int, set[int]] = {n: set() for n in range(STREAMS)}
    for _ in range(KILLS):
        for n, length, kind in run_until_killed(path, moments.uniform(0.0, 0.05)):
            delivered[n] = max(delivered[n], length)
            if kind == "e":
                ended[n].add(length)
        store = LedgerStore(path)
        recovered = {int(s.session_id): s for s in store.recover()}
        store.close()
        assert set(recovered) == set(range(STREAMS))
        for n, session in recovered.items():
            assert len(session.tokens) >= delivered[n]
            assert list(session.tokens) == [token(n, position) for position in range(len(session.tokens))]
            assert ended[n] <= {turn.end for turn in session.turns if turn.finish_reason is FinishReason.EOS}
            spans = [(turn.start, turn.end) for turn in session.turns]
            assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])], "turn upon turn"
            assert spans[-1][1] == len(session.tokens)
    print(f"\n{KILLS} kills: {sum(delivered.values())} tokens delivered, all recovered")
    assert min(delivered.values()) > KILLS, "the child got to work in each round"


# At start


def test_the_file_is_for_its_owner_only(path: Path) -> None:
    """It holds conversations in the clear; -wal is made in its image, and a file that was open to others is shut."""
    path.touch(0o644)
    path.chmod(0o644)
    store = LedgerStore(path)
    store.apply([created("s")])
    for part in path.parent.iterdir():
        assert stat.S_IMODE(part.stat().st_mode) == 0o600, part
    store.close()
    assert [part.name for part in path.parent.iterdir()] == [path.name]


def hold(path: Path, pipe: int) -> None:
    """Open the store, say so, and keep it. Runs in a child."""
    store = LedgerStore(path)
    os.write(pipe, b"!")
    signal.pause()
    store.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_file_that_another_process_has_is_refused_until_that_one_dies(path: Path) -> None:
    reads, writes = os.pipe()
    child = multiprocessing.get_context("fork").Process(target=hold, args=(path, writes))
    child.start()
    assert os.read(reads, 1) == b"!"
    with pytest.raises(LedgerError, match=r"ledger\.db.*another process has it open"):
        LedgerStore(path, busy_timeout=0.1)
    assert child.pid
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    LedgerStore(path, busy_timeout=0.1).close()
    os.close(reads)
    os.close(writes)


def test_a_second_store_in_this_process_is_refused_too(path: Path) -> None:
    store = LedgerStore(path)
    with pytest.raises(LedgerError, match="another process has it open"):
        LedgerStore(path, busy_timeout=0.05)
    store.apply([created("s")])
    store.close()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"nowhere/ledger\.db.*No such file or directory"):
        LedgerStore(tmp_path / "nowhere" / "ledger.db")
    with pytest.raises(LedgerError, match="is not a regular file"):
        LedgerStore(tmp_path)


def as_nobody(call: Callable[[], None]) -> str:
    """What `call` raises in a child without root's power to write everywhere."""
    reads, writes = os.pipe()

    def run() -> None:
        if os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        try:
            call()
        except LedgerError as error:
            os.write(writes, str(error).encode())

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    os.close(writes)
    child.join()
    with os.fdopen(reads) as pipe:
        return pipe.read()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that another user can reach; pytest's own are closed to others."""
    folder = Path("/var/tmp") / f"segue-{os.getpid()}"  # noqa: S108
    folder.mkdir(mode=0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("exists", [False, True], ids=["no file yet", "a file"])
def test_a_read_only_directory_is_refused_at_start(open_folder: Path, exists: bool) -> None:
    path = open_folder / "ledger.db"
    if exists:
        filled(path, sessions=1)
        path.chmod(0o600)
        if os.getuid() == 0:
            os.chown(path, 65534, 65534)
    open_folder.chmod(0o555)
    said = as_nobody(lambda: LedgerStore(path).close())
    assert str(path) in said
    assert "unable to open database file" in said or "Permission denied" in said or "readonly" in said


def test_a_database_of_another_program_is_refused_and_left_alone(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE mine (x)")
    db.close()
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="is a database of another program"):
        LedgerStore(path)
    assert path.read_bytes() == before


def test_another_schema_version_is_refused_and_left_alone(path: Path) -> None:
    filled(path, sessions=1)
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 7")
    db.close()
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="has schema version 7; this server knows version 1 only"):
        LedgerStore(path)
    assert path.read_bytes() == before


def test_random_bytes_are_not_a_database(path: Path) -> None:
    path.write_bytes(random.Random(1).randbytes(100_000))
    with pytest.raises(LedgerError, match="file is not a database"):
        LedgerStore(path)


def test_a_truncated_file_is_refused(path: Path) -> None:
    """Cut anywhere but to nothing: a file of no bytes is a new one."""
    filled(path)
    whole = path.read_bytes()
    for share in (0.001, 0.3, 0.6, 0.95):
        path.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(LedgerError, match=r"ledger\.db"):
            list(LedgerStore(path).recover())


def test_damage_anywhere_is_an_error_and_never_a_wrong_token(path: Path) -> None:
    """60 files with a run of random bytes somewhere: each is refused, or has lost nothing."""
    filled(path)
    whole = path.read_bytes()
    rng = random.Random(2)
    refused = 0
    for _ in range(60):
        damaged = bytearray(whole)
        where = rng.randrange(len(whole) - 64)
        damaged[where : where + 64] = rng.randbytes(64)
        path.write_bytes(damaged)
        try:
            store = LedgerStore(path)
        except LedgerError:
            refused += 1
            continue
        try:
            tokens = {int(s.session_id[1:]): list(s.tokens) for s in store.recover()}
        except LedgerError:
            refused += 1
        else:
            assert tokens == {n: [token(n, position) for position in range(3000)] for n in range(20)}
        finally:
            store.close()
    print(f"\n{refused} of 60 damaged files refused; the rest was damaged where nothing lies")
    assert refused > 30


# On the call


def test_a_full_disk_fails_the_call_and_keeps_what_was_there(path: Path) -> None:
    """SQLITE_FULL in the middle of a batch: none of it is in the file; with room again, the same batch goes in."""
    store = LedgerStore(path)
    store.apply([created("s"), TurnBegan("s", "r", 0, [1]), TokensAppended("s", 1, [2])])
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    batch: list[Record] = [TokensAppended("s", 2, [3]), created("t"), TokensAppended("t", 0, list(range(10_000)))]
    for _ in range(2):
        with pytest.raises(LedgerError, match="database or disk is full"):
            store.apply(batch)
    store._db.execute("PRAGMA max_page_count = 100000")
    store.apply(batch)
    store.close()
    store = LedgerStore(path)
    assert {s.session_id: len(s.tokens) for s in store.recover()} == {"s": 3, "t": 10_000}
    store.close()


def test_a_write_that_the_system_refuses_fails_the_call_and_the_next_one_works(path: Path) -> None:
    """A real failing write(2): the file may not grow (RLIMIT_FSIZE), as on a full disk or over a quota."""
    store = LedgerStore(path)
    store.apply([created("s")])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    big = TokensAppended("s", 0, list(range(50_000)))
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, hard))
        with pytest.raises(LedgerError, match=r"ledger\.db.*(disk|full|I/O)"):
            store.apply([big])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    store.apply([big])
    store.close()
    store = LedgerStore(path)
    (session,) = store.recover()
    assert list(session.tokens) == list(range(50_000))
    store.close()
