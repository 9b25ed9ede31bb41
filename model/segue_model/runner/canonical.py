"""The canonical layout of exported KV: what every runner checks before it reads or writes its own pages."""

from collections.abc import Sequence

import numpy as np

from segue_model.arrays import Floats
from segue_model.config import DecoderConfig
from segue_model.paging import PAGE_TOKENS


def check_exported_tokens(pages: Sequence[int], tokens: int) -> None:
    """Raises ValueError when a page table does not hold the first `tokens` positions."""
    if not 0 <= tokens <= len(pages) * PAGE_TOKENS:
        raise ValueError(f"tokens must lie in 0 .. {len(pages) * PAGE_TOKENS}, got {tokens}")


def check_canonical(config: DecoderConfig, pages: Sequence[int], kv: Floats) -> int:
    """The positions that `kv`, (2, layers, kv_heads, tokens, head_dim), holds for the pages of a table.

    Raises ValueError for a foreign shape, too few pages, and values that are not finite, which would outlive their
    session.
    """
    tokens = kv.shape[3] if kv.ndim == 5 else 0
    if kv.shape != (2, config.layers, config.kv_heads, tokens, config.head_dim) or not tokens:
        expected = f"(2, {config.layers}, {config.kv_heads}, tokens, {config.head_dim})"
        raise ValueError(f"kv must have the shape {expected}, got {kv.shape}")
    if tokens > len(pages) * PAGE_TOKENS:
        raise ValueError(f"{len(pages)} pages of {PAGE_TOKENS} do not cover {tokens} positions")
    if not np.isfinite(kv).all():
        raise ValueError("kv holds values that are not finite")
    return tokens
