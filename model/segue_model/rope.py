"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864).

Split halves: channel i turns together with channel i + head_dim / 2.

The frequencies of the scaled kinds follow Hugging Face transformers number for number, since that is what published
checkpoints were trained with.
"""

import math
from dataclasses import dataclass

import torch

from segue_model.config import ConfigError, DecoderConfig, RopeScaling


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Cosines and sines of every position of the context, float32, (max_context_tokens, head_dim / 2).

    Yarn's attention factor is already multiplied in.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def build(cls, config: DecoderConfig, *, device: torch.device | str = "cpu") -> "RopeTable":
        positions = torch.arange(config.max_context_tokens, dtype=torch.float32, device=device)
        angles = torch.outer(positions, inverse_frequencies(config).to(device))  # (N, head_dim/2)
        factor = attention_factor(config.rope_scaling)
        return cls(angles.cos() * factor, angles.sin() * factor)

    def slice(self, start: int, tokens: int) -> "RopeTable":
        """The rows of positions start .. start + tokens - 1."""
        return RopeTable(self.cos[start : start + tokens], self.sin[start : start + tokens])

    def at(self, positions: torch.Tensor) -> "RopeTable":
        """The rows of a list of positions (N,), in its order."""
        return RopeTable(self.cos[positions], self.sin[positions])

    def to(self, device: torch.device) -> "RopeTable":
        return RopeTable(self.cos.to(device), self.sin.to(device))


def apply_rope(x: torch.Tensor, table: RopeTable) -> torch.Tensor:
    """Rotate x (..., T, head_dim) by the T rows of the table, in float32, and return it in x's dtype."""
    left, right = x.float().chunk(2, dim=-1)  # (..., T, head_dim/2) each
    rotated = torch.cat((left * table.cos - right * table.sin, right * table.cos + left * table.sin), dim=-1)
    return rotated.to(x.dtype)


def interleaved_to_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of W_Q or W_K, or of their bias, from adjacent pairs (0,1)(2,3) to split halves.

    For GGUF files of architecture `llama` and for Meta's own checkpoints.
    weight: (heads * head_dim, ...). Raises ValueError when the rows do not divide into heads of even width.
    """
    rows = weight.shape[0]
    if heads < 1 or rows % (2 * heads):
        raise ValueError(f"cannot split {rows} rows into {heads} heads of even width")
    pairs = weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def inverse_frequencies(config: DecoderConfig) -> torch.Tensor:
    """Radians per position of each rotated pair, (head_dim / 2,) float32.

    Raises ConfigError, naming the field, for numbers that no model was trained with.
    """
    wavelengths = _base_wavelengths(config)
    scaling = config.rope_scaling
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


def _base_wavelengths(config: DecoderConfig) -> torch.Tensor:
    """Positions per radian, theta ^ (2i / head_dim): (head_dim / 2,) float32."""
    if not config.rope_theta > 1:
        raise ConfigError(f"rope_theta must be greater than 1, got {config.rope_theta}")
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64, device="cpu").float() / config.head_dim
    wavelengths: torch.Tensor = config.rope_theta**exponents
    return wavelengths


def _llama3_frequencies(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended."""
    context, low, high = scaling.original_context_tokens, scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    smooth = (context / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    long_ones = torch.where(wavelengths > context / low, frequencies / scaling.factor, blended)
    return torch.where(wavelengths < context / high, frequencies, long_ones)


def _yarn_frequencies(wavelengths: torch.Tensor, config: DecoderConfig, scaling: RopeScaling) -> torch.Tensor:
    """NTK-by-parts: channels that turn often keep their frequency, those that turn rarely are interpolated."""
    low = max(math.floor(_yarn_channel(scaling.beta_fast, config, scaling)), 0)
    high = min(math.ceil(_yarn_channel(scaling.beta_slow, config, scaling)), config.head_dim - 1)
    width = high - low if high != low else 0.001
    channels = torch.arange(config.head_dim // 2, dtype=torch.float32, device="cpu")
    interpolated = ((channels - low) / width).clamp(0, 1)
    kept = 1 - interpolated
    return 1.0 / (scaling.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _yarn_channel(rotations: float, config: DecoderConfig, scaling: RopeScaling) -> float:
    """The (fractional) pair that makes this many turns within the trained context."""
    turns = math.log(scaling.original_context_tokens / (rotations * 2 * math.pi))
    return config.head_dim * turns / (2 * math.log(config.rope_theta))
