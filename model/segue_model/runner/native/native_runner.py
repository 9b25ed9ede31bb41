"""The native CPU runner: one call into C++ a step, whatever the batch holds."""

import os
import sys
from collections.abc import Sequence
from typing import Final, Literal

import numpy as np

from segue_model.arrays import BFLOAT16, Floats, Logits, Weights
from segue_model.config import DecoderConfig
from segue_model.rope_frequencies import cosines_and_sines
from segue_model.runner.base import PAGE_TOKENS, Slice
from segue_model.runner.canonical import check_canonical, check_exported_tokens
from segue_model.runner.native.build import build, choose_isa
from segue_model.runner.native.draws import FlatDraws
from segue_model.runner.native.flat_batch import FlatBatch, complaint_text
from segue_model.runner.native.kernels import Ints, Kernels
from segue_model.runner.native.library import MAX_HEAD_DIM, PAIR_ROWS, KvType, Shape
from segue_model.runner.native.load import FORMATS, load_weights
from segue_model.sampling import Outcome, SampleRequest, check_rows

KvDtype = Literal["bfloat16", "float32", "int8"]
WeightsFormat = Literal["auto", "int8", "int4", "bf16"]

MAX_ROWS: Final = 256  # of one pass through the layers: their activations stay in the second-level cache
_KV_TYPES: Final = {"float32": KvType.FLOAT32, "bfloat16": KvType.BF16, "int8": KvType.INT8}
_EXPORTED: Final = {"float32": np.dtype(np.float32), "bfloat16": BFLOAT16, "int8": np.dtype(np.float32)}


