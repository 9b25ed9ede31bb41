"""GGUF: one file with metadata, tokenizer and block-quantised weights (llama.cpp's format).

Keys and tensor names: ggml-org/llama.cpp, docs and gguf-py/gguf/constants.py. Files of architecture `llama` (Llama,
Mistral, SmolLM) store W_Q and W_K for RoPE over adjacent pairs; Qwen files are split-half already.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from segue_model.arrays import Floats
from segue_model.chat import ChatTemplate
from segue_model.checkpoint import Checkpoint, CheckpointError
from segue_model.config import DecoderConfig, RopeScaling
from segue_model.loaders.block_types import NOT_READ, BlockType, dequantise
from segue_model.loaders.fields import MAX_CONTEXT_TOKENS, Fields
from segue_model.loaders.gguf_file import GgufFile, TensorInfo, read_gguf
from segue_model.loaders.layout import Names, bind, interleaved_to_halves
from segue_model.loaders.rope_factors import recover_llama3
from segue_model.rope_frequencies import attention_factor
from segue_model.tokenizer import Tokenizer

INTERLEAVED: Final = {"llama": True, "qwen2": False, "qwen3": False}  # architecture -> W_Q, W_K hold adjacent pairs
SAMPLING_KEYS: Final = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
ROPE_FACTORS: Final = "rope_freqs.weight"
NAMES: Final = Names(
    outer={"embed.weight": "token_embd.weight", "norm.weight": "output_norm.weight", "head.weight": "output.weight"},
    layer="blk.{i}.",
    inner={
        "attention_norm": "attn_norm",
        "attention.wq": "attn_q",
        "attention.wk": "attn_k",
        "attention.wv": "attn_v",
        "attention.wo": "attn_output",
        "attention.q_norm": "attn_q_norm",
        "attention.k_norm": "attn_k_norm",
        "ffn_norm": "ffn_norm",
        "ffn.gate": "ffn_gate",
        "ffn.up": "ffn_up",
        "ffn.down": "ffn_down",
    },
)


class RawTensor(NamedTuple):
    """A weight in the blocks it is stored in."""

    quant: BlockType
    rows: npt.NDArray[np.uint8]  # (rows, bytes of a row); read-only, usually a view into the file


class GgufWeights(Mapping[str, Floats]):
    """Canonical names to float32 arrays, dequantised anew at each access: the file is mapped, never inflated whole."""

    def __init__(self, file: GgufFile, stored: Mapping[str, str], heads_of: Mapping[str, int]) -> None:
        """stored: canonical name -> name in the file. heads_of: canonical names to bring to split halves."""
        self._file, self._stored, self._heads_of = file, stored, heads_of

    def __getitem__(self, name: str) -> Floats:
        info = self._file.tensors[self._stored[name]]
        with np.errstate(over="ignore", invalid="ignore"):  # a damaged scale gives NaN weights, no warning
            weight = dequantise(self._file.rows(info.name), info.quant).reshape(info.shape)
        return interleaved_to_halves(weight, self._heads_of[name]) if name in self._heads_of else weight

    def __contains__(self, name: object) -> bool:
        return name in self._stored  # Mapping's own would dequantise the weight to find out

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def raw(self, name: str) -> RawTensor:
        """The stored blocks of a weight, its rows in canonical (split-half) order; a block never spans rows."""
        info = self._file.tensors[self._stored[name]]
        rows = self._file.rows(info.name)
        if name in self._heads_of:
            rows = interleaved_to_halves(rows, self._heads_of[name])
        return RawTensor(info.quant, rows)


def load_gguf(path: Path) -> Checkpoint:
    """Read a GGUF file. Raises CheckpointError when it is damaged or asks for something that is not supported."""
    file = read_gguf(path)
    metadata = Fields(file.metadata, str(path))
    architecture = _architecture(metadata)
    config = _config(metadata, architecture, file)
    _check_dequantisable(file)
    stored = bind(config, NAMES, {n: t.shape for n, t in file.tensors.items()}, str(path), ignored=[ROPE_FACTORS])
    return Checkpoint(
        config=config,
        weights=GgufWeights(file, stored, _interleaved_heads(config, stored) if INTERLEAVED[architecture] else {}),
        model_id=metadata.text("general.name", path.stem),
        tokenizer=Tokenizer.from_gguf(file.metadata) if metadata.has("tokenizer.ggml.model") else None,
        chat_template=_chat_template(metadata),
        eos_token_ids=_eos_token_ids(metadata),
        bos_token_id=_token_id(metadata, "bos"),
        weight_dtype=_main_quant(file.tensors),
        weight_bytes=sum(t.num_bytes for t in file.tensors.values()),
        default_sampling={
            name: metadata.number(key, above=-1e-9) for name, key in SAMPLING_KEYS.items() if metadata.has(key)
        },
    )


def _architecture(metadata: Fields) -> str:
    found = metadata.text("general.architecture")
    if found not in INTERLEAVED:
        raise CheckpointError(
            f"{metadata.source}: architecture {found!r} is not supported, only {', '.join(INTERLEAVED)}"
        )
    metadata.refuse("split.count", 0, 1)
    metadata.refuse(f"{found}.expert_count", 0)
    metadata.refuse(f"{found}.use_parallel_residual", False)
    metadata.refuse(f"{found}.attention.causal", True)
    return found


def _config(metadata: Fields, architecture: str, file: GgufFile) -> DecoderConfig:
    def key(name: str) -> str:
        return f"{architecture}.{name}"

    dim, heads = metadata.integer(key("embedding_length")), metadata.integer(key("attention.head_count"))
    head_dim = metadata.integer(key("attention.key_length"), dim // heads or 1)
    metadata.refuse(key("attention.value_length"), head_dim)
    metadata.refuse(key("rope.dimension_count"), head_dim)
    theta = metadata.number(key("rope.freq_base"), 10_000.0, above=1.0)
    return DecoderConfig(
        vocab_size=_vocab_size(metadata, file),
        dim=dim,
        layers=metadata.integer(key("block_count")),
        heads=heads,
        kv_heads=metadata.integer(key("attention.head_count_kv"), heads),
        head_dim=head_dim,
        ffn_dim=metadata.integer(key("feed_forward_length")),
        max_context_tokens=metadata.integer(key("context_length"), high=MAX_CONTEXT_TOKENS),
        rms_eps=metadata.number(key("attention.layer_norm_rms_epsilon")),
        rope_theta=theta,
        rope_scaling=_rope_scaling(metadata, architecture, file, head_dim, theta),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias=architecture == "qwen2" or (architecture == "llama" and "blk.0.attn_q.bias" in file.tensors),
        qk_norm=architecture == "qwen3",
        sliding_window=_optional_window(metadata, key("attention.sliding_window")),
    )


def _vocab_size(metadata: Fields, file: GgufFile) -> int:
    """Rows of the embedding: `vocab_size` is often absent, and the token list may be shorter than a padded matrix."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{metadata.source}: tensor token_embd.weight is missing")
    rows = embedding.shape[0]
    tokens = metadata.values.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > rows:
        raise CheckpointError(f"{metadata.source}: has {len(tokens)} tokens, token_embd.weight only {rows} rows")
    return rows


