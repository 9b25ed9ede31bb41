"""A decoder's weights, merged for few large matrix products: Q, K and V into one, gate and up into one."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from segue_model.arrays import Weights
from segue_model.config import DecoderConfig
from segue_model.torch_arrays import to_torch


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer."""

    attention_norm: torch.Tensor  # (dim,)
    qkv: torch.Tensor  # ((heads + 2 * kv_heads) * head_dim, dim)
    qkv_bias: torch.Tensor | None  # ((heads + 2 * kv_heads) * head_dim,)
    q_norm: torch.Tensor | None  # (head_dim,)
    k_norm: torch.Tensor | None  # (head_dim,)
    wo: torch.Tensor  # (dim, heads * head_dim)
    ffn_norm: torch.Tensor  # (dim,)
    gate_up: torch.Tensor  # (2 * ffn_dim, dim)
    down: torch.Tensor  # (dim, ffn_dim)


@dataclass(frozen=True, slots=True)
class MergedWeights:
    """The whole model on one device in one dtype."""

    embed: torch.Tensor  # (vocab, dim)
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # (dim,)
    head: torch.Tensor  # (vocab, dim); `embed` itself when tied

    @classmethod
    def load(cls, config: DecoderConfig, weights: Weights, device: torch.device, dtype: torch.dtype) -> "MergedWeights":
        """Copy the tensors that `checkpoint.Checkpoint` names, one at a time: a lazy mapping holds one of them at most.

        Raises ValueError naming the tensor that is missing or has another shape.
        """
        loader = _Loader(weights, device, dtype)
        embed = loader.merge(["embed.weight"], [config.vocab_size], config.dim)
        layers = tuple(_load_layer(loader, config, f"layers.{i}.") for i in range(config.layers))
        norm = loader.merge(["norm.weight"], [config.dim])
        head = embed if config.tie_embeddings else loader.merge(["head.weight"], [config.vocab_size], config.dim)
        return cls(embed, layers, norm, head)


@dataclass(frozen=True, slots=True)
class _Loader:
    weights: Weights
    device: torch.device
    dtype: torch.dtype

    def merge(self, names: Sequence[str], rows: Sequence[int], *width: int) -> torch.Tensor:
        """The named tensors, of (rows[i], *width) each, one below the other."""
        merged = torch.empty((sum(rows), *width), device=self.device, dtype=self.dtype)
        for name, part in zip(names, torch.split(merged, list(rows)), strict=True):
            part.copy_(self._read(name, part.shape))
        return merged

    def _read(self, name: str, shape: torch.Size) -> torch.Tensor:
        if name not in self.weights:
            raise ValueError(f"the checkpoint has no tensor {name}")
        array = self.weights[name]
        if array.shape != shape:
            raise ValueError(f"{name} must have the shape {tuple(shape)}, got {array.shape}")
        return to_torch(array)


def _load_layer(loader: _Loader, config: DecoderConfig, prefix: str) -> LayerWeights:
    dim, ffn_dim, head_dim = config.dim, config.ffn_dim, config.head_dim
    q_width, kv_width = config.heads * head_dim, config.kv_heads * head_dim
    qkv_rows = [q_width, kv_width, kv_width]
    qkv_names = [f"{prefix}attention.{name}" for name in ("wq", "wk", "wv")]
    biases = [f"{name}.bias" for name in qkv_names]
    gate_up = [f"{prefix}ffn.{name}.weight" for name in ("gate", "up")]
    return LayerWeights(
        attention_norm=loader.merge([f"{prefix}attention_norm.weight"], [dim]),
        qkv=loader.merge([f"{name}.weight" for name in qkv_names], qkv_rows, dim),
        qkv_bias=loader.merge(biases, qkv_rows) if config.qkv_bias else None,
        q_norm=loader.merge([f"{prefix}attention.q_norm.weight"], [head_dim]) if config.qk_norm else None,
        k_norm=loader.merge([f"{prefix}attention.k_norm.weight"], [head_dim]) if config.qk_norm else None,
        wo=loader.merge([f"{prefix}attention.wo.weight"], [dim], q_width),
        ffn_norm=loader.merge([f"{prefix}ffn_norm.weight"], [dim]),
        gate_up=loader.merge(gate_up, [ffn_dim, ffn_dim], dim),
        down=loader.merge([f"{prefix}ffn.down.weight"], [dim], ffn_dim),
    )
