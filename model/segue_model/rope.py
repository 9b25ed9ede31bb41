"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864).

Split halves: channel i turns together with channel i + head_dim / 2.
"""

from dataclasses import dataclass

import torch

from segue_model.config import DecoderConfig
from segue_model.rope_frequencies import cosines_and_sines


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Cosines and sines of every position of the context, float32, (max_context_tokens, head_dim / 2).

    Yarn's attention factor is already multiplied in.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def build(cls, config: DecoderConfig, *, device: torch.device | str = "cpu") -> "RopeTable":
        cos, sin = cosines_and_sines(config)
        return cls(torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device))

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
