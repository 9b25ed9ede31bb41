"""Rotary embedding: relative positions, the two pairings, and the scaled frequencies against transformers."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from segue_model.config import ConfigError, DecoderConfig, RopeScaling
from segue_model.loaders.layout import interleaved_to_halves
from segue_model.rope import RopeTable, apply_rope
from segue_model.rope_frequencies import attention_factor, inverse_frequencies

HEAD_DIM = 16
SCALINGS = {
    "none": None,
    "linear": RopeScaling(kind="linear", factor=4.0),
    "llama3": RopeScaling(kind="llama3", factor=8.0, original_context_tokens=256),
    "yarn": RopeScaling(kind="yarn", factor=4.0, original_context_tokens=256),
    "yarn, own factor": RopeScaling(kind="yarn", factor=4.0, original_context_tokens=256, attention_factor=1.5),
}


def rope_config(scaling: RopeScaling | None = None, context: int = 64, theta: float = 10_000.0) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=8,
        dim=32,
        layers=1,
        heads=2,
        kv_heads=1,
        head_dim=HEAD_DIM,
        ffn_dim=32,
        max_context_tokens=context,
        rope_theta=theta,
        rope_scaling=scaling,
    )


def test_a_score_depends_on_the_distance_only() -> None:
    torch.manual_seed(0)
    table = RopeTable.build(rope_config())
    q, k = torch.randn(1, HEAD_DIM), torch.randn(1, HEAD_DIM)

    def score(query_at: int, key_at: int) -> float:
        return float(apply_rope(q, table.slice(query_at, 1))[0] @ apply_rope(k, table.slice(key_at, 1))[0])

    print(f"rope: score(5,2)={score(5, 2):.6f} score(20,17)={score(20, 17):.6f} score(20,10)={score(20, 10):.6f}")
    assert abs(score(5, 2) - score(20, 17)) < 1e-5
    assert abs(score(5, 2) - score(20, 10)) > 1e-2


def rotate_adjacent(x: torch.Tensor, table: RopeTable) -> torch.Tensor:
    """The other pairing: channels 2i and 2i + 1 turn together, as complex numbers (Meta's own code)."""
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.complex(table.cos, table.sin)
    return torch.view_as_real(turned).flatten(-2)


@pytest.mark.parametrize("with_bias", [False, True], ids=["weights", "weights and biases"])
def test_both_pairings_agree_after_the_permutation_and_only_then(with_bias: bool) -> None:
    torch.manual_seed(1)
    heads, dim, tokens = 2, 32, 9
    table = RopeTable.build(rope_config()).slice(3, tokens)
    x = torch.randn(tokens, dim)
    wq, wk = torch.randn(2, heads * HEAD_DIM, dim) / 4
    bq, bk = torch.randn(2, heads * HEAD_DIM) * with_bias

    def split(rows: torch.Tensor) -> torch.Tensor:
        return rows.unflatten(-1, (heads, HEAD_DIM)).transpose(0, 1).contiguous()

    def halves(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return apply_rope(split(x @ weight.T + bias), table)

    def permuted(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        moved = [torch.from_numpy(interleaved_to_halves(rows.numpy(), heads)) for rows in (weight, bias)]
        return halves(*moved)

    adjacent = rotate_adjacent(split(x @ wq.T + bq), table) @ rotate_adjacent(split(x @ wk.T + bk), table).mT
    agreed = (adjacent - permuted(wq, bq) @ permuted(wk, bk).mT).abs().max().item()
    forgotten = (adjacent - halves(wq, bq) @ halves(wk, bk).mT).abs().max().item()
    print(f"pairings: {agreed:.1e} apart after the permutation, {forgotten:.2f} without it")
    assert agreed < 1e-4
    assert forgotten > 0.1


def test_the_permutation_moves_even_rows_before_odd_ones() -> None:
    rows = np.arange(8)
    assert interleaved_to_halves(rows, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    with pytest.raises(ValueError, match="6 rows into 2 heads"):
        interleaved_to_halves(np.zeros((6, 3)), 2)


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("kind", SCALINGS)
def test_frequencies_are_those_of_transformers(kind: str, theta: float) -> None:
    modeling = pytest.importorskip("transformers.modeling_rope_utils")
    llama = pytest.importorskip("transformers").LlamaConfig
    scaling = SCALINGS[kind]
    ours = inverse_frequencies(rope_config(scaling, theta=theta))
    parameters: dict[str, object] = {"rope_type": "default", "rope_theta": theta}
    if scaling is not None:
        parameters |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling is not None and scaling.kind != "linear":
        parameters["original_max_position_embeddings"] = scaling.original_context_tokens
    if scaling is not None and scaling.kind == "llama3":
        parameters |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling is not None and scaling.attention_factor is not None:
        parameters["attention_factor"] = scaling.attention_factor
    config = llama(hidden_size=32, num_attention_heads=2, head_dim=HEAD_DIM, rope_parameters=parameters)
    if scaling is None:
        theirs, factor = 1.0 / theta ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM), 1.0
    else:
        theirs, factor = modeling.ROPE_INIT_FUNCTIONS[scaling.kind](config, "cpu")
    torch.testing.assert_close(torch.from_numpy(ours), theirs, rtol=2**-23, atol=0)  # the power's last bit
    assert attention_factor(scaling) == factor


@pytest.mark.parametrize(
    ("scaling", "field"),
    [
        (RopeScaling(kind="linear", factor=0.0), "factor must be greater than 0, got 0.0"),
        (RopeScaling(kind="linear", factor=float("nan")), "factor must be greater than 0, got nan"),
        (RopeScaling(kind="yarn", factor=2.0), "original_context_tokens must be at least 1 for yarn"),
        (RopeScaling(kind="llama3", factor=2.0, original_context_tokens=8, low_freq_factor=4.0), "low_freq_factor"),
        (RopeScaling(kind="yarn", factor=2.0, original_context_tokens=8, beta_slow=0.0), "beta_slow"),
    ],
)
def test_impossible_scaling_is_an_error_that_names_the_field(scaling: RopeScaling, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        inverse_frequencies(rope_config(scaling))


def test_impossible_theta_is_an_error_that_names_the_field() -> None:
    with pytest.raises(ConfigError, match="rope_theta must be greater than 1"):
        inverse_frequencies(rope_config(theta=1.0))


@given(st.integers(0, 60), st.integers(1, 4))
def test_a_slice_holds_the_rows_of_its_positions(start: int, tokens: int) -> None:
    table = RopeTable.build(rope_config())
    rows = table.slice(start, tokens)
    assert torch.equal(rows.cos, table.at(torch.arange(start, start + tokens)).cos)
    assert torch.equal(rows.sin, table.sin[start : start + tokens])


def test_rotation_keeps_lengths_and_the_dtype() -> None:
    table = RopeTable.build(rope_config())
    x = torch.randn(3, 64, HEAD_DIM)
    lengths = [t.norm(dim=-1) for t in (x, apply_rope(x, table))]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in pairwise(lengths))
    assert apply_rope(x.bfloat16(), table).dtype == torch.bfloat16