def _optional_window(metadata: Fields, key: str) -> int | None:
    return metadata.integer(key, low=0) or None if metadata.has(key) else None


def _rope_scaling(
    metadata: Fields, architecture: str, file: GgufFile, head_dim: int, theta: float
) -> RopeScaling | None:
    kind = metadata.text(f"{architecture}.rope.scaling.type", "none")
    if ROPE_FACTORS in file.tensors:
        metadata.refuse(f"{architecture}.rope.scaling.type", "none")
        return recover_llama3(_rope_factors(file, head_dim), head_dim, theta, str(file.path))
    if kind == "none":
        # Files older than rope.scaling.*
        return _linear(metadata, f"{architecture}.rope.scale_linear")
    if kind == "linear":
        return _linear(metadata, f"{architecture}.rope.scaling.factor")
    if kind == "yarn":
        return _yarn(metadata, f"{architecture}.rope.scaling")
    raise CheckpointError(f"{file.path}: rope.scaling.type {kind!r} is not supported, only none, linear and yarn")


def _linear(metadata: Fields, key: str) -> RopeScaling | None:
    factor = metadata.number(key, 1.0)
    return None if factor == 1.0 else RopeScaling(kind="linear", factor=factor)


def _yarn(metadata: Fields, prefix: str) -> RopeScaling:
    metadata.refuse(f"{prefix}.yarn_log_multiplier", 0.0)
    metadata.refuse(f"{prefix}.yarn_ext_factor", 1.0, -1.0)
    factor = metadata.number(f"{prefix}.factor")
    plain = RopeScaling(
        kind="yarn",
        factor=factor,
        original_context_tokens=metadata.integer(f"{prefix}.original_context_length"),
        beta_fast=metadata.number(f"{prefix}.yarn_beta_fast", 32.0),
        beta_slow=metadata.number(f"{prefix}.yarn_beta_slow", 1.0),
    )
    # llama.cpp multiplies its stored factor with the paper's 0.1 ln(factor) + 1, see rope_yarn in ggml.
    stored = [metadata.number(f"{prefix}.{name}", 1.0) for name in ("attn_factor", "yarn_attn_factor")]
    multiplier = stored[0] * stored[1]
    return plain if multiplier == 1.0 else replace(plain, attention_factor=multiplier * attention_factor(plain))


