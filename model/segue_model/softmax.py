"""exp in integers: the weights that tokens are drawn by, the same to the last bit wherever they are computed.

Integers add up exactly, so no order of summation matters. Each weight takes single IEEE roundings of additions and
multiplications in a fixed order, and no library's exp, whose last bits differ between libraries and processors.
`runner/native/src/softmax.h` says the same in C++.
"""

import math
import sys
from typing import Final

import numpy as np
import numpy.typing as npt

from segue_model.arrays import Floats

Ids = npt.NDArray[np.int64]

ONE: Final = 1 << 42  # the weight of the best token
MAX_VOCAB: Final = 1 << 21  # of these fit into 63 bits

_LOG2_E: Final = 1.4426950408889634
_LEAST: Final = -64.0  # octaves below the best, where a weight has long been 0
# 2^(f / 64) for |f| <= 1/2, highest power first (Remez); its 64th power is 2^f to 2e-13.
_POLYNOMIAL: Final = (
    5.732872717002738e-10,
    2.1173176031317313e-07,
    5.864904955034224e-05,
    0.010830424696224803,
    1.0,
)
_SQUARINGS: Final = 6


def weights(scores: Floats, peak: float, temperature: float) -> Ids:
    """exp((scores - peak) / temperature) in units of 1 / ONE, off by two at most; `peak` is the largest score.

    A temperature above 0 may be so small that every other score gets 0; -inf always does.
    """
    f = scores.astype(np.float64)  # one array, changed in place: a vocabulary's takes a page fault for each 4 KiB
    f -= peak
    with np.errstate(over="ignore"):
        f *= min(_LOG2_E / temperature, sys.float_info.max)
    np.maximum(f, _LEAST, out=f)
    octaves = np.rint(f)
    f -= octaves
    power = np.full_like(f, _POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        power *= f
        power += coefficient
    for _ in range(_SQUARINGS):
        power *= power
    power *= ONE
    np.rint(np.ldexp(power, octaves.astype(np.int32), out=power), out=power)
    return power.astype(np.int64)


def log_total(peak: float, mass: int) -> float:
    """log(sum(exp(scores))), from the largest score and the sum of the weights at temperature 1."""
    return peak + math.log(mass / ONE)
