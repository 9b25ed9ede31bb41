"""The parts of training a decoder: tokens, windows, schedule, and what is refused."""

import math
from pathlib import Path

import pytest
import torch

from segue_model.config import ConfigError, DecoderConfig
from segue_model.decoder import Decoder
from segue_model.train.__main__ import main
from segue_model.train.curve import save_curve
from segue_model.train.export import export
from segue_model.train.recipe import Diverged, Progress, Recipe, _groups, train
from segue_model.train.text import END, Corpus, TextError, train_tokenizer

TEXT = "".join(f"{n} and {n + 1} make {2 * n + 1}.\n" for n in range(400))


def corpus(context: int = 16) -> Corpus:
    return Corpus.of(TEXT, vocab_size=300, context=context)


def tiny_config(**changes: object) -> DecoderConfig:
    sizes: dict[str, object] = {
        "vocab_size": 300,
        "dim": 16,
        "layers": 1,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 8,
        "ffn_dim": 32,
        "max_context_tokens": 16,
    }
    return DecoderConfig(**(sizes | changes))


def test_byte_level_bpe_spells_any_text() -> None:
    """What was never seen falls back to bytes; nothing is unknown, and decoding gives the text back."""
    tokenizer = train_tokenizer(TEXT, 300)
    for text in (TEXT[:200], "Füchse, 狐, 🦊\n\ttab", ""):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode(TEXT).ids) < 0.6 * len(TEXT)  # and what was seen is merged
    assert tokenizer.get_vocab_size() == 300


def test_the_end_marker_in_the_text_is_one_token() -> None:
    """Documents are separated by the token that ends an answer."""
    tokenizer = train_tokenizer(TEXT, 300)
    ids = tokenizer.encode(f"one.{END}two.").ids
    assert ids.count(tokenizer.token_to_id(END)) == 1


def test_the_held_out_part_is_the_texts_end_and_never_in_a_batch() -> None:
    """Training windows come from the first nine tenths; validation windows are the same at each call."""
    parts = corpus()
    train_text = parts.tokenizer.decode(parts.train.tolist())
    validation_text = parts.tokenizer.decode(parts.validation.tolist())
    assert train_text + validation_text == TEXT
    assert len(validation_text) == pytest.approx(len(TEXT) / 10, abs=1)
    batch = next(parts.batches(16, 32, torch.Generator().manual_seed(0)))
    assert batch.shape == (32, 17)
    assert all(parts.tokenizer.decode(row.tolist()) in train_text for row in batch)
    windows = parts.validation_windows(16, 8)
    assert windows.shape[0] <= 8
    assert torch.equal(windows, parts.validation_windows(16, 8))


def test_rate_rises_then_falls_along_half_a_cosine() -> None:
    """A line up to the peak, its middle at 55 %, a tenth of it at the end."""
    recipe = Recipe(steps=110, warmup=10, rate=1.0)
    rates = [recipe.rate_at(step) for step in range(1, 111)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert recipe.rate_at(60) == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert Recipe(warmup=0).rate_at(1) > 0


def test_training_starts_at_ln_v_learns_and_repeats() -> None:
    """The first loss is that of a model that knows nothing; the same seed gives the same losses bit for bit."""

    def history(seed: int) -> list[Progress]:
        torch.manual_seed(seed)
        recipe = Recipe(steps=30, batch=8, context=16, rate=1e-2, warmup=3, validate_every=20)
        return list(train(Decoder(tiny_config()), corpus(), recipe, seed))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    first, again = history(0), history(0)
    torch.set_num_threads(threads)
    print(f"\nloss {first[0].loss:.2f} -> {first[-1].loss:.2f}, ln 300 = {math.log(300):.2f}")
    assert first == again
    assert first[0].loss == pytest.approx(math.log(300), abs=0.1)
    assert first[-1].loss < 0.8 * math.log(300)
    assert [at.step for at in first if at.validation is not None] == [20, 30]


def test_a_diverged_training_stops_and_says_where() -> None:
    """Numbers that are none must not be written as a model."""
    model = Decoder(tiny_config())
    torch.nn.init.constant_(model.norm.weight, math.inf)
    with pytest.raises(Diverged, match=r"step 1 .*lower --rate"):
        next(train(model, corpus(), Recipe(steps=3, context=16), 0))


def test_gains_of_norms_do_not_decay() -> None:
    """With gradients of 0 a step of AdamW is pure decay: matrices shrink, gains stay."""
    model = Decoder(tiny_config())
    optimizer = torch.optim.AdamW(_groups(model, 0.5), lr=0.1)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    for name, weight in model.named_parameters():
        factor = 1.0 if "norm" in name else 0.95
        assert torch.allclose(weight, before[name] * factor), name


def test_what_model_type_llama_cannot_say_is_not_written(tmp_path: Path) -> None:
    """A folder that would be read back as another model is refused."""
    with pytest.raises(ConfigError, match="qk_norm"):
        export(Decoder(tiny_config(qk_norm=True)), train_tokenizer(TEXT, 300), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_curve_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    history = [Progress(step, 6.0 / step, 6.5 / step if step % 2 else None) for step in range(1, 6)]
    save_curve(tmp_path / "loss.png", history, 300)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--vocab", "256"), "at least 257 tokens"),
        (("--context", "100000"), "training part has"),
        (("--heads", "3"), "--heads must divide --dim"),
        (("--kv-heads", "3"), "kv_heads must divide heads"),
        (("--steps", "0"), "steps must be at least 1"),
        (("--rate", "0"), "rate and clip must be above 0"),
        (("--text", "no-such-file.txt"), "no-such-file.txt"),
    ],
)
def test_impossible_options_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, str], named: str
) -> None:
    """One line that names the option and the limit, exit code 2, nothing trained."""
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    start = ["--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out"), "--dim", "32"]
    assert main([*start, *words]) == 2
    assert named in capsys.readouterr().out.replace("\n", " ")


def test_a_text_without_room_for_validation_is_refused() -> None:
    with pytest.raises(TextError, match="validation part has"):
        Corpus.of(TEXT[:600], vocab_size=260, context=100)
