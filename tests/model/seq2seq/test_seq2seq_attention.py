"""What attention is, one sentence a test; figures show with pytest -s."""

import math

import pytest
import torch

from segue_model.seq2seq import Attention, attend, causal_mask, padding_mask

NOTHING = torch.zeros(1, dtype=torch.bool)  # blocks nothing
DIM, HEADS = 32, 4


def self_attend(attention: Attention, x: torch.Tensor, blocked: torch.Tensor) -> torch.Tensor:
    return attention(x, attention.keys_values(x), blocked).out


def small_attention() -> Attention:
    return Attention(DIM, HEADS, DIM // HEADS, DIM // HEADS)


def test_softmax_turns_scores_into_shares() -> None:
    """softmax of [2, 1, 0] is about [0.665, 0.245, 0.090]."""
    shares = torch.softmax(torch.tensor([2.0, 1.0, 0.0]), dim=0)
    print(f"\nsoftmax([2, 1, 0]) = {[round(share, 3) for share in shares.tolist()]}")
    assert shares.tolist() == pytest.approx([0.665, 0.245, 0.090], abs=5e-4)
    # The same through attention: d_k = 1, query 1, keys 2, 1, 0, values that tell the keys apart.
    out, _ = attend(torch.ones(1, 1), torch.tensor([[2.0], [1.0], [0.0]]), torch.eye(3), NOTHING)
    assert torch.allclose(out[0], shares)


def test_each_row_of_weights_sums_to_one_and_blocked_keys_get_none() -> None:
    """A query distributes exactly 1 among the keys it may see, in all three uses of the one module."""
    attention = small_attention()
    target, source = torch.randn(2, 5, DIM), torch.randn(2, 7, DIM)
    source_padding = padding_mask(torch.tensor([[5] * 7, [5] * 4 + [0] * 3]))
    target_blocked = padding_mask(torch.tensor([[5] * 5, [5] * 3 + [0] * 2])) | causal_mask(0, 5)
    uses = {
        "encoder self-attention": (source, source, source_padding),
        "decoder self-attention": (target, target, target_blocked),
        "cross-attention": (target, source, source_padding),
    }
    for use, (queries, keys, blocked) in uses.items():
        weights = attention(queries, attention.keys_values(keys), blocked, need_weights=True).weights
        assert weights is not None
        assert weights.shape == (2, HEADS, queries.shape[1], keys.shape[1]), use
        assert torch.allclose(weights.sum(dim=-1), torch.ones(1)), use
        assert not weights[blocked.expand_as(weights)].any(), use


def test_weights_come_only_on_request() -> None:
    """Who does not ask for the weights does not keep them alive."""
    attention = small_attention()
    x = torch.randn(1, 3, DIM)
    assert attention(x, attention.keys_values(x), NOTHING).weights is None


def test_the_scale_keeps_scores_at_variance_one() -> None:
    """The variance of q.k is d_k for unit-normal q and k, and 1 after scaling by sqrt(d_k)."""
    for d_k in (16, 64, 256):
        q, k = torch.randn(20_000, d_k), torch.randn(20_000, d_k)
        raw = (q * k).sum(dim=-1)
        scaled = raw / math.sqrt(d_k)
        print(f"\nd_k = {d_k}: var(q.k) = {raw.var():.1f}, after scaling {scaled.var():.3f}", end="")
        assert raw.var().item() == pytest.approx(d_k, rel=0.05)
        assert scaled.var().item() == pytest.approx(1.0, rel=0.05)


def test_without_the_scale_a_wide_head_sees_one_key_only() -> None:
    """Unscaled scores of a wide head saturate the softmax, where its gradient vanishes."""
    q, k = torch.randn(200, 1, 512), torch.randn(200, 16, 512)
    scaled = attend(q, k, k, NOTHING)[1].amax(dim=-1).mean().item()
    unscaled = torch.softmax(q @ k.transpose(-1, -2), dim=-1).amax(dim=-1).mean().item()
    print(f"\nlargest of 16 weights at d_k = 512: {scaled:.2f} scaled, {unscaled:.2f} not")
    assert scaled < 0.5
    assert unscaled > 0.9


def test_scale_is_that_of_the_head_and_d_v_may_differ() -> None:
    """Equal to a loop over batch, heads and queries that scales by sqrt(d_k), with d_v unlike d_k."""
    heads, d_k, d_v = 3, 5, 7
    attention = Attention(DIM, heads, d_k, d_v)
    x, source = torch.randn(2, 4, DIM), torch.randn(2, 6, DIM)
    padding = padding_mask(torch.tensor([[9] * 6, [9] * 2 + [0] * 4]))
    rows = torch.zeros(2, 4, heads * d_v)
    for b, h, t in torch.cartesian_prod(torch.arange(2), torch.arange(heads), torch.arange(4)).tolist():
        wq, wk = (w.weight[h * d_k : (h + 1) * d_k] for w in (attention.wq, attention.wk))
        wv = attention.wv.weight[h * d_v : (h + 1) * d_v]
        allowed = source[b][~padding[b, 0, 0]]
        weights = torch.softmax((allowed @ wk.T) @ (wq @ x[b, t]) / d_k**0.5, dim=0)
        rows[b, t, h * d_v : (h + 1) * d_v] = weights @ (allowed @ wv.T)
    found = attention(x, attention.keys_values(source), padding).out
    assert torch.allclose(found, attention.wo(rows), atol=1e-6)


def test_a_query_without_a_key_is_an_error() -> None:
    """A softmax over nothing is 0 / 0: the call says which query it is instead of spreading NaN."""
    blocked = torch.zeros(3, 4, dtype=torch.bool)
    blocked[1] = True
    with pytest.raises(ValueError, match=r"all 4 keys are blocked for the query at \[1\]"):
        attend(torch.randn(3, 8), torch.randn(4, 8), torch.randn(4, 8), blocked)


def test_self_attention_without_positions_sees_a_set() -> None:
    """Self-attention without positions is permutation-equivariant; with a causal mask it is not."""
    attention = small_attention()
    x, order = torch.randn(1, 8, DIM), torch.randperm(8)
    moved_after = self_attend(attention, x, NOTHING)[:, order]
    moved_before = self_attend(attention, x[:, order], NOTHING)
    assert torch.allclose(moved_before, moved_after, atol=1e-6)
    causal = causal_mask(0, 8)
    difference = self_attend(attention, x[:, order], causal) - self_attend(attention, x, causal)[:, order]
    print(f"\nlargest difference after a permutation: {difference.abs().max():.2f} with a causal mask, 0 without")
    assert difference.abs().max() > 0.1


def test_only_the_product_of_w_q_and_w_k_counts() -> None:
    """W_Q R and W_K R^-T leave the scores unchanged for every invertible R: q and k have no meaning of their own."""
    x = torch.randn(6, DIM, dtype=torch.float64)
    w_q, w_k = torch.randn(2, DIM, 8, dtype=torch.float64).unbind()
    mix = torch.randn(8, 8, dtype=torch.float64)
    scores = (x @ w_q) @ (x @ w_k).T
    remixed = (x @ w_q @ mix) @ (x @ w_k @ torch.linalg.inv(mix).T).T
    assert torch.allclose(remixed, scores)
    assert not torch.allclose(x @ w_q @ mix, x @ w_q)


def test_shared_queries_and_keys_give_symmetric_scores_but_not_weights() -> None:
    """Q = K gives symmetric scores and, in general, asymmetric weights: each row has a softmax of its own."""
    q = torch.randn(6, 8)
    scores = q @ q.T
    _, weights = attend(q, q, q, NOTHING)
    print(f"\nlargest |w_ij - w_ji| with Q = K: {(weights - weights.T).abs().max():.2f}")
    assert torch.allclose(scores, scores.T)
    assert (weights - weights.T).abs().max() > 0.05


def test_zeroing_weights_after_the_softmax_is_not_masking() -> None:
    """A key that is zeroed after the softmax still counts in the denominator: rows lose mass and the key leaks."""
    q, k, v = torch.randn(3, 1, 5, 8).unbind()
    blocked = causal_mask(0, 5)
    changed = k.clone()
    changed[:, 4] += 3.0  # the future of queries 0 .. 3
    zeroed, zeroed_changed = (attend(q, keys, v, NOTHING)[1].masked_fill(blocked, 0.0) for keys in (k, changed))
    leak = ((zeroed - zeroed_changed) @ v)[:, :4].abs().max()
    sums = [round(total, 2) for total in zeroed.sum(dim=-1)[0].tolist()]
    print(f"\nzeroed rows sum to {sums}; a key of their future moves them by {leak:.2f}")
    assert zeroed.sum(dim=-1)[:, :4].max() < 0.99
    assert leak > 0.05
    masked, masked_changed = (attend(q, keys, v, blocked)[0][:, :4] for keys in (k, changed))
    assert torch.equal(masked, masked_changed)


def test_padding_changes_nothing() -> None:
    """The output at real positions is the same whatever padding follows them."""
    attention = small_attention()
    x = torch.randn(1, 5, DIM)
    padded = torch.cat((x, torch.randn(1, 3, DIM)), dim=1)
    blocked = padding_mask(torch.tensor([[7] * 5 + [0] * 3]))
    assert torch.allclose(self_attend(attention, padded, blocked)[:, :5], self_attend(attention, x, NOTHING), atol=1e-6)


def test_causal_mask_of_later_queries_is_the_end_of_the_triangle() -> None:
    """With `start` computed positions the mask is (T, start + T), the last T rows of the square one."""
    assert torch.equal(causal_mask(3, 2), causal_mask(0, 5)[3:])
    assert causal_mask(0, 3).tolist() == [[False, True, True], [False, False, True], [False, False, False]]
