"""What formats of weights and KV cost in quality, in bounds; docs/quality.md has the figures."""

from dataclasses import dataclass
from pydoc_data import topics

import pytest
import torch

from segue_model.agreement import Agreement, agreement, window_logits
from segue_model.arrays import Weights
from segue_model.config import DecoderConfig
from segue_model.decoder import Decoder
from segue_model.loaders import find_embedded_model, load_checkpoint
from segue_model.runner.native import NativeRunner, NativeUnavailable
from segue_model.runner.native.build import build
from segue_model.runner.native.native_runner import KvDtype, WeightsFormat
from segue_model.runner.torch_runner import TorchRunner
from segue_model.torch_arrays import weights_of

WINDOW = 512
# Wide enough for the builds without AMX, and for the text of another Python.
FORMATS: list[tuple[WeightsFormat, KvDtype, float, float]] = [  # mean KL at most, same best token at least
    ("auto", "float32", 0.006, 0.94),
    ("auto", "bfloat16", 0.006, 0.94),
    ("auto", "int8", 0.008, 0.94),
    ("bf16", "bfloat16", 0.001, 0.98),
    ("int8", "bfloat16", 0.008, 0.94),
]


def test_agreement_is_the_mean_over_all_windows() -> None:
    """Against the definition, written out."""
    theirs, ours = torch.randn(7, 11), torch.randn(7, 11)
    p, q = theirs.softmax(-1), ours.softmax(-1)
    expected = (p * (p / q).log()).sum(-1).mean().item()
    found = agreement(iter(theirs.split(3)), iter(ours.split(3)))
    assert found.tokens == 7
    assert found.mean_kl == pytest.approx(expected, rel=1e-5)
    assert found.top1 == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())
    assert agreement(iter([theirs]), iter([theirs])) == Agreement(7, 0.0, 1.0)


def test_windows_stand_alone_and_texts_must_be_equally_long() -> None:
    config = DecoderConfig(
        vocab_size=30, dim=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn_dim=16, max_context_tokens=64
    )
    runner = TorchRunner(config, weights_of(Decoder(config).state_dict()), num_pages=2)
    tokens = list(range(25))
    first, second = window_logits(runner, tokens, window=16)
    assert (len(first), len(second)) == (16, 9)
    (alone,) = window_logits(runner, tokens[16:], window=16)
    assert torch.equal(second, alone)
    with pytest.raises(ValueError, match="window of 40 tokens needs 3 pages"):
        list(window_logits(runner, tokens, window=40))
    with pytest.raises(ValueError, match="shorter"):
        agreement(iter([first, second]), iter([first]))
    with pytest.raises(ValueError, match="no token"):
        agreement(iter([]), iter([]))


@dataclass(frozen=True)
class Reference:
    """SmolLM2 in float32 on the weights that its file dequantises to."""

    config: DecoderConfig
    weights: Weights
    tokens: list[int]
    logits: list[torch.Tensor]


def reference_of(count: int) -> Reference:
    path = find_embedded_model()
    if path is None:
        pytest.skip("the embedded SmolLM2 is not installed")
    try:
        build(None)
    except NativeUnavailable as error:
        pytest.skip(str(error).splitlines()[0])
    checkpoint = load_checkpoint(path)
    assert checkpoint.tokenizer is not None
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    tokens = list(checkpoint.tokenizer.encode(text[: 8 * count]))[:count]
    assert len(tokens) == count
    runner = TorchRunner(checkpoint.config, checkpoint.weights, num_pages=WINDOW // 16)
    return Reference(checkpoint.config, checkpoint.weights, tokens, list(window_logits(runner, tokens, WINDOW)))


def check(reference: Reference, form: WeightsFormat, kv: KvDtype, largest_kl: float, least_top1: float) -> None:
    weights = reference.weights if form == "auto" else {name: reference.weights[name] for name in reference.weights}
    runner = NativeRunner(reference.config, weights, num_pages=WINDOW // 16, kv_dtype=kv, weights_format=form)
    found = agreement(iter(reference.logits), window_logits(runner, reference.tokens, WINDOW))
    print(f"{form}, {kv} KV: KL {found.mean_kl:.5f}, same best token {found.top1:.4f}, {found.tokens} tokens")
    assert found.mean_kl <= largest_kl
    assert found.top1 >= least_top1


@pytest.fixture(scope="module")
def reference() -> Reference:
    return reference_of(WINDOW)


@pytest.mark.parametrize(("form", "kv", "largest_kl", "least_top1"), FORMATS)
def test_formats_keep_the_distributions(
    reference: Reference, form: WeightsFormat, kv: KvDtype, largest_kl: float, least_top1: float
) -> None:
    check(reference, form, kv, largest_kl, least_top1)


@pytest.mark.soak
def test_formats_keep_the_distributions_over_4096_tokens() -> None:
    reference = reference_of(4096)
    for row in FORMATS:
        check(reference, *row)
