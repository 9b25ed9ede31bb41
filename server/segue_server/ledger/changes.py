"""One transaction: records, in order, into the file and its mirror. Whoever calls this rolls both back on an error."""

import sqlite3
from array import array
from collections.abc import Sequence

from segue_server.ledger.codec import count_ids, labels_to_json, pack_ids, settings_to_json, unpack_ids
from segue_server.ledger.mirror import Known, Mirror, OpenTurn
from segue_server.ledger.records import (
    Record,
    SessionCreated,
    SessionDeleted,
    SessionExpired,
    SessionForked,
    SessionUpdated,
    Slid,
    TokensAppended,
    TombstonesForgotten,
    Truncated,
    TurnBegan,
    TurnEnded,
    TurnRevoked,
)


class Changes:
    """Raises ValueError for a record that contradicts what is there, and sqlite3.Error."""

    def __init__(self, db: sqlite3.Connection, mirror: Mirror) -> None:
        self._db = db
        self._mirror = mirror
        self._tail: list[tuple[int, int, int, bytes]] = []

    def apply(self, record: Record) -> None:
        match record:
            case SessionCreated():
                self._create(record)
            case SessionForked():
                self._fork(record)
            case TombstonesForgotten(before):
                self._db.execute("DELETE FROM tombstones WHERE expired_at < ?", (before,))
            case _ if known := self._mirror.sessions.get(record.session_id):
                self._apply_to(known, record)

    def finish(self) -> None:
        """The tokens of this transaction as one run of rows, and the front of the tail that nobody needs any more."""
        self._db.executemany("INSERT INTO tail VALUES (?, ?, ?, ?)", self._tail)
        mirror = self._mirror
        needed = min((turn.tail for turn in mirror.open.values()), default=mirror.tail_next)
        if needed > mirror.tail_start:
            self._db.execute("DELETE FROM tail WHERE number < ?", (needed,))
            mirror.tail_start = needed

    def _apply_to(self, known: Known, record: Record) -> None:
        match record:
            case TokensAppended():
                self._append(known, record)
            case TurnBegan():
                self._begin(known, record)
            case TurnEnded():
                self._end(known, record)
            case TurnRevoked():
                self._revoke(known)
            case Truncated():
                self._rewind(known, record)
            case Slid():
                self._slide(known, record)
            case SessionUpdated():
                self._update(known, record)
            case SessionDeleted(session_id):
                self._delete(known, session_id)
            case SessionExpired(session_id, expired_at):
                self._delete(known, session_id)
                self._db.execute("INSERT OR REPLACE INTO tombstones VALUES (?, ?)", (session_id, expired_at))

    # Sessions

    def _create(self, record: SessionCreated, parent_id: str | None = None, position: int | None = None) -> Known:
        row = (
            record.session_id,
            record.display_name,
            labels_to_json(record.labels),
            settings_to_json(record.settings),
            record.create_time,
            record.last_used_time,
            record.version,
            record.model_fingerprint,
            parent_id,
            position,
        )
        cursor = self._db.execute("INSERT INTO sessions VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        self._db.execute("DELETE FROM tombstones WHERE id = ?", (record.session_id,))
        known = self._mirror.sessions[record.session_id] = Known(cursor.lastrowid or 0)
        return known

    def _update(self, known: Known, record: SessionUpdated) -> None:
        columns = "display_name = ?, labels = ?, settings = ?, last_used_time = ?, version = version + 1"
        self._db.execute(
            f"UPDATE sessions SET {columns} WHERE key = ?",  # noqa: S608 - constants
            (
                record.display_name,
                labels_to_json(record.labels),
                settings_to_json(record.settings),
                record.last_used_time,
                known.key,
            ),
        )

    def _fork(self, record: SessionForked) -> None:
        parent = self._mirror.sessions.get(record.parent_id)
        if parent is None or record.position > parent.length:
            length = "is not in the ledger" if parent is None else f"is {parent.length} tokens long"
            raise ValueError(f"a fork at {record.position} of session {record.parent_id!r}, which {length}")
        child = self._create(record.child, record.parent_id, record.position)
        for start, ids in self._rows(parent):
            self._insert(child, start, ids[: max(0, record.position - start)])
        # An open turn is in the child as far as it has come, and goes no further there.
        copied = """INSERT INTO turns
            SELECT :child, start, min(generated_start, :position), min(coalesce(end, :position), :position),
                request_id, coalesce(finish_reason, 'CANCELLED'), 0
            FROM turns WHERE session = :parent AND start < :position"""
        self._db.execute(copied, {"child": child.key, "position": record.position, "parent": parent.key})

    def _rows(self, known: Known) -> "list[tuple[int, array[int]]]":
        """(position, ids) of a whole ledger, the open turn included."""
        rows = self._db.execute("SELECT start, ids FROM tokens WHERE session = ? ORDER BY start", (known.key,))
        generated = [(known.turn.base, known.turn.generated)] if known.turn else []
        return [(start, unpack_ids(blob)) for start, blob in rows] + generated

    def _delete(self, known: Known, session_id: str) -> None:
        self._db.execute("DELETE FROM sessions WHERE key = ?", (known.key,))
        self._db.execute("DELETE FROM turns WHERE session = ?", (known.key,))
        self._db.execute("DELETE FROM tokens WHERE session = ?", (known.key,))
        self._mirror.forget(session_id)

    # Turns

    def _begin(self, known: Known, record: TurnBegan) -> None:
        if known.turn is not None:
            raise ValueError(f"session {record.session_id!r} has an open turn already")
        _expect_end(known, record.session_id, record.start)
        self._insert(known, record.start, record.prompt)
        turn = OpenTurn(record.start, known.length, known.length, self._mirror.tail_next)
        known.turn = self._mirror.open[known.key] = turn
        row = (known.key, turn.start, turn.prompt_end, record.request_id, turn.tail)
        self._db.execute("INSERT INTO turns VALUES (?, ?, ?, NULL, ?, NULL, ?)", row)

    def _append(self, known: Known, record: TokensAppended) -> None:
        _expect_end(known, record.session_id, record.start)
        if known.turn is None:
            self._insert(known, record.start, record.ids)
            return
        self._tail.append((self._mirror.tail_next, known.key, record.start, pack_ids(record.ids)))
        self._mirror.tail_next += 1
        known.turn.generated.extend(record.ids)
        known.length += len(record.ids)

    def _end(self, known: Known, record: TurnEnded) -> None:
        turn = self._close(known)
        if turn is None or not turn.start <= record.end <= known.length:
            raise ValueError(f"a turn of session {record.session_id!r} ends at {record.end} and was not open before")
        self._keep(known, turn, record.end)
        left = record.end > turn.start
        if left:
            self._db.execute(
                "UPDATE turns SET generated_start = ?, end = ?, finish_reason = ? WHERE session = ? AND start = ?",
                (min(turn.prompt_end, record.end), record.end, record.finish_reason.name, known.key, turn.start),
            )
        self._db.execute(
            "UPDATE sessions SET last_used_time = ?, version = version + ? WHERE key = ?",
            (record.time, int(left), known.key),
        )

    def _revoke(self, known: Known) -> None:
        if turn := self._close(known):
            self._keep(known, turn, turn.start)

    def _close(self, known: Known) -> OpenTurn | None:
        known.turn = None
        return self._mirror.open.pop(known.key, None)

    def _keep(self, known: Known, turn: OpenTurn, end: int) -> None:
        """What the turn generated becomes one row, as far as it is kept; a turn that keeps nothing goes."""
        known.length = turn.base
        self._insert(known, turn.base, turn.generated[: max(0, end - turn.base)])
        if end < turn.base:
            self._cut(known, end)
        if end == turn.start:
            self._db.execute("DELETE FROM turns WHERE session = ? AND start = ?", (known.key, turn.start))

    def _rewind(self, known: Known, record: Truncated) -> None:
        if known.turn is not None or not 0 <= record.position <= known.length:
            raise ValueError(f"session {record.session_id!r} cannot be cut at {record.position}")
        self._cut(known, record.position)
        places = {"key": known.key, "position": record.position}
        self._db.execute("DELETE FROM turns WHERE session = :key AND start >= :position", places)
        cut = """UPDATE turns SET generated_start = min(generated_start, :position), end = :position
            WHERE session = :key AND end > :position"""
        self._db.execute(cut, places)

    def _slide(self, known: Known, record: Slid) -> None:
        """The whole ledger becomes one row, for everything behind the gap has new positions."""
        tokens = array("i")
        for _, ids in self._rows(known):
            tokens.extend(ids)
        keep, drop = record.keep, min(record.drop, len(tokens) - record.keep)
        if drop <= 0:
            return
        del tokens[keep : keep + drop]
        self._db.execute("DELETE FROM tokens WHERE session = ?", (known.key,))
        known.length = 0
        self._insert(known, 0, tokens)
        if turn := known.turn:
            turn.start, turn.prompt_end = (max(min(p, keep), p - drop) for p in (turn.start, turn.prompt_end))
            turn.base, turn.tail, turn.generated = known.length, self._mirror.tail_next, array("i")
        self._slide_turns(known, keep, drop)

    def _slide_turns(self, known: Known, keep: int, drop: int) -> None:
        columns = ("start", "generated_start", "end")
        moved = ", ".join(f"max(min({name}, :keep), {name} - :drop)" for name in columns)
        tail = known.turn.tail if known.turn else 0
        query = f"SELECT session, {moved}, request_id, finish_reason FROM turns WHERE session = :key"  # noqa: S608
        rows = self._db.execute(query, {"key": known.key, "keep": keep, "drop": drop}).fetchall()
        self._db.execute("DELETE FROM turns WHERE session = ?", (known.key,))
        left = [(*row, tail) for row in rows if row[3] is None or row[3] > row[1]]
        self._db.executemany("INSERT INTO turns VALUES (?, ?, ?, ?, ?, ?, ?)", left)

    # Tokens

    def _insert(self, known: Known, start: int, ids: Sequence[int]) -> None:
        if len(ids):
            self._db.execute("INSERT INTO tokens VALUES (?, ?, ?)", (known.key, start, pack_ids(ids)))
            known.length = start + len(ids)

    def _cut(self, known: Known, position: int) -> None:
        self._db.execute("DELETE FROM tokens WHERE session = ? AND start >= ?", (known.key, position))
        last = "SELECT start, ids FROM tokens WHERE session = ? ORDER BY start DESC LIMIT 1"
        for start, blob in self._db.execute(last, (known.key,)).fetchall():
            if start + count_ids(len(blob)) > position:
                row = (pack_ids(unpack_ids(blob)[: position - start]), known.key, start)
                self._db.execute("UPDATE tokens SET ids = ? WHERE session = ? AND start = ?", row)
        known.length = position


def _expect_end(known: Known, session_id: str, start: int) -> None:
    if start != known.length:
        raise ValueError(f"session {session_id!r} is {known.length} tokens long; tokens at {start} do not continue it")
