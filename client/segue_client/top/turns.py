"""The table of a session's turns. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from segue_client.top.figures import NOTHING, latency, rate, shortened
from segue_client.top.snapshot import TurnRow

REQUEST_FROM = 120  # cells from which every turn has its request id beside it


@dataclass(frozen=True, slots=True)
class Column:
    """One column; numbers are right-aligned."""

    title: str
    width: int  # cells
    text: Callable[[TurnRow], str]
    number: bool = True

    def placed(self, text: str) -> str:
        """A title or a figure in its place."""
        fitted = shortened(text, self.width)
        return fitted.rjust(self.width) if self.number else fitted.ljust(self.width)


def decode_rate(row: TurnRow) -> float | None:
    """Tokens per second while decoding; the first token belongs to the prefill."""
    seconds = row.timings.decode if row.timings else None
    return (row.generated - 1) / seconds if seconds and row.generated > 1 else None


def _longest_gap(row: TurnRow) -> str:
    return latency(row.timings.max_inter_token) if row.timings and row.generated > 1 else NOTHING


def _timing(name: str) -> Callable[[TurnRow], str]:
    return lambda row: latency(getattr(row.timings, name)) if row.timings else NOTHING


COLUMNS = (
    Column("turn", 4, lambda row: str(row.turn)),
    Column("positions", 13, lambda row: f"{row.start}-{row.end}"),
    Column("prompt", 6, lambda row: str(row.prompt)),
    Column("generated", 9, lambda row: str(row.generated)),
    Column("ended by", 13, lambda row: row.reason or "in flight", number=False),
    Column("queue", 7, _timing("queue")),
    Column("TTFT", 7, _timing("time_to_first_token")),
    Column("max gap", 7, _longest_gap),
    Column("tok/s", 5, lambda row: rate(decode_rate(row))),
)
REQUEST = Column("request", 36, lambda row: row.request_id, number=False)


def columns_for(width: int) -> list[Column]:
    """The columns for so many cells."""
    return [*COLUMNS, REQUEST] if width >= REQUEST_FROM else list(COLUMNS)
