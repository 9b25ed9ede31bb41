"""The weights a configuration asks for, the check that a file holds exactly those, and the order of their rows."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from segue_model.checkpoint import CheckpointError
from segue_model.config import DecoderConfig

Shape = tuple[int, ...]
T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Names:
    """How a format spells the canonical names of Checkpoint."""

    outer: Mapping[str, str]  # "embed.weight" -> "token_embd.weight"
    layer: str  # prefix with {i}: "blk.{i}."
    inner: Mapping[str, str]  # "attention.wq" -> "attn_q", without .weight or .bias

    def stored(self, canonical: str) -> str:
        if not canonical.startswith("layers."):
            return self.outer[canonical]
        _, i, rest = canonical.split(".", 2)
        module, _, leaf = rest.rpartition(".")
        return f"{self.layer.format(i=i)}{self.inner[module]}.{leaf}"


def canonical_shapes(config: DecoderConfig) -> Iterator[tuple[str, Shape]]:
    """Every weight's canonical name and shape, in file order. Lazy: `layers` may be a lie until a tensor is missing."""
    yield "embed.weight", (config.vocab_size, config.dim)
    for i in range(config.layers):
        for name, shape in _layer_shapes(config):
            yield f"layers.{i}.{name}", shape
    yield "norm.weight", (config.dim,)
    if not config.tie_embeddings:
        yield "head.weight", (config.vocab_size, config.dim)


def _layer_shapes(config: DecoderConfig) -> Iterator[tuple[str, Shape]]:
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    yield "attention_norm.weight", (config.dim,)
    for name, rows in (("wq", q_rows), ("wk", kv_rows), ("wv", kv_rows)):
        yield f"attention.{name}.weight", (rows, config.dim)
        if config.qkv_bias:
            yield f"attention.{name}.bias", (rows,)
    if config.qk_norm:
        yield "attention.q_norm.weight", (config.head_dim,)
        yield "attention.k_norm.weight", (config.head_dim,)
    yield "attention.wo.weight", (config.dim, q_rows)
    yield "ffn_norm.weight", (config.dim,)
    yield "ffn.gate.weight", (config.ffn_dim, config.dim)
    yield "ffn.up.weight", (config.ffn_dim, config.dim)
    yield "ffn.down.weight", (config.dim, config.ffn_dim)


def bind(
    config: DecoderConfig, names: Names, found: Mapping[str, Shape], source: str, *, ignored: Collection[str] = ()
) -> dict[str, str]:
    """Match a file's tensors to the configuration: canonical name -> stored name.

    Raises CheckpointError naming the first tensor that is missing, has another shape than the configuration asks for,
    or that nothing would use (a bias, an expert, an adapter: computing without it would be silently wrong).
    """
    bound: dict[str, str] = {}
    for canonical, shape in canonical_shapes(config):
        stored = names.stored(canonical)
        if stored not in found:
            raise CheckpointError(f"{source}: tensor {stored} is missing; {config.layers} layers are declared")
        if found[stored] != shape:
            raise CheckpointError(f"{source}: tensor {stored} must have shape {shape}, found {found[stored]}")
        bound[canonical] = stored
    unused = sorted(found.keys() - set(bound.values()) - set(ignored))
    if unused:
        shown = ", ".join(unused[:5])
        raise CheckpointError(f"{source}: {len(unused)} tensors have no place in this architecture, such as {shown}")
    return bound


def interleaved_to_halves(weight: npt.NDArray[T], heads: int) -> npt.NDArray[T]:
    """Reorder the rows of W_Q or W_K, or of their bias, from adjacent pairs (0,1)(2,3) to split halves.

    For GGUF files of architecture `llama` and for Meta's own checkpoints.
    weight: (heads * head_dim, ...). Raises ValueError when the rows do not divide into heads of even width.
    """
    rows = weight.shape[0]
    if heads < 1 or rows % (2 * heads):
        raise ValueError(f"cannot split {rows} rows into {heads} heads of even width")
    pairs = weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
