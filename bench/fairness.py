"""Does a long prompt stall a running stream? The longest gap between two of its tokens while 4,096 tokens join.

Prints the stream's normal gap, the time of one chunk of the prompt computed alone, and the longest gap, and compares
it with the bound: 3 normal gaps plus one chunk. Exit code 0 within the bound, 1 beyond it.
"""

import argparse
import asyncio
import statistics
import sys
import time
from dataclasses import dataclass
from itertools import pairwise

from _server import START_TIMEOUT, parser, print_served, print_table, random_tokens, running_server, spread

from segue_client import AsyncClient, PrefillProgress, Started, Tokens
from segue_client.turn import AsyncTurn

SETTLE_TOKENS = 24  # of the stream, before the prompt joins


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds."""

    normal: float  # median gap of the stream alone
    chunk: float  # longest chunk of the prompt alone
    longest: float  # longest gap of the stream while the prompt is computed

    @property
    def bound(self) -> float:
        return 3 * self.normal + self.chunk


def main() -> int:
    options, server_words = parse()
    with running_server(*server_words) as addresses:
        print_served(addresses.grpc)
        runs = [asyncio.run(run(addresses.grpc, options.prompt_tokens)) for _ in range(options.runs)]
    milliseconds = {
        "normal gap": [one.normal * 1e3 for one in runs],
        "one chunk": [one.chunk * 1e3 for one in runs],
        "longest gap": [one.longest * 1e3 for one in runs],
        "bound": [one.bound * 1e3 for one in runs],
    }
    print_table(("", "ms"), [(name, spread(values)) for name, values in milliseconds.items()])
    print(f"median (smallest..largest) of {options.runs} runs; a prompt of {options.prompt_tokens} tokens joins")
    within = statistics.median(milliseconds["longest gap"]) <= statistics.median(milliseconds["bound"])
    print("PASS" if within else "FAIL")
    return 0 if within else 1


async def run(target: str, prompt_tokens: int) -> Run:
    async with AsyncClient(target) as client:
        vocabulary = (await client.model_info()).vocab_size
        chunk = await longest_chunk(client, random_tokens(vocabulary, prompt_tokens))
        prompt = random_tokens(vocabulary, prompt_tokens)
        arrivals: list[float] = []
        turn = client.stream(text="Once upon a time", ignore_eos=True, seed=1)
        settled = asyncio.Event()
        reader = asyncio.create_task(follow(turn, arrivals, settled))
        async with asyncio.timeout(START_TIMEOUT):
            await settled.wait()
        joined = time.perf_counter()
        await client.generate(tokens=prompt, max_tokens=1, ignore_eos=True)
        done = time.perf_counter()
        await asyncio.sleep(0.05)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
    gaps = [(before, after - before) for before, after in pairwise(arrivals)]
    return Run(
        normal=statistics.median(gap for start, gap in gaps[1:] if start + gap <= joined),
        chunk=chunk,
        longest=max(gap for start, gap in gaps if start + gap > joined and start < done),
    )


async def follow(turn: AsyncTurn, arrivals: list[float], settled: asyncio.Event) -> None:
    """Note when each token comes, and tell when SETTLE_TOKENS have come."""
    async with turn:
        async for _ in turn:
            arrivals.append(time.perf_counter())
            if len(arrivals) == SETTLE_TOKENS:
                settled.set()


async def longest_chunk(client: AsyncClient, prompt: list[int]) -> float:
    """Seconds between two steps of a prompt that has the server for itself."""
    turn = client.stream(tokens=prompt, max_tokens=1, ignore_eos=True)
    seen = (Started, PrefillProgress, Tokens)
    times = [time.perf_counter() async for event in turn.events() if isinstance(event, seen)]
    return max(after - before for before, after in pairwise(times))


def parse() -> tuple[argparse.Namespace, list[str]]:
    """The benchmark's own options, and the words for the server."""
    options = parser(__doc__)
    options.add_argument("--prompt-tokens", type=int, default=4096)
    options.add_argument("--runs", type=int, default=3)
    return options.parse_known_args()


if __name__ == "__main__":
    sys.exit(main())
