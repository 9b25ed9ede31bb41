"""The events of one turn on their way to its reader: numbered, coalesced if asked, with heartbeats in the silence."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from segue_server.events import Event, Failed, Finished, Heartbeat, Started, Tokens
from segue_server.requests import OutputOptions

MAX_BACKLOG = 256  # events a reader may be behind before its turn is paused


class TurnStream:
    """A bounded queue between the engine and one reader. Lives on the event loop; only `full` is read elsewhere.

    The bound is a pause, not a loss: the engine asks `full` before each step and leaves the sequence out while it is
    set, because gRPC's own flow control lets tens of thousands of small messages run ahead of a stalled reader.
    """

    def __init__(
        self,
        options: OutputOptions,
        *,
        on_event: Callable[[Event], Event],
        on_room: Callable[[], None],
        max_backlog: int = MAX_BACKLOG,
    ) -> None:
        """`on_event` sees, and may complete, each event as it comes; `on_room` is called when a full queue has room."""
        self._options = options
        self._on_event = on_event
        self._on_room = on_room
        self._max_backlog = max_backlog
        self._events: deque[Event] = deque()
        self._pending: Tokens | None = None  # being coalesced
        self._flush_timer: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()
        self._started = False
        self._began = asyncio.get_running_loop().time()

    @property
    def full(self) -> bool:
        """The reader is too far behind. Safe from any thread."""
        return len(self._events) >= self._max_backlog

    def deliver(self, event: Event) -> None:
        """Take an event from the engine."""
        event = self._on_event(event)
        if isinstance(event, Tokens) and self._options.max_tokens_per_event > 1:
            self._coalesce(event)
        else:
            self._flush()
            self._append(event)

    async def read(self) -> AsyncIterator[tuple[int, Event]]:
        """(1, first event), (2, second), ... until Finished. Raises the error of a turn that failed."""
        sequence = 0
        while True:
            event = await self._next()
            if isinstance(event, Failed):
                raise event.error
            sequence += 1
            yield sequence, event
            if isinstance(event, Finished):
                return

    async def _next(self) -> Event:
        while not self._events:
            self._news.clear()
            interval = self._options.heartbeat_interval if self._started else 0  # the grammar: none before Started
            try:
                async with asyncio.timeout(interval or None):
                    await self._news.wait()
            except TimeoutError:
                return Heartbeat(asyncio.get_running_loop().time() - self._began)
        was_full = self.full
        event = self._events.popleft()
        self._started = self._started or isinstance(event, Started)
        if was_full and not self.full:
            self._on_room()
        return event

    def _append(self, event: Event) -> None:
        self._events.append(event)
        self._news.set()

    def _coalesce(self, event: Tokens) -> None:
        """Hold tokens back until there are enough of them or the oldest has waited for long enough."""
        self._pending = _joined(self._pending, event) if self._pending else event
        if len(self._pending.token_ids) >= self._options.max_tokens_per_event or not self._options.max_event_delay:
            self._flush()
        elif self._flush_timer is None:
            loop = asyncio.get_running_loop()
            self._flush_timer = loop.call_later(self._options.max_event_delay, self._flush)

    def _flush(self) -> None:
        if self._flush_timer:
            self._flush_timer.cancel()
            self._flush_timer = None
        if self._pending:
            pending, self._pending = self._pending, None
            self._append(pending)


def _joined(first: Tokens, second: Tokens) -> Tokens:
    return replace(
        first,
        token_ids=first.token_ids + second.token_ids,
        text=first.text + second.text,
        logprobs=first.logprobs + second.logprobs,
    )
