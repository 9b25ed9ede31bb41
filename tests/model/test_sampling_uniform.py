"""The counter-based random numbers: known outputs, uniform over positions and over seeds, unrelated to one another."""

import numpy as np
import pytest

from segue_model.splitmix import GOLDEN_GAMMA, mix, random_bits

BINS = 64
COUNT = 20_000


def uniform(seed: int, position: int) -> float:
    return (random_bits(seed, position) >> 11) * 2.0**-53


def test_mix_is_splitmix64() -> None:
    """The first outputs of splitmix64 seeded with 1234567, as published with its reference code."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [mix(1234567 + n * GOLDEN_GAMMA) for n in range(5)] == known


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_positions_of_a_seed_are_uniform(seed: int) -> None:
    """Chi-square over 64 bins and the correlation of neighbours, for 20,000 positions."""
    check_uniform(np.array([uniform(seed, position) for position in range(COUNT)]))


@pytest.mark.parametrize("position", [0, 1, 511, 2**31 - 1])
def test_seeds_at_a_position_are_uniform(position: int) -> None:
    """The same for 20,000 neighbouring seeds at one position: users choose 0, 1, 2, ..."""
    check_uniform(np.array([uniform(seed, position) for seed in range(COUNT)]))


def test_streams_of_neighbouring_seeds_do_not_overlap_or_correlate() -> None:
    """Stream s+1 is no shifted copy of stream s, and their numbers are uncorrelated."""
    first, second = (np.array([uniform(seed, p) for p in range(COUNT)]) for seed in (41, 42))
    assert not set(first.tolist()) & set(second.tolist())
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(COUNT)


def check_uniform(numbers: np.ndarray) -> None:
    assert numbers.min() >= 0
    assert numbers.max() < 1
    observed = np.histogram(numbers, BINS, (0, 1))[0]
    expected = len(numbers) / BINS
    chi2 = float(((observed - expected) ** 2 / expected).sum())
    print(f"chi-square {chi2:.1f} at {BINS - 1} degrees of freedom")
    assert abs(chi2 - (BINS - 1)) < 5 * np.sqrt(2 * (BINS - 1))
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 5 / np.sqrt(len(numbers))
