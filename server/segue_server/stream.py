"""The events of one turn: a log that is numbered once, and read by whoever has come for it, from wherever he wants.

Events are coalesced if asked, and heartbeats fill the silence; both before they are numbered, so that event 7 is the
same event for every reader, also for one that comes back with "I have events up to 6" after a broken connection.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace

from segue_model.sampling import TokenLogprob
from segue_server.errors import PositionBeyondEnd
from segue_server.events import Event, Failed, Finished, Heartbeat, Prefill, Started, Tokens
from segue_server.requests import OutputOptions

MAX_BACKLOG = 256  # events the readers may be behind before their turn is paused


class TurnStream:
    """The log between the engine and the readers of a turn. Lives on the event loop; only `full` is read elsewhere.

    Readers that fall behind pause the turn: the engine asks `full` before each step and leaves the sequence out while
    it is set, because gRPC's own flow control lets tens of thousands of small messages run ahead of a stalled reader.
    The foremost reader counts: one whose connection is dead, but not yet known to be, must not hold up the reader that
    took its place. A turn without a reader is not paused; its log is bounded by its own length.
    """

    def __init__(
        self,
        options: OutputOptions,
        *,
        on_event: Callable[[Event], Event],
        on_room: Callable[[], None],
        max_backlog: int = MAX_BACKLOG,
    ) -> None:
        """`on_event` sees, and may complete, each event as it comes; `on_room` is called when a pause may end."""
        self.options = options
        self._on_event = on_event
        self._on_room = on_room
        self._max_backlog = max_backlog
        self._log: list[Event] = []
        self._readers: list[Reader] = []
        self._taken = 0  # events the foremost reader there has ever been has taken
        self._behind = 0  # events the foremost reader has not taken
        self._pending: Tokens | None = None  # being coalesced
        self._flush_timer: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()
        self._started = False
        self._began = self._latest = asyncio.get_running_loop().time()

    @property
    def full(self) -> bool:
        """Every reader is too far behind. Safe from any thread."""
        return self._behind >= self._max_backlog

    @property
    def has_readers(self) -> bool:
        return bool(self._readers)

    @property
    def ended(self) -> bool:
        return bool(self._log) and isinstance(self._log[-1], Finished | Failed)

    @property
    def taken(self) -> list[Event]:
        """What one reader or another has taken."""
        return self._log[: self._taken]

    @property
    def left(self) -> list[Event]:
        """What no reader has taken, tokens that are held back included."""
        return [*self._log[self._taken :], *([self._pending] if self._pending else ())]

    @property
    def size(self) -> int:
        """Bytes of memory the log takes, roughly."""
        return sum(_size(event) for event in self._log)

    def deliver(self, event: Event) -> None:
        """Take an event from the engine. Nothing follows the end."""
        if self.ended:
            return
        event = self._on_event(event)
        if isinstance(event, Tokens) and self.options.max_tokens_per_event > 1:
            self._coalesce(event)
        else:
            self._flush()
            self._append(event)

    def read(self, after: int = 0) -> "Reader":
        """A reader from event `after + 1` on; it counts until it is closed.

        Raises:
            PositionBeyondEnd: there are fewer than `after` events.
        """
        last = len(self._log) - (self.ended and isinstance(self._log[-1], Failed))
        if after > last:
            raise PositionBeyondEnd(f"the turn has {last} events so far, not {after}", lastSequence=str(last))
        reader = Reader(self, after)
        self._readers.append(reader)
        self.moved()
        return reader

    async def event(self, sequence: int) -> Event | None:
        """The event of that number, once it is there; None when the turn has ended before it."""
        while sequence > len(self._log):
            if self.ended:
                return None
            await self._more()
        return self._log[sequence - 1]

    def leave(self, reader: "Reader") -> None:
        if reader in self._readers:
            self._readers.remove(reader)
            self.moved()

    def moved(self) -> None:
        """A reader has come, gone or taken an event."""
        was_full = self.full
        if self._readers:
            foremost = max(reader.sequence for reader in self._readers)
            self._behind, self._taken = len(self._log) - foremost, max(self._taken, foremost)
        else:
            self._behind = 0
        if was_full and not self.full:
            self._on_room()

    async def _more(self) -> None:
        """Wait for an event; whoever finds that none came for too long makes one."""
        self._news.clear()
        interval = self.options.heartbeat_interval if self._started else 0  # the grammar: none before Started
        try:
            async with asyncio.timeout_at(self._latest + interval if interval else None):
                await self._news.wait()
        except TimeoutError:
            now = asyncio.get_running_loop().time()
            if now >= self._latest + interval and not self.ended:
                self._append(Heartbeat(now - self._began))

    def _append(self, event: Event) -> None:
        self._log.append(event)
        self._started = self._started or isinstance(event, Started)
        self._latest = asyncio.get_running_loop().time()
        self._news.set()
        self.moved()

    def _coalesce(self, event: Tokens) -> None:
        """Hold tokens back until there are enough of them or the oldest has waited for long enough."""
        self._pending = _joined(self._pending, event) if self._pending else event
        if len(self._pending.token_ids) >= self.options.max_tokens_per_event or not self.options.max_event_delay:
            self._flush()
        elif self._flush_timer is None:
            loop = asyncio.get_running_loop()
            self._flush_timer = loop.call_later(self.options.max_event_delay, self._flush)

    def _flush(self) -> None:
        if self._flush_timer:
            self._flush_timer.cancel()
            self._flush_timer = None
        if self._pending:
            pending, self._pending = self._pending, None
            self._append(pending)


class Reader:
    """One caller's place in the log: (n + 1, event), (n + 2, event), ... until Finished."""

    def __init__(self, stream: TurnStream, after: int) -> None:
        self._stream = stream
        self.sequence = after  # of the last event taken

    def __aiter__(self) -> "Reader":
        return self

    async def __anext__(self) -> tuple[int, Event]:
        """Raises the error of a turn that failed."""
        event = await self._stream.event(self.sequence + 1)
        if event is None:
            raise StopAsyncIteration
        if isinstance(event, Failed):
            raise event.error
        self.sequence += 1
        self._stream.moved()
        return self.sequence, event

    def close(self) -> None:
        """Leave; the turn does not wait for this reader any more. May be called twice."""
        self._stream.leave(self)


def _joined(first: Tokens, second: Tokens) -> Tokens:
    return replace(
        first,
        token_ids=first.token_ids + second.token_ids,
        text=first.text + second.text,
        logprobs=first.logprobs + second.logprobs,
    )


def _size(event: Event) -> int:
    """As tracemalloc finds it on CPython 3.11: 240 bytes for a token with its text, 155 for a logprob."""
    match event:
        case Tokens(_, token_ids, text, logprobs):
            return 200 + 36 * len(token_ids) + len(text) + _logprob_size(logprobs)
        case Prefill(_, _, logprobs):
            return 200 + _logprob_size(logprobs)
        case _:
            return 200


def _logprob_size(logprobs: Iterable[TokenLogprob]) -> int:
    return sum(155 + 128 * len(logprob.top) for logprob in logprobs)
