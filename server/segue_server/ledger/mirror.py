"""What the store knows of the file without asking it: which sessions there are, how long, and their open turns."""

import sqlite3
from array import array
from dataclasses import dataclass, field

from segue_server.ledger.codec import count_ids, unpack_ids


@dataclass(slots=True)
class OpenTurn:
    """A turn that has not ended; what it has in `tail` waits here to become one row."""

    start: int
    prompt_end: int
    base: int  # where `generated` begins
    tail: int  # number of the first row of `tail` that may belong to it
    generated: "array[int]" = field(default_factory=lambda: array("i"))


@dataclass(slots=True)
class Known:
    """A session in the file."""

    key: int
    length: int = 0
    turn: OpenTurn | None = None


@dataclass(slots=True)
class Mirror:
    """Changed together with the file, and read again from it after a transaction that failed."""

    sessions: dict[str, Known] = field(default_factory=dict)
    open: dict[int, OpenTurn] = field(default_factory=dict)  # by session key
    tail_start: int = 1  # rows of `tail` before this number are gone
    tail_next: int = 1  # number of the next row

    def forget(self, session_id: str) -> None:
        self.open.pop(self.sessions.pop(session_id).key, None)


def load(db: sqlite3.Connection) -> Mirror:
    """Raises ValueError when the rows contradict each other, and sqlite3.Error."""
    by_key = {key: Known(key) for (key,) in db.execute("SELECT key FROM sessions")}
    mirror = Mirror({name: by_key[key] for name, key in db.execute("SELECT id, key FROM sessions")})
    for key, start, size in db.execute("SELECT session, max(start), length(ids) FROM tokens GROUP BY session"):
        _of(by_key, key).length = start + count_ids(size)
    rows = db.execute("SELECT session, start, generated_start, tail FROM turns WHERE end IS NULL")
    for key, start, prompt_end, tail in rows:
        known = _of(by_key, key)
        if known.turn is not None or known.length < prompt_end:
            raise ValueError(f"the open turn of session {key} does not fit its tokens")
        known.turn = mirror.open[key] = OpenTurn(start, prompt_end, known.length, tail)
    _load_tail(db, mirror, by_key)
    return mirror


def _load_tail(db: sqlite3.Connection, mirror: Mirror, by_key: dict[int, Known]) -> None:
    mirror.tail_next = max((turn.tail for turn in mirror.open.values()), default=1)
    for number, key, start, blob in db.execute("SELECT number, session, start, ids FROM tail ORDER BY number"):
        mirror.tail_next = max(mirror.tail_next, number + 1)
        turn = mirror.open.get(key)
        if turn is None or number < turn.tail:
            continue  # of a turn that has ended
        known = by_key[key]
        if start != known.length:
            raise ValueError(f"tokens of session {key} continue at {start}, not at {known.length}")
        ids = unpack_ids(blob)
        turn.generated.extend(ids)
        known.length += len(ids)


def _of(by_key: dict[int, Known], key: int) -> Known:
    if key not in by_key:
        raise ValueError(f"rows of session {key}, which does not exist")
    return by_key[key]
