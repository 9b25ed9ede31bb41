"""The recipe of sections 5 and 6.1: Adam, the Noam schedule, label smoothing, teacher forcing, averaged weights."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.optim.swa_utils import AveragedModel

from segue_model.seq2seq.config import BOS, EOS, PAD
from segue_model.seq2seq.loss import label_smoothed_loss
from segue_model.seq2seq.schedule import NoamSchedule
from segue_model.seq2seq.transformer import Transformer

_AVERAGED = 0.1  # of the steps, the last ones; the paper averaged its last checkpoints


class Pairs(NamedTuple):
    """A batch of translations, padded at the end to the longest."""

    source: torch.Tensor  # (B, S)
    target: torch.Tensor  # (B, T), begins with BOS and ends with EOS

    @classmethod
    def of(cls, sources: list[list[int]], targets: list[list[int]]) -> "Pairs":
        """BOS and EOS are put around the targets here."""
        return cls(pad(sources), pad([[BOS, *target, EOS] for target in targets]))


def pad(rows: list[list[int]]) -> torch.Tensor:
    """Rows of unequal length as one tensor (B, longest)."""
    longest = max(map(len, rows))
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])


def fit(
    model: Transformer, batches: Iterator[Pairs], *, steps: int, warmup: int, smoothing: float = 0.1
) -> Iterator[float]:
    """Train for `steps` batches, yielding each one's loss; ends in eval mode with the mean of the last weights."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    schedule = NoamSchedule(optimizer, dim=model.config.dim, warmup=warmup)
    average = AveragedModel(model)  # the rate falls slowly, so single steps still jump about; their mean does not
    model.train()
    for step in range(steps):
        source, target = next(batches)
        # The decoder reads BOS a b c and should say a b c EOS: one position shifted against the other.
        loss = label_smoothed_loss(model(source, target[:, :-1]), target[:, 1:], smoothing)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
        if step >= steps * (1 - _AVERAGED):
            average.update_parameters(model)
        yield loss.item()
    model.load_state_dict(average.module.state_dict())
    model.eval()
