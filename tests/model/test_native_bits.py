"""The native runner gives the same bits however a token's history was computed: torch.equal, never a tolerance."""

import random
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch

from segue_model.arrays import BFLOAT16, Weights
from segue_model.config import DecoderConfig, RopeScaling
from segue_model.decoder import Decoder
from segue_model.runner.base import Slice, Want
from segue_model.runner.native import NativeRunner, NativeUnavailable
from segue_model.runner.native.build import build
from segue_model.runner.native.native_runner import MAX_ROWS, KvDtype, WeightsFormat

VOCAB, CONTEXT, PAGES = 96, 640, 400
SEQUENCES = 6


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of model and how its numbers are stored."""

    changes: tuple[tuple[str, object], ...] = ()
    kv: KvDtype = "bfloat16"
    weights: WeightsFormat = "int8"
    isa: str | None = None


CASES: dict[str, Case] = {
    "int8 weights": Case(),
    "int4 weights": Case(weights="int4"),
    "bf16 weights": Case(weights="bf16"),
    "int8 kv": Case(kv="int8"),
    "float32 kv": Case(kv="float32"),
    "biases, tied": Case((("qkv_bias", True), ("tie_embeddings", True))),
    "qk norm, odd sizes": Case((("qk_norm", True), ("dim", 72), ("head_dim", 24), ("ffn_dim", 104))),
    "window": Case((("sliding_window", 70),), kv="int8"),
    "long window": Case((("sliding_window", 300),), kv="float32"),
    "yarn": Case((("rope_scaling", RopeScaling(kind="yarn", factor=4.0, original_context_tokens=64)),)),
    "one head": Case((("heads", 1), ("kv_heads", 1), ("head_dim", 80))),
    "wide group": Case((("heads", 14), ("kv_heads", 1), ("head_dim", 32))),
    "head 256": Case((("heads", 2), ("kv_heads", 1), ("head_dim", 256), ("layers", 1))),
    "head 96": Case((("heads", 3), ("kv_heads", 3), ("head_dim", 96)), kv="int8"),
    "plain avx512": Case(isa="avx512vnni", weights="int4"),
    "plain avx512, bf16": Case(isa="avx512vnni", weights="bf16"),
    "int4 weights, odd sizes": Case((("dim", 72), ("head_dim", 24), ("ffn_dim", 104)), weights="int4"),
    "avx2": Case(isa="avx2", weights="int4"),
    "avx2, bf16": Case(isa="avx2", weights="bf16"),
    "avx2, int8 kv": Case(isa="avx2", kv="int8"),
    "portable": Case((("layers", 1),), isa="portable", weights="int4"),
    "portable, int8": Case((("layers", 1),), isa="portable", kv="int8"),
}


def need(isa: str | None) -> None:
    try:
        build(isa)
    except NativeUnavailable as error:
        pytest.skip(str(error).splitlines()[0])


def config_of(case: Case) -> DecoderConfig:
    sizes: dict[str, object] = {
        "vocab_size": VOCAB,
        "dim": 64,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "ffn_dim": 96,
        "max_context_tokens": CONTEXT,
    }
    return DecoderConfig(**(sizes | dict(case.changes)))  # type: ignore[arg-type]  # checked by the config itself


@cache
def weights_of(case: Case) -> Weights:
    generator = torch.Generator().manual_seed(7)
    shapes = {name: tensor.shape for name, tensor in Decoder(config_of(case)).state_dict().items()}
    noise = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: (1 + 0.2 * x if "norm" in name else 0.15 * x).numpy() for name, x in noise.items()}


def runner_of(case: Case, threads: int = 2, pages: int = PAGES) -> NativeRunner:
    need(case.isa)
    return NativeRunner(
        config_of(case),
        weights_of(case),
        num_pages=pages,
        kv_dtype=case.kv,
        threads=threads,
        weights_format=case.weights,
        isa=case.isa,
    )


def text_of(seed: int, count: int = CONTEXT) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCAB) for _ in range(count)]


def logits_of(runner: NativeRunner, item: Slice) -> torch.Tensor:
    (logits,) = runner.forward([item])
    assert logits is not None
    return torch.from_numpy(logits)


@cache
def truth_of(case: Case) -> tuple[torch.Tensor, ...]:
    """Every position's logits of every text: alone, in one shot, one thread, pages in order."""
    runner = runner_of(case, threads=1, pages=CONTEXT // 16)
    return tuple(
        logits_of(runner, Slice(text_of(seed), 0, range(CONTEXT // 16), Want.ALL)) for seed in range(SEQUENCES)
    )


def chunk(chance: random.Random, left: int) -> int:
    return min(left, chance.choice((1, 1, 1, 2, 3, 5, 7, 12, 16, 17, 40, 100, MAX_ROWS + 9)))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_random_ragged_histories_in_shuffled_pages_give_the_same_bits(name: str, threads: int) -> None:
    """Chunks and decodes of every size in random company, with rewinds, against one shot alone on one thread."""
    case = CASES[name]
    chance = random.Random(threads)
    runner, truth = runner_of(case, threads), truth_of(case)
    shuffled = chance.sample(range(PAGES), PAGES)
    tables = [shuffled[i * 40 :][:40] for i in range(SEQUENCES)]
    computed, compared = [0] * SEQUENCES, 0
    for _ in range(12 if case.isa != "portable" else 5):
        live = [i for i in chance.sample(range(SEQUENCES), chance.randint(1, SEQUENCES)) if computed[i] < CONTEXT]
        ends = [computed[i] + chunk(chance, CONTEXT - computed[i]) for i in live]
        batch = [
            Slice(text_of(i)[computed[i] : end], computed[i], tables[i], chance.choice((Want.ALL, Want.LAST)))
            for i, end in zip(live, ends, strict=True)
        ]
        for i, end, item, logits in zip(live, ends, batch, runner.forward(batch) if batch else [], strict=True):
            assert logits is not None
            expected = truth[i][end - len(logits) : end]
            assert torch.equal(torch.from_numpy(logits), expected), f"sequence {i} at {item.start} .. {end}"
            compared += len(logits)
            computed[i] = end if chance.random() < 0.9 else chance.randint(0, end)
    assert compared > 50


@pytest.mark.parametrize(
    "name", ["int8 weights", "int4 weights", "int8 kv", "window", "bf16 weights", "plain avx512", "avx2"]
)
def test_token_by_token_gives_the_bits_of_one_shot(name: str) -> None:
    case = CASES[name]
    runner, truth = runner_of(case), truth_of(case)[0]
    table = random.Random(3).sample(range(PAGES), CONTEXT // 16)
    for position, token in enumerate(text_of(0)[:300]):
        logits = logits_of(runner, Slice([token], position, table))
        assert torch.equal(logits[0], truth[position]), f"position {position}"


@pytest.mark.parametrize("others", [1, 2, 7, 31, 63])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_company_changes_no_bit(others: int, threads: int, weights: WeightsFormat) -> None:
    """A decode at depth 599 beside up to 63 decodes and prompts of other depths."""
    case = Case(weights=weights)
    chance = random.Random(others)
    runner, truth = runner_of(case, threads, pages=64 * 40), truth_of(case)
    depths = [599, *(chance.randrange(0, 600) for _ in range(others))]
    tables = [range(i * 40, i * 40 + 40) for i in range(others + 1)]
    texts = [text_of(i % SEQUENCES) for i in range(others + 1)]
    for text, depth, table in zip(texts, depths, tables, strict=True):
        if depth:
            runner.forward([Slice(text[:depth], 0, table, Want.NOTHING)])
    tokens = [chance.choice((1, 1, 1, 9)) for _ in depths]
    batch = [
        Slice(text[depth : depth + count], depth, table, Want.ALL)
        for text, depth, count, table in zip(texts, depths, tokens, tables, strict=True)
    ]
    for i, (item, logits) in enumerate(zip(batch, runner.forward(batch), strict=True)):
        assert logits is not None
        expected = truth[i % SEQUENCES][item.start : item.start + len(item.token_ids)]
        assert torch.equal(torch.from_numpy(logits), expected)


@pytest.mark.parametrize("kv", ["bfloat16", "float32", "int8"])
def test_a_fork_goes_on_with_the_same_bits(kv: KvDtype) -> None:
    """Shared full pages and a copied partial one: both children get the bits of a history of their own."""
    case = Case(kv=kv)
    runner, truth = runner_of(case), truth_of(case)
    prefix, at = text_of(0)[:300], 300
    runner.forward([Slice(prefix, 0, range(19), Want.NOTHING)])
    runner.copy_pages([(18, 50)])
    child = [*range(18), 50, 51, 52]
    batch = [Slice(text_of(0)[at:330], at, [*range(19), 60, 61], Want.ALL), Slice(text_of(1)[:20], at, child, Want.ALL)]
    parent, other = runner.forward(batch)
    assert parent is not None
    assert other is not None
    assert torch.equal(torch.from_numpy(parent), truth[0][at:330])
    alone = runner_of(case, threads=1)
    expected = logits_of(alone, Slice(prefix + text_of(1)[:20], 0, range(30), Want.ALL))[at:]
    assert torch.equal(torch.from_numpy(other), expected)


@pytest.mark.parametrize("kv", ["bfloat16", "float32", "int8"])
@pytest.mark.parametrize("count", [1, 16, 300])
def test_exported_kv_goes_on_elsewhere_with_the_same_bits(kv: KvDtype, count: int) -> None:
    case = Case((("head_dim", 24),), kv=kv)
    here, there = runner_of(case), runner_of(case, threads=1)
    table, other = list(range(40)), random.Random(0).sample(range(PAGES), 40)
    here.forward([Slice(text_of(0)[:count], 0, table, Want.NOTHING)])
    moved = here.export_pages(table, count)
    assert moved.dtype == (BFLOAT16 if kv == "bfloat16" else np.float32)
    assert moved.shape == (2, 2, 2, count, 24)
    assert moved.flags.c_contiguous
    there.kernels.fill_pages(0xFF)
    there.import_pages(other, moved)
    assert np.array_equal(there.export_pages(other, count), moved)
    follow = text_of(0)[count : count + 30]
    expected = logits_of(here, Slice(follow, count, table, Want.ALL))
    assert torch.equal(logits_of(there, Slice(follow, count, other, Want.ALL)), expected)


def test_recomputing_after_a_rewind_gives_the_same_bits() -> None:
    case = Case(kv="int8")
    runner, truth = runner_of(case), truth_of(case)
    runner.forward([Slice(text_of(1)[:500], 0, range(40), Want.NOTHING)])
    for start, end in ((37, 60), (20, 400), (399, 400), (0, 12)):
        runner.forward([Slice(text_of(0)[:start], 0, range(40), Want.NOTHING)] if start else [Slice([1], 0, [399])])
        got = logits_of(runner, Slice(text_of(0)[start:end], start, range(40), Want.ALL))
        assert torch.equal(got, truth[0][start:end])


def test_a_batch_longer_than_one_pass_gives_the_same_bits() -> None:
    """Three prompts of 640 tokens in one call take several passes; a slice continues from one to the next."""
    case = Case()
    runner, truth = runner_of(case), truth_of(case)
    tables = [range(i * 40, i * 40 + 40) for i in range(3)]
    wants = (Want.ALL, Want.NOTHING, Want.LAST)
    batch = [Slice(text_of(i), 0, tables[i], want) for i, want in enumerate(wants)]
    everything, nothing, last = runner.forward(batch)
    assert nothing is None
    assert everything is not None
    assert last is not None
    assert len(last) == 1
    assert torch.equal(torch.from_numpy(everything), truth[0])
    assert torch.equal(torch.from_numpy(last), truth[2][-1:])
