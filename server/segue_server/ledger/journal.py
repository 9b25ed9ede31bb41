"""What the engine has noted in the step in progress. Engine thread only."""

from dataclasses import dataclass

from segue_server.jobs import Sink
from segue_server.ledger.records import Record, Slid


@dataclass(frozen=True, slots=True, eq=False)
class TurnRef:
    """The turn that fails when a record of it cannot be written."""

    session_id: str
    start: int  # ledger length before the turn, and after it has failed; of two refs of a turn the later one counts
    sink: Sink


@dataclass(frozen=True, slots=True)
class Entry:
    record: Record
    turn: TurnRef | None = None  # None: a record of a call
    lasting: bool = False  # memory has changed for good: if it cannot be written now, it is written later


class Journal:
    """Records in the order in which things happened, until the step's events leave the engine with them."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def append(self, record: Record, turn: TurnRef | None = None, *, lasting: bool = False) -> None:
        self._entries.append(Entry(record, turn, lasting or isinstance(record, Slid)))

    def take(self) -> list[Entry]:
        """The entries since the last call."""
        entries, self._entries = self._entries, []
        return entries
