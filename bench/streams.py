"""Throughput and latency by the number of streams: tokens/s, time to first token, gap between tokens.

Each stream is a turn of its own session: a prompt of random tokens, greedy decoding, no end before --new-tokens. All
start together, on a server without drafts, so that a token is a pass. tokens/s counts the generated tokens of all
streams from the first request to the last token, so it pays for the prompts too; latencies are seen by the client, over
the socket.
"""

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass
from itertools import pairwise

from _server import parser, print_served, print_table, quantile, random_tokens, running_server, spread

from segue_client import AsyncClient, Tokens


@dataclass(frozen=True, slots=True)
class Run:
    """One run of n streams; times in seconds."""

    tokens_per_second: float
    first_token: float  # p50 over the streams
    inter_token: float  # p99 over all gaps


def main() -> int:
    options, server_words = parse()
    with running_server("--draft-tokens", "0", *server_words) as addresses:
        print_served(addresses.grpc)
        print(f"prompts of {options.prompt_tokens} tokens, {options.new_tokens} new tokens each")
        rows = [row(addresses.grpc, count, options) for count in options.streams]
    print_table(("streams", "tokens/s", "TTFT p50 ms", "inter-token p99 ms"), rows)
    print(f"median (smallest..largest) of {options.runs} runs")
    return 0


def row(target: str, count: int, options: argparse.Namespace) -> list[str]:
    asyncio.run(run(target, count, options.prompt_tokens, 4))  # warm-up
    runs = [asyncio.run(run(target, count, options.prompt_tokens, options.new_tokens)) for _ in range(options.runs)]
    return [
        str(count),
        spread([one.tokens_per_second for one in runs]),
        spread([one.first_token * 1e3 for one in runs], 0),
        spread([one.inter_token * 1e3 for one in runs], 0),
    ]


async def run(target: str, count: int, prompt_tokens: int, new_tokens: int) -> Run:
    async with AsyncClient(target) as client:
        vocabulary = (await client.model_info()).vocab_size
        prompts = [random_tokens(vocabulary, prompt_tokens) for _ in range(count)]
        began = time.perf_counter()
        arrivals = await asyncio.gather(*(stream(client, prompt, new_tokens) for prompt in prompts))
    gaps = [after - before for times in arrivals for before, after in pairwise(times)]
    return Run(
        tokens_per_second=count * new_tokens / (max(times[-1] for times in arrivals) - began),
        first_token=quantile([times[0] - began for times in arrivals], 0.5),
        inter_token=quantile(gaps, 0.99),
    )


async def stream(client: AsyncClient, prompt: list[int], new_tokens: int) -> list[float]:
    """When each token came."""
    turn = client.stream(tokens=prompt, max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    return [time.perf_counter() async for event in turn.events() if isinstance(event, Tokens) and event.token_ids]


def parse() -> tuple[argparse.Namespace, list[str]]:
    """The benchmark's own options, and the words for the server."""
    options = parser(__doc__)
    options.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    options.add_argument("--prompt-tokens", type=int, default=64)
    options.add_argument("--new-tokens", type=int, default=64)
    options.add_argument("--runs", type=int, default=3)
    return options.parse_known_args()


if __name__ == "__main__":
    sys.exit(main())
