"""How the decoder is trained: AdamW, cosine schedule with warmup, gradient clipping, validation on the way."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy

from segue_model.config import ConfigError
from segue_model.decoder import Decoder
from segue_model.train.text import Corpus

_VALIDATION_WINDOWS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Raises ConfigError, naming the field."""

    steps: int = 1000
    batch: int = 16  # windows a step
    context: int = 256  # tokens a window
    rate: float = 1e-3  # the highest learning rate
    warmup: int = 50  # steps from 0 to it
    weight_decay: float = 0.1
    clip: float = 1.0  # largest norm of the gradient
    validate_every: int = 50  # steps

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "context", "validate_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.rate > 0 or not self.clip > 0:
            raise ConfigError(f"rate and clip must be above 0, got {self.rate} and {self.clip}")
        if self.warmup < 0 or self.weight_decay < 0:
            raise ConfigError(f"warmup and weight_decay must not be negative: {self.warmup} and {self.weight_decay}")

    def rate_at(self, step: int) -> float:
        """Of step 1 .. steps: up in a line, then half a cosine down to a tenth (Loshchilov and Hutter 2017)."""
        if step <= self.warmup:
            return self.rate * step / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.rate * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


class Diverged(ValueError):
    """Training has left the range of numbers; says where."""


class Progress(NamedTuple):
    """After a step; losses in nats per token."""

    step: int
    loss: float
    validation: float | None  # where it was measured


def train(model: Decoder, corpus: Corpus, recipe: Recipe, seed: int) -> Iterator[Progress]:
    """Train in place, one step for each value taken. Raises Diverged when the loss is no number any more."""
    optimizer = torch.optim.AdamW(_groups(model, recipe.weight_decay), lr=recipe.rate, betas=(0.9, 0.95))
    batches = corpus.batches(recipe.context, recipe.batch, torch.Generator().manual_seed(seed))
    windows = corpus.validation_windows(recipe.context, _VALIDATION_WINDOWS)
    for step in range(1, recipe.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate_at(step)
        loss = _loss(model, next(batches))
        if not bool(loss.isfinite()):
            raise Diverged(f"the loss of step {step} is {loss.item()}: lower --rate or raise --warmup")
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        due = step % recipe.validate_every == 0 or step == recipe.steps
        yield Progress(step, loss.item(), validation_loss(model, windows) if due else None)


@torch.no_grad()
def validation_loss(model: Decoder, windows: torch.Tensor) -> float:
    """Mean over the windows (N, context + 1), a few at a time."""
    parts = [(_loss(model, part).item(), len(part)) for part in torch.split(windows, 8)]
    return sum(loss * count for loss, count in parts) / len(windows)


def _loss(model: Decoder, windows: torch.Tensor) -> torch.Tensor:
    """Each token of a window, but the first, is predicted from those before it."""
    logits = model(windows[:, :-1])  # (B, context, vocab)
    return cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def _groups(model: Decoder, weight_decay: float) -> list[dict[str, object]]:
    """Matrices decay; gains of norms do not: pulling them to 0 would silence their layer."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    gains = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": gains, "weight_decay": 0.0}]
