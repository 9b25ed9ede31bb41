"""Meta's own layout: params.json beside consolidated.00.pth .. consolidated.NN.pth, one file a model-parallel rank.

Names, shards and defaults: meta-llama/llama-models, models/llama3/model.py and args.py; meta-llama/llama for Llama 2.
W_Q and W_K are stored for RoPE over adjacent pairs.
"""

import pickletools
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch

from segue_model.arrays import Floats
from segue_model.checkpoint import Checkpoint, CheckpointError
from segue_model.config import DecoderConfig, RopeScaling
from segue_model.loaders.fields import MAX_CONTEXT_TOKENS, Fields, read_json
from segue_model.loaders.layout import Names, Shape, bind, interleaved_to_halves
from segue_model.tokenizer import Tokenizer
from segue_model.torch_arrays import to_numpy

DTYPE_NAMES: Final = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
MAX_PICKLE_BYTES: Final = 16 * 1024**2  # names and shapes only: about 150 bytes a tensor
FORBIDDEN_OPCODES: Final = frozenset({"STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"})  # name callables differently
# What a state dict of plain tensors needs; anything else in the pickle is code or a kind of tensor we do not read.
ALLOWED_GLOBALS: Final = frozenset(
    {
        "collections OrderedDict",
        "torch._utils _rebuild_tensor_v2",
        "torch BFloat16Storage",
        "torch HalfStorage",
        "torch FloatStorage",
    }
)
NAMES: Final = Names(
    outer={"embed.weight": "tok_embeddings.weight", "norm.weight": "norm.weight", "head.weight": "output.weight"},
    layer="layers.{i}.",
    inner={
        "attention_norm": "attention_norm",
        "attention.wq": "attention.wq",
        "attention.wk": "attention.wk",
        "attention.wv": "attention.wv",
        "attention.wo": "attention.wo",
        "ffn_norm": "ffn_norm",
        "ffn.gate": "feed_forward.w1",
        "ffn.up": "feed_forward.w3",
        "ffn.down": "feed_forward.w2",
    },
)
SPLIT_DIM: Final = {"wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "output": 0, "wo": 1, "w2": 1}

Shard = Mapping[str, torch.Tensor]


class MetaWeights(Mapping[str, Floats]):
    """Canonical names to arrays in their stored dtype, merged and brought to split halves at each access."""

    def __init__(self, config: DecoderConfig, stored: Mapping[str, str], shards: Sequence[Shard]) -> None:
        self._config, self._stored, self._shards = config, stored, shards
        self._heads = {"wq": config.heads, "wk": config.kv_heads}

    def __getitem__(self, name: str) -> Floats:
        stored = self._stored[name]
        parts = [shard[stored] for shard in self._shards]
        dim = _split_dim(stored, parts[0].shape, self._config.dim)
        weight = to_numpy(parts[0] if dim is None or len(parts) == 1 else torch.cat(parts, dim))
        heads = self._heads.get(name.split(".")[-2])
        return weight if heads is None else interleaved_to_halves(weight, heads)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def load_meta(folder: Path) -> Checkpoint:
    """Read a folder with params.json. Raises CheckpointError when it is damaged or not supported."""
    params = read_json(folder / "params.json")
    shards = [_read_shard(path) for path in _shard_paths(folder)]
    config = _config(params, shards)
    found = {name: _merged_shape(name, shards, config.dim, str(folder)) for name in shards[0]}
    stored = bind(config, NAMES, found, str(folder), ignored=["rope.freqs"])
    held = _bytes_by_dtype(shards)
    return Checkpoint(
        config=config,
        weights=MetaWeights(config, stored, shards),
        model_id=folder.resolve().name,
        tokenizer=_tokenizer(folder),
        weight_dtype=held.most_common(1)[0][0],
        weight_bytes=held.total(),
    )


def _config(params: Fields, shards: Sequence[Shard]) -> DecoderConfig:
    for name in ("moe", "moe_args", "lora_args", "quantization_args", "vision_chunk_size", "sliding_window"):
        params.refuse(name)
    dim, heads = params.integer("dim"), params.integer("n_heads")
    theta = params.number("rope_theta", 10_000.0, above=1.0)
    scaling = _rope_scaling(params)
    return DecoderConfig(
        vocab_size=_vocab_size(params, shards),
        dim=dim,
        layers=params.integer("n_layers"),
        heads=heads,
        kv_heads=params.integer("n_kv_heads", heads),
        head_dim=dim // heads or 1,
        ffn_dim=_ffn_dim(params, dim),
        max_context_tokens=params.integer("max_seq_len", _context_tokens(theta, scaling), high=MAX_CONTEXT_TOKENS),
        rms_eps=params.number("norm_eps", 1e-5),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings="output.weight" not in shards[0],
    )


def _ffn_dim(params: Fields, dim: int) -> int:
    """Two thirds of 4 dim, scaled, rounded up to a multiple: `FeedForward.__init__` of the reference."""
    width = int(params.number("ffn_dim_multiplier", 1.0) * int(2 * 4 * dim / 3))
    multiple = params.integer("multiple_of", 256)
    return multiple * -(-width // multiple)


def _vocab_size(params: Fields, shards: Sequence[Shard]) -> int:
    """Llama 2 says -1 and leaves it to the tokenizer; its head is split by rows."""
    size = params.integer("vocab_size", -1, low=-1)
    if size > 0:
        return size
    head = shards[0].get("output.weight")
    if head is None or head.dim() != 2:
        raise CheckpointError(f"{params.source}: vocab_size is {size}, and there is no output.weight to tell it from")
    return head.shape[0] * len(shards)


def _rope_scaling(params: Fields) -> RopeScaling | None:
    """Constants of `apply_scaling` in the reference, unless params.json states its own."""
    if not params.boolean("use_scaled_rope", default=False):
        return None
    return RopeScaling(
        kind="llama3",
        factor=params.number("rope_scaling_factor", 8.0),
        original_context_tokens=8192,
        low_freq_factor=1.0,
        high_freq_factor=params.number("rope_high_freq_factor", 4.0, above=1.0),
    )


def _context_tokens(theta: float, scaling: RopeScaling | None) -> int:
    """params.json does not say: Llama 3.1 has 131072, Llama 3 8192 (told by its base), Llama 2 4096."""
    if scaling is not None:
        return 131_072
    return 8192 if theta >= 500_000 else 4096


def _shard_paths(folder: Path) -> list[Path]:
    paths = sorted(folder.glob("consolidated.*.pth"))
    expected = [f"consolidated.{rank:02d}.pth" for rank in range(len(paths))]
    if not paths or [path.name for path in paths] != expected:
        found = ", ".join(path.name for path in paths) or "none"
        raise CheckpointError(f"{folder}: needs consolidated.00.pth and so on without a gap, found {found}")
    return paths


def _read_shard(path: Path) -> Shard:
    """A state dict of plain tensors over the mapped file."""
    try:
        _check_pickle(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except CheckpointError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0]  # torch explains weights_only over many lines
        raise CheckpointError(f"{path}: is not a sound torch file: {reason or type(error).__name__}") from error
    if not isinstance(state, dict) or not state or not all(isinstance(name, str) for name in state):
        raise CheckpointError(f"{path}: must hold a dict of named tensors")
    for name, tensor in state.items():
        _check_tensor(name, tensor, path)
    total = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    if total > path.stat().st_size:  # many views of few bytes: a small file must not describe a large model
        raise CheckpointError(f"{path}: its tensors claim {total} bytes, the file has {path.stat().st_size}")
    return state


def _check_pickle(path: Path) -> None:
    """Read the opcodes without running them, and refuse every callable that plain tensors do not need."""
    with zipfile.ZipFile(path) as archive:
        entry = next((info for info in archive.infolist() if info.filename.endswith("/data.pkl")), None)
        if entry is None or entry.file_size > MAX_PICKLE_BYTES:
            raise CheckpointError(f"{path}: needs a data.pkl of at most {MAX_PICKLE_BYTES} bytes, found {entry}")
        for opcode, argument, _ in pickletools.genops(archive.read(entry)):
            if opcode.name in FORBIDDEN_OPCODES or (opcode.name == "GLOBAL" and argument not in ALLOWED_GLOBALS):
                found = argument or opcode.name
                raise CheckpointError(f"{path}: its pickle calls {found!r}, only plain tensors are read")


def _check_tensor(name: str, tensor: object, path: Path) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        raise CheckpointError(f"{path}: {name} must be a dense tensor, found {type(tensor).__name__}")
    if tensor.dtype not in DTYPE_NAMES:
        supported = ", ".join(DTYPE_NAMES.values())
        raise CheckpointError(f"{path}: tensor {name} has dtype {tensor.dtype}, only {supported} are supported")


def _split_dim(stored: str, shape: Sequence[int], model_dim: int) -> int | None:
    """The dimension that ranks divide; None for what each rank repeats.

    Embeddings are split by width in Llama 2 (ParallelEmbedding) and by vocabulary in Llama 3.
    """
    module = stored.split(".")[-2]
    if module == "tok_embeddings":
        return 0 if shape[1:] == (model_dim,) else 1
    return SPLIT_DIM.get(module)


def _merged_shape(stored: str, shards: Sequence[Shard], model_dim: int, source: str) -> Shape:
    shapes = {tuple(shard[stored].shape) if stored in shard else None for shard in shards}
    shape = next(iter(shapes))
    if len(shapes) != 1 or shape is None:
        raise CheckpointError(f"{source}: tensor {stored} is missing or differs in shape between the files")
    dim = _split_dim(stored, shape, model_dim)
    if dim is None or dim >= len(shape):
        return shape
    return (*shape[:dim], shape[dim] * len(shards), *shape[dim + 1 :])


def _bytes_by_dtype(shards: Sequence[Shard]) -> Counter[str]:
    held: Counter[str] = Counter()
    for tensor in (tensor for shard in shards for tensor in shard.values()):
        held[DTYPE_NAMES[tensor.dtype]] += tensor.numel() * tensor.element_size()
    return held


def _tokenizer(folder: Path) -> Tokenizer | None:
    """Meta ships tokenizer.model, which is not read; a tokenizer.json put beside it is."""
    path = folder / "tokenizer.json"
    return Tokenizer.from_file(path) if path.is_file() else None
