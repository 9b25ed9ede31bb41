"""The learning rate of section 5.3: up in a straight line for `warmup` steps, then down with the root of the step."""

from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

_WHY_NOT_ZERO = (
    "the schedule multiplies it, so the rate would stay 0 for ever, while the noise of dropout makes the loss move as"
    " if the model learned; use lr=1"
)


def noam_rate(step: int, dim: int, warmup: int) -> float:
    """dim^-0.5 * min(t^-0.5, t * warmup^-1.5) for step t = 1, 2, ...; highest at t = warmup."""
    return float(dim**-0.5 * min(step**-0.5, step * warmup**-1.5))


class NoamSchedule(LambdaLR):
    """Sets the optimizer's rate to its base rate, which should be 1, times `noam_rate`; the first step is t = 1.

    Raises ValueError for a base rate that is not above 0 and for dim or warmup below 1.
    """

    def __init__(self, optimizer: Optimizer, *, dim: int, warmup: int) -> None:
        if dim < 1 or warmup < 1:
            raise ValueError(f"dim and warmup must be at least 1, got {dim} and {warmup}")
        for group in optimizer.param_groups:
            if not group["lr"] > 0:
                raise ValueError(f"the optimizer's lr must be above 0, got {group['lr']}: {_WHY_NOT_ZERO}")
        super().__init__(optimizer, partial(_factor, dim=dim, warmup=warmup))


def _factor(steps_done: int, *, dim: int, warmup: int) -> float:
    return noam_rate(steps_done + 1, dim, warmup)