def _rope_factors(file: GgufFile, head_dim: int) -> npt.NDArray[np.float32]:
    info = file.tensors[ROPE_FACTORS]
    if info.quant != BlockType.F32 or info.shape != (head_dim // 2,):
        found = f"{info.quant.name} {info.shape}"
        raise CheckpointError(f"{file.path}: tensor {ROPE_FACTORS} must be F32 ({head_dim // 2},), found {found}")
    return file.rows(ROPE_FACTORS).view(np.float32).reshape(-1)


def _check_dequantisable(file: GgufFile) -> None:
    for tensor in file.tensors.values():
        if tensor.quant in NOT_READ:
            found = f"tensor {tensor.name} has block type {tensor.quant.name}"
            raise CheckpointError(f"{file.path}: {found}, of which no weights are read")


def _interleaved_heads(config: DecoderConfig, stored: Mapping[str, str]) -> dict[str, int]:
    heads = {"wq": config.heads, "wk": config.kv_heads}
    modules = {name: name.split(".")[-2] for name in stored}
    return {name: heads[module] for name, module in modules.items() if module in heads}


def _chat_template(metadata: Fields) -> ChatTemplate | None:
    if not metadata.has("tokenizer.chat_template"):
        return None
    bos, eos = (_token_text(metadata, _token_id(metadata, kind)) for kind in ("bos", "eos"))
    return ChatTemplate(metadata.text("tokenizer.chat_template"), bos_token=bos, eos_token=eos)


def _eos_token_ids(metadata: Fields) -> tuple[int, ...]:
    """Every token that ends a turn: end of sequence, of turn, of message."""
    ids = (_token_id(metadata, kind) for kind in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _token_id(metadata: Fields, kind: str) -> int | None:
    key = f"tokenizer.ggml.{kind}_token_id"
    return metadata.integer(key, low=0) if metadata.has(key) else None


def _token_text(metadata: Fields, token_id: int | None) -> str:
    tokens = metadata.values.get("tokenizer.ggml.tokens")
    if token_id is None or not isinstance(tokens, list) or token_id >= len(tokens):
        return ""
    return str(tokens[token_id])


def _main_quant(tensors: Mapping[str, TensorInfo]) -> str:
    """The block type that holds most of the bytes, such as "Q4_1"."""
    held: Counter[str] = Counter()
    for tensor in tensors.values():
        held[tensor.quant.name] += tensor.num_bytes
    return held.most_common(1)[0][0]
