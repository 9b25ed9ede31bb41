"""The encoder's layer: every source position looks at every other, then thinks alone."""

import torch
from torch import nn

from segue_model.seq2seq.attention import Attention
from segue_model.seq2seq.config import TransformerConfig
from segue_model.seq2seq.layers import FeedForward, Residual


class EncoderLayer(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention = Attention(config.dim, config.heads, config.d_k, config.d_v)
        self.attention_residual = Residual(config.dim, config.dropout, config.norm)
        self.ffn = FeedForward(config.dim, config.ffn_dim)
        self.ffn_residual = Residual(config.dim, config.dropout, config.norm)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        """x: (B, S, dim), padding: (B, 1, 1, S); returns (B, S, dim)."""
        y = self.attention_residual.enter(x)
        y = self.attention(y, self.attention.keys_values(y), padding).out
        x = self.attention_residual.leave(x, y)
        y = self.ffn(self.ffn_residual.enter(x))
        return self.ffn_residual.leave(x, y)
