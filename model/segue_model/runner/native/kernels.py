"""The kernels as Python sees them: numpy arrays in, checked, and one ctypes call each, which releases the GIL."""

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from segue_model.runner.native.library import (
    DRAW,
    DRAWN,
    Batch,
    Complaint,
    Drawn,
    Library,
    Rounding,
    Shape,
    Slot,
    Stored,
)

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


class Kernels:
    """One model in C++: its weights, its pages and its threads, all freed with this object."""

    def __init__(self, path: Path, shape: Shape, cos: Floats, sin: Floats) -> None:
        """cos, sin: (context, head_dim / 2), contiguous; copied."""
        self._library = Library.load(path)
        self._f = self._library.functions
        self._handle = ctypes.c_void_p()
        self._library.checked(
            self._f.segue_create(ctypes.byref(shape), cos.ctypes.data, sin.ctypes.data, ctypes.byref(self._handle))
        )
        self.close = weakref.finalize(self, self._f.segue_destroy, self._handle)

    def row_bytes(self, stored: Stored, cols: int) -> int:
        """Bytes of a stored row, 0 when `cols` is no whole number of blocks."""
        return int(self._f.segue_row_bytes(stored, cols))

    def set_matrix(
        self, slot: Slot, layer: int, stored: Stored, rounding: Rounding, rows: npt.NDArray[np.uint8], cols: int
    ) -> None:
        """rows: (count, row_bytes(stored, cols)), contiguous; repacked into memory of its own."""
        if rows.shape[1] != self.row_bytes(stored, cols) or not rows.flags.c_contiguous:
            raise ValueError(f"a row of {cols} {stored.name} values cannot have {rows.shape[1]} bytes")
        address, count = rows.ctypes.data, rows.shape[0]
        self._library.checked(
            self._f.segue_set_matrix(self._handle, slot, layer, stored, rounding, address, count, cols)
        )

    def tie_head(self) -> None:
        self._f.segue_tie_head(self._handle)

    def set_vector(self, slot: Slot, layer: int, values: Floats) -> None:
        status = self._f.segue_set_vector(self._handle, slot, layer, values.ctypes.data, values.shape[0])
        self._library.checked(status)

    @property
    def page_bytes(self) -> int:
        return int(self._f.segue_page_bytes(self._handle))

    @property
    def weight_bytes(self) -> int:
        return int(self._f.segue_weight_bytes(self._handle))

    def unpack_row(self, slot: Slot, layer: int, row: int, cols: int) -> Floats:
        """A row of a matrix as the kernels see it, (cols,)."""
        out = np.empty(-(-cols // 32) * 32, np.float32)
        self._f.segue_unpack_row(self._handle, slot, layer, row, out.ctypes.data)
        return out[:cols]

    def keep_workers_on(self, cores: Sequence[int]) -> None:
        """Thread i of the pool on cores[i], except for thread 0, which is the caller of `forward`."""
        self._f.segue_keep_workers_on(self._handle, (ctypes.c_int32 * len(cores))(*cores))

    def forward(self, batch: Batch) -> Complaint:
        """Compute a batch whose arrays the caller holds. With a fault in the complaint, nothing was computed."""
        complaint = Complaint()
        status = self._f.segue_forward(self._handle, ctypes.byref(batch), ctypes.byref(complaint))
        self._library.checked(status)
        return complaint

    def sample(self, draws: bytes, vocab: int) -> Iterator[Drawn]:
        """draws: packed; the caller holds the rows, of `vocab` logits each, and whatever else they point to."""
        count = len(draws) // DRAW.size
        drawn = ctypes.create_string_buffer(count * DRAWN.size)
        self._library.checked(self._f.segue_sample(self._handle, draws, count, vocab, drawn))
        return DRAWN.iter_unpack(drawn)

    def copy_page(self, source: int, target: int) -> None:
        self._f.segue_copy_page(self._handle, source, target)

    def export_pages(self, pages: Ints, out: Floats) -> None:
        """out: (2, layers, kv_heads, tokens, head_dim), contiguous."""
        self._f.segue_export(self._handle, pages.ctypes.data, out.shape[3], out.ctypes.data)

    def import_pages(self, pages: Ints, kv: Floats) -> None:
        """kv: (2, layers, kv_heads, tokens, head_dim), contiguous."""
        self._f.segue_import(self._handle, pages.ctypes.data, kv.shape[3], kv.ctypes.data)

    def fill_pages(self, byte: int) -> None:
        """Overwrite the whole pool: what stale memory can hold, for tests."""
        self._f.segue_fill_pages(self._handle, byte)

    def read_seconds(self, size: int, repeats: int) -> float:
        """Best time to read `size` bytes of memory with all threads."""
        return float(self._f.segue_probe_read(self._handle, size, repeats))

    def multiply_seconds(self, rounds: int, repeats: int) -> float:
        """Best time for `rounds` * 8 byte dot products of 64 bytes on each thread."""
        return float(self._f.segue_probe_multiply(self._handle, rounds, repeats))

    def tile_seconds(self, rounds: int, repeats: int) -> float:
        """Best time for `rounds` * 4 products of bf16 tiles, 16 * 16 * 32 each, on each thread; 0: no matrix unit."""
        return float(self._f.segue_probe_tiles(self._handle, rounds, repeats))

    def linear(self, slot: Slot, layer: int, x: Floats, outputs: int, repeats: int = 1) -> tuple[Floats, float]:
        """x (rows, cols) through one matrix: (rows, outputs) and the best time in seconds."""
        out = np.zeros((x.shape[0], -(-outputs // 32) * 32), np.float32)
        seconds = self._f.segue_linear(self._handle, slot, layer, x.ctypes.data, x.shape[0], out.ctypes.data, repeats)
        return out[:, :outputs], float(seconds)
