"""The native runner against plain arithmetic: blocks, linears, whole models, and SmolLM2 against the torch runner."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from segue_model.arrays import Floats, Weights
from segue_model.config import DecoderConfig, RopeScaling
from segue_model.decoder import Decoder
from segue_model.loaders import find_embedded_model, load_checkpoint
from segue_model.loaders.block_types import BlockType, dequantise
from segue_model.loaders.gguf import RawTensor
from segue_model.runner.base import Runner, Slice, Want
from segue_model.runner.native import NativeRunner, NativeUnavailable
from segue_model.runner.native.build import ISAS, build
from segue_model.runner.native.library import Slot
from segue_model.runner.native.native_runner import KvDtype, WeightsFormat
from segue_model.runner.torch_runner import TorchRunner

Quant = gguf.GGMLQuantizationType
QUANTS = (Quant.Q4_0, Quant.Q4_1, Quant.Q5_0, Quant.Q5_1, Quant.Q8_0, Quant.Q4_K, Quant.Q5_K, Quant.Q6_K)
HALF_FLOATS = {  # byte offsets of a block's half-precision scales, and how large they are; other bytes are random
    Quant.Q4_0: ((0,), 0.01),
    Quant.Q4_1: ((0, 2), 0.01),
    Quant.Q5_0: ((0,), 0.005),
    Quant.Q5_1: ((0, 2), 0.005),
    Quant.Q8_0: ((0,), 0.001),
    Quant.Q4_K: ((0, 2), 0.0003),
    Quant.Q5_K: ((0, 2), 0.0002),
    Quant.Q6_K: ((208,), 0.0001),
}
CONFIG = DecoderConfig(
    vocab_size=80,
    dim=256,
    layers=2,
    heads=8,
    kv_heads=4,
    head_dim=32,
    ffn_dim=512,
    max_context_tokens=400,
)
TEXT = (
    "The river rises in the hills above the town and runs for forty miles before it meets the sea. In spring the water "
    "is high, and boats can travel as far as the old bridge; by the end of summer, children walk across it with dry "
    "knees. Most of the people who live along its banks keep sheep or grow barley, and every year in the week of the "
    "harvest they meet at the mill to sell what they have made. The miller, whose family has owned it since 1742, "
    "weighs every sack himself and writes the number in a book."
)


@pytest.fixture(autouse=True, scope="module")
def _one_quiet_torch_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class FakeBlocks(Mapping[str, Floats]):
    """A model whose matrices are random blocks of one type, like an opened GGUF file."""

    def __init__(self, config: DecoderConfig, quant: Quant) -> None:
        chance = np.random.default_rng(int(quant))
        shapes = {name: tuple(tensor.shape) for name, tensor in Decoder(config).state_dict().items()}
        self._raw = {n: _random_blocks(chance, quant, *shape) for n, shape in shapes.items() if len(shape) == 2}
        self._norms = {
            n: chance.uniform(0.5, 1.5, shape).astype(np.float32) for n, shape in shapes.items() if len(shape) == 1
        }

    def raw(self, name: str) -> RawTensor:
        return self._raw[name]

    def __getitem__(self, name: str) -> Floats:
        if name in self._norms:
            return self._norms[name]
        return dequantise(self._raw[name].rows, self._raw[name].quant)

    def __iter__(self) -> Iterator[str]:
        return iter([*self._raw, *self._norms])

    def __len__(self) -> int:
        return len(self._raw) + len(self._norms)


@cache
def fake_blocks(quant: Quant) -> FakeBlocks:
    return FakeBlocks(CONFIG, quant)


def _random_blocks(chance: np.random.Generator, quant: Quant, count: int, cols: int) -> RawTensor:
    block, size = gguf.GGML_QUANT_SIZES[quant]
    rows = chance.integers(0, 256, (count, cols // block, size), dtype=np.uint8)
    offsets, largest = HALF_FLOATS[quant]
    for offset in offsets:
        scales = chance.uniform(-largest, largest, (count, cols // block, 1)).astype(np.float16)
        rows[:, :, offset : offset + 2] = scales.view(np.uint8)
    return RawTensor(BlockType(quant), rows.reshape(count, -1))


def need(isa: str) -> None:
    try:
        build(isa)
    except NativeUnavailable as error:
        pytest.skip(str(error).splitlines()[0])


def rounded(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """What int8 in groups of 32 makes of activations (rows, cols), in exact arithmetic."""
    groups = x.astype(np.float64).reshape(x.shape[0], -1, 32)
    scale = np.abs(groups).max(axis=2, keepdims=True) / 127
    values: npt.NDArray[np.float64] = (np.rint(groups / scale) * scale).reshape(x.shape)
    return values


def logits_of(runner: Runner, tokens: list[int], pages: int = 25) -> torch.Tensor:
    (logits,) = runner.forward([Slice(tokens, 0, range(pages), Want.ALL)])
    assert logits is not None
    return torch.from_numpy(logits)


def tokens_of(config: DecoderConfig, count: int) -> list[int]:
    return torch.randint(config.vocab_size, (count,), generator=torch.Generator().manual_seed(count)).tolist()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("quant", QUANTS, ids=lambda quant: quant.name)
def test_packed_blocks_hold_the_values_of_the_file_bit_by_bit(quant: Quant, isa: str) -> None:
    """Except a least below 2^-14 for the matrix unit: a half float in the matrix's units, it may lose its last bit."""
    need(isa)
    weights = fake_blocks(quant)
    runner = NativeRunner(CONFIG, weights, num_pages=1, threads=1, isa=isa)
    lost = 2.0**-24 if isa == "avx512amx" and quant is Quant.Q4_1 else 0.0
    for slot, name in ((Slot.WK, "layers.1.attention.wk.weight"), (Slot.DOWN, "layers.1.ffn.down.weight")):
        expected = weights[name]
        for row in range(0, expected.shape[0], 7):
            got = runner.kernels.unpack_row(slot, 1, row, expected.shape[1])
            assert np.abs(got - expected[row]).max() <= lost, f"{name} row {row}"


