"""Segue's native runner in process: what its kernels do without a server around them."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from peers.workers.loop import serve, shared_prefix
from segue_model.loaders import load_checkpoint
from segue_model.runner.base import PAGE_TOKENS, Slice
from segue_model.runner.native import NativeRunner


class Segue:
    def __init__(self, options: argparse.Namespace) -> None:
        checkpoint = load_checkpoint(Path(options.model))
        kv_dtype, isa = options.variant.split(",")
        self._runner = NativeRunner(
            checkpoint.config,
            checkpoint.weights,
            num_pages=-(-options.context // PAGE_TOKENS),
            kv_dtype=kv_dtype,
            threads=options.threads,
            isa=isa or None,
        )
        self._held: list[int] = []  # token ids whose KV lies in the pages from 0 on

    def run(self, prompts: Sequence[Sequence[int]], new: int) -> Iterator[Mapping[int, int]]:
        starts = [shared_prefix(self._held, prompts[0]) if len(prompts) == 1 else 0 for _ in prompts]
        self._held = list(prompts[0]) if len(prompts) == 1 else []
        each = self._runner.num_pages // len(prompts)
        tables = [range(i * each, (i + 1) * each) for i in range(len(prompts))]
        tokens = [list(prompt[start:]) for prompt, start in zip(prompts, starts, strict=True)]
        for _ in range(new):
            batch = [Slice(*one) for one in zip(tokens, starts, tables, strict=True)]
            logits = [row for row in self._runner.forward(batch) if row is not None]
            starts = [start + len(some) for start, some in zip(starts, tokens, strict=True)]
            tokens = [[int(row.argmax())] for row in logits]
            yield {i: token for i, [token] in enumerate(tokens)}


if __name__ == "__main__":
    serve(Segue)
