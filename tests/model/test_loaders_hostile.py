"""A damaged or hostile model file gives one CheckpointError: no crash, no other exception, no large allocation."""

import json
import os
import resource
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from segue_model.checkpoint import CheckpointError
from segue_model.loaders import load_checkpoint

DIM, FFN, VOCAB, LAYERS = 32, 32, 258, 1
EXTRA_BYTES = 200 * 1024**2  # what a whole property test may add to the process; the files have under 100 kB
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
HF_SHAPES = {
    "model.embed_tokens.weight": (VOCAB, DIM),
    "model.norm.weight": (DIM,),
    "model.layers.0.input_layernorm.weight": (DIM,),
    "model.layers.0.post_attention_layernorm.weight": (DIM,),
    **{f"model.layers.0.self_attn.{name}_proj.weight": (DIM, DIM) for name in "qkvo"},
    **{f"model.layers.0.mlp.{name}_proj.weight": (FFN, DIM) for name in ("gate", "up", "down")},
}
GGUF_SHAPES = {
    "token_embd.weight": (VOCAB, DIM),
    "output_norm.weight": (DIM,),
    "blk.0.attn_norm.weight": (DIM,),
    "blk.0.ffn_norm.weight": (DIM,),
    **{f"blk.0.{name}.weight": (DIM, DIM) for name in ("attn_q", "attn_k", "attn_v", "attn_output")},
    **{f"blk.0.{name}.weight": (FFN, DIM) for name in ("ffn_gate", "ffn_up", "ffn_down")},
}
META_SHAPES = {
    "tok_embeddings.weight": (VOCAB, DIM),
    "norm.weight": (DIM,),
    "layers.0.attention_norm.weight": (DIM,),
    "layers.0.ffn_norm.weight": (DIM,),
    **{f"layers.0.attention.w{name}.weight": (DIM, DIM) for name in "qkvo"},
    **{f"layers.0.feed_forward.w{i}.weight": (96, DIM) if i != 2 else (DIM, 96) for i in (1, 2, 3)},
}
PARAMS = {"dim": DIM, "n_layers": LAYERS, "n_heads": 2, "vocab_size": VOCAB, "multiple_of": 32}


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    kept = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(moved)) for byte in range(256)]


