"""The whole model (the paper's figure 1): source tokens and target tokens in, logits of the next target token out."""

import math
from typing import NamedTuple

import torch
from torch import nn

from segue_model.seq2seq.cache import DecoderCache
from segue_model.seq2seq.config import TransformerConfig
from segue_model.seq2seq.decoder import DecoderLayer
from segue_model.seq2seq.encoder import EncoderLayer
from segue_model.seq2seq.layers import Dropout, LayerNorm
from segue_model.seq2seq.masks import causal_mask, padding_mask
from segue_model.seq2seq.positions import sinusoids


class Decoded(NamedTuple):
    """What a call of the decoder returns."""

    logits: torch.Tensor  # (B, T, target_vocab)
    cross_weights: tuple[torch.Tensor, ...]  # per layer (B, H, T, S); empty unless asked for


class Transformer(nn.Module):
    """`model(source, target)` in training; `cache = model.encode(source)`, then `model.decode(...)` step by step."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.source_embedding = nn.Embedding(config.source_vocab, config.dim)
        self.target_embedding = nn.Embedding(config.target_vocab, config.dim)
        self.dropout = Dropout(config.dropout)
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        # Post-norm ends each layer with a norm; in pre-norm the residual stream leaves the last layer unnormalised.
        pre = config.norm == "pre"
        self.encoder_norm = LayerNorm(config.dim) if pre else None
        self.decoder_norm = LayerNorm(config.dim) if pre else None
        self.head = nn.Linear(config.dim, config.target_vocab, bias=False)
        self._initialise()

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Teacher forcing, all positions at once: source (B, S) and target (B, T) to logits (B, T, target_vocab)."""
        return self.decode(target, self.encode(source)).logits

    def encode(self, source: torch.Tensor) -> DecoderCache:
        """Read the source (B, S) and give every decoder layer its keys and values.

        Raises ValueError for a source row that is nothing but padding.
        """
        padding = padding_mask(source)  # (B, 1, 1, S)
        x = self._embed(source, self.source_embedding, 0)  # (B, S, dim)
        for layer in self.encoder:
            x = layer(x, padding)
        memory = x if self.encoder_norm is None else self.encoder_norm(x)
        return DecoderCache([layer.cross_attention.keys_values(memory) for layer in self._decoder_layers], padding)

    def decode(self, target: torch.Tensor, cache: DecoderCache, *, need_weights: bool = False) -> Decoded:
        """Logits after each of the new target tokens (B, T), which stand at cache.pos and on. Advances the cache."""
        start, count = cache.pos, target.shape[1]
        target_padding = torch.cat((cache.target_padding, padding_mask(target)), dim=-1)  # (B, 1, 1, start + T)
        blocked = target_padding | causal_mask(start, count, target.device)  # (B, 1, T, start + T)
        x = self._embed(target, self.target_embedding, start)  # (B, T, dim)
        weights: list[torch.Tensor] = []
        for layer, layer_cache in zip(self.decoder, cache.layers, strict=True):
            x, crossed = layer(x, layer_cache, blocked, cache.source_padding, need_weights=need_weights)
            weights += [crossed] if need_weights else []
        cache.advance(target_padding)
        x = x if self.decoder_norm is None else self.decoder_norm(x)
        return Decoded(self.head(x), tuple(weights))

    @property
    def _decoder_layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.decoder if isinstance(layer, DecoderLayer)]

    def _embed(self, tokens: torch.Tensor, embedding: nn.Embedding, start: int) -> torch.Tensor:
        """(B, T) to (B, T, dim); embeddings are small, so the scale lifts them to the size of the sinusoids."""
        scaled = embedding(tokens) * math.sqrt(self.config.dim)
        x: torch.Tensor = self.dropout(scaled + sinusoids(start, tokens.shape[1], self.config.dim, tokens.device))
        return x

    @torch.no_grad()
    def _initialise(self) -> None:
        """Xavier for what multiplies activations; embeddings get unit size after their scale by sqrt(dim)."""
        for name, parameter in self.named_parameters():
            if name.endswith("embedding.weight"):
                parameter.normal_(0.0, self.config.dim**-0.5)
            elif parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
            elif name.endswith((".up.bias", ".down.bias")):
                parameter.zero_()
        if self.config.share_embeddings:
            self.source_embedding.weight = self.head.weight = self.target_embedding.weight
