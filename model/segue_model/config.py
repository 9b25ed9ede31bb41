"""The shape of a decoder-only model, and nothing else: frozen, checked once, derived values as properties."""

from dataclasses import dataclass
from typing import Literal


class ConfigError(ValueError):
    """A model's description contradicts itself or asks for what is not supported; says what was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    linear: positions divided by `factor` (kaiokendev 2023). llama3: frequencies blended by wavelength (Llama 3.1).
    yarn: NTK-by-parts with an attention temperature (Peng et al. 2023, arXiv:2309.00071).
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_context_tokens: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None = 0.1 ln(factor) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Llama 2/3, Mistral, Qwen2, Qwen3 and SmolLM: RMSNorm, RoPE, grouped-query attention, SwiGLU.

    Raises ConfigError, naming the field, when the numbers do not fit together.
    """

    vocab_size: int
    dim: int  # width of the residual stream
    layers: int
    heads: int  # query heads
    kv_heads: int  # key and value heads; divides `heads`
    head_dim: int  # even; heads * head_dim need not equal dim
    ffn_dim: int
    max_context_tokens: int
    rms_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False  # the head is the embedding matrix
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3: RMSNorm over head_dim of q and k, before RoPE
    sliding_window: int | None = None  # Mistral: a query sees at most this many keys, itself included

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "dim", "layers", "heads", "kv_heads", "head_dim", "ffn_dim", "max_context_tokens")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"kv_heads must divide heads, got {self.kv_heads} and {self.heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for RoPE, got {self.head_dim}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f"sliding_window must be at least 1, got {self.sliding_window}")

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def parameter_count(self) -> int:
        """Weights and biases, a tied embedding counted once."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.dim * q + 2 * self.dim * kv
        attention += (q + 2 * kv if self.qkv_bias else 0) + (2 * self.head_dim if self.qk_norm else 0)
        layer = attention + 3 * self.dim * self.ffn_dim + 2 * self.dim
        embeddings = (1 if self.tie_embeddings else 2) * self.vocab_size * self.dim
        return self.layers * layer + embeddings + self.dim

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of K and V of one position over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes
