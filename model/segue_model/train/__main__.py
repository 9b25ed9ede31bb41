"""`python -m segue_model.train --text FILE --out DIR`: train a small decoder on a text; then `make serve MODEL=DIR`."""

import argparse
import importlib.util
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from segue_model.config import ConfigError, DecoderConfig
from segue_model.decoder import Decoder
from segue_model.train.curve import save_curve
from segue_model.train.export import export
from segue_model.train.recipe import Diverged, Progress, Recipe, train
from segue_model.train.text import Corpus, TextError


def main(words: Sequence[str] | None = None) -> int:
    """Exit codes: 0 trained and written, 2 an option or the text cannot work, or the training diverged."""
    options = _parser().parse_args(words)
    console = Console(highlight=False)
    try:
        _run(options, console)
    except (ConfigError, TextError, Diverged, OSError, UnicodeDecodeError) as error:
        console.print(f"train: {error}", markup=False)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m segue_model.train", description=__doc__)
    parser.add_argument(
        "--text", type=Path, required=True, metavar="FILE", help="UTF-8 text; its last tenth is held out"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the model is written")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="loss curve (default: DIR/loss.png, if it can be)"
    )
    parser.add_argument("--vocab", type=int, default=1024, help="tokens of the BPE, at most (default: %(default)s)")
    parser.add_argument("--dim", type=int, default=256, help="width of the residual stream (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--heads", type=int, default=4, help="query heads (default: %(default)s)")
    parser.add_argument("--kv-heads", type=int, default=2, help="key and value heads (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")
    recipe = Recipe()
    parser.add_argument("--steps", type=int, default=recipe.steps, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=recipe.batch, help="windows a step (default: %(default)s)")
    parser.add_argument("--context", type=int, default=recipe.context, help="tokens a window (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=recipe.rate, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=recipe.warmup, help="steps up to it (default: %(default)s)")
    return parser


def _run(options: argparse.Namespace, console: Console) -> None:
    can_plot = importlib.util.find_spec("matplotlib") is not None
    if options.plot and not can_plot:
        raise ConfigError("--plot needs matplotlib: pip install 'segue[train]'")
    recipe = Recipe(
        steps=options.steps, batch=options.batch, context=options.context, rate=options.rate, warmup=options.warmup
    )
    corpus = Corpus.of(options.text.read_text(encoding="utf-8"), vocab_size=options.vocab, context=options.context)
    config = _config(options, corpus.tokenizer.get_vocab_size())
    options.out.mkdir(parents=True, exist_ok=True)  # rather now than after an hour
    console.print(f"{config.parameter_count:,} parameters, {config.vocab_size} tokens in the vocabulary")
    console.print(f"{len(corpus.train):,} tokens to learn from, {len(corpus.validation):,} held out")
    torch.manual_seed(options.seed)
    model = Decoder(config)
    history = _watched(model, corpus, recipe, options.seed, console)
    export(model, corpus.tokenizer, options.out)
    if can_plot:
        save_curve(options.plot or options.out / "loss.png", history, config.vocab_size)
    console.print(f"written; now: make serve MODEL={options.out}", markup=False)


def _config(options: argparse.Namespace, vocab_size: int) -> DecoderConfig:
    if options.heads < 1 or options.dim % options.heads:
        raise ConfigError(f"--heads must divide --dim, got {options.heads} and {options.dim}")
    return DecoderConfig(
        vocab_size=vocab_size,
        dim=options.dim,
        layers=options.layers,
        heads=options.heads,
        kv_heads=options.kv_heads,
        head_dim=options.dim // options.heads,
        ffn_dim=-(-options.dim * 8 // 3 // 32) * 32,  # three matrices cost what two of 4 dim did
        max_context_tokens=options.context,
        tie_embeddings=True,
    )


def _watched(model: Decoder, corpus: Corpus, recipe: Recipe, seed: int, console: Console) -> list[Progress]:
    """Train behind a progress bar; returns what happened at each step."""
    began, nothing = time.monotonic(), math.log(model.config.vocab_size)
    history: list[Progress] = []
    losses = TextColumn("loss {task.fields[loss]:.3f}, validation {task.fields[validation]:.3f}")
    columns = ("training", BarColumn(), "{task.completed}/{task.total}", losses, TimeRemainingColumn())
    with ProgressBar(*columns, console=console) as bars:
        bar = bars.add_task("", total=recipe.steps, loss=nothing, validation=nothing)
        for at in train(model, corpus, recipe, seed):
            history.append(at)
            bars.update(bar, advance=1, loss=at.loss)
            if at.validation is not None:
                bars.update(bar, validation=at.validation)
    figures = f"validation loss {history[-1].validation:.3f}; ln {model.config.vocab_size} = {nothing:.3f}"
    console.print(f"trained in {time.monotonic() - began:.1f} s: loss {history[-1].loss:.3f}, {figures}")
    return history


if __name__ == "__main__":
    sys.exit(main())
