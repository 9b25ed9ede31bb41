"""What the prefix index holds, as it changes: one numbered log of batches, bounded, for routers that follow it."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from segue_server.cache.prefix import Change
from segue_server.errors import EventHistoryLost, SegueError

CAPACITY = 4096  # batches; a step seals at most one


@dataclass(frozen=True, slots=True)
class CacheEventBatch:
    """The changes of one step."""

    sequence: int  # 1, 2, 3, ... since the server started; 0 before the first
    time: float  # Unix seconds
    changes: Sequence[Change]


class CacheEventLog:
    """Event loop only."""

    def __init__(self, *, capacity: int = CAPACITY) -> None:
        self._log: deque[CacheEventBatch] = deque(maxlen=capacity)
        self._news = asyncio.Event()
        self._end: SegueError | None = None
        self.last_sequence = 0

    @property
    def oldest_sequence(self) -> int:
        """Of the oldest batch that is kept; of the next one when there is none."""
        return self.last_sequence + 1 - len(self._log)

    def seal(self, changes: Sequence[Change]) -> None:
        self.last_sequence += 1
        self._log.append(CacheEventBatch(self.last_sequence, time.time(), changes))
        self._news.set()

    def close(self, error: SegueError) -> None:
        """End every subscription, after the batches there are."""
        self._end = error
        self._news.set()

    def check(self, after: int) -> None:
        """Raises EventHistoryLost when not every batch after this one is kept, or there never was such a one."""
        if not self.oldest_sequence - 1 <= after <= self.last_sequence:
            message = f"events after {after} are not kept; those from {self.oldest_sequence} on are"
            raise EventHistoryLost(message, oldestSequence=str(self.oldest_sequence))

    async def follow(self, after: int) -> AsyncGenerator[CacheEventBatch, None]:
        """Batches after this one, for ever. Raises EventHistoryLost once the log has overtaken the reader."""
        while True:
            while after == self.last_sequence:
                if self._end:
                    raise self._end
                self._news.clear()
                await self._news.wait()
            self.check(after)
            batch = self._log[after + 1 - self.oldest_sequence]
            after = batch.sequence
            yield batch
