"""Every supported family against transformers: the same tiny random weights, read by both, give the same logits."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from segue_model.arrays import Weights
from segue_model.cache import KVCache
from segue_model.checkpoint import Checkpoint
from segue_model.config import DecoderConfig
from segue_model.decoder import Decoder
from segue_model.loaders import load_checkpoint
from segue_model.torch_arrays import state_of

TOLERANCE = 1e-4
PREFILL, STEPS = 20, 8
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 192,  # what Meta's rule gives for dim 64 and multiple_of 32
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def tiny(kind: Callable[..., PreTrainedConfig], **extra: object) -> PreTrainedConfig:
    return kind(**{**SIZES, **extra})


FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": tiny(LlamaConfig),
    "llama-linear": tiny(LlamaConfig, rope_parameters=dict(LINEAR)),
    "llama-yarn": tiny(LlamaConfig, rope_parameters=dict(YARN)),
    "llama-yarn-mscale": tiny(LlamaConfig, rope_parameters={**YARN, "mscale": 1.5, "mscale_all_dim": 0.5}),
    "llama3": tiny(LlamaConfig, rope_parameters=dict(LLAMA3)),
    "smollm": tiny(LlamaConfig, tie_word_embeddings=True),
    "mistral": tiny(MistralConfig, head_dim=24, sliding_window=7),
    "mistral-no-window": tiny(MistralConfig, sliding_window=None),
    "qwen2": tiny(Qwen2Config, sliding_window=7, use_sliding_window=False),
    "qwen2-window": tiny(Qwen2Config, sliding_window=7, use_sliding_window=True, max_window_layers=0),
    "qwen3": tiny(Qwen3Config, head_dim=32, tie_word_embeddings=True),
}


def build_reference(config: PreTrainedConfig) -> PreTrainedModel:
    """Random weights large enough that a wrong rotation, window, bias or norm moves the logits visibly."""
    torch.manual_seed(7)
    build: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
    model = build(config, attn_implementation="eager", dtype=torch.float32)
    nn.Module.eval(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            parameter.normal_(centre, 0.2)
    return model


@torch.no_grad()
def reference_logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(tokens, use_cache=False).logits
    return logits


@torch.no_grad()
def cached_logits(config: DecoderConfig, weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
    """A prefill of PREFILL tokens, then one token a step."""
    decoder = Decoder(config).eval()
    decoder.load_state_dict(state_of(weights), strict=True)
    cache = KVCache(config, PREFILL + STEPS, batch=1)
    chunks = [tokens[:, :PREFILL], *tokens[:, PREFILL:].chunk(STEPS, dim=1)]
    return torch.cat([decoder(chunk, cache) for chunk in chunks], dim=1)


def some_tokens() -> torch.Tensor:
    return torch.randint(0, 128, (1, PREFILL + STEPS), generator=torch.Generator().manual_seed(3))


def distance(model: PreTrainedModel, checkpoint: Checkpoint, config: DecoderConfig | None = None) -> float:
    tokens = some_tokens()
    ours = cached_logits(config or checkpoint.config, checkpoint.weights, tokens)
    return (ours - reference_logits(model, tokens)).abs().max().item()


@pytest.mark.parametrize("name", FAMILIES)
def test_safetensors_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model = build_reference(FAMILIES[name])
    model.save_pretrained(tmp_path)
    found = distance(model, load_checkpoint(tmp_path))
    print(f"{name}: largest difference of logits {found:.1e}")
    assert found < TOLERANCE


@pytest.mark.parametrize("name", ["llama-linear", "llama-yarn", "llama3", "mistral", "qwen2-window"])
def test_comparison_sees_a_dropped_scaling_or_window(name: str, tmp_path: Path) -> None:
    """The oracle has teeth: the same weights without the scaling or the window are far off."""
    model = build_reference(FAMILIES[name])
    model.save_pretrained(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    plain = replace(checkpoint.config, rope_scaling=None, sliding_window=None)
    assert plain != checkpoint.config
    assert distance(model, checkpoint, plain) > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_sharded_safetensors_equal_the_single_file(name: str, tmp_path: Path) -> None:
    model = build_reference(FAMILIES[name])
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="60KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = load_checkpoint(tmp_path / "one"), load_checkpoint(tmp_path / "many")
    assert one.config == many.config
    assert one.weights.keys() == many.weights.keys()
    assert all(np.array_equal(one.weights[key], many.weights[key]) for key in one.weights)


@pytest.mark.parametrize("name", ["llama", "llama-linear", "llama-yarn", "llama3"])
def test_transformers_4_config_reads_the_same(name: str, tmp_path: Path) -> None:
    """rope_theta and rope_scaling at the top level, as transformers 4 wrote them."""
    build_reference(FAMILIES[name]).save_pretrained(tmp_path)
    new = load_checkpoint(tmp_path).config
    settings = json.loads((tmp_path / "config.json").read_text())
    rope = settings.pop("rope_parameters")
    settings["rope_theta"] = rope.pop("rope_theta")
    settings["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert load_checkpoint(tmp_path).config == new


def halves_to_interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """What Meta's and llama.cpp's files hold, from Hugging Face's order."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape).contiguous()


