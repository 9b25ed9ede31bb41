"""The position-wise parts of the model."""

import torch
from torch import nn


class RMSNorm(nn.Module):
    """Root mean square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467) over the last dimension.

    The mean square is taken in float32 whatever the activations are; the result is cast back before the gain.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202), (..., dim) to (..., dim)."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, ffn_dim, bias=False)
        self.up = nn.Linear(dim, ffn_dim, bias=False)
        self.down = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate(x)  # (..., ffn_dim)
        out: torch.Tensor = self.down(gate * torch.sigmoid(gate) * self.up(x))
        return out
