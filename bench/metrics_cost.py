"""What the metrics cost: as a share of a decode step, and in throughput, with them and without.

1. Everything that is counted in one decode step of --streams turns is run by itself and timed, against the mean time of
   such a step as the server measures it.
2. Two servers, one of which counts nothing: its histograms and tallies are replaced before it starts, which no option
   does. They take turns (on, off, off, on, ...) under the same load; the one that counts is scraped once a second.
"""

import argparse
import asyncio
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import streams
from _server import Addresses, cpu_seconds, parser, print_served, print_table, read, running_server, spread
from prometheus_client.parser import text_string_to_metric_families

from segue_server import stats
from segue_server.__main__ import main as serve
from segue_server.accountant import Accountant
from segue_server.cache.pages import PagePool
from segue_server.cache.session import SessionCache
from segue_server.jobs import Job, NoSink, TurnSpec, new_turn
from segue_server.plan import Plan, Work
from segue_server.sequence import Sequence

SILENT = "--serve-without-metrics"
REPEATS = 2000  # of the counting of a step
TARGET = 0.02


@dataclass(frozen=True, slots=True)
class Run:
    tokens_per_second: float
    cpu: float  # microseconds of the server's for a token: beside other work it says more than the clock


@dataclass(frozen=True, slots=True)
class Pair:
    on: Run
    off: Run


def main() -> int:
    if sys.argv[1:2] == [SILENT]:
        return serve_without_metrics(sys.argv[2:])
    options, words = parse()
    silent = (str(Path(__file__).resolve()), SILENT)
    with running_server(*words) as on, running_server(*words, program=silent) as off:
        print_served(on.grpc)
        pairs = measure(on, off, options)
        step = mean_step(on.metrics)
    print(f"{options.runs} pairs of {options.streams} streams, {options.new_tokens} new tokens each")
    print_table(
        ("", "with", "without", "cost of each pair"),
        [
            row("tokens/s", pairs, lambda one: one.tokens_per_second, lambda on, off: 1 - on / off),
            row("CPU us/token", pairs, lambda one: one.cpu, lambda on, off: on / off - 1),
        ],
    )
    counting = counting_of_a_step(options.streams)
    share = counting / step
    print(f"counting a step takes {counting * 1e6:.0f} us of {step * 1e3:.1f} ms: {share:.2%} (target: {TARGET:.0%})")
    return int(share > TARGET)


def row(name: str, pairs: Seq[Pair], value: Callable[[Run], float], cost: Callable[[float, float], float]) -> list[str]:
    on, off = [value(pair.on) for pair in pairs], [value(pair.off) for pair in pairs]
    costs = [cost(*both) * 100 for both in zip(on, off, strict=True)]
    return [name, spread(on, 0), spread(off, 0), spread(costs) + " %"]


def measure(on: Addresses, off: Addresses, options: argparse.Namespace) -> list[Pair]:
    """Pair by pair; every second one begins without metrics."""
    for target in (on.grpc, off.grpc):
        asyncio.run(streams.run(target, options.streams, options.prompt_tokens, 8))  # warm-up
    return [pair(on, off, options, turned=number % 2 == 1) for number in range(options.runs)]


def pair(on: Addresses, off: Addresses, options: argparse.Namespace, *, turned: bool) -> Pair:
    if turned:
        without = measured(off, options, scraped=False)
        return Pair(measured(on, options, scraped=True), without)
    return Pair(measured(on, options, scraped=True), measured(off, options, scraped=False))


def measured(server: Addresses, options: argparse.Namespace, *, scraped: bool) -> Run:
    before = cpu_seconds(server.metrics)
    with scraping(server.metrics, every=1.0 if scraped else threading.TIMEOUT_MAX):
        load = streams.run(server.grpc, options.streams, options.prompt_tokens, options.new_tokens)
        rate = asyncio.run(load).tokens_per_second
    used = cpu_seconds(server.metrics) - before
    return Run(rate, used * 1e6 / (options.streams * options.new_tokens))


@contextmanager
def scraping(url: str, *, every: float) -> Iterator[None]:
    """Somebody reads the metrics meanwhile."""
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(every):
            read(url)

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def mean_step(url: str) -> float:
    """Seconds of a decode step, over all of them: nearly all had every stream in it."""
    samples = {
        (sample.name, sample.labels.get("phase")): sample.value
        for family in text_string_to_metric_families(read(url))
        for sample in family.samples
    }
    name = "segue_engine_step_seconds"
    return samples[f"{name}_sum", "decode"] / samples[f"{name}_count", "decode"]


def counting_of_a_step(count: int) -> float:
    """Seconds, the median of many, for what the engine counts in a decode step."""
    counted = stats.EngineStats()
    accounts = Accountant(counted, time.monotonic)
    jobs = [job(number) for number in range(count)]
    plan = Plan(work=[Work(job.sequence, 64, 1) for job in jobs])
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        for one in jobs:
            accounts.computed(one, 64, 65)
        accounts.step(plan, 0.1)
        counted.busy_seconds.add("sample", amount=0.001)
        for one in jobs:
            accounts.token(one, began)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def job(number: int) -> Job:
    """A turn in the middle of its answer."""
    name = str(number)
    sequence = Sequence(session_id=name, cache=SessionCache(PagePool(1)))
    spec = TurnSpec(
        request_id=name,
        session_id=name,
        prompt=[1] * 64,
        arrival=0.0,
        sink=NoSink(),
        max_tokens=1 << 20,
        max_context_tokens=1 << 21,
    )
    return Job(spec, sequence, new_turn(spec, 0), last_token=0.0, reached=64)


def serve_without_metrics(words: list[str]) -> int:
    """`segue-server`, but what it counts goes nowhere."""
    stats.Histogram.observe = lambda *_: None  # type: ignore[method-assign]
    stats.Tally.add = lambda *_, **__: None  # type: ignore[method-assign]
    return serve(words)


def parse() -> tuple[argparse.Namespace, list[str]]:
    """The benchmark's own options, and the words for the servers."""
    options = parser(__doc__)
    options.add_argument("--streams", type=int, default=32)
    options.add_argument("--prompt-tokens", type=int, default=8)
    options.add_argument("--new-tokens", type=int, default=64)
    options.add_argument("--runs", type=int, default=8)
    return options.parse_known_args()


if __name__ == "__main__":
    sys.exit(main())