def write_gguf(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(DIM)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*byte_alphabet(), "ab", "<|end|>"])
    writer.add_token_types([*[1] * 257, 3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(257)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    for name, shape in GGUF_SHAPES.items():
        writer.add_tensor(name, np.full(shape, 0.5, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_safetensors(folder: Path, **changes: object) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file({name: torch.full(shape, 0.5) for name, shape in HF_SHAPES.items()}, folder / "model.safetensors")


def write_meta(folder: Path, **changes: object) -> None:
    (folder / "params.json").write_text(json.dumps({**PARAMS, **changes}))
    torch.save({n: torch.full(shape, 0.5) for n, shape in META_SHAPES.items()}, folder / "consolidated.00.pth")


def load_or_refuse(path: Path) -> bool:
    """True when it loaded and every weight could be read; any exception but CheckpointError is the test's failure."""
    try:
        checkpoint = load_checkpoint(path)
    except CheckpointError:
        return False
    for weight in checkpoint.weights.values():
        assert weight.size <= VOCAB * DIM
    return True


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


Damage = Callable[[bytes], bytes]


@st.composite
def damages(draw: st.DrawFn, focus: int) -> Damage:
    """Up to four bytes overwritten, mostly within the first `focus` bytes, and sometimes the end cut off."""
    positions = st.one_of(st.integers(0, focus), st.integers(0, focus), st.integers(0, 2**20))
    patches = draw(st.lists(st.tuples(positions, st.integers(0, 255)), max_size=4))
    kept = draw(st.one_of(st.just(1.0), st.floats(0, 1)))

    def apply(data: bytes) -> bytes:
        damaged = bytearray(data[: int(len(data) * kept)])
        for position, value in patches:
            if damaged:
                damaged[position % len(damaged)] = value
        return bytes(damaged)

    return apply


def check_damage(whole: Path, target: Path, damage: Damage) -> None:
    """Damage a copy, so that no earlier mapping of the file is pulled from under a reader."""
    target.unlink(missing_ok=True)
    target.write_bytes(damage(whole.read_bytes()))
    load_or_refuse(target)


many = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def bounded_memory() -> object:
    before = peak_bytes()
    yield
    assert peak_bytes() - before < EXTRA_BYTES


@many
@given(damage=damages(focus=9000))
def test_damaged_gguf_is_refused_or_loads(damage: Damage, tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    if not whole.exists():
        write_gguf(whole)
        assert load_or_refuse(whole)
    check_damage(whole, tmp_path / "damaged.gguf", damage)


@many
@given(damage=damages(focus=1400))
def test_damaged_safetensors_is_refused_or_loads(damage: Damage, tmp_path: Path) -> None:
    whole = tmp_path / "whole.safetensors"
    if not whole.exists():
        write_safetensors(tmp_path)
        assert load_or_refuse(tmp_path)
        (tmp_path / "model.safetensors").rename(whole)
    check_damage(whole, tmp_path / "model.safetensors", damage)


@settings(many, max_examples=150)
@given(damage=damages(focus=3000))
def test_damaged_torch_file_is_refused_or_loads(damage: Damage, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    if not whole.exists():
        write_meta(tmp_path)
        assert load_or_refuse(tmp_path)
        (tmp_path / "consolidated.00.pth").rename(whole)
    check_damage(whole, tmp_path / "consolidated.00.pth", damage)


@settings(many, max_examples=150)
@given(damage=damages(focus=300))
def test_damaged_config_is_refused_or_loads(damage: Damage, tmp_path: Path) -> None:
    whole = tmp_path / "whole.json"
    if not whole.exists():
        write_safetensors(tmp_path)
        (tmp_path / "config.json").rename(whole)
    check_damage(whole, tmp_path / "config.json", damage)
    load_or_refuse(tmp_path)


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def header(tensors: int = 0, keys: int = 0, body: bytes = b"", *, magic: bytes = b"GGUF", version: int = 3) -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, keys) + body


def tensor_info(name: str = "t", dims: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


U32 = struct.pack("<I", 4)
HOSTILE_GGUF = {
    "empty": (b"", "cannot be read|no known model"),
    "magic only": (b"GGUF", "needs 4 bytes"),
    "renamed": (header(magic=b"GGML"), "no known model file"),
    "version 1": (header(version=1), "version 1, versions 2 and 3"),
    "big-endian": (header(version=3 << 24), "big-endian"),
    "tensor count": (header(tensors=2**63), "truncated or damaged"),
    "key count": (header(keys=2**63), "truncated or damaged"),
    "key length": (header(keys=1, body=struct.pack("<Q", 2**62)), "at most 65536"),
    "string length": (header(keys=1, body=string("k") + struct.pack("<IQ", 8, 2**62)), "k needs 4611686018427387904"),
    "not UTF-8": (header(keys=1, body=string(b"\xff\xfe")), "not UTF-8"),
    "value type": (header(keys=1, body=string("k") + struct.pack("<I", 99)), "unknown value type 99"),
    "array length": (header(keys=1, body=string("k") + struct.pack("<IIQ", 9, 4, 2**60)), "at most 16777216"),
    "array of arrays": (header(keys=1, body=string("k") + struct.pack("<IIQ", 9, 9, 1)), "array of arrays"),
    "long array, short file": (header(keys=1, body=string("k") + struct.pack("<IIQ", 9, 8, 2**24)), "truncated"),
    "key twice": (header(keys=2, body=(string("k") + U32 + U32) * 2), "k occurs twice"),
    "alignment": (header(keys=1, body=string("general.alignment") + U32 + struct.pack("<I", 3)), "power of two"),
    "rank": (header(tensors=1, body=tensor_info(dims=(1,) * 5)), "5 dimensions"),
    "no dimension": (header(tensors=1, body=tensor_info(dims=())), "0 dimensions"),
    "zero dimension": (header(tensors=1, body=tensor_info(dims=(8, 0))), "no whole rows"),
    "dimensions overflow": (header(tensors=1, body=tensor_info(dims=(2**33, 2**33))), "ends at byte"),
    "block type": (header(tensors=1, body=tensor_info(kind=999)), "unknown block type 999"),
    "part of a block": (header(tensors=1, body=tensor_info(dims=(33,), kind=8)), "no whole rows of Q8_0"),
    "offset": (header(tensors=1, body=tensor_info(offset=2**62)), "ends at byte"),
    "crooked offset": (header(tensors=1, body=tensor_info(offset=7)), "no multiple of the alignment 32"),
    "tensor twice": (header(tensors=2, body=tensor_info() * 2), "occurs twice"),
    "overlap": (header(tensors=2, body=tensor_info("a") + tensor_info("b") + bytes(200)), "a and b overlap"),
    "no architecture": (header(), "general.architecture is missing"),
}


@pytest.mark.parametrize("name", HOSTILE_GGUF)
def test_hostile_gguf_header_is_refused(name: str, tmp_path: Path) -> None:
    data, message = HOSTILE_GGUF[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path)


@pytest.mark.parametrize("kept", [4, 24, 100, 5000, -1, -5000])
def test_truncated_gguf_is_refused(kept: int, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"truncated or damaged|no known model file"):
        load_checkpoint(tmp_path / "cut.gguf")


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/etc/x.safetensors", "a/../x.safetensors", "..", "x.bin", 7, None]
)
def test_index_cannot_name_files_outside_its_folder(file: object, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_safetensors(folder)
    (folder / "model.safetensors").rename(tmp_path / "x.safetensors")  # "../x.safetensors" exists and is sound
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(HF_SHAPES, file)}))
    with pytest.raises(CheckpointError, match="no file name of this folder"):
        load_checkpoint(folder)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"t": "model.safetensors"}}'])
def test_index_that_is_wrong_inside_is_refused(index: str, tmp_path: Path) -> None:
    write_safetensors(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", "7", '"x"', "null", "{", "[" * 100_000, '{"a": ' * 100_000, "\x00", "{'a': 1}"]
)
def test_json_that_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    write_safetensors(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json: (not valid JSON|must hold a JSON object)"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("value", ["8", 0, -1, 1.5, True, [], {}, 2**40, float("nan")])
@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_sizes_of_the_wrong_type_or_range_are_refused(name: str, value: object, tmp_path: Path) -> None:
    write_safetensors(tmp_path, **{name: value})
    with pytest.raises(CheckpointError, match=rf"config\.json: {name} must be"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_type", ["llama"]),
        ("rms_norm_eps", "1e-5"),
        ("rms_norm_eps", float("inf")),
        ("rope_theta", -1),
        ("rope_theta", 1.0),
        ("rope_scaling", "linear"),
        ("rope_scaling", {"type": "linear", "factor": "2"}),
        ("rope_scaling", {"type": "linear", "factor": 0}),
        ("tie_word_embeddings", "yes"),
        ("max_position_embeddings", 10**15),
        ("num_hidden_layers", 2**31 - 1),
        ("num_key_value_heads", 3),
        ("head_dim", 15),
        ("eos_token_id", "2"),
        ("eos_token_id", [1, None]),
        ("eos_token_id", -2),
    ],
)
def test_other_fields_are_checked_too(name: str, value: object, tmp_path: Path) -> None:
    write_safetensors(tmp_path, **{name: value})
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path)


class Payload:
    """Unpickles into a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (self.command,)


def test_pickle_with_code_is_refused_and_not_run(tmp_path: Path) -> None:
    write_meta(tmp_path)
    marker = tmp_path / "ran"
    torch.save({"norm.weight": Payload(f"touch {marker}")}, tmp_path / "consolidated.00.pth")
    with pytest.raises(CheckpointError, match=r"its pickle calls .*system"):
        load_checkpoint(tmp_path)
    assert not marker.exists()


class Hoard:
    """Unpickles into a gigabyte, by a callable that torch's weights_only allows."""

    def __reduce__(self) -> tuple[object, ...]:
        return bytearray, (2**30,)


def test_pickle_that_allocates_is_refused(tmp_path: Path) -> None:
    write_meta(tmp_path)
    torch.save({"norm.weight": Hoard()}, tmp_path / "consolidated.00.pth")
    with pytest.raises(CheckpointError, match=r"its pickle calls .*bytearray"):
        load_checkpoint(tmp_path)


def test_small_torch_file_cannot_describe_a_large_model(tmp_path: Path) -> None:
    """One element repeated by a stride of 0 is refused before anything copies it."""
    write_meta(tmp_path)
    torch.save({"norm.weight": torch.zeros(1).expand(2**20, 2**10)}, tmp_path / "consolidated.00.pth")
    with pytest.raises(CheckpointError, match="its tensors claim 4294967296 bytes"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "state", [[], {}, {"norm.weight": 1}, {1: torch.zeros(1)}, {"w": torch.zeros(4, dtype=torch.int8)}]
)
def test_torch_file_that_is_no_state_dict_is_refused(state: object, tmp_path: Path) -> None:
    write_meta(tmp_path)
    torch.save(state, tmp_path / "consolidated.00.pth")
    with pytest.raises(CheckpointError, match=r"consolidated\.00\.pth"):
        load_checkpoint(tmp_path)


def test_legacy_torch_file_is_refused(tmp_path: Path) -> None:
    write_meta(tmp_path)
    torch.save({"w": torch.zeros(1)}, tmp_path / "consolidated.00.pth", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="not a sound torch file"):
        load_checkpoint(tmp_path)


def test_missing_paths_and_empty_folders_say_what_a_model_is(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match=r"a \.gguf file, a folder with config\.json and safetensors"):
            load_checkpoint(path)
