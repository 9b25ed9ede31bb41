"""Who may not look at whom. True = blocked; masks combine with `|` and broadcast to scores (B, H, T, S)."""

import torch

from segue_model.seq2seq.config import PAD


def padding_mask(tokens: torch.Tensor) -> torch.Tensor:
    """tokens: (B, S); returns (B, 1, 1, S): nobody looks at padding, whatever the head and the query."""
    return (tokens == PAD)[:, None, None, :]


def causal_mask(start: int, count: int, device: torch.device | None = None) -> torch.Tensor:
    """Queries at positions start .. start + count - 1 see the keys up to themselves; returns (T, S), S = start + T.

    In training start is 0 and the mask a square triangle; with a cache it is the triangle's last `count` rows.
    """
    queries = torch.arange(start, start + count, device=device)[:, None]  # (T, 1)
    keys = torch.arange(start + count, device=device)[None, :]  # (1, S)
    return keys > queries
