"""What the durable ledger costs: decode throughput of many streams with --ledger FILE and without.

Two servers run side by side, one of them idle at any time, and the runs alternate between them, so that a machine that
gets slower or faster meanwhile does so for both. Each stream is a turn of its own session; tokens/s counts what all of
them generate between the first token that the last of them gets and the first end of any: all streams decode then.
CPU time is the server's own, of all its threads and over the whole run; on a busy machine it says more than tokens/s.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from _server import Addresses, cpu_seconds, parser, print_served, print_table, random_tokens, running_server, spread

from segue_client import AsyncClient, Tokens


def main() -> int:
    options, server_words = parse()
    with (
        tempfile.TemporaryDirectory(dir=options.directory) as folder,
        running_server(*server_words) as plain,
        running_server(*server_words, "--ledger", str(Path(folder) / "ledger.db")) as durable,
    ):
        print_served(plain.grpc)
        print(f"{options.streams} streams, prompts of {options.prompt_tokens} tokens, {options.new_tokens} new each")
        runs = {"in memory": Runs(plain), "ledger": Runs(durable)}
        measure(list(runs.values()), options)
    print_table(
        ("sessions kept", "tokens/s", "CPU ms/token"),
        [(name, spread(one.speeds), spread(one.costs, 2)) for name, one in runs.items()],
    )
    without, with_ledger = runs.values()
    print(f"median (smallest..largest) of {options.runs} runs")
    print(f"the ledger takes {share(with_ledger.speeds, without.speeds):.1%} of the tokens/s")
    print(f"and {-share(with_ledger.costs, without.costs):.1%} more CPU time")
    return 0


@dataclass(frozen=True, slots=True)
class Runs:
    """What one of the servers did."""

    addresses: Addresses
    speeds: list[float] = field(default_factory=list)  # tokens/s
    costs: list[float] = field(default_factory=list)  # CPU milliseconds per generated token

    def add(self, options: argparse.Namespace) -> None:
        before = cpu_seconds(self.addresses.metrics)
        target, tokens = self.addresses.grpc, options.streams * options.new_tokens
        self.speeds.append(asyncio.run(run(target, options.streams, options.prompt_tokens, options.new_tokens)))
        self.costs.append((cpu_seconds(self.addresses.metrics) - before) / tokens * 1e3)


def measure(both: Sequence[Runs], options: argparse.Namespace) -> None:
    """Runs in pairs; which of the two is first alternates."""
    for one in both:
        asyncio.run(run(one.addresses.grpc, options.streams, options.prompt_tokens, 8))  # warm-up
    for number in range(options.runs):
        for one in reversed(both) if number % 2 else both:
            one.add(options)


def share(with_ledger: Sequence[float], without: Sequence[float]) -> float:
    """By how much the median fell."""
    return 1 - statistics.median(with_ledger) / statistics.median(without)


async def run(target: str, count: int, prompt_tokens: int, new_tokens: int) -> float:
    """Tokens per second of `count` streams that all decode."""
    async with AsyncClient(target) as client:
        vocabulary = (await client.model_info()).vocab_size
        prompts = [random_tokens(vocabulary, prompt_tokens) for _ in range(count)]
        arrivals = await asyncio.gather(*(stream(client, prompt, new_tokens) for prompt in prompts))
    began, ended = max(times[0] for times in arrivals), min(times[-1] for times in arrivals)
    return sum(began < at <= ended for times in arrivals for at in times) / (ended - began)


async def stream(client: AsyncClient, prompt: list[int], new_tokens: int) -> list[float]:
    """When each token came, in a session that the ledger keeps, and that goes afterwards."""
    session = await client.create_session()
    turn = session.stream(tokens=prompt, max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    times: list[float] = []
    async for event in turn.events():
        if isinstance(event, Tokens):
            times.extend(time.perf_counter() for _ in event.token_ids)
    await session.delete()
    return times


def parse() -> tuple[argparse.Namespace, list[str]]:
    """The benchmark's own options, and the words for the servers."""
    options = parser(__doc__)
    options.add_argument("--streams", type=int, default=32)
    options.add_argument("--prompt-tokens", type=int, default=32)
    options.add_argument("--new-tokens", type=int, default=64)
    options.add_argument("--runs", type=int, default=3)
    options.add_argument("--directory", help="where the ledger's file lies (default: the system's temporary folder)")
    return options.parse_known_args()


if __name__ == "__main__":
    sys.exit(main())
