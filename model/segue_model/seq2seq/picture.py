"""Attention weights to look at: characters in the terminal, and all heads in a PNG."""

from collections.abc import Sequence
from pathlib import Path

import torch

_DENSITY = " .:-=+*#%@"


def in_characters(weights: torch.Tensor, rows: Sequence[str], columns: Sequence[str]) -> str:
    """weights (T, S) of one head, or a mean: a row per decoder step, a column per source position; denser is larger."""
    left, width = max(map(len, rows)), max(map(len, columns)) + 1
    lines = [" " * left + "".join(name.rjust(width) for name in columns)]
    for name, line in zip(rows, weights.tolist(), strict=True):
        lines.append(name.rjust(left) + "".join(_character(weight).rjust(width) for weight in line))
    return "\n".join(lines)


def _character(weight: float) -> str:
    return _DENSITY[min(int(weight * len(_DENSITY)), len(_DENSITY) - 1)]


def save_png(path: Path, weights: Sequence[torch.Tensor], rows: Sequence[str], columns: Sequence[str]) -> None:
    """weights: per layer (H, T, S); one panel per head, one line of panels per layer. Needs matplotlib."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - only who asks for a picture needs it

    heads = weights[0].shape[0]
    figure = Figure(figsize=(2.6 * heads, 2.8 * len(weights)), layout="constrained")
    panels = figure.subplots(len(weights), heads, squeeze=False)
    for layer, of_layer in enumerate(weights):
        for head, (panel, of_head) in enumerate(zip(panels[layer], of_layer, strict=True)):
            panel.imshow(of_head.numpy(), cmap="Greys", vmin=0, vmax=1)
            panel.set_title(f"layer {layer + 1}, head {head + 1}", fontsize=9)
            panel.set_xticks(range(len(columns)), columns, fontsize=7)
            panel.set_yticks(range(len(rows)), rows, fontsize=7)
    figure.supxlabel("source position")
    figure.supylabel("decoder step")
    figure.savefig(path, dpi=120, format="png")
