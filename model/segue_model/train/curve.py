"""The loss over the steps as a PNG."""

import math
from collections.abc import Sequence
from pathlib import Path

from segue_model.train.recipe import Progress


def save_curve(path: Path, history: Sequence[Progress], vocab_size: int) -> None:
    """Training and validation loss, and ln V, where a model that knows nothing stands. Needs matplotlib."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - only who asks for a picture needs it

    measured = [(at.step, at.validation) for at in history if at.validation is not None]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([at.step for at in history], [at.loss for at in history], linewidth=0.8, label="training")
    axes.plot(*zip(*measured, strict=True), marker="o", markersize=3, label="validation")
    axes.axhline(math.log(vocab_size), color="grey", linestyle="--", label=f"ln {vocab_size}: knows nothing")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.legend()
    figure.savefig(path, dpi=120, format="png")
