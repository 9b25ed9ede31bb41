"""Does the event loop stay free while the model computes? Latency of health Check while streams decode.

Checks are sent one after another, 10 ms apart, by a stock stub. Exit code 0 when p99 stays under --limit ms, else 1.
"""

import argparse
import asyncio
import statistics
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc
from _server import START_TIMEOUT, parser, print_served, print_table, quantile, running_server, spread
from grpc_health.v1 import health_pb2, health_pb2_grpc

from segue_client import AsyncClient

PAUSE = 0.01  # seconds between two checks


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds."""

    p50: float
    p99: float


def main() -> int:
    options, server_words = parse()
    with running_server(*server_words) as addresses:
        print_served(addresses.grpc)
        idle = [asyncio.run(run(addresses.grpc, 0, options.checks)) for _ in range(options.runs)]
        busy = [asyncio.run(run(addresses.grpc, options.streams, options.checks)) for _ in range(options.runs)]
    rows = [
        (name, spread([one.p50 * 1e3 for one in runs], 2), spread([one.p99 * 1e3 for one in runs], 2))
        for name, runs in (("idle", idle), (f"{options.streams} streams decode", busy))
    ]
    print_table(("server", "Check p50 ms", "Check p99 ms"), rows)
    print(f"median (smallest..largest) of {options.runs} runs of {options.checks} checks")
    within = statistics.median(one.p99 for one in busy) * 1e3 < options.limit
    print(f"{'PASS' if within else 'FAIL'}: p99 under {options.limit:g} ms")
    return 0 if within else 1


async def run(target: str, streams: int, checks: int) -> Run:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncClient(target))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(target))
        decoding = [asyncio.Event() for _ in range(streams)]
        readers = [asyncio.create_task(decode(client, number, event)) for number, event in enumerate(decoding)]
        async with asyncio.timeout(START_TIMEOUT):
            await asyncio.gather(*(event.wait() for event in decoding))
        latencies = await check(health_pb2_grpc.HealthStub(channel), checks)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    return Run(quantile(latencies, 0.5), quantile(latencies, 0.99))


async def check(stub: health_pb2_grpc.HealthStub, checks: int) -> list[float]:
    """Latency of each check, in seconds."""
    latencies = []
    for _ in range(checks):
        began = time.perf_counter()
        await stub.Check(health_pb2.HealthCheckRequest())
        latencies.append(time.perf_counter() - began)
        await asyncio.sleep(PAUSE)
    return latencies


async def decode(client: AsyncClient, number: int, decoding: asyncio.Event) -> None:
    """One stream without an end; tells when it is past its prompt."""
    async with client.stream(text=f"Number {number}:", ignore_eos=True, seed=number) as turn:
        async for _ in turn:
            decoding.set()


def parse() -> tuple[argparse.Namespace, list[str]]:
    """The benchmark's own options, and the words for the server."""
    options = parser(__doc__)
    options.add_argument("--streams", type=int, default=8)
    options.add_argument("--checks", type=int, default=300)
    options.add_argument("--runs", type=int, default=3)
    options.add_argument("--limit", type=float, default=20.0, help="ms that p99 must stay under")
    return options.parse_known_args()


if __name__ == "__main__":
    sys.exit(main())