META_NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def exported(
    model: PreTrainedModel, names: Mapping[str, str], prefix: str, *, interleave: bool
) -> dict[str, torch.Tensor]:
    """The model's weights under another format's names and pairing of channels."""
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    state: dict[str, torch.Tensor] = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        module, _, leaf = name.removeprefix("model.layers.").rpartition(".")
        in_layer = name.startswith("model.layers.")
        layer, _, inner = module.partition(".")
        stored = f"{prefix}{layer}.{names[inner]}.{leaf}" if in_layer else f"{names[module]}.{leaf}"
        count = heads.get(module.rpartition(".")[2])
        state[stored] = halves_to_interleaved(weight, count) if interleave and count else weight
    return state


def write_meta(model: PreTrainedModel, folder: Path, ranks: int, embedding_dim: int = 0) -> None:
    """A folder as Meta publishes it, split over model-parallel ranks along the reference's dimensions."""
    split = {"wo": 1, "w2": 1, "tok_embeddings": embedding_dim}
    state = exported(model, META_NAMES, "layers.", interleave=True)
    for rank in range(ranks):
        shard = {
            name: weight.chunk(ranks, split.get(name.split(".")[-2], 0))[rank].clone() if weight.dim() == 2 else weight
            for name, weight in state.items()
        }
        torch.save(shard, folder / f"consolidated.{rank:02d}.pth")
    params = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 128, "multiple_of": 32}
    (folder / "params.json").write_text(json.dumps({**params, "norm_eps": 1e-5, "rope_theta": 10_000.0}))


@pytest.mark.parametrize(("ranks", "embedding_dim"), [(1, 0), (2, 0), (2, 1)])
def test_meta_export_equals_transformers(ranks: int, embedding_dim: int, tmp_path: Path) -> None:
    """Merged from one or two ranks, embeddings split by vocabulary (Llama 3) or by width (Llama 2)."""
    model = build_reference(FAMILIES["llama"])
    write_meta(model, tmp_path, ranks, embedding_dim)
    found = distance(model, load_checkpoint(tmp_path))
    print(f"meta, {ranks} ranks: largest difference of logits {found:.1e}")
    assert found < TOLERANCE


def write_gguf(model: PreTrainedModel, path: Path, architecture: str, quant: gguf.GGMLQuantizationType) -> None:
    """A file as llama.cpp's converter writes it: matrices in `quant`, vectors in F32."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(config.head_dim if architecture == "qwen3" else 16)
    add_rope_scaling(writer, config.rope_parameters)
    for name, weight in exported(model, GGUF_NAMES, "blk.", interleave=architecture == "llama").items():
        kind = quant if weight.dim() == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(weight.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_rope_scaling(writer: gguf.GGUFWriter, rope: Mapping[str, float | str]) -> None:
    kind = rope["rope_type"]
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(float(rope["factor"]))
        writer.add_rope_scaling_orig_ctx_len(int(rope["original_max_position_embeddings"]))
    elif kind == "llama3":
        writer.add_tensor("rope_freqs.weight", np.array(llama_cpp_rope_factors(rope, 16), np.float32))


def llama_cpp_rope_factors(rope: Mapping[str, float | str], head_dim: int) -> list[float]:
    """LlamaModel.generate_extra_tensors of llama.cpp's convert_hf_to_gguf.py."""
    factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    context = float(rope["original_max_position_embeddings"])
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * float(rope["rope_theta"]) ** (i / head_dim)
        if wavelength < context / high:
            factors.append(1.0)
        elif wavelength > context / low:
            factors.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def load_dequantised(model: PreTrainedModel, quant: gguf.GGMLQuantizationType) -> None:
    """Give the reference the weights that the file can express."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(parameter.numpy(), quant), quant)))


@pytest.mark.parametrize("quant", [gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0])
@pytest.mark.parametrize("name", ["llama", "llama-linear", "llama-yarn", "llama3", "smollm", "qwen2", "qwen3"])
def test_gguf_export_equals_transformers(name: str, quant: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    """Architecture llama is un-permuted, qwen2 and qwen3 are read as they are."""
    model = build_reference(FAMILIES[name])
    architecture = name if name.startswith("qwen") else "llama"
    write_gguf(model, tmp_path / "model.gguf", architecture, quant)
    load_dequantised(model, quant)
    found = distance(model, load_checkpoint(tmp_path / "model.gguf"))
    print(f"gguf {name} {quant.name}: largest difference of logits {found:.1e}")
    assert found < TOLERANCE


def test_gguf_llama_with_biases_has_them_unpermuted(tmp_path: Path) -> None:
    """Qwen2's weights stored as architecture llama: biases of q and k lie in adjacent pairs, like their matrices."""
    model = build_reference(FAMILIES["qwen2"])
    write_gguf(model, tmp_path / "model.gguf", "llama", gguf.GGMLQuantizationType.F32)
    assert distance(model, load_checkpoint(tmp_path / "model.gguf")) < TOLERANCE


def test_gguf_recovers_the_parameters_of_llama3_scaling(tmp_path: Path) -> None:
    """The file holds only per-channel factors; the configuration they came from is told from them exactly."""
    model = build_reference(FAMILIES["llama3"])
    model.save_pretrained(tmp_path / "hf")
    write_gguf(model, tmp_path / "model.gguf", "llama", gguf.GGMLQuantizationType.F32)
    expected, found = load_checkpoint(tmp_path / "hf").config, load_checkpoint(tmp_path / "model.gguf").config
    assert found.rope_scaling == expected.rope_scaling
