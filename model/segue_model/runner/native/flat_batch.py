"""A ragged batch as flat arrays, the way the kernels take it, and their complaints as errors."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt

from segue_model.config import DecoderConfig
from segue_model.runner.base import PAGE_TOKENS, Slice, Want
from segue_model.runner.native.kernels import Floats, Ints
from segue_model.runner.native.library import Batch, Complaint, Fault

_WANTS: Final = {Want.NOTHING: 0, Want.LAST: 1, Want.ALL: 2}


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """All slices one after the other."""

    lengths: Ints  # (slices,) tokens
    starts: Ints  # (slices,)
    tables: Ints  # (slices,) pages of each table that are used
    wants: npt.NDArray[np.int32]  # (slices,)
    token_ids: Ints
    pages: Ints
    logit_counts: tuple[int, ...]  # rows of logits that each slice wants

    @classmethod
    def of(cls, batch: Sequence[Slice]) -> "FlatBatch":
        """Raises ValueError for numbers beyond 64 bits; everything else is checked by the kernels."""
        used = [item.pages[: max(0, -(-(item.start + len(item.token_ids)) // PAGE_TOKENS))] for item in batch]
        return cls(
            lengths=_integers([len(item.token_ids) for item in batch]),
            starts=_integers([item.start for item in batch]),
            tables=_integers([len(table) for table in used]),
            wants=np.array([_WANTS[item.want] for item in batch], np.int32),
            token_ids=_integers(chain.from_iterable(item.token_ids for item in batch)),
            pages=_integers(chain.from_iterable(used)),
            logit_counts=tuple(_logit_count(item) for item in batch),
        )

    def pointing_to(self, logits: Floats) -> Batch:
        """The C structure; valid as long as this object and `logits` live."""
        arrays = (self.lengths, self.starts, self.tables, self.wants, self.token_ids, self.pages, logits)
        return Batch(len(self.lengths), *(array.ctypes.data for array in arrays))


def complaint_text(complaint: Complaint, batch: Sequence[Slice], config: DecoderConfig, num_pages: int) -> str:
    """What is wrong with which slice, and the limit it broke."""
    item = batch[complaint.slice]
    end = item.start + len(item.token_ids)
    problems = {
        Fault.EMPTY: "token_ids must hold at least one token",
        Fault.POSITION: f"positions {item.start} .. {end - 1} must lie in 0 .. {config.max_context_tokens - 1}",
        Fault.COVER: f"{len(item.pages)} pages of {PAGE_TOKENS} do not cover {end} positions",
        Fault.TOKEN: f"token_ids must lie in 0 .. {config.vocab_size - 1}, got {complaint.value}",
        Fault.PAGE: f"page ids must lie in 0 .. {num_pages - 1}, got {complaint.value}",
        Fault.SHARED: f"page {complaint.value} is written here and used elsewhere in the batch",
    }
    return f"slice {complaint.slice}: {problems[Fault(complaint.fault)]}"


def _integers(values: Iterable[int]) -> Ints:
    try:
        return np.fromiter(values, np.int64)
    except OverflowError as error:
        raise ValueError("token ids, positions and page ids must fit into 64 bits") from error


def _logit_count(item: Slice) -> int:
    return {Want.NOTHING: 0, Want.LAST: 1, Want.ALL: len(item.token_ids)}[item.want]
