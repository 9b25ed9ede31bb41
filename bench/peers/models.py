"""The checkpoints that are compared, all of the same weights, made once and kept in the cache directory.

SmolLM2-135M-Instruct   Q4_1 GGUF as packaged; the same weights dequantised to float32 in the Hugging Face layout
                        (transformers, vLLM), and from there int8 per channel (OpenVINO); Q8_0 GGUF
random-1.1b             TinyLlama's layers over SmolLM2's vocabulary, random Q4_0 or Q8_0 blocks: no sense in its
                        answers, but more bytes than any cache holds
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaConfig

from segue_model.checkpoint import Checkpoint
from segue_model.config import DecoderConfig
from segue_model.loaders import load_checkpoint
from segue_model.loaders.safetensors import NAMES
from segue_model.torch_arrays import state_of

RANDOM_SHAPE: Final = DecoderConfig(
    vocab_size=49_152,
    dim=2048,
    layers=22,
    heads=32,
    kv_heads=4,
    head_dim=64,
    ffn_dim=5632,
    max_context_tokens=8192,
    tie_embeddings=True,
)
BLOCK: Final = 32  # weights of a Q4_0 or Q8_0 block, beside one float16 scale
TYPICAL_WEIGHT: Final = 0.02


class Blocks(NamedTuple):
    """A format of random weights."""

    type: gguf.GGMLQuantizationType
    file_type: gguf.LlamaFileType
    code_bytes: int  # of a block
    deviation: float  # of a uniform code


Q4_0: Final = Blocks(gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0, BLOCK // 2, 4.6)
Q8_0: Final = Blocks(gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0, BLOCK, 74)


def made_once(path: Path, make: Callable[[Path], None]) -> Path:
    """`path`, made under another name first, so that what was cut off half-way is never taken for whole."""
    if not path.exists():
        half = path.with_name(f"{path.name}.half-{os.getpid()}")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            make(half)
            half.rename(path)
        finally:
            shutil.rmtree(half, ignore_errors=True)
            half.unlink(missing_ok=True)
    return path


def write_hugging_face(source: Path, folder: Path) -> None:
    """The GGUF file `source`, dequantised to float32, with the tokenizer that is in it."""
    checkpoint = load_checkpoint(source)
    tensors = {NAMES.stored(name): tensor.contiguous() for name, tensor in state_of(checkpoint.weights).items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _llama_config(checkpoint).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def _llama_config(checkpoint: Checkpoint) -> LlamaConfig:
    config = checkpoint.config
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.ffn_dim,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_context_tokens,
        rms_norm_eps=config.rms_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tie_embeddings,
        bos_token_id=checkpoint.bos_token_id,
        eos_token_id=checkpoint.eos_token_ids[0],
        dtype=torch.float32,
    )


def write_random_gguf(tokenizer_of: Path, file: Path, blocks: Blocks) -> None:
    """RANDOM_SHAPE in `blocks` with the embedding, which is the head too, in Q8_0; the same file every time."""
    config, generator = RANDOM_SHAPE, np.random.default_rng(0)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("random-1.1b")
    writer.add_context_length(config.max_context_tokens)
    writer.add_embedding_length(config.dim)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.ffn_dim)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(blocks.file_type)
    _copy_tokenizer(gguf.GGUFReader(tokenizer_of), writer)
    _add_random_tensors(config, writer, generator, blocks)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy_tokenizer(source: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for name, field in source.fields.items():
        if name.startswith("tokenizer."):
            sub_type = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)


def _add_random_tensors(
    config: DecoderConfig, writer: gguf.GGUFWriter, generator: np.random.Generator, blocks: Blocks
) -> None:
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    matrices = {
        "attn_q": (q, config.dim),
        "attn_k": (kv, config.dim),
        "attn_v": (kv, config.dim),
        "attn_output": (config.dim, q),
        "ffn_gate": (config.ffn_dim, config.dim),
        "ffn_up": (config.ffn_dim, config.dim),
        "ffn_down": (config.dim, config.ffn_dim),
    }
    ones = np.ones(config.dim, np.float32)
    embedding = _random_blocks(generator, (config.vocab_size, config.dim), Q8_0)
    writer.add_tensor("token_embd.weight", embedding, raw_dtype=Q8_0.type)
    for i in range(config.layers):
        for name, shape in matrices.items():
            weight = _random_blocks(generator, shape, blocks)
            writer.add_tensor(f"blk.{i}.{name}.weight", weight, raw_dtype=blocks.type)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", ones)
    writer.add_tensor("output_norm.weight", ones)


def _random_blocks(
    generator: np.random.Generator, shape: tuple[int, int], blocks: Blocks
) -> "np.ndarray[tuple[int, int], np.dtype[np.uint8]]":
    """(rows, cols) as (rows, bytes of a row): a float16 scale before each block's uniformly random codes."""
    rows, cols = shape
    stored = np.empty((rows, cols // BLOCK, 2 + blocks.code_bytes), np.uint8)
    stored[:, :, :2] = np.array([TYPICAL_WEIGHT / blocks.deviation], np.float16).view(np.uint8)
    stored[:, :, 2:] = generator.integers(0, 256, (rows, cols // BLOCK, blocks.code_bytes), np.uint8)
    return stored.reshape(rows, -1)
