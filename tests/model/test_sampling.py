"""Sampling against a naive reference: the filtered distribution, the draws, and what may never happen."""

import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segue_model import sampling as module
from segue_model.arrays import Logits
from segue_model.sampling import Sampled, SampleRequest, Sampling, SamplingError, TokenLogprob, token_logprobs
from segue_model.softmax import ONE, weights

VOCAB = 400  # more than one block of the draw and of the nucleus search


def reference_distribution(logits: list[float], request: SampleRequest) -> list[float]:
    """The distribution a token is drawn from, as plainly as possible: Python floats and full sorts.

    Scores are rounded to float32 after each change, for they are float32 logits.
    """
    s = request.sampling
    scores = [float(x) for x in logits]
    for token, bias in s.logit_bias.items():
        scores[token] = float(np.float32(scores[token] + bias))
    for token in set(request.history):
        count = list(request.history).count(token)
        x = scores[token]
        x = x / s.repetition_penalty if x > 0 else x * s.repetition_penalty
        scores[token] = float(np.float32(x - count * s.frequency_penalty - s.presence_penalty))
    for token in request.banned:
        scores[token] = -math.inf
    best_first = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if s.temperature == 0:
        return [float(token == best_first[0]) for token in range(len(scores))]
    best_first = best_first[: s.top_k]
    peak = scores[best_first[0]]
    weight = {token: math.exp((scores[token] - peak) / s.temperature) for token in best_first}
    total = sum(weight.values())
    kept, mass = [], 0.0
    for token in best_first:
        if mass < s.top_p * total or s.top_p == 1:
            kept.append(token)
            mass += weight[token]
    kept = [token for token in kept if weight[token] >= s.min_p * weight[kept[0]]]
    mass = sum(weight[token] for token in kept)
    return [weight[token] / mass if token in kept else 0.0 for token in range(len(scores))]


def random_rows(count: int, vocab: int, *, seed: int) -> Logits:
    return np.random.default_rng(seed).standard_normal((count, vocab), np.float32)


def sample(rows: Logits, requests: Sequence[SampleRequest]) -> list[Sampled]:
    """The tokens of rows that can all be drawn from; raises the first error."""
    drawn = module.sample(list(rows), requests)
    if errors := [each for each in drawn if isinstance(each, SamplingError)]:
        raise errors[0]
    return [each for each in drawn if isinstance(each, Sampled)]


def draw(logits: Logits, request: SampleRequest) -> int:
    return sample(logits[None], [request])[0].token_id


def exact_distribution(monkeypatch: pytest.MonkeyPatch, logits: Logits, request: SampleRequest) -> list[float]:
    """The probabilities behind sample(): the weights that reach the draw, seen by drawing each of their indices."""
    seen: list[np.ndarray] = []
    original = module._draw

    def spy(shares: np.ndarray, random: int) -> int:
        seen.append(shares)
        return original(shares, random)

    monkeypatch.setattr(module, "_draw", spy)
    draw(logits, request)
    distribution = [0.0] * len(logits)
    for index, share in enumerate(seen[0] / seen[0].sum()):
        monkeypatch.setattr(module, "_draw", lambda *_, index=index: index)
        distribution[draw(logits, request)] += float(share)
    monkeypatch.undo()
    return distribution


