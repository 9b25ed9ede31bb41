"""Between the engine and the event loop: nothing passes before the records of its step are in the file.

So a reader never holds a token that a restart would not know. When a write fails, every turn that has something in it
ends with LedgerUnavailable and leaves no trace, in the engine's memory and, as soon as it can be written, in the file.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from segue_server.errors import LedgerUnavailable
from segue_server.events import Event, Failed
from segue_server.jobs import Sink
from segue_server.ledger.journal import Entry, Journal
from segue_server.ledger.records import Record, TurnRevoked
from segue_server.ledger.store import LedgerStore
from segue_server.ledger.writer import LedgerStats, LedgerWriter, Lost

Outbox = list[tuple[Sink, Event]]
Answer = Callable[[LedgerUnavailable | None], None]  # None: it is in the file


@dataclass(frozen=True, slots=True)
class Step:
    """What leaves the engine after one step."""

    entries: list[Entry]
    outbox: Outbox
    answers: list[Answer]  # of calls that wait for their records


class LedgerGate:
    """The engine notes records in the journal; `publish` sends them to the file and its events after them."""

    def __init__(self, store: LedgerStore, journal: Journal, *, revoke: Callable[[str, int], None]) -> None:
        """`revoke` (session id, start) has the engine end the turn if it still runs, without an event, and cut the
        session's ledger back to `start`. Called on the engine's thread. The gate closes the store.
        """
        self._store = store
        self._journal = journal
        self._revoke_in_engine = revoke
        self._answers: list[Answer] = []
        self._deliver: Callable[[Outbox], None]
        self._writer: LedgerWriter[Step]

    @property
    def stats(self) -> LedgerStats:
        return self._writer.stats

    def start(self, deliver: Callable[[Outbox], None], *, wake: Callable[[], None]) -> None:
        """`deliver` takes events to the loop, from any thread; `wake` has the engine's thread call `publish` soon."""
        self._deliver = deliver
        self._writer = LedgerWriter(self._store, deliver=self._let_go, on_loss=wake)
        self._writer.start()

    def record(self, records: Sequence[Record], answer: Answer, *, lasting: bool = False) -> None:
        """Note what a call changes; `answer` is called when it is in the file or lost. Engine thread.

        What is lost is not written later, unless it is `lasting`: then it goes in with the first write that succeeds.
        """
        for record in records:
            self._journal.append(record, lasting=lasting)
        self._answers.append(answer)

    def publish(self, outbox: Outbox) -> None:
        """Send a step's events behind its records. Engine thread, after each step."""
        answers, self._answers = self._answers, []
        step = Step(self._journal.take(), outbox, answers)
        if lost := self._writer.take_lost():
            self._take_back(lost, step)
        elif step.entries or step.outbox or step.answers:
            self._writer.put([entry.record for entry in step.entries], step)

    def flush(self) -> None:
        """Return when everything published has reached the loop or is lost."""
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _let_go(self, step: Step) -> None:
        self._deliver(step.outbox)
        for answer in step.answers:
            answer(None)

    def _take_back(self, lost: Lost[Step], current: Step) -> None:
        """Fail every turn that has a record in what is lost, and the step that builds on it; let the others go on.

        What has changed in memory for good, such as a ledger that slid, still has to reach the file.
        """
        steps = [*lost.payloads, current]
        turns = {id(entry.turn.sink): entry.turn for step in steps for entry in step.entries if entry.turn}
        for turn in turns.values():
            self._revoke_in_engine(turn.session_id, turn.start)
        self._journal.take()  # what the engine notes of that is what TurnRevoked says
        lasting = [entry.record for step in steps for entry in step.entries if entry.lasting]
        self._writer.resume([*lasting, *(TurnRevoked(turn.session_id) for turn in turns.values())])
        others = [(sink, event) for step in steps for sink, event in step.outbox if id(sink) not in turns]
        self._deliver([*others, *((turn.sink, Failed(lost.error, turn.start)) for turn in turns.values())])
        for answer in (answer for step in steps for answer in step.answers):
            answer(lost.error)
