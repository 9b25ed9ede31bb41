"""splitmix64 (Steele, Lea and Flood 2014) as a function of seed and position: no state to keep, restore or share."""

from typing import Final

_MASK: Final = 2**64 - 1
GOLDEN_GAMMA: Final = 0x9E3779B97F4A7C15


def random_bits(seed: int, position: int) -> int:
    """The 64 random bits of a position: output number `position` of the generator that the hashed seed starts."""
    return mix(mix(seed) + position * GOLDEN_GAMMA)


def mix(state: int) -> int:
    """The finaliser of a 64-bit state, advanced by one step first."""
    z = (state + GOLDEN_GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
