"""The highest rate that holds: double until one fails, then halve the interval between the two."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long to search.

    Attributes:
        start: the first rate.
        lowest: below it nothing is tried: the server holds no rate that matters.
        highest: above it nothing is tried.
        tolerance: the search ends when the failing rate is at most this share above the one that held.
        probes: rates tried at most.
    """

    start: float
    lowest: float
    highest: float
    tolerance: float
    probes: int

    def __post_init__(self) -> None:
        if not 0 < self.lowest <= self.start <= self.highest:
            raise ValueError(f"0 < {self.lowest} <= {self.start} <= {self.highest} must hold of lowest, start, highest")
        if not self.tolerance > 0:
            raise ValueError(f"the tolerance is {self.tolerance}; it must be above 0")


class RateSearch:
    """Says which rate to try next, and is told whether it held.

    Example:
        >>> while (rate := search.next_rate()) is not None:
        ...     search.tell(rate, held=try_out(rate))
        >>> search.best
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._tried = 0
        self.best: float | None = None  # the highest rate that held
        self.failed: float | None = None  # the lowest rate that did not

    def next_rate(self) -> float | None:
        """The next rate; None when the search is over."""
        if self._tried == self._limits.probes or self._settled():
            return None
        if self.best is None:
            wanted = self._limits.start if self.failed is None else self.failed / 2
        elif self.failed is None:
            wanted = self.best * 2
        else:
            wanted = math.sqrt(self.best * self.failed)  # rates are compared by their ratio
        return min(max(wanted, self._limits.lowest), self._limits.highest)

    def tell(self, rate: float, *, held: bool) -> None:
        """The outcome of a rate.

        One that holds above one that failed is noise at the edge: the lower bound stays below the upper one.
        """
        self._tried += 1
        if held and (self.failed is None or rate < self.failed):
            self.best = rate if self.best is None else max(self.best, rate)
        elif not held:
            self.failed = rate if self.failed is None else min(self.failed, rate)

    def _settled(self) -> bool:
        if self.best is None:
            return self.failed is not None and self.failed <= self._limits.lowest
        if self.failed is None:
            return self.best >= self._limits.highest
        return self.failed <= self.best * (1 + self._limits.tolerance)