HISTORY = [3, 3, 3, 17, 250, 250, 399]
SETTINGS = {
    "temperature 1": Sampling(),
    "temperature 0.3": Sampling(temperature=0.3),
    "temperature 2": Sampling(temperature=2.0),
    "top-k 1": Sampling(top_k=1),
    "top-k 20": Sampling(top_k=20),
    "top-k over the vocabulary": Sampling(top_k=10_000),
    "top-p 0.001": Sampling(top_p=0.001),
    "top-p 0.5": Sampling(top_p=0.5),
    "top-p 0.99": Sampling(top_p=0.99),
    "top-p 0.9, hot": Sampling(top_p=0.9, temperature=2.0),
    "min-p": Sampling(min_p=0.05),
    "min-p 0.99": Sampling(min_p=0.99),
    "repetition penalty": Sampling(repetition_penalty=1.5),
    "repetition reward": Sampling(repetition_penalty=0.5),
    "frequency penalty": Sampling(frequency_penalty=0.7),
    "presence penalty": Sampling(presence_penalty=1.9),
    "negative frequency and presence": Sampling(frequency_penalty=-2.0, presence_penalty=-2.0),
    "bias": Sampling(logit_bias={0: 4.0, 7: -100.0, 300: 2.5}),
    "top-k, top-p": Sampling(top_k=40, top_p=0.8),
    "top-k, top-p, min-p": Sampling(temperature=0.8, top_k=60, top_p=0.95, min_p=0.02),
    "everything": Sampling(
        temperature=1.3,
        top_k=100,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.2,
        frequency_penalty=0.4,
        presence_penalty=0.3,
        logit_bias={3: 2.0, 11: 3.0},
    ),
}


@pytest.fixture(scope="module")
def logits() -> Logits:
    return random_rows(1, VOCAB, seed=1)[0] * 1.5


@pytest.mark.parametrize("name", SETTINGS)
def test_filtered_distribution_equals_the_reference(name: str, logits: Logits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every filter and penalty, alone and together, leaves exactly the reference's tokens at its probabilities."""
    request = SampleRequest(SETTINGS[name], 0, HISTORY, frozenset({5, 6}))
    expected = reference_distribution(logits.tolist(), request)
    got = exact_distribution(monkeypatch, logits, request)
    unit = 1 / ONE  # of weights: half of it rounds to nothing
    assert [p > 0 for p in got] == [p > unit / 2 * max(expected) for p in expected]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=unit)


@pytest.mark.parametrize("name", ["temperature 1", "temperature 2", "top-k 20", "top-p 0.5", "min-p", "everything"])
def test_draws_over_positions_follow_the_distribution(name: str, logits: Logits) -> None:
    """Chi-square of 4,000 draws at successive positions stays within 5 standard deviations of its expectation."""
    request = SampleRequest(replace(SETTINGS[name], seed=99), 0, HISTORY)
    draws = 4000
    results = sample(np.tile(logits, (draws, 1)), [replace(request, position=p) for p in range(draws)])
    observed = np.bincount([r.token_id for r in results], minlength=VOCAB)
    expected = np.array(reference_distribution(logits.tolist(), request)) * draws
    common = expected >= 5
    cells_o = np.append(observed[common], observed[~common].sum())
    cells_e = np.append(expected[common], expected[~common].sum())
    cells_o, cells_e = cells_o[cells_e > 0], cells_e[cells_e > 0]
    chi2, freedom = float(((cells_o - cells_e) ** 2 / cells_e).sum()), len(cells_e) - 1
    print(f"{name}: chi-square {chi2:.1f} at {freedom} degrees of freedom")
    assert freedom >= 3
    assert abs(chi2 - freedom) < 5 * math.sqrt(2 * freedom)


def thousandths(low: float, high: float) -> st.SearchStrategy[float]:
    """Two logits are equal, or differ by so much that float32 and float64 agree on their order."""
    return st.floats(low, high).map(lambda value: round(value, 3))


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-6, 0.2, 1.0, 2.0]),
    top_k=st.none() | st.integers(1, 700),
    top_p=st.just(1.0) | st.floats(1e-6, 1.0, exclude_min=True),
    min_p=st.just(0.0) | st.floats(0, 0.999),
    repetition_penalty=st.just(1.0) | thousandths(0.1, 3),
    frequency_penalty=st.just(0.0) | thousandths(-2, 2),
    presence_penalty=st.just(0.0) | thousandths(-2, 2),
    logit_bias=st.dictionaries(st.integers(0, 9), thousandths(-100, 100), max_size=3),
    seed=st.integers(-(2**63), 2**63 - 1),
)


