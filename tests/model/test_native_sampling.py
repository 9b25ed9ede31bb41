"""The kernels draw what the slow twin draws: tokens and logprobs compare with ==, for every instruction set."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue_model.arrays import Logits
from segue_model.config import DecoderConfig
from segue_model.decoder import Decoder
from segue_model.runner.native import NativeRunner, NativeUnavailable
from segue_model.runner.native.build import ISAS
from segue_model.sampling import Outcome, Sampled, SampleRequest, Sampling, SamplingError
from segue_model.sampling import sample as twin
from segue_model.torch_arrays import to_numpy

NEAR = 12  # ids that lists of tokens name: few, so that they meet


@cache
def runner_of(isa: str) -> NativeRunner:
    """A model of no importance: rows may come from any vocabulary."""
    config = DecoderConfig(
        vocab_size=32, dim=32, layers=1, heads=1, kv_heads=1, head_dim=32, ffn_dim=32, max_context_tokens=32
    )
    weights = {name: to_numpy(tensor) for name, tensor in Decoder(config).state_dict().items()}
    return NativeRunner(config, weights, num_pages=1, threads=2, isa=isa)


@pytest.fixture(params=ISAS)
def runner(request: pytest.FixtureRequest) -> NativeRunner:
    try:
        return runner_of(request.param)
    except NativeUnavailable as error:
        pytest.skip(str(error).splitlines()[0])


def shown(outcome: Outcome) -> object:
    """What == can compare."""
    return outcome if isinstance(outcome, Sampled) else str(outcome)


def check(runner: NativeRunner, rows: list[Logits], requests: list[SampleRequest]) -> list[Outcome]:
    """All rows at once, and each one alone, against the twin."""
    expected = [shown(each) for each in twin(rows, requests)]
    drawn = runner.sample(rows, requests)
    assert [shown(each) for each in drawn] == expected
    alone = [runner.sample([row], [request])[0] for row, request in zip(rows, requests, strict=True)]
    assert [shown(each) for each in alone] == expected
    return drawn


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 5e-324, 1e-6, 0.2, 0.7, 1.0, 2.0, 50.0]),
    top_k=st.none() | st.sampled_from([1, 2, 5, 40]) | st.integers(1, 5000),
    top_p=st.just(1.0) | st.sampled_from([0.5, 0.9, 1 - 1e-9, 1 - 2**-53]) | st.floats(1e-6, 1.0, exclude_min=True),
    min_p=st.just(0.0) | st.sampled_from([5e-324, 1e-13, 0.05]) | st.floats(0, 0.999),
    repetition_penalty=st.just(1.0) | st.floats(0.1, 3),
    frequency_penalty=st.just(0.0) | st.floats(-2, 2),
    presence_penalty=st.just(0.0) | st.floats(-2, 2),
    logit_bias=st.dictionaries(st.integers(0, NEAR - 1), st.floats(-100, 100), max_size=3),
    seed=st.integers(-(2**63), 2**63 - 1),
)
requests_of_rows = st.builds(
    SampleRequest,
    samplings,
    position=st.integers(0, 2**31),
    history=st.lists(st.integers(0, NEAR - 1), max_size=8),
    banned=st.frozensets(st.integers(0, NEAR - 1), max_size=3),
    top_logprobs=st.none() | st.integers(0, 6) | st.just(5000),
)


@st.composite
def row_of(draw: st.DrawFn, vocab: int) -> Logits:
    """Normal logits of any spread: rounded ones have ties, some are -inf, a few are what no model should give."""
    values = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from([0.0, 1e-30, 0.5, 3.0, 30.0, 1e30]))
    row = values.standard_normal(vocab, np.float32) * np.float32(spread)
    if draw(st.booleans()):
        row = row.round(draw(st.integers(0, 1)))
    row[values.random(vocab) < draw(st.sampled_from([0.0, 0.0, 0.5, 0.999]))] = -math.inf
    for value in draw(st.lists(st.sampled_from([0.0, -0.0, 1e-45]), max_size=3)):
        row[draw(st.integers(0, vocab - 1))] = value
    if draw(st.integers(0, 9)) == 0:
        row[draw(st.integers(0, vocab - 1))] = draw(st.sampled_from([math.nan, -math.nan, math.inf]))
    return row


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Logits], list[SampleRequest]]:
    vocab = draw(st.integers(NEAR, 200) | st.sampled_from([255, 256, 257, 1000, 4096, 4099]))
    count = draw(st.integers(1, 5))
    return [draw(row_of(vocab)) for _ in range(count)], [draw(requests_of_rows) for _ in range(count)]


@settings(max_examples=150, deadline=None)
@given(batches())
def test_any_batch_is_drawn_as_the_twin_draws_it(
    runner_isas: list[NativeRunner], batch: tuple[list[Logits], list[SampleRequest]]
) -> None:
    """Random logits, settings and batches: tokens, logprobs and refusals, together and alone, by every build."""
    for runner in runner_isas:
        check(runner, *batch)


@pytest.fixture(scope="module")
def runner_isas() -> list[NativeRunner]:
    found = []
    for isa in ISAS:
        try:
            found.append(runner_of(isa))
        except NativeUnavailable:
            continue
    return found or pytest.skip("no kernels can be built here")


SETTINGS = {
    "greedy": Sampling(temperature=0.0),
    "temperature": Sampling(),
    "cold": Sampling(temperature=0.3),
    "top-k": Sampling(top_k=50),
    "top-k of thousands": Sampling(top_k=3000),
    "top-p": Sampling(top_p=0.9),
    "top-p, hot": Sampling(temperature=2.0, top_p=0.999),
    "min-p": Sampling(min_p=0.05),
    "top-k, top-p, min-p": Sampling(top_k=200, top_p=0.95, min_p=0.01),
    "penalties": Sampling(repetition_penalty=1.2, frequency_penalty=0.4, presence_penalty=0.3, top_p=0.9),
    "bias": Sampling(logit_bias={7: 30.0, 9: -100.0}),
}


@pytest.mark.parametrize("spread", [1.0, 3.5, 12.0])
def test_rows_of_a_real_vocabulary(runner: NativeRunner, spread: float) -> None:
    """49,152 logits, flat to peaked, in a batch of every setting, with logprobs and without."""
    rows = np.random.default_rng(5).standard_normal((2 * len(SETTINGS), 49_152), np.float32) * np.float32(spread)
    requests = [
        SampleRequest(replace(sampling, seed=i), 100 + i, [3, 3, 17, 40_000], top_logprobs=5 if i % 2 else None)
        for i, sampling in enumerate([*SETTINGS.values()] * 2)
    ]
    drawn = check(runner, list(rows), requests)
    print(f"spread {spread}: {[each.token_id for each in drawn if isinstance(each, Sampled)]}")
    assert all(isinstance(each, Sampled) for each in drawn)


def test_a_refusal_is_the_row_s_own(runner: NativeRunner) -> None:
    """Of five rows three cannot be drawn from, for three reasons, in the twin's words; the others are drawn."""
    rows = np.zeros((5, 300), np.float32)
    rows[1, 250] = math.nan
    requests = [SampleRequest(Sampling(), 0, []) for _ in rows]
    requests[2] = SampleRequest(Sampling(presence_penalty=1.0), 0, [1, 300])
    requests[3] = SampleRequest(Sampling(), 0, [], banned=frozenset(range(300)))
    drawn = check(runner, list(rows), requests)
    assert [type(each) for each in drawn] == [Sampled, SamplingError, SamplingError, SamplingError, Sampled]


def test_the_caller_keeps_its_logits_and_may_hold_them_in_any_layout(runner: NativeRunner) -> None:
    """Rows of a transposed array are copied, and no row is written to."""
    columns = np.random.default_rng(1).standard_normal((500, 3), np.float32)
    before = columns.copy()
    request = SampleRequest(Sampling(top_p=0.8, logit_bias={1: 5.0}), 0, [], frozenset({2}))
    check(runner, list(columns.T), [request] * 3)
    assert np.array_equal(columns, before)


def test_no_rows_and_rows_that_do_not_fit(runner: NativeRunner) -> None:
    """An empty batch draws nothing; what the twin refuses is refused before the kernels see it."""
    assert runner.sample([], []) == []
    with pytest.raises(ValueError, match="a row of logits for each request, got 1 rows, 0 requests"):
        runner.sample([np.zeros(9, np.float32)], [])
