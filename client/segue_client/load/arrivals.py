"""When the requests of an open loop are due, whatever the server does."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from random import Random
from typing import Literal, assert_never

Process = Literal["poisson", "constant"]


def arrivals(process: Process, rate: float, seed: int) -> Iterator[float]:
    """Endless moments in seconds from 0, in order: the same for the same seed.

    Args:
        process: "poisson" for independent users, whose gaps are exponential; "constant" for equal gaps.
        rate: arrivals a second, on average.
        seed: of the gaps.

    Raises:
        ValueError: the rate is not above 0.
    """
    if not rate > 0:
        raise ValueError(f"the rate is {rate}; it must be above 0")
    match process:
        case "constant":
            return (number / rate for number in count())
        case "poisson":
            return _poisson(rate, Random(f"{seed}/arrivals"))  # noqa: S311  no secret
        case _:
            assert_never(process)


def _poisson(rate: float, rng: Random) -> Iterator[float]:
    moment = 0.0
    while True:
        moment += rng.expovariate(rate)
        yield moment
