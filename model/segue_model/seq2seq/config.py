"""The shape of the model. The defaults are the paper's base model (its table 3)."""

from dataclasses import dataclass
from typing import Literal

from segue_model.config import ConfigError

PAD, BOS, EOS = 0, 1, 2  # token ids of every vocabulary here; symbols come after them
SPECIAL_TOKENS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """Raises ConfigError, naming the field, when the numbers do not fit together."""

    source_vocab: int
    target_vocab: int
    dim: int = 512  # d_model: the width of the residual stream
    heads: int = 8
    key_dim: int | None = None  # d_k, of each head; None = dim / heads
    value_dim: int | None = None  # d_v, of each head; None = dim / heads
    encoder_layers: int = 6
    decoder_layers: int = 6
    dropout: float = 0.1
    norm: Literal["post", "pre"] = "post"  # post: the paper; pre: what replaced it
    share_embeddings: bool = False  # source, target and output share one matrix, as in the paper

    def __post_init__(self) -> None:
        for name in ("source_vocab", "target_vocab"):
            if getattr(self, name) <= SPECIAL_TOKENS:
                raise ConfigError(f"{name} must exceed the {SPECIAL_TOKENS} special tokens, got {getattr(self, name)}")
        for name in ("dim", "heads", "encoder_layers", "decoder_layers", "d_k", "d_v"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dim % 2:
            raise ConfigError(f"dim must be even for the sinusoids, got {self.dim}")
        if None in (self.key_dim, self.value_dim) and self.dim % self.heads:
            raise ConfigError(f"heads must divide dim, got {self.heads} and {self.dim}; or give key_dim and value_dim")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout must be at least 0 and below 1, got {self.dropout}")
        if self.norm not in ("post", "pre"):
            raise ConfigError(f"norm must be 'post' or 'pre', got {self.norm!r}")
        if self.share_embeddings and self.source_vocab != self.target_vocab:
            sizes = f"{self.source_vocab} and {self.target_vocab}"
            raise ConfigError(f"share_embeddings needs source_vocab and target_vocab to be equal, got {sizes}")

    @property
    def d_k(self) -> int:
        return self.dim // self.heads if self.key_dim is None else self.key_dim

    @property
    def d_v(self) -> int:
        return self.dim // self.heads if self.value_dim is None else self.value_dim

    @property
    def ffn_dim(self) -> int:
        return 4 * self.dim
