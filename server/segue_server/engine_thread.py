"""The thread the engine lives on, and the only way in and out: an inbox of calls, one wake-up of the loop a step."""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from segue_server.cache.prefix import Change
from segue_server.engine import Engine
from segue_server.errors import EngineError, SegueError
from segue_server.events import Event
from segue_server.jobs import Sink
from segue_server.ledger.gate import LedgerGate
from segue_server.ledger.records import Record

log = logging.getLogger(__name__)
T = TypeVar("T")

IDLE_WAIT = 1.0  # seconds; the longest an idle engine sleeps before it looks at the clock again


class EngineThread:
    """Runs `engine` on a thread of its own; everything else talks to it from the event loop that started it."""

    def __init__(
        self,
        engine: Engine,
        *,
        on_crash: Callable[[BaseException], None],
        ledger: LedgerGate | None = None,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_crash` is called on the loop if the engine itself fails, not just a step: nothing moves after that.

        `prepare` is called on the new thread before anything else.

        With a `ledger`, events reach the loop when the records of their step are in the file; it is closed by `stop`.
        """
        self.engine = engine
        self._ledger = ledger
        self._prepare = prepare
        self._on_crash = on_crash
        self._on_failure: list[Callable[[SegueError], None]] = []
        self._on_shrunk: Callable[[set[str]], None] = lambda _: None
        self._on_cache_changes: Callable[[list[Change]], None] = lambda _: None
        self._failed = False
        self._calls: set[asyncio.Future[Any]] = set()  # that wait for an answer
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop

    @property
    def durable(self) -> bool:
        """Sessions outlive the process."""
        return self._ledger is not None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.engine.mover.store.on_news = lambda: self.post(_nothing)
        if self._ledger:
            self._ledger.start(self.deliver, wake=lambda: self.post(_nothing))
        self._thread.start()

    async def stop(self) -> None:
        """Let the step in progress end, then the thread."""
        self.post(self._stop)
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self.engine.shut_down)
        if self._ledger:
            await asyncio.to_thread(self._ledger.close)

    def on_failure(self, call: Callable[[SegueError], None]) -> None:
        """Have `call` run on the loop if the engine fails: whoever waits for an event would wait for ever."""
        self._on_failure.append(call)

    def on_shrunk(self, call: Callable[[set[str]], None]) -> None:
        """Have `call` run on the loop with the ids of the sessions that lost KV to others in a step."""
        self._on_shrunk = call

    def on_cache_changes(self, call: Callable[[list[Change]], None]) -> None:
        """Have `call` run on the loop with what a step has changed in the prefix index."""
        self._on_cache_changes = call

    def check(self) -> None:
        """Raises EngineError when the engine has failed."""
        if self._failed:
            raise _engine_failed()

    def post(self, call: Callable[[], object]) -> None:
        """Run `call` on the engine thread before its next step; nobody waits for it."""
        self._inbox.put(lambda: void(call))

    async def call(self, call: Callable[[], T]) -> T:
        """Run `call` on the engine thread before its next step, and return or raise what it does."""
        self.check()
        future: asyncio.Future[T] = self._future()
        self._inbox.put(lambda: self._answer(future, call))
        return await future

    def note(self, *records: Record) -> None:
        """Have the ledger write what nobody waits for, later if it cannot now; the log says so."""
        if self._ledger:
            self._inbox.put(partial(self._ledger.record, records, _log_loss, lasting=True))

    async def record(self, *records: Record) -> None:
        """Have the ledger write what is about to change, behind everything the engine has noted before.

        Returns when it is in the file, at once without a ledger. Raises LedgerUnavailable when none of it is written.
        Cancelling the wait does not take the records back.
        """
        await self.commit(lambda: (None, records))

    async def commit(self, call: Callable[[], tuple[T, Sequence[Record]]], *, lasting: bool = False) -> T:
        """Like `call`, for a call whose outcome decides what is to be written: (result, records).

        Raises what `call` raises, or LedgerUnavailable when it has run and its records cannot be written; `lasting`
        ones then follow with the first write that succeeds, for what cannot be undone in memory.
        """
        if self._ledger is None:
            return (await self.call(call))[0]
        self.check()
        future: asyncio.Future[T] = self._future()
        self._inbox.put(partial(self._commit, self._ledger, future, call, lasting))
        return await future

    def _commit(
        self,
        ledger: LedgerGate,
        future: "asyncio.Future[T]",
        call: Callable[[], tuple[T, Sequence[Record]]],
        lasting: bool,
    ) -> None:
        try:
            result, records = call()
        except Exception as error:  # noqa: BLE001 - it belongs to the caller
            self._raise(future, error)
        else:
            answer = partial(self._answer_commit, future, result)
            ledger.record(records, answer, lasting=lasting)

    def _answer_commit(self, future: "asyncio.Future[T]", result: T, lost: SegueError | None) -> None:
        if lost:
            self._raise(future, lost)
        else:
            self._return(future, result)

    def _return(self, future: "asyncio.Future[T]", result: T) -> None:
        self._loop.call_soon_threadsafe(_set_result, future, result)

    def _raise(self, future: "asyncio.Future[T]", error: Exception) -> None:
        self._loop.call_soon_threadsafe(_set_exception, future, error)

    def _future(self) -> "asyncio.Future[Any]":
        """One that fails with the engine."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return future

    def deliver(self, outbox: list[tuple[Sink, Event]]) -> None:
        """Bring events to their sinks, on the loop, in order. From any thread."""
        if outbox:
            self._loop.call_soon_threadsafe(_deliver, outbox)

    def _answer(self, future: "asyncio.Future[T]", call: Callable[[], T]) -> None:
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 - it belongs to the caller
            self._raise(future, error)
        else:
            self._return(future, result)

    def _run(self) -> None:
        try:
            self._prepare()
            busy = False
            while not self._stopping:
                self._take_inbox(0.0 if busy else self._wait())
                busy = self.engine.step()
                self._publish()
        except BaseException as error:
            log.critical("the engine has failed", exc_info=True)
            if self._ledger:
                self._ledger.flush()  # what happened before comes before
            void(self.engine.jobs.give_up)
            self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        """On the loop: end everything that waits for the engine, and say so."""
        self._failed = True
        for future in list(self._calls):
            _set_exception(future, _engine_failed())
        for call in self._on_failure:
            call(_engine_failed())
        self._on_crash(error)

    def _wait(self) -> float:
        return min(max(self.engine.jobs.next_deadline() - self.engine.clock(), 0.0), IDLE_WAIT)

    def _take_inbox(self, wait: float) -> None:
        """Run the calls that are there, after waiting up to `wait` seconds for the first."""
        try:
            self._inbox.get(timeout=wait)() if wait else self._inbox.get_nowait()()
            while True:
                self._inbox.get_nowait()()
        except Empty:
            return

    def _publish(self) -> None:
        outbox = self.engine.jobs.take_outbox()
        if shrunk := self.engine.scheduler.evictor.take_shrunk():
            self._loop.call_soon_threadsafe(self._on_shrunk, shrunk)
        if changes := self.engine.holdings.prefixes.take_changes():
            self._loop.call_soon_threadsafe(self._on_cache_changes, changes)
        if self._ledger:
            self._ledger.publish(outbox)
        else:
            self.deliver(outbox)

    def _stop(self) -> None:
        self._stopping = True


def _deliver(outbox: list[tuple[Sink, Event]]) -> None:
    for sink, event in outbox:
        void(partial(sink.deliver, event))  # a fault in one stream must not cost the others their events


def _nothing() -> None:
    pass


def _engine_failed() -> EngineError:
    return EngineError("the engine has failed; the server is shutting down")


def _log_loss(lost: SegueError | None) -> None:
    if lost:
        log.error("the ledger could not note what happened: %s", lost)


def _set_result(future: "asyncio.Future[T]", result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: "asyncio.Future[T]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def void(call: Callable[[], object]) -> None:
    """Run a call whose failure nobody waits for: it is logged."""
    try:
        call()
    except Exception:
        log.exception("a call that nobody waits for failed")
