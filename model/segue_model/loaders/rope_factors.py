"""Llama 3's rotary scaling, told from the per-channel factors that GGUF files carry instead of its parameters."""

import math

import numpy as np
import numpy.typing as npt

from segue_model.checkpoint import CheckpointError
from segue_model.config import RopeScaling

LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR = 1.0, 4.0  # of every Llama 3 release
RELATIVE_TOLERANCE = 1e-4  # the factors are stored in float32


def recover_llama3(factors: npt.NDArray[np.float32], head_dim: int, theta: float, source: str) -> RopeScaling | None:
    """The parameters whose factors these are; None when all are 1.

    factors: (head_dim / 2,), by which each frequency is divided. Raises CheckpointError when Llama 3's rule with its
    published constants gives other factors (longrope, for one).
    """
    stored = factors.astype(np.float64)
    if np.array_equal(stored, np.ones_like(stored)):
        return None
    if not (np.isfinite(stored) & (stored >= 1)).all():
        raise CheckpointError(f"{source}: the factors in rope_freqs.weight must be finite and at least 1")
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    for context in _candidate_contexts(stored, wavelengths):
        scaling = RopeScaling(
            kind="llama3",
            factor=float(stored.max()),
            original_context_tokens=context,
            low_freq_factor=LOW_FREQ_FACTOR,
            high_freq_factor=HIGH_FREQ_FACTOR,
        )
        if np.allclose(llama3_factors(scaling, wavelengths), stored, rtol=RELATIVE_TOLERANCE, atol=0):
            return scaling
    raise CheckpointError(
        f"{source}: the factors in rope_freqs.weight do not follow Llama 3's rule, the only one known"
    )


def llama3_factors(scaling: RopeScaling, wavelengths: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """What each frequency is divided by (Llama 3.1, `apply_scaling` of meta-llama/llama-models)."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = ((scaling.original_context_tokens / wavelengths - low) / (high - low)).clip(0, 1)
    divisors: npt.NDArray[np.float64] = 1 / ((1 - smooth) / scaling.factor + smooth)
    return divisors


def _candidate_contexts(stored: npt.NDArray[np.float64], wavelengths: npt.NDArray[np.float64]) -> list[int]:
    """8192 (all releases), and what each blended channel gives when the rule is solved for the context."""
    factor = stored.max()
    blended = (stored > 1) & (stored < factor)
    smooth = (1 / stored[blended] - 1 / factor) / (1 - 1 / factor)
    contexts = (smooth * (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR) + LOW_FREQ_FACTOR) * wavelengths[blended]
    return [8192, *(round(context) for context in contexts if 1 <= context < 2**31)]