@settings(max_examples=200, deadline=None)
@given(
    samplings,
    st.integers(10, 600),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.5, 3.0, 30.0]),
    st.lists(st.integers(0, 9), max_size=6),
    st.frozensets(st.integers(0, 9), max_size=4),
    st.integers(0, 2**31),
)
def test_a_drawn_token_is_in_the_reference_support(
    sampling: Sampling, vocab: int, data: int, scale: float, history: list[int], banned: frozenset[int], position: int
) -> None:
    """Any settings and logits, ties included: no draw outside what the reference allows, nor a banned one."""
    values = np.random.default_rng(data).normal(size=vocab).astype(np.float32).round(1) * scale
    request = SampleRequest(sampling, position, history, banned)
    token = draw(values, request)
    # A filter may keep one token more where sums and exp differ from the reference's in their last bits.
    wider = replace(sampling, top_p=min(1.0, sampling.top_p + 1e-9), min_p=sampling.min_p * (1 - 1e-9))
    allowed = reference_distribution(values.tolist(), replace(request, sampling=wider))
    assert allowed[token] > 0
    assert token not in banned


def mixed_requests(count: int) -> list[SampleRequest]:
    everything = list(SETTINGS.values())
    return [
        SampleRequest(replace(everything[i % len(everything)], seed=i), 1000 + i, HISTORY, top_logprobs=3)
        for i in range(count)
    ]


@pytest.mark.parametrize("vocab", [VOCAB, 1021, 4096])
def test_a_row_is_drawn_alone_as_in_a_batch_of_32(vocab: int) -> None:
    """Token and logprob bits of a row do not depend on the other rows, their number, or the row's alignment."""
    rows = random_rows(32, vocab, seed=2)
    requests = mixed_requests(32)
    batched = sample(rows, requests)
    alone = [sample(rows[i : i + 1].copy(), requests[i : i + 1])[0] for i in range(32)]
    backwards = sample(rows[::-1], requests[::-1])[::-1]
    assert batched == alone == backwards


def test_the_caller_keeps_its_logits(logits: Logits) -> None:
    """Bias, penalties and bans work on a copy."""
    before = logits.copy()
    sample(np.tile(logits, (32, 1)), mixed_requests(32))
    draw(logits, SampleRequest(SETTINGS["everything"], 0, HISTORY, frozenset({1})))
    assert np.array_equal(logits, before)


def test_seeds_and_positions_give_streams_of_their_own(logits: Logits) -> None:
    """64 tokens under neighbouring seeds, and under the same seed from another position, are different streams."""

    def stream(seed: int, start: int = 0) -> tuple[int, ...]:
        requests = [SampleRequest(Sampling(seed=seed), start + p, []) for p in range(64)]
        return tuple(r.token_id for r in sample(np.tile(logits, (64, 1)), requests))

    seeds = [0, 1, 2, -1, 2**63 - 1, -(2**63)]
    assert stream(7) == stream(7)
    assert len({stream(seed) for seed in seeds} | {stream(0, 1)}) == len(seeds) + 1


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(top_k=1), Sampling(top_p=1e-9)])
def test_greedy_is_the_best_token_and_the_lowest_id_of_equal_ones(sampling: Sampling) -> None:
    """Temperature 0, top-k 1 and a vanishing nucleus agree, also when the best logit occurs several times."""
    row = np.zeros(1000, np.float32)
    row[[123, 456, 789]] = 2.0
    assert draw(row, SampleRequest(sampling, 5, [])) == 123
    assert draw(row, SampleRequest(sampling, 5, [], frozenset({123}))) == 456


def test_ties_at_the_edge_of_a_filter_keep_the_lowest_ids() -> None:
    """Of 1,000 equal logits top-k 7 keeps tokens 0 to 6, and top-p 0.25 keeps 0 to 249."""
    row = np.zeros((3000, 1000), np.float32)
    by_k = sample(row, [SampleRequest(Sampling(top_k=7), p, []) for p in range(3000)])
    by_p = sample(row, [SampleRequest(Sampling(top_p=0.25), p, []) for p in range(3000)])
    assert {r.token_id for r in by_k} == set(range(7))
    assert {r.token_id for r in by_p} == set(range(250))


