"""config.json of Hugging Face transformers, versions 4 and 5, to DecoderConfig.

Names and defaults are those of transformers' configuration classes. What would change the arithmetic and is not
supported is refused, never skipped.
"""

import math
from dataclasses import dataclass
from typing import Final

from segue_model.checkpoint import CheckpointError
from segue_model.config import DecoderConfig, RopeScaling
from segue_model.loaders.fields import MAX_CONTEXT_TOKENS, Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a model_type implies without saying it in config.json."""

    kv_heads: int | None = None  # default; None = as many as query heads
    head_dim: int | None = None  # default; None = dim / heads
    qkv_bias: bool = False
    qk_norm: bool = False
    window: int | None = None  # default sliding window of every layer
    window_is_optional: bool = False  # `use_sliding_window` decides


FAMILIES: Final = {
    "llama": Family(),  # SmolLM and SmolLM2 too
    "mistral": Family(kv_heads=8, window=4096),
    "qwen2": Family(kv_heads=32, qkv_bias=True, window_is_optional=True),
    "qwen3": Family(kv_heads=32, head_dim=128, qk_norm=True, window_is_optional=True),
}


def decoder_config(config: Fields) -> DecoderConfig:
    """Raises CheckpointError for what is missing, of the wrong type or not supported."""
    family = _family(config)
    _refuse_variants(config)
    dim, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    layers = config.integer("num_hidden_layers")
    max_context_tokens = config.integer("max_position_embeddings", high=MAX_CONTEXT_TOKENS)
    theta, scaling = _rope(config, max_context_tokens)
    return DecoderConfig(
        vocab_size=config.integer("vocab_size"),
        dim=dim,
        layers=layers,
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", family.kv_heads or heads),
        head_dim=config.integer("head_dim", family.head_dim or dim // heads or 1),
        ffn_dim=config.integer("intermediate_size"),
        max_context_tokens=max_context_tokens,
        rms_eps=config.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=config.boolean("tie_word_embeddings", default=False),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        sliding_window=_sliding_window(config, family, layers),
    )


def _family(config: Fields) -> Family:
    model_type = config.text("model_type")
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"{config.source}: model_type {model_type!r} is not supported, only {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


def _refuse_variants(config: Fields) -> None:
    config.refuse("quantization_config")
    config.refuse("hidden_act", "silu")
    config.refuse("attention_bias", False)
    config.refuse("mlp_bias", False)
    config.refuse("num_local_experts")
    config.refuse("num_experts")
    config.refuse("partial_rotary_factor", 1.0, 1)


def _sliding_window(config: Fields, family: Family, layers: int) -> int | None:
    if family.window_is_optional:
        if not config.boolean("use_sliding_window", default=False) or not config.has("sliding_window"):
            return None
        return config.integer("sliding_window") if _all_layers_slide(config, layers) else None
    if family.window is None:
        config.refuse("sliding_window")
        return None
    if "sliding_window" in config.values and not config.has("sliding_window"):
        return None  # null switches it off, absence means the default
    return config.integer("sliding_window", family.window)


def _all_layers_slide(config: Fields, layers: int) -> bool:
    """False when no layer does. Raises when some do: one cache geometry serves all layers."""
    kinds = config.values.get("layer_types")
    if isinstance(kinds, list) and all(kind == kinds[0] for kind in kinds):
        return bool(kinds) and kinds[0] == "sliding_attention"
    full_layers = config.integer("max_window_layers", 28, low=0)
    if kinds is not None or 0 < full_layers < layers:
        raise CheckpointError(f"{config.source}: a sliding window in some layers only is not supported")
    return full_layers == 0


def _rope(config: Fields, max_context_tokens: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling: in `rope_parameters` since transformers 5, `rope_theta` and `rope_scaling` before."""
    rope = config.section("rope_parameters" if config.has("rope_parameters") else "rope_scaling")
    theta = (rope if rope.has("rope_theta") else config).number("rope_theta", 10_000.0, above=1.0)
    rope.refuse("partial_rotary_factor", 1.0, 1)
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise CheckpointError(f"{rope.source}: one rotation per kind of layer is not supported")
    kind = rope.text("rope_type" if rope.has("rope_type") else "type", "default")
    original_in = config if config.has("original_max_position_embeddings") else rope
    original = original_in.integer("original_max_position_embeddings", max_context_tokens)
    return theta, _scaling(kind, rope, original, max_context_tokens)


def _scaling(kind: str, rope: Fields, original: int, max_context_tokens: int) -> RopeScaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=rope.number("factor"))
    if kind == "llama3":
        return _llama3(rope, original)
    if kind == "yarn":
        return _yarn(rope, original, max_context_tokens)
    raise CheckpointError(f"{rope.source}: rope_type {kind!r} is not supported, only default, linear, llama3, yarn")


def _llama3(rope: Fields, original: int) -> RopeScaling:
    low = rope.number("low_freq_factor")
    return RopeScaling(
        kind="llama3",
        factor=rope.number("factor"),
        original_context_tokens=original,
        low_freq_factor=low,
        high_freq_factor=rope.number("high_freq_factor", above=low),
    )


def _yarn(rope: Fields, original: int, max_context_tokens: int) -> RopeScaling:
    rope.refuse("truncate", True)
    factor = rope.number("factor", max_context_tokens / original)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_context_tokens=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=_attention_factor(rope, factor),
    )


def _attention_factor(rope: Fields, factor: float) -> float | None:
    """Stated, or the ratio of DeepSeek's two mscales; None leaves the paper's rule."""
    if rope.has("attention_factor"):
        return rope.number("attention_factor")
    if not (rope.has("mscale") and rope.has("mscale_all_dim")):
        return None
    grown = 0.1 * math.log(max(factor, 1.0))
    return (grown * rope.number("mscale") + 1.0) / (grown * rope.number("mscale_all_dim") + 1.0)
