"""The one seam between the server and the arithmetic.

The server hands over integers (token ids, positions, page ids) and gets logits back. It never sees a KV tensor: the
bytes of a page belong to the runner.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from segue_model.arrays import Floats, Logits
from segue_model.config import DecoderConfig
from segue_model.paging import PAGE_TOKENS
from segue_model.sampling import Outcome, SampleRequest

__all__ = ["PAGE_TOKENS", "Runner", "Slice", "Want"]


class Want(Enum):
    """Which logits of a slice the caller needs."""

    NOTHING = "nothing"  # a prompt chunk that is not the last
    LAST = "last"  # the next token's
    ALL = "all"  # prompt logprobs, scoring


@dataclass(frozen=True, slots=True)
class Slice:
    """One sequence's share of a ragged batch: T tokens at positions start .. start + T - 1.

    Keys run from 0 to start + T - 1, so the mask is (T, start + T) and RoPE is sliced from `start`.
    Decode is T = 1; a prompt chunk, a second turn, a fork and a rewind are the same case with other numbers.
    """

    token_ids: Sequence[int]  # T >= 1
    start: int  # positions already computed: cache.pos
    pages: Sequence[int]  # page table; covers at least start + T positions, only this sequence writes the last ones
    want: Want = Want.LAST


class Runner(Protocol):
    """Computes ragged batches over paged KV, and draws from what comes out. Called from one thread only."""

    @property
    def config(self) -> DecoderConfig: ...

    @property
    def name(self) -> str:
        """What runs, for logs and build_info, such as "torch-cpu-float32"."""
        ...

    @property
    def page_bytes(self) -> int:
        """Bytes one page takes in the pool: PAGE_TOKENS positions of K and V over all layers."""
        ...

    @property
    def num_pages(self) -> int:
        """Pages in the pool; page ids are 0 .. num_pages - 1."""
        ...

    @property
    def batch_invariant(self) -> bool:
        """A token's logits are the same bits whatever else is in the batch, and however its history was chunked."""
        ...

    def forward(self, batch: Sequence[Slice]) -> list[Logits | None]:
        """Compute the batch, write its K and V into the pages, and return float32 logits slice by slice.

        None for Want.NOTHING, (1, vocab) for LAST, (T, vocab) for ALL. No slice may read a page that another slice of
        the same batch writes.
        """
        ...

    def sample(self, rows: Sequence[Logits], requests: Sequence[SampleRequest]) -> list[Outcome]:
        """Draw a token from each row of logits (vocab,): what sampling.sample draws, bit for bit."""
        ...

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages (source, target): copy-on-write of a partial page after a fork."""
        ...

    def export_pages(self, pages: Sequence[int], tokens: int) -> Floats:
        """The first `tokens` positions of a page table in the canonical layout, any runner can import it.

        Canonical: (2, layers, kv_heads, tokens, head_dim), contiguous, in the KV dtype (arrays.BFLOAT16 for bfloat16).
        """
        ...

    def import_pages(self, pages: Sequence[int], kv: Floats) -> None:
        """Write a canonical array into the pages of a table, from position 0 on."""
        ...