@pytest.mark.parametrize("temperature", [1e-6, 1e-45, sys.float_info.min])
def test_a_tiny_temperature_is_greedy_and_does_not_overflow(temperature: float) -> None:
    """Down to the smallest float, without a NaN or a warning (warnings are errors here)."""
    row = np.linspace(1e30, -1e30, 1000, dtype=np.float32)
    assert draw(row, SampleRequest(Sampling(temperature=temperature, top_p=0.9), 3, [])) == 0


def test_a_minus_inf_logit_is_never_drawn() -> None:
    """-inf masks a token: only the two that are left come up, at temperature 2 and at any position."""
    row = np.full(500, -math.inf, np.float32)
    row[[77, 499]] = 0.0
    results = sample(np.tile(row, (200, 1)), [SampleRequest(Sampling(temperature=2.0), p, []) for p in range(200)])
    assert {r.token_id for r in results} == {77, 499}


@pytest.mark.parametrize("random", [0, 2**64 - 1])
def test_the_ends_of_the_random_range_stay_on_tokens_with_mass(random: int) -> None:
    """The smallest and the largest random number skip tokens of weight 0 before and behind."""
    generator = np.random.default_rng(0)
    for size in range(3, 900, 7):
        shares = np.zeros(size + 600, np.int64)
        shares[300 : 300 + size] = generator.integers(1, ONE + 1, size)
        assert module._draw(shares, random) == (300 if random == 0 else 299 + size)


def test_weights_are_exp_to_two_units() -> None:
    """Over all octaves a weight has, and at the temperatures of requests, within two units of 2**-42 of math.exp."""
    scores = np.append(np.linspace(-32, 0, 20_011, dtype=np.float32), np.float32(-math.inf))
    for temperature in (0.3, 1.0, 2.0):
        exact = [math.exp((float(x)) / temperature) * ONE for x in scores]
        worst = np.abs(weights(scores, 0.0, temperature) - np.array(exact)).max()
        print(f"temperature {temperature}: {worst:.2f} units")
        assert worst < 2
    assert weights(scores, 0.0, 1.0)[-2:].tolist() == [ONE, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(), SETTINGS["everything"]])
def test_a_bad_row_is_refused_and_the_others_drawn(bad: float, sampling: Sampling, logits: Logits) -> None:
    """One NaN or +inf anywhere in row 2 gives a SamplingError there; scoring names the row."""
    rows = np.tile(logits, (4, 1))
    rows[2, 333] = bad
    drawn = module.sample(list(rows), [SampleRequest(sampling, 0, HISTORY)] * 4)
    assert [type(each) for each in drawn] == [Sampled, Sampled, SamplingError, Sampled]
    assert re.fullmatch(r"the best logit is (nan|inf) \(token 333\)", str(drawn[2]))
    with pytest.raises(SamplingError, match=r"^row 2: "):
        token_logprobs(rows, [0, 1, 2, 3], 0)


@pytest.mark.parametrize(
    ("request_of", "message"),
    [
        (lambda: SampleRequest(Sampling(), 0, [], frozenset(range(VOCAB))), "^the best logit after .* is -inf"),
        (lambda: SampleRequest(Sampling(logit_bias={VOCAB: 1.0}), 0, []), "^logit_bias holds token 400, .* 399"),
        (lambda: SampleRequest(Sampling(), 0, [], frozenset({-1})), "^banned holds token -1"),
        (lambda: SampleRequest(Sampling(presence_penalty=1.0), 0, [1, 400]), "^history holds token 400"),
        (
            lambda: SampleRequest(Sampling(repetition_penalty=1e-300), 0, list(range(VOCAB))),
            "^the best logit after .* is inf",
        ),
    ],
)
def test_a_request_that_does_not_fit_is_refused(
    request_of: Callable[[], SampleRequest], message: str, logits: Logits
) -> None:
    """Nothing left to draw, ids outside the vocabulary and overflow say which field was wrong."""
    with pytest.raises(SamplingError, match=message):
        sample(logits[None], [request_of()])


