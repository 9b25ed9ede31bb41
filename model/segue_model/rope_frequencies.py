"""How fast each pair of channels turns in rotary position embedding, and by what angles at every position.

The frequencies of the scaled kinds follow Hugging Face transformers number for number, since that is what published
checkpoints were trained with.
"""

import math

import numpy as np
import numpy.typing as npt

from segue_model.config import ConfigError, DecoderConfig, RopeScaling

Float32s = npt.NDArray[np.float32]


def cosines_and_sines(config: DecoderConfig) -> tuple[Float32s, Float32s]:
    """Of every position of the context, (max_context_tokens, head_dim / 2) each, with yarn's attention factor."""
    angles = np.outer(np.arange(config.max_context_tokens, dtype=np.float32), inverse_frequencies(config))
    factor = np.float32(attention_factor(config.rope_scaling))
    return np.cos(angles) * factor, np.sin(angles) * factor


def inverse_frequencies(config: DecoderConfig) -> Float32s:
    """Radians per position of each rotated pair, (head_dim / 2,); not finite for some numbers that nobody uses.

    Raises ConfigError, naming the field, for numbers that no model was trained with.
    """
    scaling = config.rope_scaling
    with np.errstate(all="ignore"):
        wavelengths = _base_wavelengths(config)
        if scaling is None:
            return 1.0 / wavelengths
        _check(scaling)
        if scaling.kind == "linear":
            return 1.0 / wavelengths / scaling.factor
        if scaling.kind == "llama3":
            return _llama3_frequencies(1.0 / wavelengths, scaling)
        return _yarn_frequencies(wavelengths, config, scaling)


def attention_factor(scaling: RopeScaling | None) -> float:
    """What yarn multiplies cos and sin with (so that scores grow by its square); 1 for everything else."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1.0 else 1.0


def _check(scaling: RopeScaling) -> None:
    if not scaling.factor > 0:
        raise ConfigError(f"rope_scaling.factor must be greater than 0, got {scaling.factor}")
    if scaling.kind == "linear":
        return
    if scaling.original_context_tokens < 1:
        raise ConfigError(f"rope_scaling.original_context_tokens must be at least 1 for {scaling.kind}")
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if scaling.kind == "llama3" and not 0 < low < high:
        raise ConfigError(f"rope_scaling needs 0 < low_freq_factor < high_freq_factor, got {low} and {high}")
    if scaling.kind == "yarn" and not 0 < scaling.beta_slow <= scaling.beta_fast:
        betas = f"{scaling.beta_slow} and {scaling.beta_fast}"
        raise ConfigError(f"rope_scaling needs 0 < beta_slow <= beta_fast, got {betas}")


def _base_wavelengths(config: DecoderConfig) -> Float32s:
    """Positions per radian, theta ^ (2i / head_dim): (head_dim / 2,).

    The power is rounded once, from float64: a float32 power is another on every processor.
    """
    if not config.rope_theta > 1:
        raise ConfigError(f"rope_theta must be greater than 1, got {config.rope_theta}")
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    wavelengths: Float32s = np.power(config.rope_theta, exponents.astype(np.float64)).astype(np.float32)
    return wavelengths


def _llama3_frequencies(frequencies: Float32s, scaling: RopeScaling) -> Float32s:
    """Long wavelengths are divided by the factor, short ones kept, those between blended."""
    context, low, high = scaling.original_context_tokens, scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    smooth = (context / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    long_ones = np.where(wavelengths > context / low, frequencies / scaling.factor, blended)
    return np.where(wavelengths < context / high, frequencies, long_ones)


def _yarn_frequencies(wavelengths: Float32s, config: DecoderConfig, scaling: RopeScaling) -> Float32s:
    """NTK-by-parts: channels that turn often keep their frequency, those that turn rarely are interpolated."""
    low = max(math.floor(_yarn_channel(scaling.beta_fast, config, scaling)), 0)
    high = min(math.ceil(_yarn_channel(scaling.beta_slow, config, scaling)), config.head_dim - 1)
    width = high - low if high != low else 0.001
    channels = np.arange(config.head_dim // 2, dtype=np.float32)
    interpolated: Float32s = ((channels - low) / width).clip(0, 1)
    kept = 1 - interpolated
    return 1.0 / (scaling.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _yarn_channel(rotations: float, config: DecoderConfig, scaling: RopeScaling) -> float:
    """The (fractional) pair that makes this many turns within the trained context."""
    turns = math.log(scaling.original_context_tokens / (rotations * 2 * math.pi))
    return config.head_dim * turns / (2 * math.log(config.rope_theta))
