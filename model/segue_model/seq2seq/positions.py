"""Where a token stands (section 3.5): attention alone sees a set, not a sequence."""

import torch

_BASE = 10_000.0


def sinusoids(start: int, count: int, dim: int, device: torch.device | None = None) -> torch.Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i / dim)), PE(pos, 2i + 1) = cos of the same; returns (count, dim).

    Positions start .. start + count - 1. Each pair is a clock hand; a shift by k turns every hand by a fixed angle.
    """
    positions = torch.arange(start, start + count, dtype=torch.float32, device=device)[:, None]  # (T, 1)
    channels = torch.arange(0, dim, 2, dtype=torch.float32, device=device)  # (dim / 2,)
    angles = positions * _BASE ** (-channels / dim)  # (T, dim / 2)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)