def test_rows_and_requests_must_agree(logits: Logits) -> None:
    """A row too many is an error, not a dropped row."""
    with pytest.raises(ValueError, match="a row of logits for each request, got 2 rows, 1 requests"):
        sample(np.tile(logits, (2, 1)), [SampleRequest(Sampling(), 0, [])])
    with pytest.raises(ValueError, match=r"a row of logits must be \(vocab,\), .* got \(2, 400\)"):
        module.sample([np.tile(logits, (2, 1))], [SampleRequest(Sampling(), 0, [])])
    with pytest.raises(ValueError, match="must be of one vocabulary, got 400 and 399 tokens"):
        module.sample([logits, logits[1:]], [SampleRequest(Sampling(), 0, [])] * 2)
    with pytest.raises(SamplingError, match=r"logits must be \(1, vocab\).* got \(2, 400\)"):
        token_logprobs(np.tile(logits, (2, 1)), [0], 0)
    with pytest.raises(SamplingError, match=r"row 1: token_ids holds token 400"):
        token_logprobs(np.tile(logits, (2, 1)), [0, 400], 0)


def test_logprobs_are_of_the_raw_logits(logits: Logits) -> None:
    """log_softmax before bias, penalties, bans and temperature; the k best come best first."""
    expected = torch.log_softmax(torch.from_numpy(logits).double(), -1)
    request = SampleRequest(SETTINGS["everything"], 4, HISTORY, frozenset({int(logits.argmax())}), top_logprobs=5)
    got = sample(logits[None], [request])[0]
    assert got.logprob is not None
    assert got.logprob.logprob == pytest.approx(float(expected[got.token_id]), abs=1e-9)
    values, ids = expected.topk(5)
    assert [token for token, _ in got.logprob.top] == ids.tolist()
    assert [logprob for _, logprob in got.logprob.top] == pytest.approx(values.tolist(), abs=1e-9)
    everything = token_logprobs(logits[None], [0], 10_000)[0].top
    assert sum(math.exp(logprob) for _, logprob in everything) == pytest.approx(1.0)


def test_logprobs_on_request_only_and_the_same_as_scoring(logits: Logits) -> None:
    """None asks for none, 0 for the token's own; scoring the drawn token gives the very same numbers."""
    assert draw_with(logits, None).logprob is None
    drawn = draw_with(logits, 0)
    assert drawn.logprob == TokenLogprob(drawn.token_id, drawn.logprob.logprob if drawn.logprob else math.nan)
    assert [draw_with(logits, 3).logprob] == token_logprobs(logits[None], [drawn.token_id], 3)


def draw_with(logits: Logits, top_logprobs: int | None) -> Sampled:
    return sample(logits[None], [SampleRequest(Sampling(temperature=0.0), 0, [], top_logprobs=top_logprobs)])[0]


def test_top_logprobs_of_equal_logits_have_the_lowest_ids_first() -> None:
    """Ties are in token id order, at the edge too."""
    row = np.zeros((1, 600), np.float32)
    row[0, 500] = 1.0
    assert [token for token, _ in token_logprobs(row, [0], 4)[0].top] == [500, 0, 1, 2]


def test_cost_of_a_row_at_vocabulary_49152() -> None:
    """Prints the cost of a row; the bounds are ten times what an idle core takes, so that only a real fault fails."""
    rows = random_rows(1, 49_152, seed=3) * 4
    cases = {
        "greedy": (Sampling(temperature=0.0), 100),
        "temperature": (Sampling(), 4000),
        "top-k": (Sampling(top_k=40), 1300),
        "top-p": (Sampling(top_p=0.95), 5000),
        "min-p": (Sampling(min_p=0.05), 4000),
        "top-k, top-p": (Sampling(top_k=40, top_p=0.95), 1500),
    }
    for name, (sampling, bound_us) in cases.items():
        cost_us = min(timed_us(rows, SampleRequest(sampling, p, [])) for p in range(60))
        print(f"{name}: {cost_us:.0f} us a row")
        assert cost_us < bound_us


def timed_us(rows: Logits, request: SampleRequest) -> float:
    start = time.perf_counter()
    sample(rows, [request])
    return (time.perf_counter() - start) * 1e6
