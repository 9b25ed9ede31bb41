"""Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) over a cache, in bare tensor operations."""

import math

import torch
from torch import nn

from segue_model.cache import KVCache
from segue_model.config import DecoderConfig
from segue_model.layers import RMSNorm
from segue_model.rope import RopeTable, apply_rope


def blocked_keys(
    start: int, tokens: int, window: int | None = None, device: torch.device | None = None
) -> torch.Tensor:
    """The mask (T, S) with S = start + T; True = blocked.

    Query i stands at position start + i and sees the keys up to itself, at most `window` of them.
    """
    queries = torch.arange(start, start + tokens, device=device)[:, None]  # (T, 1)
    keys = torch.arange(start + tokens, device=device)[None, :]  # (1, S)
    blocked = keys > queries
    return blocked if window is None else blocked | (keys <= queries - window)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocked: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(head_dim)) v, where query heads g * group .. (g + 1) * group - 1 share KV head g.

    q: (B, heads, T, head_dim), k and v: (B, kv_heads, S, head_dim), blocked: (T, S); returns (B, heads, T, head_dim).
    The softmax runs in float32. Raises ValueError when a query has no allowed key: its softmax would be NaN.
    """
    if bool(blocked.all(dim=-1).any()):
        first = int(blocked.all(dim=-1).nonzero()[0])
        raise ValueError(f"query {first} of {blocked.shape[0]} has no allowed key among {blocked.shape[1]}")
    batch, heads, tokens, head_dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, tokens, head_dim)
    scores = grouped @ k[:, :, None].transpose(-1, -2) / math.sqrt(head_dim)  # (B, kv_heads, group, T, S)
    scores = scores.float().masked_fill(blocked, -math.inf)
    weights = torch.softmax(scores, dim=-1).to(v.dtype)
    return (weights @ v[:, :, None]).reshape(batch, heads, tokens, head_dim)


class Attention(nn.Module):
    """One layer's attention: project, normalise (Qwen3), rotate, remember, attend, project back."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        q_width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, q_width, bias=config.qkv_bias)
        self.wk = nn.Linear(config.dim, kv_width, bias=config.qkv_bias)
        self.wv = nn.Linear(config.dim, kv_width, bias=config.qkv_bias)
        self.wo = nn.Linear(q_width, config.dim, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_eps) if config.qk_norm else None

    def forward(
        self, x: torch.Tensor, rope: RopeTable, blocked: torch.Tensor, cache: KVCache | None, layer: int
    ) -> torch.Tensor:
        """x: (B, T, dim), rope: T rows, blocked: (T, S); returns (B, T, dim)."""
        q, k, v = (self._split_heads(projection(x)) for projection in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        if cache is not None:
            k, v = cache.write(layer, k, v)  # (B, kv_heads, S, head_dim)
        mixed = attend(q, k.to(q.dtype), v.to(q.dtype), blocked)  # (B, heads, T, head_dim)
        out: torch.Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return out

    def _split_heads(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, n * head_dim) to (B, n, T, head_dim)."""
        return x.reshape(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