def halved(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Rounded to bf16, to nearest even."""
    rounded: npt.NDArray[np.float64] = torch.from_numpy(x).to(torch.bfloat16).double().numpy()
    return rounded


def halved_twice(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Rounded to a half float, then to the eight bits of bf16, ties away from zero; below 2^-12 it only says so."""
    bits = (x * np.float32(4)).astype(np.float16).view(np.uint16)
    return (bits + 4 & 0xFFF8).astype(np.uint16).view(np.float16).astype(np.float64) / 4


@pytest.mark.parametrize("quant", [Quant.Q4_0, Quant.Q4_1], ids=lambda quant: quant.name)
def test_a_linear_on_the_matrix_unit_is_the_product_in_bf16(quant: Quant) -> None:
    """Float64 arithmetic on inputs and weights that are rounded as the unit's are, for every way to cut the rows."""
    need("avx512amx")
    weights = fake_blocks(quant)
    runner = NativeRunner(CONFIG, weights, num_pages=1, threads=2, isa="avx512amx")
    matrix = halved_twice(weights["layers.0.ffn.up.weight"])
    for rows in (1, 2, 15, 16, 17, 31, 32, 33, 65):
        x = np.random.default_rng(rows).standard_normal((rows, CONFIG.dim)).astype(np.float32)
        got, _ = runner.kernels.linear(Slot.UP, 0, x, CONFIG.ffn_dim)
        expected = halved(x) @ matrix.T
        error = float(np.abs(got - expected).max() / expected.std())
        print(f"{quant.name}, {rows} rows: largest error {error:.1e} of the output's spread")
        assert error < 3e-3  # the unit's smallest weights, below 1/4,000 of the largest, are only that: small


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("quant", QUANTS, ids=lambda quant: quant.name)
def test_a_linear_is_the_exact_product_with_the_rounded_input(quant: Quant, isa: str) -> None:
    """For every number of rows a tile can have: float64 arithmetic on the same rounded activations."""
    need(isa)
    if isa == "avx512amx" and quant in (Quant.Q4_0, Quant.Q4_1):
        pytest.skip("computed in bf16, see above")
    weights = fake_blocks(quant)
    runner = NativeRunner(CONFIG, weights, num_pages=1, threads=2, isa=isa)
    matrix = weights["layers.0.ffn.up.weight"].astype(np.float64)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 21):
        x = np.random.default_rng(rows).standard_normal((rows, CONFIG.dim)).astype(np.float32)
        got, _ = runner.kernels.linear(Slot.UP, 0, x, CONFIG.ffn_dim)
        expected = rounded(x) @ matrix.T
        # A group's code may round the other way where x / scale lies within a float's rounding of a half.
        error = np.abs(got - expected) / np.abs(expected).std()
        assert np.median(error) < 1e-6
        assert error.max() < 0.02


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("form", "bound"), [("bf16", 0.01), ("int8", 0.03), ("int4", 0.25)], ids=["bf16", "int8", "int4"]
)
def test_floats_are_rounded_no_more_than_their_format_says(form: WeightsFormat, bound: float, isa: str) -> None:
    need(isa)
    weights = {n: 0.1 * torch.randn(x.shape).numpy() for n, x in Decoder(CONFIG).state_dict().items()}
    runner = NativeRunner(CONFIG, weights, num_pages=1, threads=1, weights_format=form, isa=isa)
    x = np.random.default_rng(0).standard_normal((5, CONFIG.dim)).astype(np.float32)
    got, _ = runner.kernels.linear(Slot.GATE, 1, x, CONFIG.ffn_dim)
    expected = x.astype(np.float64) @ weights["layers.1.ffn.gate.weight"].astype(np.float64).T
    error = float(np.sqrt(np.mean((got - expected) ** 2)) / expected.std())
    print(f"linear in {form}, {isa}: error {error:.4f} of the output's spread")
    assert 1e-4 < error < bound


