"""Turns that have ended, for a while: what a repeated request id is answered from, without running anything again."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from segue_server.sessions import ActiveTurn, Session

WINDOW = 600.0  # seconds a turn is remembered
MAX_TURNS = 4096
MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _Entry:
    turn: ActiveTurn
    ended: float
    size: int


class RecentTurns:
    """The turns that ended last, by request id; bounded in time, number and memory, and the oldest goes first."""

    def __init__(
        self,
        *,
        window: float = WINDOW,
        max_turns: int = MAX_TURNS,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._window = window
        self._max_turns = max_turns
        self._max_bytes = max_bytes
        self._clock = clock
        self._entries: dict[str, _Entry] = {}  # oldest first
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, turn: ActiveTurn) -> None:
        """Remember a turn that has ended."""
        self._drop(turn.request_id)
        entry = _Entry(turn, self._clock(), turn.stream.size)
        self._entries[turn.request_id] = entry
        self._bytes += entry.size
        self._trim()

    def find(self, request_id: str) -> ActiveTurn | None:
        self._trim()
        entry = self._entries.get(request_id)
        return entry.turn if entry else None

    def forget(self, session: Session) -> None:
        """Drop what a session has said."""
        for request_id in [i for i, entry in self._entries.items() if entry.turn.session is session]:
            self._drop(request_id)

    def _trim(self) -> None:
        horizon = self._clock() - self._window
        while self._entries:
            request_id, oldest = next(iter(self._entries.items()))
            if oldest.ended > horizon and len(self._entries) <= self._max_turns and self._bytes <= self._max_bytes:
                return
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        if entry := self._entries.pop(request_id, None):
            self._bytes -= entry.size
