"""The reference decoder against Hugging Face transformers: same random weights, same logits."""

import pytest
import torch

from segue_model.config import DecoderConfig, RopeScaling
from segue_model.decoder import Decoder

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "attn_implementation": "eager",
}
LLAMA3 = RopeScaling(kind="llama3", factor=8.0, original_context_tokens=64)
YARN = RopeScaling(kind="yarn", factor=4.0, original_context_tokens=32)
RENAMED = {
    "model.embed_tokens": "embed",
    "model.norm": "norm",
    "lm_head": "head",
    "model.layers": "layers",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "ffn.gate",
    "mlp.up_proj": "ffn.up",
    "mlp.down_proj": "ffn.down",
}


def our_names(theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {_our_name(name): tensor for name, tensor in theirs.items()}


def _our_name(name: str) -> str:
    for old, new in RENAMED.items():
        if old in name:
            return _our_name(name.replace(old, new))
    return name


def rope_parameters(scaling: RopeScaling | None) -> dict[str, object]:
    if scaling is None:
        return {"rope_type": "default", "rope_theta": 10_000.0}
    return {
        "rope_type": scaling.kind,
        "rope_theta": 10_000.0,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_context_tokens,
    } | ({"low_freq_factor": 1.0, "high_freq_factor": 4.0} if scaling.kind == "llama3" else {})


@pytest.mark.parametrize(
    ("family", "theirs", "ours"),
    [
        ("Llama", {}, {}),
        ("Llama", {"tie_word_embeddings": True}, {"tie_embeddings": True}),
        ("Llama", {}, {"rope_scaling": LLAMA3}),
        ("Llama", {}, {"rope_scaling": YARN}),
        ("Mistral", {"sliding_window": 5}, {"sliding_window": 5}),
        ("Qwen2", {}, {"qkv_bias": True}),
        ("Qwen3", {}, {"qk_norm": True}),
    ],
    ids=["llama", "tied", "llama3 rope", "yarn rope", "mistral window", "qwen2 bias", "qwen3 norms"],
)
def test_logits_are_those_of_transformers(family: str, theirs: dict[str, object], ours: dict[str, object]) -> None:
    torch.manual_seed(5)
    scaling = ours.get("rope_scaling")
    assert scaling is None or isinstance(scaling, RopeScaling)
    settings = SIZES | {"tie_word_embeddings": False, "rope_parameters": rope_parameters(scaling)} | theirs
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**settings)).eval()
    config = DecoderConfig(
        vocab_size=128,
        dim=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=24,
        ffn_dim=96,
        max_context_tokens=128,
        **ours,
    )
    tokens = torch.randint(128, (2, 40))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        decoder = Decoder(config)
        weights = our_names(dict(model.named_parameters()))
        decoder.load_state_dict(weights)
        error = (decoder(tokens) - model(tokens).logits).abs().max().item()
    print(f"{family} {ours}: largest difference from transformers {error:.1e}")
    assert error < 1e-4
