"""The reference decoder beyond its proofs: cache positions, masks, grouped heads, names, and what it refuses."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segue_model.attention import attend, blocked_keys
from segue_model.cache import KVCache
from segue_model.config import DecoderConfig
from segue_model.decoder import Decoder


def small_config(**changes: object) -> DecoderConfig:
    sizes: dict[str, object] = {
        "vocab_size": 96,
        "dim": 48,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "ffn_dim": 64,
        "max_context_tokens": 40,
    }
    return DecoderConfig(**(sizes | changes))


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    torch.manual_seed(3)
    with torch.inference_mode():
        yield


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.data())
def test_rewind_then_decode_equals_a_fresh_decode(computed: int, data: st.DataObject) -> None:
    kept = data.draw(st.integers(0, computed))
    model = Decoder(small_config())
    abandoned, taken = torch.randint(96, (1, computed)), torch.randint(96, (1, data.draw(st.integers(1, 6))))
    used, fresh = KVCache(model.config, 32), KVCache(model.config, 32)
    model(abandoned, used)
    used.pos = kept
    if kept:
        model(abandoned[:, :kept], fresh)
    assert torch.allclose(model(taken, used), model(taken, fresh), atol=1e-6)
    assert used.pos == fresh.pos == kept + taken.shape[1]


def test_pos_advances_once_per_forward_and_only_after_it() -> None:
    model = Decoder(small_config(layers=3))
    cache = KVCache(model.config, 16)
    for expected, chunk in ((5, 5), (6, 1), (9, 3)):
        model(torch.zeros(1, chunk, dtype=torch.int64), cache)
        assert cache.pos == expected
    with pytest.raises(ValueError, match="do not fit"):
        model(torch.zeros(1, 8, dtype=torch.int64), cache)
    assert cache.pos == 9


@pytest.mark.parametrize("value", [-1, 4])
def test_pos_moves_neither_below_zero_nor_to_positions_never_computed(value: int) -> None:
    cache = KVCache(small_config(), 16)
    cache.advance(3)
    with pytest.raises(ValueError, match=r"0 \.\. 3, got"):
        cache.pos = value


def test_the_mask_is_not_square_behind_a_cache() -> None:
    blocked = blocked_keys(start=3, tokens=2)
    assert blocked.tolist() == [[False] * 4 + [True], [False] * 5]


def test_a_window_shows_so_many_keys_and_the_query_is_one_of_them() -> None:
    blocked = blocked_keys(start=0, tokens=5, window=2)
    seen = [[key for key in range(5) if not row[key]] for row in blocked]
    assert seen == [[0], [0, 1], [1, 2], [2, 3], [3, 4]]


def test_a_token_outside_the_window_of_every_layer_changes_nothing() -> None:
    model = Decoder(small_config(sliding_window=3))
    tokens = torch.randint(96, (1, 12))
    changed = tokens.clone()
    changed[0, 2] = (changed[0, 2] + 1) % 96
    difference = (model(tokens) - model(changed)).abs().amax(dim=-1)[0]
    reach = 2 + model.config.layers * (3 - 1)  # each layer hands a token on to window - 1 later ones
    assert difference[2 : reach + 1].min() > 0
    assert difference[reach + 1 :].max() == 0


def test_a_query_without_an_allowed_key_raises() -> None:
    q, kv = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 3, 8)
    blocked = torch.tensor([[False, False, True], [True, True, True]])
    with pytest.raises(ValueError, match="query 1 of 2 has no allowed key among 3"):
        attend(q, kv, kv, blocked)


def test_attention_is_the_softmax_formula() -> None:
    q, k, v = torch.randn(3, 1, 1, 4, 8)
    blocked = blocked_keys(0, 4)
    for i in range(4):
        weights = [math.exp(float(q[0, 0, i] @ k[0, 0, j]) / math.sqrt(8)) for j in range(i + 1)]
        expected = sum(w * v[0, 0, j] for j, w in enumerate(weights)) / sum(weights)
        assert torch.allclose(attend(q, k, v, blocked)[0, 0, i], expected, atol=1e-5)


def test_shared_kv_heads_equal_full_attention_with_repeated_heads() -> None:
    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    repeated = [t.repeat_interleave(3, dim=1) for t in (k, v)]
    blocked = blocked_keys(0, 5)
    assert torch.allclose(attend(q, k, v, blocked), attend(q, *repeated, blocked), atol=1e-6)


def test_state_dict_has_the_documented_names_and_shapes() -> None:
    config = small_config(layers=1, qkv_bias=True, qk_norm=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in Decoder(config).state_dict().items()}
    layer = {
        "attention_norm.weight": (48,),
        "attention.wq.weight": (64, 48),
        "attention.wq.bias": (64,),
        "attention.wk.weight": (32, 48),
        "attention.wk.bias": (32,),
        "attention.wv.weight": (32, 48),
        "attention.wv.bias": (32,),
        "attention.q_norm.weight": (16,),
        "attention.k_norm.weight": (16,),
        "attention.wo.weight": (48, 64),
        "ffn_norm.weight": (48,),
        "ffn.gate.weight": (64, 48),
        "ffn.up.weight": (64, 48),
        "ffn.down.weight": (48, 64),
    }
    outside = {"embed.weight": (96, 48), "norm.weight": (48,), "head.weight": (96, 48)}
    assert shapes == outside | {f"layers.0.{name}": shape for name, shape in layer.items()}
    assert "head.weight" not in Decoder(small_config(tie_embeddings=True)).state_dict()


def test_bfloat16_stays_near_float32_and_gives_float32_logits() -> None:
    model = Decoder(small_config())
    tokens = torch.randint(96, (2, 12))
    expected = model(tokens)
    model.bfloat16()
    logits = torch.cat(
        [
            model(t, c)
            for c in [KVCache(model.config, 12, batch=2, dtype=torch.bfloat16)]
            for t in tokens.split(5, dim=1)
        ],
        dim=1,
    )
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.int64), "at least one token"),
        (torch.zeros(1, 41, dtype=torch.int64), "41 positions exceed the context of 40"),
        (torch.tensor([[0, 96]]), r"0 \.\. 95, got 0 \.\. 96"),
        (torch.tensor([[-1, 3]]), r"0 \.\. 95, got -1 \.\. 3"),
    ],
)
def test_bad_tokens_get_an_error_that_names_the_limit(tokens: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Decoder(small_config())(tokens)


def test_a_cache_of_another_batch_is_refused() -> None:
    model = Decoder(small_config())
    with pytest.raises(ValueError, match="batch of 2, got 1"):
        model(torch.zeros(1, 2, dtype=torch.int64), KVCache(model.config, 8, batch=2))