def page_bytes(config: DecoderConfig, kv_dtype: KvDtype) -> int:
    """Bytes a page takes: heads are padded to 16 channels, int8 adds a scale to each key and value of a head."""
    width = -(-config.head_dim // 16) * 16
    vector = {"float32": 4 * width, "bfloat16": 2 * width, "int8": width + 4}[kv_dtype]
    return 2 * PAGE_TOKENS * config.layers * config.kv_heads * vector


def pages_for_bytes(config: DecoderConfig, kv_dtype: KvDtype, budget_bytes: int) -> int:
    """Pages that fit into `budget_bytes` of KV. Raises ValueError when not even one does."""
    page = page_bytes(config, kv_dtype)
    if budget_bytes < page:
        raise ValueError(f"a KV budget of {budget_bytes} bytes is less than one page of {page}")
    return budget_bytes // page


class NativeRunner:
    """Implements runner.base.Runner on the CPU.

    A token's logits are the same bits whatever else is in the batch, however its history was chunked, on any number of
    threads and in any pages; see README.md for the order of reduction that gives this. Memory of the pool is taken when
    a page is first written.

    weights: the arrays that `checkpoint.Checkpoint` names, read once and repacked. GGUF blocks are kept as they are
    with weights_format "auto"; floats become bf16 with "auto" and "bf16", or are rounded in groups of 32.
    threads: None takes every core this process may use. isa: see build.build.
    kernels: the C++ side, for tests and benchmarks.
    Raises NativeUnavailable when the kernels cannot be built here, ValueError for weights that do not fit the
    configuration or arguments out of range, MemoryError when there is not enough address space for the pool.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        *,
        num_pages: int,
        kv_dtype: KvDtype = "bfloat16",
        threads: int | None = None,
        weights_format: WeightsFormat = "auto",
        isa: str | None = None,
    ) -> None:
        self._threads = _cores() if threads is None else threads
        _check_arguments(config, num_pages, kv_dtype, self._threads, weights_format)
        self._config, self._num_pages, self._kv_dtype = config, num_pages, kv_dtype
        self._isa = choose_isa(isa)
        self.kernels = Kernels(build(isa), self._shape(), *cosines_and_sines(config))
        load_weights(config, weights, self.kernels, weights_format)
        self._logits: Logits = np.empty((0, self._padded_vocab), np.float32)

    @property
    def config(self) -> DecoderConfig:
        return self._config

    @property
    def name(self) -> str:
        return f"native-{self._isa}-{self._kv_dtype}"

    @property
    def threads(self) -> int:
        return self._threads

    def keep_threads_on(self, cores: Sequence[int]) -> None:
        """Compute thread i stays on cores[i] from now on. The calling thread, which shall call `forward`, is thread 0.

        Threads that the system moves about meet on one core whenever something else wakes up, and then wait for each
        other at every barrier. Raises ValueError unless there is one core for each, of those this thread may use.
        """
        if len(cores) != self._threads:
            raise ValueError(f"cores must be {self._threads}, one for each thread, got {len(cores)}")
        if foreign := set(cores) - os.sched_getaffinity(0):
            raise ValueError(f"cores must be of those this thread may use, got {sorted(foreign)}")
        os.sched_setaffinity(0, {cores[0]})
        self.kernels.keep_workers_on(cores)

    @property
    def page_bytes(self) -> int:
        return self.kernels.page_bytes

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def batch_invariant(self) -> bool:
        return True

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weights and the rotary tables."""
        return self.kernels.weight_bytes

    def forward(self, batch: Sequence[Slice]) -> list[Logits | None]:
        """See Runner.forward. Raises ValueError, before anything is written, for a slice that does not fit.

        The logits stay valid as long as the caller holds them; memory nobody holds any more is used again.
        """
        if not batch:
            raise ValueError("a batch must hold at least one slice")
        flat = FlatBatch.of(batch)
        logits = self._free_logits(sum(flat.logit_counts))
        complaint = self.kernels.forward(flat.pointing_to(logits))
        if complaint.fault:
            raise ValueError(complaint_text(complaint, batch, self._config, self._num_pages))
        parts = np.split(logits[:, : self._config.vocab_size], np.cumsum(flat.logit_counts))
        return [part if len(part) else None for part in parts[:-1]]

    def sample(self, rows: Sequence[Logits], requests: Sequence[SampleRequest]) -> list[Outcome]:
        """See Runner.sample. One call for all rows, which the threads share out."""
        check_rows(rows, requests)
        if not rows:
            return []
        flat = FlatDraws(rows, requests)
        return flat.outcomes(self.kernels.sample(flat.packed, flat.vocab))

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See Runner.copy_pages; pairs are copied in order."""
        self._page_ids([page for pair in pairs for page in pair])
        for source, target in pairs:
            self.kernels.copy_page(source, target)

    def export_pages(self, pages: Sequence[int], tokens: int) -> Floats:
        """See Runner.export_pages. int8 pages come out as float32, and give the same int8 again when imported."""
        check_exported_tokens(pages, tokens)
        config = self._config
        out = np.empty((2, config.layers, config.kv_heads, tokens, config.head_dim), np.float32)
        self.kernels.export_pages(self._page_ids(pages), out)
        return out.astype(_EXPORTED[self._kv_dtype], copy=False)

    def import_pages(self, pages: Sequence[int], kv: Floats) -> None:
        """See Runner.import_pages. The rest of the last page is zeroed; pages beyond it are left alone.

        Raises ValueError for a foreign shape and for values that are not finite, which would outlive their session.
        """
        tokens = check_canonical(self._config, pages, kv)
        ids = self._page_ids(pages[: -(-tokens // PAGE_TOKENS)])
        self.kernels.import_pages(ids, np.ascontiguousarray(kv, np.float32))

    @property
    def _padded_vocab(self) -> int:
        return -(-self._config.vocab_size // PAIR_ROWS) * PAIR_ROWS

    def _shape(self) -> Shape:
        config = self._config
        return Shape(
            vocab=config.vocab_size,
            dim=config.dim,
            layers=config.layers,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            ffn_dim=config.ffn_dim,
            context=config.max_context_tokens,
            window=config.sliding_window or 0,
            qk_norm=config.qk_norm,
            kv_type=_KV_TYPES[self._kv_dtype],
            threads=self._threads,
            max_rows=MAX_ROWS,
            eps=config.rms_eps,
            num_pages=self._num_pages,
        )

    def _free_logits(self, rows: int) -> Logits:
        """Memory for logits: a step's own would spend a page fault on every 4 KiB of them."""
        held = sys.getrefcount(self._logits) > 2  # the attribute and the argument; logits of an earlier step add one
        if held or self._logits.shape[0] < rows:
            self._logits = np.empty((rows, self._padded_vocab), np.float32)
        return self._logits

    def _page_ids(self, pages: Sequence[int]) -> Ints:
        ids = np.array(list(pages), dtype=np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= self._num_pages):
            raise ValueError(f"page ids must lie in 0 .. {self._num_pages - 1}, got {ids.min()} .. {ids.max()}")
        return ids


def _cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_arguments(config: DecoderConfig, num_pages: int, kv_dtype: str, threads: int, form: str) -> None:
    if num_pages < 1:
        raise ValueError(f"num_pages must be at least 1, got {num_pages}")
    if kv_dtype not in _KV_TYPES:
        raise ValueError(f"kv_dtype must be one of {', '.join(_KV_TYPES)}, got {kv_dtype}")
    if not 1 <= threads <= 256:
        raise ValueError(f"threads must lie in 1 .. 256, got {threads}")
    if form not in FORMATS:
        raise ValueError(f"weights_format must be one of {', '.join(FORMATS)}, got {form}")
    if config.head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be at most {MAX_HEAD_DIM} for the native runner, got {config.head_dim}")
