"""TorchRunner on a GPU: does it say what the CPU says, and how near is it to the memory's limit? Five minutes at most.

    python bench/gpu.py [--device cuda] [--dtype bfloat16] [--streams 1 8 64] [--model PATH]
    python bench/gpu.py --device cpu --quick      the same script where there is no GPU

First correctness, against float32 on the CPU: the first choice at every position, and how far its distribution is. Then
tokens/s of decoding by the number of streams, beside transformers on the same device, and beside what the device's
memory bandwidth, measured by copying, allows for the weights and KV that a step must read. Exit code 1 when the
answers differ more than rounding explains.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
from _server import print_table, spread
from peers.models import made_once, write_hugging_face
from peers.reference import Reference
from peers.store import cache_folder
from torch import nn
from torch.nn import functional as fn
from transformers import AutoModelForCausalLM, DynamicCache

from segue_model.checkpoint import Checkpoint
from segue_model.loaders import find_embedded_model, load_checkpoint
from segue_model.runner.base import PAGE_TOKENS, Slice
from segue_model.runner.torch_runner import TorchRunner

PROMPT: Final = 64  # tokens before the first that is timed
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE: Final = {"float32": 1e-5, "bfloat16": 0.01}  # mean KL divergence of the next token, nats
AGREEING: Final = {"float32": 16, "bfloat16": 14}  # first choices, of 16
COPY_BYTES: Final = {True: 1 << 30, False: 128 << 20}  # by whether there is a GPU


def main() -> int:
    options = parse()
    checkpoint = load_checkpoint(options.model)
    device = torch.device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    print(f"{checkpoint.model_id} in {options.dtype} on {name}, torch {torch.__version__}")
    right = is_right(checkpoint, device, options.dtype)
    bandwidth = copy_bandwidth(device)
    print(f"memory: {bandwidth / 1e9:.0f} GB/s, reading and writing counted\n")
    rows = [row(checkpoint, device, count, bandwidth, options) for count in options.streams]
    print_table(("streams", "Segue tokens/s", "of limit", "transformers tokens/s", "ratio"), rows)
    print(f"median (smallest..largest) of {options.runs} runs of {options.steps} steps after {PROMPT} tokens")
    return 0 if right else 1


def is_right(checkpoint: Checkpoint, device: torch.device, dtype: str) -> bool:
    """Compare with float32 on the CPU, along the tokens that it chooses."""
    reference = Reference.compute(checkpoint)
    ledger = [*reference.prompt, *reference.expected]
    ours, theirs = (
        all_logits(checkpoint, where, kind, ledger)[len(reference.prompt) - 1 : -1]
        for where, kind in ((device, DTYPES[dtype]), (torch.device("cpu"), torch.float32))
    )
    divergence = float(fn.kl_div(ours.log_softmax(-1), theirs.log_softmax(-1), log_target=True, reduction="batchmean"))
    equal = int((ours.argmax(-1) == theirs.argmax(-1)).sum())
    right = divergence <= TOLERANCE[dtype] and equal >= AGREEING[dtype]
    print(f"against float32 on the CPU: {equal} of {len(ours)} first choices equal,", end=" ")
    print(f"KL divergence {divergence:.6f}: {'as it should be' if right else 'WRONG'}", flush=True)
    return right


def all_logits(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, ledger: Sequence[int]) -> torch.Tensor:
    """(T, vocab), token by token through the cache, as decoding does."""
    pages = range(-(-len(ledger) // PAGE_TOKENS))
    runner = TorchRunner(checkpoint.config, checkpoint.weights, num_pages=len(pages), device=device, dtype=dtype)
    rows = [runner.forward([Slice([token], i, pages)])[0] for i, token in enumerate(ledger)]
    return torch.cat([torch.from_numpy(row) for row in rows if row is not None])


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written a second."""
    source = torch.ones(COPY_BYTES[device.type == "cuda"] // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(timed(device, lambda: target.copy_(source)) for _ in range(5))


def row(
    checkpoint: Checkpoint, device: torch.device, count: int, bandwidth: float, options: argparse.Namespace
) -> list[str]:
    config, dtype = checkpoint.config, DTYPES[options.dtype]
    generator = torch.Generator().manual_seed(count)
    prompts = torch.randint(0, config.vocab_size, (count, PROMPT), generator=generator)
    ours = [segue_rate(checkpoint, device, prompts, options) for _ in range(options.runs)]
    theirs = [transformers_rate(device, prompts, options) for _ in range(options.runs)]
    kv = count * (PROMPT + options.steps // 2) * config.kv_bytes_per_token(dtype.itemsize)
    limit = count * bandwidth / (config.parameter_count * dtype.itemsize + kv)
    best, other = sorted(ours)[len(ours) // 2], sorted(theirs)[len(theirs) // 2]
    return [str(count), spread(ours), f"{best / limit:.1%}", spread(theirs), f"{best / other:.2f}"]


def segue_rate(
    checkpoint: Checkpoint, device: torch.device, prompts: torch.Tensor, options: argparse.Namespace
) -> float:
    """Tokens/s of all streams, greedy; the choice is made on the CPU, where the runner hands the logits over."""
    each = -(-(PROMPT + options.steps + 1) // PAGE_TOKENS)
    runner = TorchRunner(
        checkpoint.config,
        checkpoint.weights,
        num_pages=each * len(prompts),
        device=device,
        dtype=DTYPES[options.dtype],
    )
    tables = [range(i * each, (i + 1) * each) for i in range(len(prompts))]

    def step(tokens: Sequence[Sequence[int]], start: int) -> list[list[int]]:
        batch = [Slice(some, start, table) for some, table in zip(tokens, tables, strict=True)]
        return [[int(logits.argmax())] for logits in runner.forward(batch) if logits is not None]

    tokens = step(prompts.tolist(), 0)
    tokens = step(tokens, PROMPT)  # the first step of this shape pays for what the device prepares

    def decode() -> None:
        nonlocal tokens
        for i in range(1, options.steps):
            tokens = step(tokens, PROMPT + i)

    generated: int = len(prompts) * (options.steps - 1)
    return generated / timed(device, decode)


@torch.inference_mode()
def transformers_rate(device: torch.device, prompts: torch.Tensor, options: argparse.Namespace) -> float:
    """Tokens/s of a static batch, greedy, with the cache that `generate` uses."""
    model = AutoModelForCausalLM.from_pretrained(options.hugging_face, dtype=DTYPES[options.dtype])
    nn.Module.to(model, device)
    cache = DynamicCache()

    def step(tokens: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=tokens, cache=cache, use_cache=True, logits_to_keep=1).logits
        chosen: torch.Tensor = logits[:, -1].argmax(-1, keepdim=True)
        return chosen

    tokens = step(step(prompts.to(device)))

    def decode() -> None:
        nonlocal tokens
        for _ in range(1, options.steps):
            tokens = step(tokens)

    generated: int = len(prompts) * (options.steps - 1)
    return generated / timed(device, decode)


def timed(device: torch.device, call: Callable[[], object]) -> float:
    """Seconds, the device's queue emptied before and after."""
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def parse() -> argparse.Namespace:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--device", default="cuda")
    words.add_argument("--dtype", choices=DTYPES, help="default: bfloat16, on a CPU float32")
    words.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    words.add_argument("--steps", type=int, default=64, help="tokens of each stream")
    words.add_argument("--runs", type=int, default=3)
    words.add_argument("--model", type=Path, default=None, help="a GGUF file; default: the embedded SmolLM2")
    words.add_argument("--quick", action="store_true", help="one short run of 1 and 8 streams")
    options = words.parse_args()
    if options.quick:
        options.streams, options.steps, options.runs = [1, 8], 6, 1
    options.dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    options.model = options.model or find_embedded_model()
    folder = cache_folder() / "models" / f"{options.model.stem.lower()}-float32"
    options.hugging_face = made_once(folder, lambda path: write_hugging_face(options.model, path))
    return options


if __name__ == "__main__":
    sys.exit(main())
