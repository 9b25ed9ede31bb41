"""Hugging Face layout: config.json beside one model.safetensors, or shards listed by model.safetensors.index.json."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Final, Protocol

from safetensors import SafetensorError, safe_open

from segue_model.arrays import Floats
from segue_model.chat import ChatTemplate
from segue_model.checkpoint import Checkpoint, CheckpointError
from segue_model.config import DecoderConfig
from segue_model.loaders.fields import Fields, read_json, read_text
from segue_model.loaders.hf_config import decoder_config
from segue_model.loaders.layout import Names, bind
from segue_model.tokenizer import Tokenizer

CONFIG: Final = "config.json"
SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
BYTES_OF: Final = {"F32": 4, "F16": 2, "BF16": 2}
SAMPLING_FIELDS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
NAMES: Final = Names(
    outer={
        "embed.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    },
    layer="model.layers.{i}.",
    inner={
        "attention_norm": "input_layernorm",
        "attention.wq": "self_attn.q_proj",
        "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.o_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn.gate": "mlp.gate_proj",
        "ffn.up": "mlp.up_proj",
        "ffn.down": "mlp.down_proj",
    },
)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as a file's header describes it; safetensors has checked the header against the file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * BYTES_OF[self.dtype]


class TensorReader(Protocol):
    """What we use of safetensors' handle, typed."""

    def get_tensor(self, name: str) -> Floats: ...


class SafetensorsWeights(Mapping[str, Floats]):
    """Canonical names to arrays in their stored dtype, read from the mapped files at each access."""

    def __init__(self, stored: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> None:
        self._stored, self._tensors = stored, tensors
        files = {tensor.file for tensor in tensors.values()}
        self._handles: dict[Path, TensorReader] = {file: safe_open(file, framework="numpy") for file in files}

    def __getitem__(self, name: str) -> Floats:
        stored = self._stored[name]
        return self._handles[self._tensors[stored].file].get_tensor(stored)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def load_safetensors(path: Path) -> Checkpoint:
    """Read a folder, or a .safetensors file with config.json beside it.

    Raises CheckpointError when something is missing, damaged or not supported.
    """
    folder = path if path.is_dir() else path.parent
    settings = read_json(folder / CONFIG)
    config = decoder_config(settings)
    tensors = _read_headers(folder, path)
    stored = _bind(config, tensors, str(path))
    generation, tokens = (_optional(folder / name) for name in ("generation_config.json", "tokenizer_config.json"))
    held = _bytes_by_dtype(tensors)
    return Checkpoint(
        config=config,
        weights=SafetensorsWeights(stored, tensors),
        model_id=folder.resolve().name,
        tokenizer=_tokenizer(folder),
        chat_template=_chat_template(folder, tokens),
        eos_token_ids=generation.token_ids("eos_token_id") or settings.token_ids("eos_token_id"),
        bos_token_id=next(iter(settings.token_ids("bos_token_id")), None),
        weight_dtype=held.most_common(1)[0][0],
        weight_bytes=held.total(),
        default_sampling={
            name: generation.number(name, above=-1e-9) for name in SAMPLING_FIELDS if generation.has(name)
        },
    )


def _bind(config: DecoderConfig, tensors: Mapping[str, StoredTensor], source: str) -> dict[str, str]:
    # Old Llama files carry the rotary frequencies; a tied model may repeat its embedding as the head.
    ignored = {name for name in tensors if name.endswith(".rotary_emb.inv_freq")}
    if config.tie_embeddings:
        ignored.add(NAMES.outer["head.weight"])
    stored = bind(config, NAMES, {n: t.shape for n, t in tensors.items()}, source, ignored=ignored)
    for name in stored.values():
        if tensors[name].dtype not in BYTES_OF:
            found = f"{source}: tensor {name} has dtype {tensors[name].dtype}"
            raise CheckpointError(f"{found}, only {', '.join(BYTES_OF)} are supported")
    return stored


def _read_headers(folder: Path, path: Path) -> dict[str, StoredTensor]:
    if path.is_file() and not (folder / INDEX).is_file():
        return _read_header(path)
    if (folder / SINGLE).is_file():
        return _read_header(folder / SINGLE)
    if (folder / INDEX).is_file():
        return _read_shards(folder)
    raise CheckpointError(f"{folder}: holds neither {SINGLE} nor {INDEX}; other weight files are not supported")


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(file, framework="numpy") as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 - not a mapping
            return {n: StoredTensor(file, tuple(s.get_shape()), str(s.get_dtype())) for n, s in slices.items()}
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{file}: is not a sound safetensors file: {error}") from error


def _read_shards(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of all shards. The index decides which file counts, and each must hold what it is said to."""
    index = read_json(folder / INDEX)
    weight_map = index.section("weight_map").values
    shards = {name: _read_header(folder / name) for name in sorted(_shard_names(index, weight_map))}
    tensors: dict[str, StoredTensor] = {}
    for name, file in weight_map.items():
        tensor = shards[str(file)].get(name)
        if tensor is None:
            raise CheckpointError(f"{index.source}: tensor {name} is not in {file}")
        tensors[name] = tensor
    return tensors


def _shard_names(index: Fields, weight_map: Mapping[str, object]) -> set[str]:
    """The distinct file names; only plain names, so that an index cannot reach outside its folder."""
    names: set[str] = set()
    for tensor, file in weight_map.items():
        plain = isinstance(file, str) and file.endswith(".safetensors") and "\\" not in file
        if not plain or PurePath(str(file)).name != file:
            raise CheckpointError(f"{index.source}: {tensor} lies in {file!r}, which is no file name of this folder")
        names.add(str(file))
    return names


def _bytes_by_dtype(tensors: Mapping[str, StoredTensor]) -> Counter[str]:
    held: Counter[str] = Counter()
    for tensor in tensors.values():
        if tensor.dtype in BYTES_OF:
            held[tensor.dtype] += tensor.num_bytes
    return held


def _optional(path: Path) -> Fields:
    return read_json(path) if path.is_file() else Fields({}, str(path))


def _tokenizer(folder: Path) -> Tokenizer | None:
    path = folder / "tokenizer.json"
    return Tokenizer.from_file(path) if path.is_file() else None


def _chat_template(folder: Path, tokens: Fields) -> ChatTemplate | None:
    """chat_template.jinja goes before the field of tokenizer_config.json, as in transformers."""
    path = folder / "chat_template.jinja"
    source = read_text(path) if path.is_file() else _template_field(tokens)
    if source is None:
        return None
    return ChatTemplate(source, bos_token=_token_text(tokens, "bos_token"), eos_token=_token_text(tokens, "eos_token"))


def _template_field(tokens: Fields) -> str | None:
    """A string, or a list of {name, template} of which the one named "default" counts."""
    value = tokens.values.get("chat_template")
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        named = [Fields(entry, f"{tokens.source}: chat_template") for entry in value]
        return next((entry.text("template") for entry in named if entry.text("name") == "default"), None)
    raise tokens.wrong("chat_template", "a string or a list of objects")


def _token_text(tokens: Fields, name: str) -> str:
    """A special token is written as its text, or as an object with the text in `content`."""
    if isinstance(tokens.values.get(name), dict):
        return tokens.section(name).text("content", "")
    return tokens.text(name, "")
