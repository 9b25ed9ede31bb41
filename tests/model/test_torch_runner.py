"""The torch runner against the reference decoder: ragged batches, shuffled pages, forks, moves and bad input."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segue_model.cache import KVCache
from segue_model.config import DecoderConfig, RopeScaling
from segue_model.decoder import Decoder
from segue_model.runner.base import PAGE_TOKENS, Runner, Slice, Want
from segue_model.runner.torch_runner import TorchRunner, pages_for_bytes
from segue_model.torch_arrays import to_torch, weights_of

VOCAB, PAGES, CONTEXT = 80, 40, 112
FAMILIES: dict[str, dict[str, object]] = {
    "plain": {},
    "tied": {"tie_embeddings": True},
    "qkv_bias": {"qkv_bias": True},
    "qk_norm": {"qk_norm": True},
    "window": {"sliding_window": 21},
    "narrow window": {"sliding_window": 1},
    "yarn": {"rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_context_tokens=32)},
    "one kv head each": {"kv_heads": 4},
    "head_dim apart from dim": {"head_dim": 24},
}


def small_config(**changes: object) -> DecoderConfig:
    sizes: dict[str, object] = {
        "vocab_size": VOCAB,
        "dim": 48,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "ffn_dim": 64,
        "max_context_tokens": CONTEXT,
    }
    return DecoderConfig(**(sizes | changes))


def lively_decoder(config: DecoderConfig) -> Decoder:
    """Every tensor random and large enough that a mistake in any of them shows in the logits."""
    model = Decoder(config)
    generator = torch.Generator().manual_seed(11)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.15 * noise)
    return model


def make_runner(model: Decoder, dtype: torch.dtype = torch.float32, pages: int = PAGES) -> TorchRunner:
    return TorchRunner(model.config, weights_of(model.state_dict()), num_pages=pages, dtype=dtype)


def tokens_of(count: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(VOCAB) for _ in range(count)]


def expected_logits(model: Decoder, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([tokens]))[0]
    return logits


def logits_of(runner: Runner, item: Slice) -> torch.Tensor:
    (logits,) = runner.forward([item])
    assert logits is not None
    return torch.from_numpy(logits)


@pytest.fixture(autouse=True)
def _one_quiet_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


def random_history(runner: TorchRunner, model: Decoder, seed: int, sequences: int = 4, steps: int = 8) -> float:
    """Grow sequences by random chunks and decodes in random company; the largest error of any logit on the way."""
    chance = random.Random(seed)
    texts = [tokens_of(CONTEXT, seed * 100 + i) for i in range(sequences)]
    truth = [expected_logits(model, text) for text in texts]
    shuffled = chance.sample(range(PAGES), PAGES)
    per_sequence = PAGES // sequences
    tables = [shuffled[i * per_sequence :][:per_sequence] for i in range(sequences)]
    computed, worst = [0] * sequences, 0.0
    for _ in range(steps):
        chosen = chance.sample(range(sequences), chance.randint(1, sequences))
        ends = {i: min(CONTEXT, computed[i] + chance.choice((1, 1, 1, 2, 5, 16, 23, 40))) for i in chosen}
        live = [i for i in chosen if ends[i] > computed[i]]
        wants = [chance.choice(list(Want)) for _ in live]
        batch = [
            Slice(texts[i][computed[i] : ends[i]], computed[i], tables[i], want)
            for i, want in zip(live, wants, strict=True)
        ]
        for i, item, logits in zip(live, batch, runner.forward(batch) if batch else [], strict=True):
            begin = {Want.NOTHING: ends[i], Want.LAST: ends[i] - 1, Want.ALL: item.start}[item.want]
            assert (logits is None) == (item.want is Want.NOTHING)
            if logits is not None:
                assert logits.dtype == np.float32
                worst = max(worst, (torch.from_numpy(logits) - truth[i][begin : ends[i]]).abs().max().item())
            computed[i] = ends[i] if chance.random() < 0.8 else chance.randint(0, ends[i])  # sometimes a rewind
    return worst


@pytest.mark.parametrize("family", FAMILIES)
def test_random_ragged_histories_give_the_logits_of_the_reference(family: str) -> None:
    model = lively_decoder(small_config(**FAMILIES[family]))
    runner = make_runner(model)
    worst = max(random_history(runner, model, seed) for seed in range(6))
    print(f"torch runner, {family}: largest difference from the reference {worst:.1e}")
    assert worst <= 1e-4


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(sorted(FAMILIES)))
def test_no_history_disagrees_with_the_reference(seed: int, family: str) -> None:
    model = lively_decoder(small_config(**FAMILIES[family]))
    assert random_history(make_runner(model), model, seed, steps=4) <= 1e-4


def test_bfloat16_stays_near_the_float32_reference() -> None:
    model = lively_decoder(small_config())
    spread = expected_logits(model, tokens_of(CONTEXT)).std().item()
    worst = random_history(make_runner(model, torch.bfloat16), model, seed=3)
    print(f"torch runner, bfloat16: largest difference {worst:.2f} where logits spread by {spread:.2f}")
    assert worst < 0.25 * spread


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, CONTEXT - 1), min_size=1, max_size=5), st.integers(0, 50))
def test_company_in_the_batch_changes_nothing(lengths: list[int], seed: int) -> None:
    """Decodes of unlike depths and one prompt chunk, together and alone."""
    model = lively_decoder(small_config())
    runner = make_runner(model, pages=len(lengths) * 7 + 7)
    tables = [range(i * 7, i * 7 + 7) for i in range(len(lengths) + 1)]
    texts = [tokens_of(n + 1, seed + i) for i, n in enumerate(lengths)]
    runner.forward([Slice(text[:-1], 0, table) for text, table in zip(texts, tables, strict=False)])
    decodes = [Slice(text[-1:], len(text) - 1, table) for text, table in zip(texts, tables, strict=False)]
    batch = [*decodes, Slice(tokens_of(20, seed), 0, tables[-1])]
    together = runner.forward(batch)
    for item, logits in zip(batch, together, strict=True):
        assert logits is not None
        assert torch.allclose(logits_of(runner, item), torch.from_numpy(logits), atol=2e-5, rtol=0)


def test_a_copied_page_goes_its_own_way() -> None:
    """Fork within a page: both children write after the shared prefix, neither sees the other."""
    model = lively_decoder(small_config())
    runner = make_runner(model)
    prefix, left, right = tokens_of(21, 1), tokens_of(6, 2), tokens_of(6, 3)
    runner.forward([Slice(prefix, 0, [7, 3], Want.NOTHING)])
    runner.copy_pages([(3, 9)])
    batch = [Slice(left, 21, [7, 3], Want.ALL), Slice(right, 21, [7, 9], Want.ALL)]
    for ours, tail in zip(runner.forward(batch), (left, right), strict=True):
        assert ours is not None
        assert torch.allclose(torch.from_numpy(ours), expected_logits(model, prefix + tail)[21:], atol=1e-4)
    runner.copy_pages([])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 16, 37, 48])
def test_exported_kv_works_in_other_pages_of_another_runner(count: int, dtype: torch.dtype) -> None:
    model = lively_decoder(small_config())
    here, there = make_runner(model, dtype), make_runner(model, dtype)
    text = tokens_of(count + 1, count)
    table, other = [5, 1, 8, 30], [2, 11, 0, 4]
    here.forward([Slice(text[:-1], 0, table, Want.NOTHING)])
    kv = here.export_pages(table, count)
    assert kv.shape == (2, model.config.layers, model.config.kv_heads, count, model.config.head_dim)
    assert kv.flags.c_contiguous
    assert to_torch(kv).dtype == dtype
    there.import_pages(other, kv)
    assert np.array_equal(there.export_pages(other, count), kv)
    last = text[-1:]
    assert torch.equal(logits_of(there, Slice(last, count, other)), logits_of(here, Slice(last, count, table)))


def test_canonical_kv_is_that_of_the_reference_cache() -> None:
    """What moves between runners is rotated K and V, head by head, in order of position."""
    model = lively_decoder(small_config())
    runner, cache = make_runner(model), KVCache(model.config, 30)
    text = tokens_of(30)
    runner.forward([Slice(text, 0, [9, 2], Want.NOTHING)])
    model(torch.tensor([text]), cache)
    expected = torch.stack((cache._keys[:, 0], cache._values[:, 0]))
    assert torch.allclose(to_torch(runner.export_pages([9, 2], 30)), expected, atol=1e-4)


@pytest.mark.parametrize("path", ["computed", "imported"])
def test_what_a_page_held_before_cannot_reach_its_next_owner(path: str) -> None:
    """Not even NaN, which a mask by weight zero would let through."""
    model = lively_decoder(small_config())
    runner = make_runner(model)
    text = tokens_of(19)
    good = make_runner(model)
    good.forward([Slice(text[:18], 0, [0, 1], Want.NOTHING)])
    runner._pool.fill_(torch.nan)
    if path == "computed":
        runner.forward([Slice(text[:18], 0, [3, 6], Want.NOTHING)])
    else:
        runner.import_pages([3, 6], good.export_pages([0, 1], 18))
    runner.forward([Slice(tokens_of(40), 0, [8, 9, 10], Want.NOTHING)])
    longer = Slice([1], 40, [8, 9, 10])  # makes the padding of a shared group show, too
    logits, _ = runner.forward([Slice(text[18:], 18, [3, 6]), longer])
    assert logits is not None
    assert torch.allclose(torch.from_numpy(logits), expected_logits(model, text)[18:], atol=1e-4)


def test_unused_pages_of_a_long_table_are_ignored() -> None:
    model = lively_decoder(small_config())
    text = tokens_of(5)
    logits = logits_of(make_runner(model), Slice(text, 0, [4, 4, 4, 10**6], Want.ALL))
    assert torch.allclose(logits, expected_logits(model, text), atol=1e-4)


def test_the_pool_takes_the_bytes_it_declares() -> None:
    config = small_config()
    for dtype in (torch.float32, torch.bfloat16):
        runner = make_runner(lively_decoder(config), dtype, pages=6)
        assert runner.page_bytes == PAGE_TOKENS * config.kv_bytes_per_token(dtype.itemsize)
        assert runner._pool.nbytes == runner.num_pages * runner.page_bytes
        assert pages_for_bytes(config, dtype, 6 * runner.page_bytes + 1) == 6
    with pytest.raises(ValueError, match="less than one page"):
        pages_for_bytes(config, torch.float32, 100)


def test_the_name_says_device_and_dtype() -> None:
    model = lively_decoder(small_config())
    assert make_runner(model).name == "torch-cpu-float32"
    assert make_runner(model, torch.bfloat16).name == "torch-cpu-bfloat16"


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([], "at least one slice"),
        ([Slice([], 0, [0])], "slice 0: token_ids must hold"),
        ([Slice([1], 0, [0]), Slice([1, VOCAB], 0, [1])], "slice 1: token_ids must lie in 0 .. 79, got 1 .. 80"),
        ([Slice([-1], 0, [0])], "token_ids must lie in 0 .. 79"),
        ([Slice([1], -1, [0])], "positions -1 .. -1 must lie in 0 .. 111"),
        ([Slice([1], CONTEXT, list(range(8)))], "positions 112 .. 112 must lie in 0 .. 111"),
        ([Slice([1], 16, [0])], "1 pages of 16 do not cover 17 positions"),
        ([Slice([1], 0, [PAGES])], "page ids must lie in 0 .. 39, got 40 .. 40"),
        ([Slice([1], 0, [-1])], "page ids must lie in 0 .. 39, got -1 .. -1"),
        ([Slice([1], 0, [5]), Slice([1], 16, [5, 6])], "slice 0: page 5 is written here and used elsewhere"),
        ([Slice([1] * 17, 0, [5, 5])], "slice 0: page 5 is written here and used elsewhere"),
    ],
)
def test_a_bad_batch_gets_an_error_that_names_slice_and_limit(batch: list[Slice], message: str) -> None:
    runner = make_runner(lively_decoder(small_config()))
    with pytest.raises(ValueError, match=message):
        runner.forward(batch)
    assert not runner._pool.any()


def test_bad_pages_and_arrays_are_refused() -> None:
    runner = make_runner(lively_decoder(small_config()))
    kv = np.zeros((2, 2, 2, 17, 16), np.float32)
    with pytest.raises(ValueError, match=r"0 \.\. 39, got 3 \.\. 40"):
        runner.copy_pages([(3, 5), (40, 6)])
    with pytest.raises(ValueError, match=r"0 \.\. 16, got 17"):
        runner.export_pages([0], 17)
    with pytest.raises(ValueError, match="1 pages of 16 do not cover 17"):
        runner.import_pages([0], kv)
    with pytest.raises(ValueError, match=r"shape \(2, 2, 2, tokens, 16\), got \(2, 2, 1, 17, 16\)"):
        runner.import_pages([0, 1], kv[:, :, :1])
    with pytest.raises(ValueError, match="not finite"):
        runner.import_pages([0, 1], kv + np.inf)


def test_weights_that_do_not_fit_are_named() -> None:
    config = small_config()
    weights = weights_of(lively_decoder(config).state_dict())
    with pytest.raises(ValueError, match=r"layers\.1\.ffn\.up\.weight must have the shape \(64, 48\), got \(64, 47\)"):
        TorchRunner(config, weights | {"layers.1.ffn.up.weight": np.zeros((64, 47), np.float32)}, num_pages=1)
    del weights["head.weight"]
    with pytest.raises(ValueError, match=r"no tensor head\.weight"):
        TorchRunner(config, weights, num_pages=1)
    with pytest.raises(ValueError, match="dtype must be one of"):
        TorchRunner(config, weights, num_pages=1, dtype=torch.float16)
    with pytest.raises(ValueError, match="num_pages must be at least 1"):
        TorchRunner(config, weights, num_pages=0)
