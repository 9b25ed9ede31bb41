"""The reference decoder: nn.Linear, nn.Embedding and bare tensor operations, meant to be read.

Every faster path is compared with this one. Parameter names are those that `checkpoint.Checkpoint` documents.
"""

import torch
from torch import nn

from segue_model.attention import Attention, blocked_keys
from segue_model.cache import KVCache
from segue_model.config import DecoderConfig
from segue_model.layers import RMSNorm, SwiGLU
from segue_model.rope import RopeTable

_INIT_STD = 0.02  # Radford et al. 2019 (GPT-2)


class Block(nn.Module):
    """Pre-norm residual block: x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.rms_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.rms_eps)
        self.ffn = SwiGLU(config.dim, config.ffn_dim)

    def forward(
        self, x: torch.Tensor, rope: RopeTable, blocked: torch.Tensor, cache: KVCache | None, layer: int
    ) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rope, blocked, cache, layer)
        out: torch.Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class Decoder(nn.Module):
    """Tokens in, logits out; with a cache, only the new tokens are computed."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, config.rms_eps)
        self.head = None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
        # Not a buffer: `decoder.to(torch.bfloat16)` would round the angles of far positions into each other.
        self._rope = RopeTable.build(config)
        self._initialise()

    def forward(self, tokens: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        """tokens: (B, T) int64 at positions cache.pos .. cache.pos + T - 1; returns float32 logits (B, T, vocab).

        Raises ValueError for tokens outside the vocabulary or positions outside the context or the cache.
        """
        count = tokens.shape[1]
        start = 0 if cache is None else cache.pos
        self._check(tokens, start, cache)
        rope = self._rope.slice(start, count).to(tokens.device)
        blocked = blocked_keys(start, count, self.config.sliding_window, tokens.device)  # (T, start + T)
        x = self.embed(tokens)  # (B, T, dim)
        for layer, block in enumerate(self.layers):
            x = block(x, rope, blocked, cache, layer)
        if cache is not None:
            cache.advance(count)
        output = self.embed.weight if self.head is None else self.head.weight  # (vocab, dim)
        logits: torch.Tensor = self.norm(x) @ output.T
        return logits.float()

    def _check(self, tokens: torch.Tensor, start: int, cache: KVCache | None) -> None:
        batch, count = tokens.shape
        if count < 1:
            raise ValueError("tokens must hold at least one token")
        if start + count > self.config.max_context_tokens:
            raise ValueError(f"{start + count} positions exceed the context of {self.config.max_context_tokens}")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.config.vocab_size:
            raise ValueError(f"token ids must lie in 0 .. {self.config.vocab_size - 1}, got {low} .. {high}")
        if cache is not None and cache.batch != batch:
            raise ValueError(f"the cache was made for a batch of {cache.batch}, got {batch}")

    @torch.no_grad()
    def _initialise(self) -> None:
        """Small normals; projections into the residual stream shrink with its depth, as in GPT-2."""
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
            elif "norm" not in name:
                into_residual = name.endswith(("wo.weight", "down.weight"))
                parameter.normal_(0.0, _INIT_STD / (2 * self.config.layers) ** 0.5 if into_residual else _INIT_STD)
        # A tied head gives the token just read a logit of about std * dim, which must not dominate a wide model.
        output = self.embed.weight if self.head is None else self.head.weight
        output.normal_(0.0, min(_INIT_STD, 2 / self.config.dim))
