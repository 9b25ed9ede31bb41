"""The thread that writes: it commits everything that waits in one transaction, and only then lets it go on.

    put ──▶ waiting ──▶ apply ──▶ deliver                        each step's events behind its records
                          └─ fails ─▶ lost ──▶ take_lost, resume   the engine takes back what is not in the file

After a write that failed nothing more is written until the engine has been heard: what came later builds on what is
missing.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from segue_server.errors import LedgerUnavailable
from segue_server.ledger.records import Record
from segue_server.ledger.schema import LedgerError
from segue_server.ledger.store import LedgerStore
from segue_server.stats import CALL_EDGES, Histogram

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_WAITING = 64  # steps the file may be behind before the engine waits for it
RETRY_INTERVAL = 1.0  # seconds between two tries to write the repairs that are due


class LedgerStats:
    """Written by the writer's thread; any thread may read."""

    def __init__(self) -> None:
        self.commit = Histogram(CALL_EDGES)  # seconds of each transaction
        self.failures = 0


@dataclass(frozen=True, slots=True)
class Lost(Generic[T]):
    """What is not in the file, in order, and why."""

    error: LedgerUnavailable
    payloads: list[T]


class LedgerWriter(Generic[T]):
    """Between one producer, the engine's thread, and the file. A payload `T` is what waits for its records."""

    def __init__(
        self,
        store: LedgerStore,
        *,
        deliver: Callable[[T], None],
        on_loss: Callable[[], None],
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """`deliver` gets each payload whose records are in the file; `on_loss` says that `take_lost` has something.

        Both are called on the writer's thread and must not raise.
        """
        self.stats = LedgerStats()
        self._store = store
        self._deliver = deliver
        self._on_loss = on_loss
        self._max_waiting = max_waiting
        self._news = threading.Condition()
        self._waiting: list[tuple[Sequence[Record], T]] = []
        self._writing = False
        self._lost: Lost[T] | None = None
        self._repairs: list[Record] = []
        self._repair_now = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, records: Sequence[Record], payload: T) -> None:
        """Write `records`, then deliver. Waits while too much is waiting already."""
        with self._news:
            self._news.wait_for(lambda: len(self._waiting) < self._max_waiting or self._lost)
            self._waiting.append((records, payload))
            self._news.notify_all()

    def take_lost(self) -> Lost[T] | None:
        """Everything since a write that failed; None if none did. The writer then waits for `resume`."""
        with self._news:
            if self._lost is None:
                return None
            payloads = [*self._lost.payloads, *(payload for _, payload in self._waiting)]
            self._waiting.clear()
            return Lost(self._lost.error, payloads)

    def resume(self, repairs: Sequence[Record]) -> None:
        """Go on. `repairs` take back what the file has of failed turns: they go first, and are tried until done."""
        with self._news:
            self._repairs.extend(repairs)
            self._repair_now = True
            self._lost = None
            self._news.notify_all()

    def flush(self) -> None:
        """Return when everything put so far has been delivered or lost."""
        with self._news:
            self._news.wait_for(lambda: self._lost or not (self._waiting or self._writing))

    def close(self) -> None:
        """Write what waits, end the thread and close the file."""
        with self._news:
            self._closing = True
            self._news.notify_all()
        self._thread.join()
        if self._lost:
            log.error(
                "%d steps were never written: %s", len(self._lost.payloads) + len(self._waiting), self._lost.error
            )
        try:
            self._store.apply(self._repairs)
        except LedgerError as error:
            log.error("%s; turns that failed are still in it, in part", error)
        self._store.close()

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            error = self._write([record for records, _ in batch for record in records])
            payloads = [payload for _, payload in batch]
            if error is None:
                for payload in payloads:
                    self._deliver(payload)
            self._done(error, payloads)

    def _next(self) -> list[tuple[Sequence[Record], T]] | None:
        """Everything that waits; nothing when only repairs are due; None at the end."""
        with self._news:
            due = RETRY_INTERVAL if self._repairs else None
            self._news.wait_for(self._has_work, due)
            self._repair_now = False
            if self._closing and (self._lost or not self._waiting):
                return None
            batch: list[tuple[Sequence[Record], T]] = []
            if self._lost is None:
                batch, self._waiting = self._waiting, batch
            self._writing = bool(batch)
            self._news.notify_all()
            return batch

    def _has_work(self) -> bool:
        return self._closing or (self._lost is None and bool(self._waiting or self._repair_now))

    def _write(self, records: list[Record]) -> LedgerUnavailable | None:
        repairs = self._repairs[:]
        if not repairs and not records:
            return None
        began = time.perf_counter()
        try:
            self._store.apply([*repairs, *records])
        except Exception as error:  # noqa: BLE001 - whatever it is, the turns must hear of it
            self.stats.failures += 1
            return _unavailable(error)
        self.stats.commit.observe(time.perf_counter() - began)
        with self._news:
            del self._repairs[: len(repairs)]
        return None

    def _done(self, error: LedgerUnavailable | None, payloads: list[T]) -> None:
        lost = error is not None and bool(payloads)
        with self._news:
            self._writing = False
            if error is not None and lost:
                self._lost = Lost(error, payloads)
            self._news.notify_all()
        if lost:
            self._on_loss()


def _unavailable(error: Exception) -> LedgerUnavailable:
    """The path is for the log alone."""
    cause = error.cause if isinstance(error, LedgerError) else "internal error"
    log.error("a write failed: %s", error, exc_info=None if isinstance(error, LedgerError) else error)
    return LedgerUnavailable(f"the server cannot write its ledger: {cause}")
