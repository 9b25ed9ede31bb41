"""Attention (sections 3.2.1 and 3.2.2 of the paper): one module, three uses.

                        queries from    keys and values from    blocked
encoder self-attention  the source      the source              source padding              (B, 1, 1, S)
decoder self-attention  the target      the target so far       target padding | causal     (B, 1, T, S)
cross-attention         the target      the encoder's output    source padding              (B, 1, 1, S)
"""

import math
from typing import NamedTuple

import torch
from torch import nn


class KeysValues(NamedTuple):
    """What is looked at: keys say where, values say what."""

    k: torch.Tensor  # (B, H, S, d_k)
    v: torch.Tensor  # (B, H, S, d_v)


class Attended(NamedTuple):
    """What attention returns."""

    out: torch.Tensor  # (B, T, dim)
    weights: torch.Tensor | None  # (B, H, T, S), each row sums to 1; only on request


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocked: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T / sqrt(d_k)) v.

    q: (..., T, d_k), k: (..., S, d_k), v: (..., S, d_v), blocked: broadcasts to (..., T, S), True = blocked.
    Returns the mixed values (..., T, d_v) and the weights (..., T, S).
    Raises ValueError when a query has no allowed key: a softmax over nothing is 0 / 0.
    """
    if bool(blocked.all(dim=-1).any()):
        where = blocked.all(dim=-1).nonzero()[0].tolist()
        raise ValueError(
            f"all {blocked.shape[-1]} keys are blocked for the query at {where} of the mask's leading axes"
        )
    # q k^T has variance d_k for unit q and k: without the scale, wide heads would saturate the softmax.
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # (..., T, S)
    weights = torch.softmax(scores.masked_fill(blocked, -math.inf), dim=-1)
    return weights @ v, weights


class Attention(nn.Module):
    """H heads side by side: each looks with projections of its own, W_O mixes what they found. No biases (3.2.2)."""

    def __init__(self, dim: int, heads: int, d_k: int, d_v: int) -> None:
        super().__init__()
        self.heads = heads
        self.wq = nn.Linear(dim, heads * d_k, bias=False)
        self.wk = nn.Linear(dim, heads * d_k, bias=False)
        self.wv = nn.Linear(dim, heads * d_v, bias=False)
        self.wo = nn.Linear(heads * d_v, dim, bias=False)

    def keys_values(self, x: torch.Tensor) -> KeysValues:
        """What x (B, S, dim) offers to be looked at. Depends on no query, and so can be kept."""
        return KeysValues(self._split_heads(self.wk(x)), self._split_heads(self.wv(x)))

    def forward(
        self, x: torch.Tensor, memory: KeysValues, blocked: torch.Tensor, *, need_weights: bool = False
    ) -> Attended:
        """x (B, T, dim) looks at `memory` (S positions). blocked: broadcasts to (B, H, T, S), True = blocked."""
        q = self._split_heads(self.wq(x))  # (B, H, T, d_k)
        mixed, weights = attend(q, memory.k, memory.v, blocked)  # (B, H, T, d_v), (B, H, T, S)
        out = self.wo(mixed.transpose(1, 2).flatten(2))  # the heads side by side again: (B, T, H * d_v) to (B, T, dim)
        return Attended(out, weights if need_weights else None)

    def _split_heads(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, H * d) to (B, H, T, d)."""
        return x.reshape(*x.shape[:2], self.heads, -1).transpose(1, 2)
