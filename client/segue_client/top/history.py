"""Rates: what lies between two snapshots. No clock, no I/O."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from segue_client.top.snapshot import Latency, Snapshot

KEPT = 512  # intervals; wider than any terminal's sparkline


@dataclass(frozen=True, slots=True)
class Rates:
    """Between two snapshots; None where nothing was measured in between."""

    prefilled: float | None = None  # tokens per second
    generated: float | None = None
    first_token: float | None = None  # mean, seconds
    inter_token: float | None = None


def rates(before: Snapshot, after: Snapshot) -> Rates:
    """What the server did in between; nothing is known when it was started anew, or no time has passed."""
    seconds = after.time - before.time
    if seconds <= 0 or _restarted(before, after):
        return Rates()
    old, new = before.load, after.load
    return Rates(
        prefilled=(new.prefilled - old.prefilled) / seconds,
        generated=(new.generated - old.generated) / seconds,
        first_token=_mean(old.first_token, new.first_token),
        inter_token=_mean(old.inter_token, new.inter_token),
    )


def _restarted(before: Snapshot, after: Snapshot) -> bool:
    return after.server.uptime < before.server.uptime or after.load.generated < before.load.generated


def _mean(before: Latency, after: Latency) -> float | None:
    count = after.count - before.count
    return (after.total - before.total) / count if count > 0 else None


class History:
    """The rates of the last intervals, the newest one last."""

    def __init__(self) -> None:
        self._rates: deque[Rates] = deque(maxlen=KEPT)
        self._latest: Snapshot | None = None

    def add(self, snapshot: Snapshot) -> None:
        """Takes the next snapshot; the first one only begins an interval."""
        if self._latest is not None:
            self._rates.append(rates(self._latest, snapshot))
        self._latest = snapshot

    @property
    def now(self) -> Rates:
        """Of the last interval."""
        return self._rates[-1] if self._rates else Rates()

    @property
    def prefilled(self) -> list[float | None]:
        """Tokens per second."""
        return [each.prefilled for each in self._rates]

    @property
    def generated(self) -> list[float | None]:
        """Tokens per second."""
        return [each.generated for each in self._rates]

    @property
    def first_token(self) -> list[float | None]:
        """Mean seconds."""
        return [each.first_token for each in self._rates]

    @property
    def inter_token(self) -> list[float | None]:
        """Mean seconds."""
        return [each.inter_token for each in self._rates]
