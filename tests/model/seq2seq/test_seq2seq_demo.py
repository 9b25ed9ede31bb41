"""The demonstration: it learns what it never saw, shows where it looks, and comes back from its folder."""

import re
from pathlib import Path

import pytest
import torch

from segue_model.seq2seq import Transformer, TransformerConfig
from segue_model.seq2seq.demo import main
from segue_model.seq2seq.picture import in_characters
from segue_model.seq2seq.reversal import Reversal, exact_matches
from segue_model.seq2seq.training import fit

QUICK = ("--steps", "4", "--batch", "4", "--dim", "16", "--checks", "3")


def report(text: str) -> str:
    """What the demo says after its training: exact matches and the picture."""
    return text[text.index("exact match") :]


def test_a_small_model_reverses_sequences_it_never_saw() -> None:
    """Some seconds of the recipe suffice for short sequences: nearly all held-out ones come out right."""
    task = Reversal(symbols=8, min_length=1, max_length=3)
    model = Transformer(
        TransformerConfig(
            source_vocab=task.vocab,
            target_vocab=task.vocab,
            dim=32,
            heads=2,
            encoder_layers=1,
            decoder_layers=1,
            dropout=0.0,
            share_embeddings=True,
        )
    )
    sources = task.held_out(0, 2, 20) + task.held_out(0, 3, 80)
    before = exact_matches(model.eval(), sources, beams=1)
    losses = list(fit(model, task.batches(0, 32), steps=300, warmup=300))
    after = exact_matches(model, sources, beams=1)
    print(f"\nloss {losses[0]:.2f} -> {losses[-1]:.2f}, exact match {before:.0%} -> {after:.0%}")
    assert before < 0.05
    assert after > 0.75


def test_the_picture_is_denser_where_the_weight_is_larger() -> None:
    """Rows are decoder steps, columns source positions; 0 is blank and 1 the densest character."""
    weights = torch.tensor([[0.0, 0.25, 0.75], [1.0, 0.0, 0.0]])
    assert in_characters(weights, ["a", "end"], ["x", "y", "z"]).splitlines() == [
        "    x y z",
        "  a   : #",
        "end @    ",
    ]


def test_a_run_repeats_and_its_folder_decodes_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same seed gives the same report, and --load gives the report of the run that --save wrote."""
    folder = str(tmp_path / "model")
    reports = []
    for words in (("--save", folder), (), ("--load", folder)):
        assert main([*QUICK, *words]) == 1  # four steps do not reach 99 %
        reports.append(report(capsys.readouterr().out))
    assert reports[0] == reports[1] == reports[2]
    assert re.search(r"longer: +11: 0%", reports[0])
    assert "cross-attention, last layer" in reports[0]


def test_plot_writes_a_png(tmp_path: Path) -> None:
    """All heads of all layers in one picture."""
    pytest.importorskip("matplotlib")
    main([*QUICK, "--plot", str(tmp_path / "heads.png")])
    assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_without_a_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--load", str(tmp_path)]) == 2
    assert "task.json" in capsys.readouterr().out.replace("\n", "")


@pytest.mark.parametrize("option", ["--steps", "--warmup", "--batch", "--dim", "--beams", "--checks"])
def test_counts_below_one_are_refused_by_name(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """argparse says which option, and exits with 2."""
    with pytest.raises(SystemExit, match="2"):
        main([option, "0"])
    assert f"{option}: must be at least 1" in capsys.readouterr().err


@pytest.mark.soak
def test_the_demonstration_as_documented() -> None:
    """With its defaults it reaches 99 % on held-out sequences; main says so by its exit code."""
    assert main([]) == 0
