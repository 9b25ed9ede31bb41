"""`python -m segue_model.seq2seq.demo`: train sequence reversal, check it on unseen sequences, show where it looks."""

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from segue_model.checkpoint import CheckpointError
from segue_model.config import ConfigError
from segue_model.loaders.fields import read_json
from segue_model.seq2seq.config import BOS, EOS, SPECIAL_TOKENS, TransformerConfig
from segue_model.seq2seq.decoding import greedy
from segue_model.seq2seq.picture import in_characters, save_png
from segue_model.seq2seq.reversal import Reversal, exact_matches
from segue_model.seq2seq.storage import load, save
from segue_model.seq2seq.training import fit
from segue_model.seq2seq.transformer import Transformer

_TASK = "task.json"  # beside the model: what it was trained on
_BEYOND = (1, 2, 4, 8)  # by how much longer than trained

# The rate grows as the width shrinks: 0.0028 after 1000 steps of warmup, four times the paper's peak, undoes learning.
_WARMUP = "steps of rising learning rate; more than --steps: a short run stays below the peak (default: %(default)s)"


def main(words: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 exact match below 99 %, 2 an option that cannot work."""
    options = _parser().parse_args(words)
    console = Console(highlight=False)
    try:
        _check_plot(options.plot)
        task, model = _loaded(options.load) if options.load else _trained(options, console)
    except (ConfigError, CheckpointError) as error:
        console.print(f"demo: {error}", markup=False)
        return 2
    if options.save:
        save(model, options.save)
        (options.save / _TASK).write_text(json.dumps(asdict(task)) + "\n", encoding="utf-8")
    matched = _check(model, task, options, console)
    _show_attention(model, task.held_out(options.seed, task.max_length, 1)[0], options.plot, console)
    return 0 if matched >= 0.99 else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m segue_model.seq2seq.demo", description=__doc__)
    parser.add_argument("--steps", type=_count, default=1200, help="training batches (default: %(default)s)")
    parser.add_argument("--warmup", type=_count, default=2000, help=_WARMUP)
    parser.add_argument("--batch", type=_count, default=64, help="sequences in a batch (default: %(default)s)")
    parser.add_argument("--dim", type=_count, default=64, help="d_model (default: %(default)s)")
    parser.add_argument("--norm", choices=("post", "pre"), default="post", help="default: %(default)s, as in the paper")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches, dropout and checks (default: 0)")
    parser.add_argument("--beams", type=_count, default=1, help="of the check; 1 = greedy (default: %(default)s)")
    parser.add_argument(
        "--checks", type=_count, default=100, help="held-out sequences per length (default: %(default)s)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="cross-attention of all heads; needs matplotlib")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write the trained model")
    parser.add_argument("--load", type=Path, metavar="DIR", help="decode with a saved model instead of training")
    return parser


def _check_plot(path: Path | None) -> None:
    """Rather now than after the training."""
    if path and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'segue[train]'")
    if path and not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.absolute().parent}")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _trained(options: argparse.Namespace, console: Console) -> tuple[Reversal, Transformer]:
    task = Reversal()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # batches this small gain little from more, and lose much where other work needs the cores
    model = Transformer(_config(task, options))
    count = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"{count:,} parameters, reversing {task.min_length} to {task.max_length} of {task.symbols} symbols")
    began = time.monotonic()
    batches = task.batches(options.seed, options.batch)
    losses = fit(model, batches, steps=options.steps, warmup=options.warmup)
    columns = ("training", BarColumn(), "{task.completed}/{task.total}", TextColumn("loss {task.fields[loss]:.3f}"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("", total=options.steps, loss=float("nan"))
        for loss in losses:
            progress.update(bar, advance=1, loss=loss)
    console.print(
        f"trained in {time.monotonic() - began:.1f} s, last loss {loss:.3f} nats (smoothed: it cannot reach 0)"
    )
    return task, model


def _config(task: Reversal, options: argparse.Namespace) -> TransformerConfig:
    return TransformerConfig(
        source_vocab=task.vocab,
        target_vocab=task.vocab,
        dim=options.dim,
        heads=4,
        encoder_layers=2,
        decoder_layers=2,
        dropout=0.0,
        norm=options.norm,
        share_embeddings=True,
    )


def _loaded(folder: Path) -> tuple[Reversal, Transformer]:
    fields = read_json(folder / _TASK)
    task = Reversal(*(fields.integer(name) for name in ("symbols", "min_length", "max_length")))
    model = load(folder)
    if model.config.source_vocab != task.vocab:
        raise CheckpointError(f"{folder}: the model has {model.config.source_vocab} tokens, its task {task.vocab}")
    return task, model


def _check(model: Transformer, task: Reversal, options: argparse.Namespace, console: Console) -> float:
    """Exact match by length, in and beyond the trained range; returns the mean over the trained one."""
    trained = range(task.min_length, task.max_length + 1)
    beyond = [task.max_length + extra for extra in _BEYOND]
    shares = {
        length: exact_matches(model, task.held_out(options.seed, length, options.checks), beams=options.beams)
        for length in (*trained, *beyond)
    }
    matched = sum(shares[length] for length in trained) / len(trained)
    console.print(
        f"\nexact match, {options.checks} held-out sequences of each length: {matched:.1%} of trained lengths"
    )
    console.print("  trained: " + "  ".join(f"{n}: {shares[n]:.0%}" for n in trained))
    console.print("  longer:  " + "  ".join(f"{n}: {shares[n]:.0%}" for n in beyond))
    return matched


@torch.inference_mode()
def _show_attention(model: Transformer, source: list[int], plot: Path | None, console: Console) -> None:
    """Decode one sequence, then read the weights of the same tokens again in one pass."""
    batch = torch.tensor([source])
    found = greedy(model, batch, max_tokens=len(source) + 4).tokens  # (1, T)
    read = torch.cat((torch.tensor([[BOS]]), found[:, :-1]), dim=1)
    weights = [layer[0] for layer in model.decode(read, model.encode(batch), need_weights=True).cross_weights]
    rows, columns = [_name(token) for token in found[0].tolist()], [_name(token) for token in source]
    console.print("\ncross-attention, last layer, mean of its heads (down: written, across: source)\n")
    console.print(in_characters(weights[-1].mean(dim=0), rows, columns), markup=False)
    if plot:
        save_png(plot, weights, rows, columns)
        console.print(f"\nall heads of all layers: {plot}", markup=False)


def _name(token: int) -> str:
    if token < SPECIAL_TOKENS:
        return "end" if token == EOS else "?"
    return str(token - SPECIAL_TOKENS)


if __name__ == "__main__":
    sys.exit(main())
