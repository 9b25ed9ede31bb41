"""The claims the server rests on, proved on the reference decoder; each test prints its figure (pytest -s)."""

import math
from collections.abc import Iterator

import pytest
import torch

from segue_model.cache import KVCache
from segue_model.config import DecoderConfig
from segue_model.decoder import Decoder

TOKENS = 12


def small_config(**changes: object) -> DecoderConfig:
    sizes: dict[str, object] = {
        "vocab_size": 512,
        "dim": 64,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "ffn_dim": 128,
        "max_context_tokens": 64,
    }
    return DecoderConfig(**(sizes | changes))


@pytest.fixture(autouse=True)
def _one_quiet_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


def lively_decoder(config: DecoderConfig) -> Decoder:
    """Weights large enough that attention looks somewhere and an error in it shows in the logits."""
    model = Decoder(config)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.normal_(0.0, 0.15)
    return model


def run_in_chunks(model: Decoder, tokens: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    cache = KVCache(model.config, tokens.shape[1])
    return torch.cat([model(chunk, cache) for chunk in tokens.split(chunks, dim=1)], dim=1)


def errors_of_all_splits(
    model: Decoder, tokens: torch.Tensor, expected: torch.Tensor, cache: KVCache, before: torch.Tensor
) -> Iterator[torch.Tensor]:
    """The largest error of each way to cut the tokens beyond `cache.pos`, and `before`, that of the chunks up to it.

    Splits that begin with the same chunks share their computation: the cache is rewound to where they part.
    """
    start = cache.pos
    if start == tokens.shape[1]:
        yield before
    for end in range(start + 1, tokens.shape[1] + 1):
        cache.pos = start
        difference = model(tokens[:, start:end], cache) - expected[:, start:end]
        error = torch.maximum(before, difference.abs().max())
        yield from errors_of_all_splits(model, tokens, expected, cache, error)


@pytest.mark.parametrize("position", [1, 9])
def test_a_token_changes_no_logits_before_it(position: int) -> None:
    model = lively_decoder(small_config())
    tokens = torch.randint(512, (1, TOKENS))
    changed = tokens.clone()
    changed[0, position] = (changed[0, position] + 1) % 512
    difference = (model(tokens) - model(changed)).abs().amax(dim=-1)[0]
    print(
        f"causality: token {position} changed; before it {difference[:position].max():.1e}, from it on "
        f"{difference[position:].min():.1e} at least"
    )
    assert difference[:position].max() == 0
    assert difference[position:].min() > 1e-3


def test_every_split_of_twelve_tokens_equals_the_run_without_a_cache() -> None:
    model = lively_decoder(small_config(layers=1))
    tokens = torch.randint(512, (1, TOKENS))
    expected = model(tokens)
    cache = KVCache(model.config, TOKENS)
    errors = torch.stack(list(errors_of_all_splits(model, tokens, expected, cache, torch.zeros(()))))
    print(f"cache equivalence: {len(errors)} splits of {TOKENS} tokens, largest difference {errors.max():.1e}")
    assert len(errors) == 2 ** (TOKENS - 1)
    assert errors.max() <= 1e-5


@pytest.mark.parametrize("chunks", [[1] * TOKENS, [5, 1, 1, 4, 1], [TOKENS]], ids=["incremental", "mixed", "one shot"])
@pytest.mark.parametrize(
    "family",
    [{}, {"qkv_bias": True}, {"qk_norm": True}, {"sliding_window": 4}, {"tie_embeddings": True}],
    ids=["llama", "qwen2", "qwen3", "mistral", "tied"],
)
def test_the_cache_changes_nothing_in_any_family(family: dict[str, object], chunks: list[int]) -> None:
    model = lively_decoder(small_config(**family))
    tokens = torch.randint(512, (1, TOKENS))
    error = (run_in_chunks(model, tokens, chunks) - model(tokens)).abs().max().item()
    print(f"cache equivalence: {family or 'llama'} in {chunks}: {error:.1e}")
    assert error <= 1e-5


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("dim", "vocab"), [(64, 512), (576, 8192)])
def test_an_untrained_model_knows_nothing(dim: int, vocab: int, tied: bool) -> None:
    model = Decoder(small_config(dim=dim, vocab_size=vocab, tie_embeddings=tied))
    tokens = torch.randint(vocab, (4, 33))
    logits = model(tokens[:, :-1]).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()).item()
    print(f"initial loss: {loss:.4f}, ln {vocab} = {math.log(vocab):.4f}")
    assert abs(loss - math.log(vocab)) < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_cache_takes_exactly_the_bytes_of_the_formula(dtype: torch.dtype) -> None:
    config, capacity = small_config(layers=3), 48
    cache = KVCache(config, capacity, dtype=dtype)
    expected = 2 * config.layers * config.kv_heads * config.head_dim * capacity * dtype.itemsize
    print(f"cache bytes: {cache.nbytes} for {capacity} positions in {dtype}")
    assert cache.nbytes == expected == capacity * config.kv_bytes_per_token(dtype.itemsize)


def test_eight_kv_heads_take_a_quarter_of_thirty_two() -> None:
    many, few = (KVCache(small_config(heads=32, kv_heads=n, head_dim=8), 16).nbytes for n in (32, 8))
    print(f"grouped-query attention: 32 KV heads {many} bytes, 8 KV heads {few} bytes, ratio {many / few}")
    assert many == 4 * few
