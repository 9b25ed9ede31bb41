"""Lengths and pauses that vary as they do in life, written as short words.

120                          always 120, as fixed:120
uniform:50,200               anything between, both ends included
lognormal:120,0.6            median 120, sigma 0.6 of the logarithm: many short ones, a few long ones
exponential:2                mean 2
lognormal:120,0.6,min=8,max=1024    any of them, kept within bounds
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random


class SpecError(ValueError):
    """A word that describes a workload cannot be understood; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Where a random number comes from; made by `parse`."""

    spec: str  # as it was given
    kind: str
    parameters: tuple[float, ...]
    minimum: float
    maximum: float

    def __str__(self) -> str:
        return self.spec

    def sample(self, rng: Random) -> float:
        """One number."""
        return min(max(_KINDS[self.kind].draw(rng, self.parameters), self.minimum), self.maximum)

    def count(self, rng: Random) -> int:
        """One number of things, at least 1."""
        return max(1, round(self.sample(rng)))


@dataclass(frozen=True, slots=True)
class _Kind:
    parameters: int
    draw: Callable[[Random, tuple[float, ...]], float]


_KINDS: Mapping[str, _Kind] = {
    "fixed": _Kind(1, lambda _, p: p[0]),
    "uniform": _Kind(2, lambda rng, p: rng.uniform(p[0], p[1])),
    "lognormal": _Kind(2, lambda rng, p: rng.lognormvariate(math.log(p[0]), p[1])),
    "exponential": _Kind(1, lambda rng, p: rng.expovariate(1 / p[0])),
}


def parse(spec: str) -> Distribution:
    """The distribution that a word describes.

    Raises:
        SpecError: an unknown kind, a wrong count of numbers, or one that is out of its range.
    """
    kind, colon, rest = spec.strip().partition(":")
    if not colon:
        kind, rest = "fixed", kind
    if kind not in _KINDS:
        raise SpecError(f"{spec!r}: the kind is {kind!r}; known are {', '.join(_KINDS)}")
    words = [word.strip() for word in rest.split(",")]
    numbers = tuple(_number(spec, word) for word in words if "=" not in word)
    bounds = _bounds(spec, [word for word in words if "=" in word])
    _check(spec, kind, numbers)
    return Distribution(spec, kind, numbers, bounds.get("min", 0.0), bounds.get("max", math.inf))


def _bounds(spec: str, words: list[str]) -> dict[str, float]:
    bounds = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in ("min", "max"):
            raise SpecError(f"{spec!r}: {name!r} is not a bound; use min= or max=")
        bounds[name] = _number(spec, value)
    if bounds.get("min", 0.0) > bounds.get("max", math.inf):
        raise SpecError(f"{spec!r}: min is above max")
    return bounds


def _number(spec: str, word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        raise SpecError(f"{spec!r}: {word!r} is not a number") from None
    if not 0 <= value < math.inf:
        raise SpecError(f"{spec!r}: {word} is out of range; every number must be 0 or more, and finite")
    return value


def _check(spec: str, kind: str, numbers: tuple[float, ...]) -> None:
    wanted = _KINDS[kind].parameters
    if len(numbers) != wanted:
        raise SpecError(f"{spec!r}: {kind} takes {wanted} number{'s' * (wanted > 1)}, not {len(numbers)}")
    if kind in ("lognormal", "exponential") and numbers[0] == 0:
        raise SpecError(f"{spec!r}: the {'median' if kind == 'lognormal' else 'mean'} must be above 0")
    if kind == "uniform" and numbers[0] > numbers[1]:
        raise SpecError(f"{spec!r}: the lower end is above the upper one")
