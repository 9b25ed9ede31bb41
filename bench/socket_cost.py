"""What the way over the socket costs: tokens/s of streams through the server, beside its runner's own rate.

A server and a runner with the same options take turns, each in a process of its own. Counted is the time in which all
streams decode: through the server from the last stream's first token to the first stream's last one, over the socket
and into a client on the same cores; for the runner steps over the same positions, with nothing drawn and nothing said.
"""

import argparse
import asyncio
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import streams
from _server import parser, print_served, print_table, random_tokens, running_server, spread

from segue_client import AsyncClient
from segue_model.loaders import find_embedded_model, load_checkpoint
from segue_model.paging import PAGE_TOKENS
from segue_model.runner.base import Runner, Slice, Want
from segue_server.config import parse_config
from segue_server.runners import keep_on_cores, make_runner

TARGETS = {1: 0.93, 32: 0.85}
_runner: Runner  # of the process that has one


def main() -> int:
    options, words = parse()
    spawn = multiprocessing.get_context("spawn")
    with running_server("--draft-tokens", "0", *words) as addresses:
        print_served(addresses.grpc)
        with ProcessPoolExecutor(1, spawn, make, (words,)) as alone:
            rows = [row(addresses.grpc, alone, count, options) for count in options.streams]
    print_table(("streams", "runner, tokens/s", "socket, tokens/s", "ratio of each pair", "target"), rows)
    print(f"median (smallest..largest) of {options.runs} pairs; after {options.prompt_tokens} tokens")
    return 0


def row(target: str, alone: ProcessPoolExecutor, count: int, options: argparse.Namespace) -> list[str]:
    asyncio.run(through_socket(target, count, options.prompt_tokens, options.new_tokens))  # warm-up
    runner, socket = [], []
    for _ in range(options.runs):
        socket.append(asyncio.run(through_socket(target, count, options.prompt_tokens, options.new_tokens)))
        runner.append(alone.submit(by_itself, count, options.prompt_tokens, options.new_tokens).result())
    ratios = [ours / its for ours, its in zip(socket, runner, strict=True)]
    return [str(count), spread(runner), spread(socket), spread(ratios, 2), str(TARGETS.get(count, ""))]


async def through_socket(target: str, count: int, prompt_tokens: int, new_tokens: int) -> float:
    """Tokens/s while all of `count` streams decode."""
    async with AsyncClient(target) as client:
        vocabulary = (await client.model_info()).vocab_size
        prompts = [random_tokens(vocabulary, prompt_tokens) for _ in range(count)]
        arrivals = await asyncio.gather(*(streams.stream(client, prompt, new_tokens) for prompt in prompts))
    began, ended = max(times[0] for times in arrivals), min(times[-1] for times in arrivals)
    return sum(began < at <= ended for times in arrivals for at in times) / (ended - began)


def make(words: Sequence[str]) -> None:
    """In the runner's process: one as the server's."""
    global _runner
    config = parse_config(words)
    _runner, _ = make_runner(config, load_checkpoint(config.model or find_embedded_model()))
    keep_on_cores(_runner)


def by_itself(count: int, prompt_tokens: int, new_tokens: int) -> float:
    """Tokens/s of `count` slices of one token, `new_tokens` steps."""
    ids = random_tokens(_runner.config.vocab_size, prompt_tokens + new_tokens)
    each = len(ids) // PAGE_TOKENS + 1
    tables = [range(i * each, (i + 1) * each) for i in range(count)]
    for table in tables:
        _runner.forward([Slice(ids[:prompt_tokens], 0, table, Want.NOTHING)])
    began = time.perf_counter()
    for at in range(prompt_tokens, len(ids)):
        _runner.forward([Slice(ids[at : at + 1], at, table) for table in tables])
    return count * new_tokens / (time.perf_counter() - began)


def parse() -> tuple[argparse.Namespace, list[str]]:
    """The benchmark's own options, and the words for the server and the runner."""
    options = parser(__doc__)
    options.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    options.add_argument("--prompt-tokens", type=int, default=64)
    options.add_argument("--new-tokens", type=int, default=256)
    options.add_argument("--runs", type=int, default=5)
    return options.parse_known_args()


if __name__ == "__main__":
    sys.exit(main())
