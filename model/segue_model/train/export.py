"""A trained decoder as a folder in the Hugging Face layout, model_type llama, that the server and transformers read."""

import json
from pathlib import Path

from safetensors.torch import save
from tokenizers import Tokenizer

from segue_model.config import ConfigError, DecoderConfig
from segue_model.decoder import Decoder
from segue_model.loaders.safetensors import CONFIG, NAMES, SINGLE
from segue_model.train.text import END


def export(model: Decoder, tokenizer: Tokenizer, folder: Path) -> None:
    """Write config, weights and tokenizer. Raises ConfigError for what model_type llama cannot say."""
    tensors = {NAMES.stored(name): tensor.contiguous() for name, tensor in model.state_dict().items()}
    end = tokenizer.token_to_id(END)
    described = {**_llama(model.config), "eos_token_id": end}
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
    folder.mkdir(parents=True, exist_ok=True)
    # safetensors' own save_file makes files that only their owner may read; a server is often another user.
    (folder / SINGLE).write_bytes(save(tensors, metadata={"format": "pt"}))
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in (
        (CONFIG, described),
        ("tokenizer_config.json", {**named, "model_max_length": model.config.max_context_tokens}),
        ("generation_config.json", {"eos_token_id": end}),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _llama(config: DecoderConfig) -> dict[str, object]:
    if config.qkv_bias or config.qk_norm or config.sliding_window or config.rope_scaling:
        raise ConfigError("qkv_bias, qk_norm, sliding_window and rope_scaling are not part of model_type llama here")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_context_tokens,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "dtype": "float32",
        "bos_token_id": None,
    }
