"""The training recipe: schedule, label smoothing, teacher forcing, and a model that comes back from its folder."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch

from segue_model.checkpoint import CheckpointError
from segue_model.seq2seq import (
    NoamSchedule,
    Transformer,
    TransformerConfig,
    label_smoothed_loss,
    load,
    noam_rate,
    save,
)
from segue_model.seq2seq.reversal import Reversal, is_held_out
from segue_model.seq2seq.training import Pairs, fit

TASK = Reversal(symbols=8, min_length=2, max_length=5)


def small_model(**changes: object) -> Transformer:
    sizes: dict[str, object] = {
        "source_vocab": TASK.vocab,
        "target_vocab": TASK.vocab,
        "dim": 32,
        "heads": 2,
        "encoder_layers": 1,
        "decoder_layers": 1,
    }
    return Transformer(TransformerConfig(**(sizes | changes)))


def rates(steps: int, *, dim: int, warmup: int, base: float = 1.0) -> Iterator[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=base)
    schedule = NoamSchedule(optimizer, dim=dim, warmup=warmup)
    for _ in range(steps):
        yield optimizer.param_groups[0]["lr"]
        optimizer.step()
        schedule.step()


def test_noam_rate_rises_in_a_line_and_falls_with_the_root() -> None:
    """d^-0.5 * min(t^-0.5, t * warmup^-1.5), with the first step at t = 1 and the peak at t = warmup."""
    found = list(rates(400, dim=64, warmup=100))
    assert found == pytest.approx([64**-0.5 * min(t**-0.5, t * 100**-1.5) for t in range(1, 401)])
    assert found.index(max(found)) + 1 == 100
    assert found[49] == pytest.approx(found[99] / 2)
    assert found[399] == pytest.approx(found[99] / 2)


def test_noam_peak_of_the_paper() -> None:
    """d_model 512 and 4000 steps of warmup peak at 7.0e-4."""
    assert noam_rate(4000, 512, 4000) == pytest.approx(6.99e-4, rel=1e-3)


def test_a_base_rate_of_zero_is_refused_with_the_reason() -> None:
    """The schedule multiplies the base rate: 0 stays 0, and dropout noise would hide it."""
    with pytest.raises(ValueError, match=r"stay 0 for ever.*dropout"):
        next(rates(1, dim=64, warmup=10, base=0.0))
    with pytest.raises(ValueError, match="warmup must be at least 1, got 64 and 0"):
        next(rates(1, dim=64, warmup=0))


def test_with_a_rate_of_zero_dropout_noise_looks_like_learning() -> None:
    """What the refusal is for: nothing learns, and yet the loss of one and the same batch moves at each step."""
    model = small_model(dropout=0.3)
    batch = next(TASK.batches(0, 8))
    with torch.no_grad():
        losses = [label_smoothed_loss(model(batch.source, batch.target), batch.target, 0.1).item() for _ in range(6)]
    print(f"\nlosses at rate 0: {[round(loss, 3) for loss in losses]}")
    assert max(losses) - min(losses) > 0.01


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.6, 1.0])
def test_label_smoothing_equals_torchs(smoothing: float) -> None:
    """Equal to nn.CrossEntropyLoss(label_smoothing=..., ignore_index=0) to 1e-6, padding ignored, gradients too."""
    logits = torch.randn(4, 7, 11, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(1, 11, (4, 7))
    targets[1, 3:] = targets[2] = 0
    ours = label_smoothed_loss(logits, targets, smoothing)
    theirs = torch.nn.CrossEntropyLoss(label_smoothing=smoothing, ignore_index=0)(logits.mT, targets)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)
    ours_grad, theirs_grad = (torch.autograd.grad(loss, logits)[0] for loss in (ours, theirs))
    assert torch.allclose(ours_grad, theirs_grad, atol=1e-6)
    assert not ours_grad[2].any()


def test_a_certain_model_pays_under_label_smoothing() -> None:
    """The smoothed loss has its minimum at probability 1 - s + s / V for the right token, not at 1."""
    targets = torch.tensor([[1]])
    best = torch.full((1, 1, 10), 0.01).log()
    best[..., 1] = torch.tensor(0.91).log()
    certain = torch.zeros(1, 1, 10).index_fill(-1, torch.tensor([1]), 30.0)
    assert label_smoothed_loss(best, targets, 0.1) < label_smoothed_loss(certain, targets, 0.1)
    assert label_smoothed_loss(certain, targets, 0.0) < label_smoothed_loss(best, targets, 0.0)


def test_loss_refuses_what_has_no_mean() -> None:
    """All padding has no tokens to average over: an error, not NaN."""
    with pytest.raises(ValueError, match="at least one token"):
        label_smoothed_loss(torch.randn(1, 2, 5), torch.zeros(1, 2, dtype=torch.long), 0.1)
    with pytest.raises(ValueError, match="smoothing must lie in"):
        label_smoothed_loss(torch.randn(1, 2, 5), torch.ones(1, 2, dtype=torch.long), 1.5)


def test_targets_are_shifted_by_one() -> None:
    """The decoder reads BOS a b and should say a b EOS; short rows end in padding."""
    pairs = Pairs.of([[5, 6], [7]], [[6, 5], [7]])
    assert pairs.source.tolist() == [[5, 6], [7, 0]]
    assert pairs.target.tolist() == [[1, 6, 5, 2], [1, 7, 2, 0]]


def test_no_position_sees_the_token_it_should_write() -> None:
    """Teacher forcing computes all positions at once; changing a target token changes no logits before it."""
    model = small_model().eval()
    source, target = torch.tensor([[5, 6, 7]]), torch.tensor([[1, 7, 6, 5]])
    changed = target.clone()
    changed[0, 2] = 9
    with torch.no_grad():
        before, after = model(source, target), model(source, changed)
    assert torch.equal(before[:, :2], after[:, :2])
    assert not torch.equal(before[:, 2:], after[:, 2:])


def test_training_learns_and_seeds_repeat_it() -> None:
    """The loss falls, and the same seed gives the same losses bit for bit, dropout included; another seed does not."""

    def losses(seed: int) -> list[float]:
        torch.manual_seed(seed)
        return list(fit(small_model(), TASK.batches(seed, 16), steps=60, warmup=30))

    first, again, other = losses(1), losses(1), losses(2)
    print(f"\nloss {first[0]:.2f} -> {first[-1]:.2f}")
    assert first == again != other
    assert sum(first[-5:]) < 0.9 * sum(first[:5])


def test_held_out_sequences_are_in_no_batch() -> None:
    """What is checked was never trained on, whatever the seeds: membership is a property of the sequence."""
    held_out = TASK.held_out(3, 4, 50)
    assert all(is_held_out(sequence) and len(sequence) == 4 for sequence in held_out)
    trained = [row[row > 0].tolist() for batch in islice(TASK.batches(3, 64), 20) for row in batch.source]
    assert not any(map(is_held_out, trained))
    assert {len(sequence) for sequence in trained} == {2, 3, 4, 5}


@pytest.mark.parametrize("share", [False, True])
def test_a_saved_model_comes_back_bit_for_bit(tmp_path: Path, share: bool) -> None:
    """safetensors + config; shared matrices are stored once and shared again; files follow the umask."""
    model = small_model(share_embeddings=share, key_dim=5, norm="pre").eval()
    save(model, tmp_path / "model")
    loaded = load(tmp_path / "model")
    source, target = torch.tensor([[5, 6, 0]]), torch.tensor([[1, 6]])
    with torch.no_grad():
        assert torch.equal(loaded(source, target), model(source, target))
    assert loaded.config == model.config
    assert (loaded.source_embedding.weight is loaded.head.weight) == share
    config, weights = sorted((tmp_path / "model").iterdir())
    assert (config.name, weights.name) == ("config.json", "model.safetensors")
    assert weights.stat().st_mode == config.stat().st_mode


def test_a_damaged_folder_is_refused_by_name(tmp_path: Path) -> None:
    """Missing files, unknown fields, wrong kinds and weights of another shape are CheckpointErrors that say which."""
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(tmp_path)
    save(small_model(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, named in (
        ({"wings": 2}, "wings"),
        ({"dim": "wide"}, "dim must be an integer"),
        ({"norm": "both"}, "norm"),
        ({"dim": 34}, "heads|size mismatch"),
        ({"encoder_layers": 2}, r"model\.safetensors"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(CheckpointError, match=named):
            load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(tmp_path)
