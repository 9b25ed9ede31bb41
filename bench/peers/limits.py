"""What the machine gives at this moment, and how much of it a token must take at least."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from segue_model.checkpoint import Checkpoint
from segue_model.config import DecoderConfig
from segue_model.runner.native import NativeRunner, NativeUnavailable

PROBE_ROUNDS: Final = 500_000
PRODUCTS_A_ROUND: Final = 8 * 64  # eight byte dot products of 64
GEMM: Final = 2048
REPEATS: Final = 3


@dataclass(frozen=True, slots=True)
class Limits:
    """The best of a few tries, all threads."""

    read: float  # bytes/s, over as many bytes as the weights have
    integer: float  # int8 multiply-adds/s
    bfloat16: float  # multiply-adds/s; for the reader, no share is taken of it


class Probes:
    """Reads and multiplies with the project's own kernels and with torch's, and takes the faster."""

    def __init__(self, checkpoint: Checkpoint, threads: int) -> None:
        """The checkpoint gives the kernels something to be built for; its weights are not read by the probes."""
        torch.set_num_threads(threads)
        self._threads = threads
        try:
            runner = NativeRunner(checkpoint.config, checkpoint.weights, num_pages=1, threads=threads)
        except NativeUnavailable:
            self._kernels = None
        else:
            self._kernels = runner.kernels

    def measure(self, weight_bytes: int) -> Limits:
        read, integer = [self._torch_read(weight_bytes)], [self._torch_integer()]
        if self._kernels is not None:
            products = self._threads * PRODUCTS_A_ROUND * PROBE_ROUNDS
            read.append(weight_bytes / self._kernels.read_seconds(weight_bytes, REPEATS))
            integer.append(products / self._kernels.multiply_seconds(PROBE_ROUNDS, REPEATS))
        return Limits(max(read), max(integer), self._torch_bfloat16())

    def _torch_read(self, size: int) -> float:
        data = torch.ones(size // 8, dtype=torch.int64)
        return size / _best(data.sum)

    def _torch_integer(self) -> float:
        """oneDNN's int8 product, which uses AMX or VNNI where there is one."""
        a, b = (torch.ones(GEMM, GEMM, dtype=torch.int8) for _ in range(2))
        return float(GEMM) ** 3 / _best(lambda: torch._int_mm(a, b))  # noqa: SLF001

    def _torch_bfloat16(self) -> float:
        a, b = (torch.ones(GEMM, GEMM, dtype=torch.bfloat16) for _ in range(2))
        return float(GEMM) ** 3 / _best(lambda: a @ b)


def _best(call: Callable[[], object]) -> float:
    """Seconds."""
    call()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


@dataclass(frozen=True, slots=True)
class Work:
    """What a system cannot avoid: the bytes of its own format, and the model's products."""

    config: DecoderConfig
    weight_bytes: int
    kv_token_bytes: int

    def seconds(self, limits: Limits, *, rows: int, logits: int, context: int, streams: int = 1) -> float:
        """Of one pass over `rows` new tokens in all, `logits` of them with logits; each stream has `context` keys."""
        head = self.config.vocab_size * self.config.dim
        body = self.config.parameter_count - (1 if self.config.tie_embeddings else 2) * head
        attended = context - (rows / streams - 1) / 2  # a causal prompt sees on average so many keys
        attention = 2 * self.config.layers * self.config.heads * self.config.head_dim * rows * attended
        products = rows * body + logits * head + attention
        read = self.weight_bytes + streams * context * self.kv_token_bytes
        return max(read / limits.read, products / limits.integer)
