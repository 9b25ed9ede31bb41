"""The tables, and everything that is looked at before a file is believed."""

import contextlib
import os
import sqlite3
import stat
from pathlib import Path

VERSION = 1
APPLICATION_ID = 0x53454755  # "SEGU"; keeps other programs' databases out

# `tail` takes the tokens of open turns in the order of their arrival, whatever their session: one step of 32 streams
# then writes a page or two, where rows kept by session would write 32. What an ended turn leaves in it is dropped from
# the front; a row counts only if its session has an open turn that began at or before it (turns.tail).
_TABLES = """
CREATE TABLE sessions (
    key INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    display_name TEXT NOT NULL,
    labels TEXT NOT NULL,
    settings TEXT NOT NULL,
    create_time REAL NOT NULL,
    last_used_time REAL NOT NULL,
    version INTEGER NOT NULL,
    model_fingerprint TEXT NOT NULL,
    parent_id TEXT,
    fork_position INTEGER
) STRICT;
CREATE TABLE turns (
    session INTEGER NOT NULL,
    start INTEGER NOT NULL,
    generated_start INTEGER NOT NULL,
    end INTEGER,
    request_id TEXT NOT NULL,
    finish_reason TEXT,
    tail INTEGER NOT NULL,
    PRIMARY KEY (session, start)
) STRICT, WITHOUT ROWID;
CREATE TABLE tokens (
    session INTEGER NOT NULL,
    start INTEGER NOT NULL,
    ids BLOB NOT NULL,
    PRIMARY KEY (session, start)
) STRICT, WITHOUT ROWID;
CREATE TABLE tail (
    number INTEGER PRIMARY KEY,
    session INTEGER NOT NULL,
    start INTEGER NOT NULL,
    ids BLOB NOT NULL
) STRICT;
CREATE TABLE tombstones (
    id TEXT PRIMARY KEY,
    expired_at REAL NOT NULL
) STRICT, WITHOUT ROWID;
"""


class LedgerError(Exception):
    """The file cannot be opened, read or written; nothing of what was asked has been done."""

    def __init__(self, path: Path, cause: str) -> None:
        super().__init__(f"ledger {str(path)!r}: {cause}")
        self.path = path
        self.cause = cause


def open_database(path: Path, *, busy_timeout: float) -> sqlite3.Connection:
    """A checked database, locked for as long as the connection lives. Raises LedgerError."""
    _prepare_file(path)
    try:
        # An absolute path: SQLite gives some relative ones, such as ":memory:", a meaning of their own.
        db = sqlite3.connect(path.absolute(), timeout=busy_timeout, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise LedgerError(path, str(error)) from error
    try:
        _take(db, path)
    except sqlite3.Error as error:
        db.close()
        raise LedgerError(path, _explain(error)) from error
    except BaseException:
        db.close()
        raise
    return db


def _prepare_file(path: Path) -> None:
    """A file that nobody else can read: it holds conversations in the clear. SQLite gives -wal the same mode."""
    try:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        if not stat.S_ISREG(path.stat().st_mode):
            raise LedgerError(path, "is not a regular file")
        if stat.S_IMODE(path.stat().st_mode) != 0o600:
            path.chmod(0o600)  # by name: opening and closing it would drop this process's other locks on it (POSIX)
    except OSError as error:
        raise LedgerError(path, error.strerror or str(error)) from error


def _take(db: sqlite3.Connection, path: Path) -> None:
    """Lock the file, look at all of it, and write to it, so that what cannot work fails now and not in a turn."""
    db.execute("PRAGMA locking_mode = EXCLUSIVE")
    fresh = _is_fresh(db, path)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    faults = [str(row[0]) for row in db.execute("PRAGMA quick_check(1)")]
    if faults != ["ok"]:
        raise LedgerError(path, f"is damaged: {faults[0]}")
    db.execute("BEGIN IMMEDIATE")
    if fresh:
        for statement in filter(str.strip, _TABLES.split(";")):
            db.execute(statement)
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {VERSION}")
    db.execute("COMMIT")


def _is_fresh(db: sqlite3.Connection, path: Path) -> bool:
    """Nothing is in the file yet. Raises LedgerError when what is there is not ours, or of another version."""
    application, version = (_number(db, name) for name in ("application_id", "user_version"))
    if application != APPLICATION_ID:
        if application or version or db.execute("SELECT 1 FROM sqlite_master").fetchone():
            raise LedgerError(path, "is a database of another program")
        return True
    if version != VERSION:
        raise LedgerError(path, f"has schema version {version}; this server knows version {VERSION} only")
    return False


def _number(db: sqlite3.Connection, pragma: str) -> int:
    return int(db.execute(f"PRAGMA {pragma}").fetchone()[0])


def _explain(error: sqlite3.Error) -> str:
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
        return "another process has it open (database is locked)"
    return str(error)
