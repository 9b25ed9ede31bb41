"""How near one runner's next-token distributions are to another's: the quality that a format of weights or KV costs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from segue_model.runner.base import PAGE_TOKENS, Runner, Slice, Want


@dataclass(frozen=True, slots=True)
class Agreement:
    """Over `tokens` positions: mean KL(reference || runner) in nats, and how often both have the same best token."""

    tokens: int
    mean_kl: float
    top1: float


def window_logits(runner: Runner, tokens: Sequence[int], window: int = 1024) -> Iterator[torch.Tensor]:
    """Logits (<= window, vocabulary) of each window of the text; a window sees nothing of those before it.

    Raises ValueError when the runner's pages hold less than a window.
    """
    pages = -(-window // PAGE_TOKENS)
    if pages > runner.num_pages:
        raise ValueError(f"window of {window} tokens needs {pages} pages, and the runner has {runner.num_pages}")
    for start in range(0, len(tokens), window):
        (logits,) = runner.forward([Slice(tokens[start : start + window], 0, range(pages), Want.ALL)])
        if logits is not None:
            yield torch.from_numpy(logits)


def agreement(reference: Iterator[torch.Tensor], logits: Iterator[torch.Tensor]) -> Agreement:
    """Raises ValueError for texts of different lengths, or of none."""
    tokens, divergence, same = 0, 0.0, 0
    for theirs, ours in zip(reference, logits, strict=True):
        p, q = theirs.log_softmax(-1), ours.log_softmax(-1)
        divergence += (p.exp() * (p - q)).sum(-1).double().sum().item()
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        tokens += len(p)
    if not tokens:
        raise ValueError("the text has no token")
    return Agreement(tokens, divergence / tokens, same / tokens)
