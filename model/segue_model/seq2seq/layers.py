"""The position-wise parts: dropout, normalisation, the residual connection around each sublayer, the feed-forward."""

from typing import Literal

import torch
from torch import nn

_EPS = 1e-5


class Dropout(nn.Module):
    """In training, zeroes each element with probability `rate` and scales the rest up, so that the mean stays."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.rate == 0:
            return x
        return x * (torch.rand_like(x) >= self.rate) / (1 - self.rate)


class LayerNorm(nn.Module):
    """Each position to mean 0 and variance 1 over its channels, then a learned gain and bias (arXiv:1607.06450)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(dim=-1, keepdim=True)
        variance = centred.square().mean(dim=-1, keepdim=True)
        return centred * torch.rsqrt(variance + _EPS) * self.gain + self.bias


class Residual(nn.Module):
    """The connection around a sublayer f, which is called between `enter` and `leave`.

    post (the paper, section 5.4): norm(x + dropout(f(x))).   pre (Xiong et al. 2020): x + dropout(f(norm(x))), where
    nothing stands in the way of the residual stream, and its gradient, from the last layer to the first.
    """

    def __init__(self, dim: int, dropout: float, norm: Literal["post", "pre"]) -> None:
        super().__init__()
        self.norm = LayerNorm(dim)
        self.dropout = Dropout(dropout)
        self.pre = norm == "pre"

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """What the sublayer is given."""
        normed: torch.Tensor = self.norm(x) if self.pre else x
        return normed

    def leave(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x goes on with what the sublayer made of it, y."""
        x = x + self.dropout(y)
        normed: torch.Tensor = x if self.pre else self.norm(x)
        return normed


class FeedForward(nn.Module):
    """max(0, x W1 + b1) W2 + b2, at each position alone (section 3.3)."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, ffn_dim)
        self.down = nn.Linear(ffn_dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(x).clamp(min=0))  # (..., 4 dim) to (..., dim)
        return out
