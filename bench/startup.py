"""What a start with the embedded model costs: time and CPU from exec to the line "serving", and peak memory.


Each run starts a server of its own, says a prompt to it that fills pages of KV, and reads its high-water mark
afterwards. CPU is user and system time of all threads up to that line. Figures are the median and the spread. The
kernels must have been built before (`segue-server build-kernels`); the first run is not counted, so files are in
memory.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from _server import FREE_PORTS, STOP_TIMEOUT, ServerLog, parser, print_table, random_tokens, spread

from segue_client import Client
from segue_model.loaders import find_embedded_model, load_checkpoint
from segue_model.runner.native import NativeRunner

MIB = 1 << 20
ALLOWED_WEIGHTS = 1.3  # packed weights, and what of the file is mapped while they are packed
ALLOWED_REST = 250 * MIB  # the interpreter, gRPC and the tokenizer


class Start(NamedTuple):
    """One start."""

    wall: float  # seconds
    cpu: float  # seconds
    peak: float  # bytes
    allowed: float  # bytes


def main() -> int:
    options, words = parse()
    packed = packed_bytes()
    starts = [start(words, packed, options.prompt_tokens) for _ in range(options.runs + 1)][1:]
    print(f"load average {os.getloadavg()[0]:.1f}, packed weights {packed / MIB:.0f} MiB\n")
    rows: Sequence[tuple[str, Sequence[float]]] = (
        ("to serving, s", [each.wall for each in starts]),
        ("CPU to serving, s", [each.cpu for each in starts]),
        ("peak memory, MiB", [each.peak / MIB for each in starts]),
        ("allowed, MiB", [each.allowed / MIB for each in starts]),
    )
    print_table(("", f"median of {options.runs}"), [(name, spread(values, 2)) for name, values in rows])
    return int(any(each.peak > each.allowed for each in starts))


def packed_bytes() -> int:
    """What the embedded model's weights take in the kernels."""
    checkpoint = load_checkpoint(find_embedded_model())
    return NativeRunner(checkpoint.config, checkpoint.weights, num_pages=1, threads=1).weight_bytes


def start(words: Sequence[str], packed: int, prompt_tokens: int) -> Start:
    """Start a server, fill some KV, read its figures and stop it."""
    command = [sys.executable, "-m", "segue_server", *FREE_PORTS, *words]
    began = time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        log = ServerLog(process)
        try:
            target = log.find(r"serving .* on (\S+)$")
            wall, cpu = time.perf_counter() - began, cpu_seconds(process.pid)
            touched = fill(target, prompt_tokens)
            peak = high_water(process.pid)
        finally:
            process.terminate()
            process.wait(STOP_TIMEOUT)
            log.join()
    return Start(wall, cpu, peak, ALLOWED_WEIGHTS * packed + touched + ALLOWED_REST)


def fill(target: str, tokens: int) -> int:
    """Compute a prompt; returns the bytes of KV it took."""
    with Client(target) as client:
        model = client.model_info()
        prompt = random_tokens(model.vocab_size, tokens)
        with client.create_session().stream(tokens=prompt, max_tokens=1, ignore_eos=True) as turn:
            turn.result()
        return tokens * model.kv_bytes_per_token


def cpu_seconds(pid: int) -> float:
    """User and system time of a process that runs."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def high_water(pid: int) -> int:
    """The largest resident set so far, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def parse() -> tuple[argparse.Namespace, list[str]]:
    """The benchmark's own options, and the words for the server."""
    options = parser(__doc__)
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--prompt-tokens", type=int, default=1024)
    return options.parse_known_args()


if __name__ == "__main__":
    sys.exit(main())