FAMILIES: dict[str, dict[str, object]] = {
    "plain": {},
    "tied": {"tie_embeddings": True},
    "qkv bias": {"qkv_bias": True},
    "qk norm": {"qk_norm": True},
    "window": {"sliding_window": 100},
    "window of one": {"sliding_window": 1},
    "linear rope": {"rope_scaling": RopeScaling(kind="linear", factor=4.0)},
    "yarn": {"rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_context_tokens=64)},
    "odd sizes": {"dim": 88, "head_dim": 10, "ffn_dim": 100, "vocab_size": 77},
    **{f"head {width}": {"head_dim": width, "heads": 4, "kv_heads": 2} for width in (64, 80, 96, 128, 256)},
    "wide group": {"heads": 26, "kv_heads": 1, "head_dim": 16},
}


def lively_weights(config: DecoderConfig) -> Weights:
    """Values that bf16 holds exactly, so that only activations are rounded; every tensor shows in the logits."""
    generator = torch.Generator().manual_seed(5)
    noise = {n: torch.randn(x.shape, generator=generator) for n, x in Decoder(config).state_dict().items()}
    scale = 1.5 / config.dim**0.5
    weights = {n: 1 + 0.2 * x if "norm" in n else (0.5 if "bias" in n else scale) * x for n, x in noise.items()}
    return {n: x.to(torch.bfloat16).float().numpy() for n, x in weights.items()}


@pytest.mark.parametrize("isa", ["avx512vnni", "avx2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_agrees_with_the_torch_runner_in_float32(family: str, isa: str) -> None:
    """bf16 weights that lose nothing, float32 KV, float inputs: what is left is the order of float32 sums."""
    need(isa)
    sizes = {field: getattr(CONFIG, field) for field in CONFIG.__dataclass_fields__} | FAMILIES[family]
    config = DecoderConfig(**sizes)
    weights = lively_weights(config)
    tokens = tokens_of(config, 300)
    expected = logits_of(TorchRunner(config, weights, num_pages=25), tokens)
    native = NativeRunner(config, weights, num_pages=25, kv_dtype="float32", threads=1, isa=isa)
    worst = (logits_of(native, tokens) - expected).abs().max().item() / expected.std().item()
    print(f"{family}, {isa}: largest difference {worst:.1e} of the logits' spread")
    assert worst < 1e-3


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("kv", "bound"), [("float32", 1e-3), ("bfloat16", 0.05), ("int8", 0.1)])
def test_kv_types_round_no_more_than_their_width(kv: KvDtype, bound: float, isa: str) -> None:
    need(isa)
    weights, tokens = lively_weights(CONFIG), tokens_of(CONFIG, 290)
    expected = logits_of(TorchRunner(CONFIG, weights, num_pages=25), tokens)
    native = NativeRunner(CONFIG, weights, num_pages=25, kv_dtype=kv, threads=1, isa=isa)
    error = (logits_of(native, tokens) - expected).square().mean().sqrt().item() / expected.std().item()
    print(f"{kv} KV, {isa}: error {error:.1e} of the logits' spread")
    narrow = isa in ("avx512amx", "avx512bf16") and kv == "float32"  # inputs of linears are bf16, too
    assert error < (0.03 if narrow else bound)


@pytest.mark.parametrize("isa", ISAS)
def test_int8_pages_are_mixed_without_a_bias(isa: str) -> None:
    """Both runners read the same values, and queries of zero weigh them alike: the roundings of weights cancel out."""
    need(isa)
    config = replace(CONFIG, layers=1)
    zero = {"layers.0.attention.wq.weight", "layers.0.ffn.down.weight"}
    weights = {name: x * (name not in zero) for name, x in lively_weights(config).items()}
    tokens, pages = tokens_of(config, 281), range(18)
    byte_wide, exact = (
        NativeRunner(config, weights, num_pages=18, kv_dtype=kv, threads=1, isa=isa) for kv in ("int8", "float32")
    )
    byte_wide.forward([Slice(tokens[:280], 0, pages, Want.NOTHING)])
    exact.import_pages(pages, byte_wide.export_pages(pages, 280))
    (got,), (expected,) = (runner.forward([Slice(tokens[280:], 280, pages)]) for runner in (byte_wide, exact))
    assert got is not None
    assert expected is not None
    error = float(np.sqrt(np.square(got - expected).mean()) / expected.std())
    print(f"{isa}: error {error:.1e} of the logits' spread")
    assert error < (0.005 if isa in ("avx512amx", "avx512bf16") else 0.002)  # inputs of linears are bf16 there


@pytest.mark.parametrize(("kv", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_exported_kv_goes_from_runner_to_runner_and_back_unchanged(kv: KvDtype, dtype: torch.dtype) -> None:
    """One canonical layout: what one runner computed, the other goes on from; the pool gives back the same bits."""
    weights, tokens = lively_weights(CONFIG), tokens_of(CONFIG, 41)
    native = NativeRunner(CONFIG, weights, num_pages=6, kv_dtype=kv, threads=1)
    slow = TorchRunner(CONFIG, weights, num_pages=6, dtype=dtype)
    for here, there in ((native, slow), (slow, native)):
        expected = logits_of(here, tokens, pages=3)[-1]
        moved = here.export_pages(range(3), 40)
        there.import_pages([5, 3, 4], moved)
        assert np.array_equal(there.export_pages([5, 3, 4], 40), moved)
        (last,) = there.forward([Slice(tokens[40:], 40, [5, 3, 4])])
        assert last is not None
        error = float((torch.from_numpy(last[0]) - expected).square().mean().sqrt() / expected.std())
        print(f"{kv}, {here.name} to {there.name}: {error:.4f} of the logits' spread")
        assert error < 0.1


@pytest.mark.parametrize("quant", QUANTS, ids=lambda quant: quant.name)
def test_models_in_every_block_type_agree_with_their_dequantised_weights(quant: Quant) -> None:
    weights, tokens = fake_blocks(quant), tokens_of(CONFIG, 40)
    expected = logits_of(TorchRunner(CONFIG, weights, num_pages=25), tokens)
    got = logits_of(NativeRunner(CONFIG, weights, num_pages=25, kv_dtype="float32", threads=1), tokens)
    error = (got - expected).square().mean().sqrt().item() / expected.std().item()
    print(f"{quant.name}: rounding of activations moves logits by {error:.3f} of their spread")
    assert error < 0.05


@pytest.fixture(scope="module")
def smollm2() -> tuple[torch.Tensor, list[int], Weights, DecoderConfig]:
    path = find_embedded_model()
    if path is None:
        pytest.skip("the embedded SmolLM2 is not installed")
    checkpoint = load_checkpoint(path)
    assert checkpoint.tokenizer is not None
    tokens = list(checkpoint.tokenizer.encode(TEXT))
    torch_runner = TorchRunner(checkpoint.config, checkpoint.weights, num_pages=25)
    return logits_of(torch_runner, tokens), tokens, checkpoint.weights, checkpoint.config


@pytest.mark.parametrize(
    ("form", "kv", "bound"),
    [("auto", "float32", 0.006), ("auto", "bfloat16", 0.006), ("auto", "int8", 0.010), ("bf16", "bfloat16", 0.003)],
)
def test_smollm2_agrees_with_float32_on_its_dequantised_weights(
    smollm2: tuple[torch.Tensor, list[int], Weights, DecoderConfig],
    form: WeightsFormat,
    kv: KvDtype,
    bound: float,
) -> None:
    expected, tokens, weights, config = smollm2
    runner = NativeRunner(config, weights, num_pages=25, kv_dtype=kv, weights_format=form)
    ours, theirs = logits_of(runner, tokens).log_softmax(-1), expected.log_softmax(-1)
    divergence = (theirs.exp() * (theirs - ours)).sum(-1).mean().item()
    agreement = (theirs.argmax(-1) == ours.argmax(-1)).float().mean().item()
    print(f"SmolLM2 {form}, {kv} KV, {len(tokens)} tokens: KL {divergence:.5f}, same best token {agreement:.3f}")
    assert divergence < bound
    assert agreement > 0.9
