"""What happens to sessions, told to whoever watches: one numbered log, bounded, and a place in it for each watcher.

A watcher holds nothing but its place, so a thousand slow ones cost no more than one. One that the log has overtaken is
told so, EventHistoryLost, and lists the sessions anew. Events are numbered from 1 since the server started; with
`after_sequence` a watcher goes on where a broken connection left it.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import Enum

from segue_server.errors import EventHistoryLost, SegueError
from segue_server.views import SessionView

CAPACITY = 4096  # events; roughly 1 KiB each


class EventType(Enum):
    """The values are those of the proto enum."""

    CREATED = 1
    TURN_STARTED = 2
    TURN_FINISHED = 3
    CACHE_MOVED = 4
    REWOUND = 5
    EXPIRING = 6
    EXPIRED = 7
    DELETED = 8


LAST = (EventType.EXPIRED, EventType.DELETED)  # nothing follows in the life of a session


@dataclass(frozen=True, slots=True)
class SessionEvent:
    """One change of one session, and the session after it."""

    sequence: int  # 1, 2, 3, ... since the server started
    type: EventType
    time: float  # Unix seconds
    session: SessionView
    reason: str  # UPPER_SNAKE


class EventHub:
    """The log of session events. Event loop only."""

    def __init__(self, *, capacity: int = CAPACITY) -> None:
        self._log: deque[SessionEvent] = deque(maxlen=capacity)
        self._end: SegueError | None = None
        self._news = asyncio.Event()
        self.last_sequence = 0

    @property
    def oldest_sequence(self) -> int:
        """Of the oldest event that is still kept; of the next one when there is none."""
        return self.last_sequence + 1 - len(self._log)

    def publish(self, kind: EventType, session: SessionView, reason: str) -> None:
        """Tell every watcher; the oldest event goes when the log is full."""
        self.last_sequence += 1
        self._log.append(SessionEvent(self.last_sequence, kind, time.time(), session, reason))
        self._news.set()

    def close(self, error: SegueError) -> None:
        """End every watch, those to come too, with `error`, after the events there are."""
        self._end = error
        self._news.set()

    def knows(self, session_id: str, after: int) -> bool:
        """Is there an event of this session among those kept after `after`?"""
        return any(e.session.session_id == session_id for e in self._log if e.sequence > after)

    def place(self, after_sequence: int | None) -> int:
        """Where a watch begins that has events up to `after_sequence`; None: with what happens from now on.

        Raises EventHistoryLost, also for a number that this server has not come to: it was another server's.
        """
        after = self.last_sequence if after_sequence is None else after_sequence
        self._check(after)
        return after

    async def watch(self, after: int, session_id: str = "") -> AsyncGenerator[SessionEvent, None]:
        """Events after `after`, of one session until its end or of all; waits for more.

        Raises EventHistoryLost when the log has overtaken the watcher, and what `close` was given.
        """
        while True:
            event = await self._next(after)
            after = event.sequence
            if session_id in ("", event.session.session_id):
                yield event
                if session_id and event.type in LAST:
                    return

    async def _next(self, after: int) -> SessionEvent:
        while after == self.last_sequence:
            if self._end:
                raise self._end
            self._news.clear()
            await self._news.wait()
        self._check(after)
        return self._log[after + 1 - self.oldest_sequence]

    def _check(self, after: int) -> None:
        if not self.oldest_sequence - 1 <= after <= self.last_sequence:
            message = f"events after {after} are not kept; those from {self.oldest_sequence} on are"
            raise EventHistoryLost(message, oldestSequence=str(self.oldest_sequence))
