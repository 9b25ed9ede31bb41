"""The decoder's layer: look back at the target, look over at the source, think alone."""

import torch
from torch import nn

from segue_model.seq2seq.attention import Attended, Attention
from segue_model.seq2seq.cache import LayerCache
from segue_model.seq2seq.config import TransformerConfig
from segue_model.seq2seq.layers import FeedForward, Residual


class DecoderLayer(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.self_attention = Attention(config.dim, config.heads, config.d_k, config.d_v)
        self.self_residual = Residual(config.dim, config.dropout, config.norm)
        self.cross_attention = Attention(config.dim, config.heads, config.d_k, config.d_v)
        self.cross_residual = Residual(config.dim, config.dropout, config.norm)
        self.ffn = FeedForward(config.dim, config.ffn_dim)
        self.ffn_residual = Residual(config.dim, config.dropout, config.norm)

    def forward(
        self,
        x: torch.Tensor,
        cache: LayerCache,
        target_blocked: torch.Tensor,
        source_padding: torch.Tensor,
        *,
        need_weights: bool = False,
    ) -> Attended:
        """x: (B, T, dim), the new target positions, of P with those in the cache.

        target_blocked: (B, 1, T, P), source_padding: (B, 1, 1, S). Returns (B, T, dim) and, on request, the
        cross-attention weights (B, H, T, S).
        """
        y = self.self_residual.enter(x)
        target = cache.extend(self.self_attention.keys_values(y))
        y = self.self_attention(y, target, target_blocked).out
        x = self.self_residual.leave(x, y)
        y = self.cross_residual.enter(x)
        crossed = self.cross_attention(y, cache.source, source_padding, need_weights=need_weights)
        x = self.cross_residual.leave(x, crossed.out)
        y = self.ffn(self.ffn_residual.enter(x))
        return Attended(self.ffn_residual.leave(x, y), crossed.weights)
