"""The file. One connection, one thread at a time; see writer.py for the thread.

What survives: a process that dies at any moment (kill -9, out of memory) loses no committed transaction, because the
operating system holds the write-ahead log. A power cut or a crash of the operating system may take the last
transactions (at most those since the last checkpoint) and nothing before them, and leaves a sound file: that is
SQLite's WAL with synchronous = NORMAL. No more is offered.
"""

import contextlib
import sqlite3
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segue_server.config import IN_MEMORY
from segue_server.ledger.changes import Changes
from segue_server.ledger.codec import labels_from_json, settings_from_json, unpack_ids
from segue_server.ledger.mirror import Mirror, load
from segue_server.ledger.records import Record, TurnEnded
from segue_server.ledger.schema import LedgerError, open_database
from segue_server.requests import FinishReason, SessionSettings
from segue_server.sessions import TurnRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredSession:
    """A session as the file has it. Times are Unix seconds; `tokens` is the whole ledger."""

    session_id: str
    settings: SessionSettings
    display_name: str
    labels: Mapping[str, str]
    create_time: float
    last_used_time: float
    version: int
    model_fingerprint: str
    parent_id: str | None
    fork_position: int | None
    tokens: "array[int]"
    turns: tuple[TurnRecord, ...]


class LedgerStore:
    """Sessions, turns, tokens and tombstones on disk. Every method raises LedgerError and has then done nothing."""

    def __init__(self, path: Path, *, busy_timeout: float = 5.0) -> None:
        """Open or create the file, mode 0600, and keep every other process out of it.

        A turn that was in flight when the last process died ends here: FinishReason.ERROR, with every token that is
        in the file. `busy_timeout`: seconds to wait for a process that has the file and is about to leave.
        """
        self.path = path
        self._db = open_database(path, busy_timeout=busy_timeout)
        self._mirror: Mirror | None = None  # None: to be read from the file
        try:
            self._end_open_turns(time.time())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        with self._translated():
            self._db.close()

    def apply(self, records: Sequence[Record]) -> None:
        """All of `records`, in order, in one transaction, or none of them."""
        with self._translated():
            mirror, self._mirror = self._mirror or load(self._db), None
            self._db.execute("BEGIN IMMEDIATE")
            try:
                changes = Changes(self._db, mirror)
                for record in records:
                    changes.apply(record)
                changes.finish()
                self._db.execute("COMMIT")
            except BaseException:
                self._roll_back()
                raise
            self._mirror = mirror

    def recover(self) -> Iterator[RecoveredSession]:
        """Every session, oldest first."""
        with self._translated():
            query = f"SELECT key, {', '.join(_COLUMNS)} FROM sessions ORDER BY create_time, key"  # noqa: S608 - constants
            rows = self._db.execute(query)
            for key, *values in rows.fetchall():
                yield self._session(key, dict(zip(_COLUMNS, values, strict=True)))

    def tombstones(self) -> dict[str, float]:
        """When which session expired."""
        with self._translated():
            return dict(self._db.execute("SELECT id, expired_at FROM tombstones").fetchall())

    def _end_open_turns(self, now: float) -> None:
        with self._translated():
            self._mirror = load(self._db)
        self.apply(
            [
                TurnEnded(session_id, known.length, FinishReason.ERROR, now)
                for session_id, known in self._mirror.sessions.items()
                if known.turn
            ]
        )

    def _session(self, key: int, row: dict[str, Any]) -> RecoveredSession:
        tokens = self._tokens(key)
        turns = tuple(self._turns(key, len(tokens)))
        settings, labels = settings_from_json(row.pop("settings")), labels_from_json(row.pop("labels"))
        session_id = row.pop("id")
        return RecoveredSession(
            session_id=session_id, settings=settings, labels=labels, tokens=tokens, turns=turns, **row
        )

    def _tokens(self, key: int) -> "array[int]":
        tokens = array("i")
        rows = self._db.execute("SELECT start, ids FROM tokens WHERE session = ? ORDER BY start", (key,))
        for start, blob in rows:
            if start != len(tokens):
                raise ValueError(f"tokens of session {key} continue at {start}, not at {len(tokens)}")
            tokens.extend(unpack_ids(blob))
        return tokens

    def _turns(self, key: int, length: int) -> Iterator[TurnRecord]:
        query = (
            "SELECT request_id, start, generated_start, end, finish_reason FROM turns WHERE session = ? ORDER BY start"
        )
        before = 0
        for request_id, start, generated, end, reason in self._db.execute(query, (key,)):
            if not before <= start <= generated <= end <= length or reason not in FinishReason.__members__:
                raise ValueError(f"the turn at {start} of session {key} does not fit its {length} tokens")
            yield TurnRecord(request_id, start, generated, end, FinishReason[reason])
            before = end

    def _roll_back(self) -> None:
        with contextlib.suppress(sqlite3.Error):  # after some errors SQLite has done it already
            self._db.execute("ROLLBACK")

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, ValueError, OverflowError) as error:
            raise LedgerError(self.path, str(error)) from error


_COLUMNS = (
    "id",
    "display_name",
    "labels",
    "settings",
    "create_time",
    "last_used_time",
    "version",
    "model_fingerprint",
    "parent_id",
    "fork_position",
)


def open_ledger(path: str) -> LedgerStore | None:
    """The store at `path`; None for ":memory:", which keeps nothing. Raises LedgerError."""
    return None if path == IN_MEMORY else LedgerStore(Path(path))
