"""Segue beside its peers: the same weights, the same tokens, one run, in turns.

    make bench                                      what is installed, about 40 minutes with every peer
    make bench PEERS=llama,openvino,vllm,transformers   install them first, outside the tree
    make bench ARGS=--quick                         fewer figures

In each round every system is asked for one figure, then every system for the next; the others stand still meanwhile
(SIGSTOP). The order turns with the rounds. Written to --out: table.md and results.json, after every figure.
"""

import argparse
import asyncio
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2
from peers import installation, report
from peers.contender import Contender, stopping
from peers.figures import FIGURES, Figure, Reading
from peers.limits import Limits, Probes, Work
from peers.reference import Reference
from peers.results import Results, Round, Sample, load, now
from peers.store import Model, Store, cache_folder
from peers.systems import BY_PEER, System
from rich.console import Console

from segue_client import SegueError

PATIENCE = 300.0  # seconds for one figure of one system
START_PATIENCE = 900.0  # vLLM compiles at its first start


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # stops what was started, as Ctrl-C does
    options = parse()
    peers_folder = cache_folder() / "peers"
    for name in options.peers:
        installation.install(peers_folder, name)
    file = options.out / "results.json"
    results = Results.read(file) if options.add and file.is_file() else Results.of_this_machine(options.threads)
    store = Store(cache_folder() / "models")
    contest = Contest(options, store, results)
    for system in wanted(options, dict(systems(options, store, peers_folder, results))):
        contest.enter(system)
    asyncio.run(contest.run())
    report.show(results, Console())
    print(f"\nwritten to {options.out}")
    return 0


def wanted(options: argparse.Namespace, installed: Mapping[str, System]) -> list[System]:
    """Raises SystemExit for one that is asked for and not there."""
    if unknown := [name for name in options.systems if name not in installed]:
        raise SystemExit(f"--systems: no {', '.join(unknown)} here; there are {', '.join(installed)}")
    return [installed[name] for name in options.systems or installed]


def systems(options: argparse.Namespace, store: Store, folder: Path, results: Results) -> Iterator[tuple[str, System]]:
    """Those that are installed, by name; why others are missing goes into the results."""
    peers = installation.find(folder)
    for name, makes in BY_PEER.items():
        if name != "segue" and name not in peers:
            results.missing[name] = installation.why_missing(folder, name)
            continue
        results.missing.pop(name, None)
        for make in makes:
            try:
                system = make(store, peers, options.threads)
            except (installation.PeerUnavailable, subprocess.CalledProcessError) as error:
                results.missing[name] = f"{error}; {getattr(error, 'stderr', '')}".strip("; ")[-300:]
                continue
            if not options.systems or system.name in options.systems:
                versions = peers[name].versions if name in peers else "this tree"
                results.systems[system.name] = f"{system.shown}; {versions}"
            yield system.name, system


class Contest:
    """Rounds of figures of systems."""

    def __init__(self, options: argparse.Namespace, store: Store, results: Results) -> None:
        self._options, self._store, self._results = options, store, results
        self._contenders: list[Contender] = []
        self._figures = chosen(options)
        self._logs = options.out / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._reference = Reference.compute(store.checkpoint("smollm2"))
        self._probes = Probes(store.checkpoint("smollm2"), options.threads)

    def enter(self, system: System) -> None:
        config = self._store.checkpoint(system.model).config
        work = Work(config, system.weight_bytes, config.kv_bytes_per_token(system.kv_element_bytes))
        reference = self._reference if system.model == "smollm2" else None
        self._contenders.append(Contender(system, work, reference, self._logs))

    async def run(self) -> None:
        """Raises nothing for a system that fails: it leaves the contest, and the results say why."""
        async with stopping(self._contenders):
            wheres = list(dict.fromkeys(figure.where for figure in self._figures))
            for contender in list(self._contenders):
                with alone(self._options.lock):
                    await self._take(contender, contender.start(wheres), START_PATIENCE)
                print(f"{contender.system.name} started", flush=True)
            for number in range(self._options.rounds):
                await self._round(number)
            for contender in self._contenders:
                self._note(contender, contender.memory())
        report.write(self._results, self._options.out)

    async def _round(self, number: int) -> None:
        for figure in self._figures:
            with alone(self._options.lock):
                limits = self._measure_limits()
                for contender in self._in_turn(number):
                    if figure.large or contender.system.model == "smollm2":
                        await self._take(contender, contender.measure(figure, limits[contender.system.model]))
            report.write(self._results, self._options.out)
            print(f"round {number + 1}: {figure.name} done, load {load():.1f}", flush=True)
        if number and not self._options.quick:
            for contender in self._in_turn(number):
                with alone(self._options.lock):
                    await self._take(contender, contender.start_again())

    def _in_turn(self, number: int) -> list[Contender]:
        """A B C, then B C A."""
        shift = number % max(1, len(self._contenders))
        return [*self._contenders[shift:], *self._contenders[:shift]]

    def _measure_limits(self) -> dict[Model, Limits]:
        models = {contender.system.model for contender in self._contenders}
        limits = {model: self._probes.measure(self._store.checkpoint(model).weight_bytes) for model in models}
        self._results.rounds += [
            Round(now(), load(), model, one.read, one.integer, one.bfloat16) for model, one in limits.items()
        ]
        return limits

    async def _take(
        self, contender: Contender, measuring: Awaitable[list[Reading]], patience: float = PATIENCE
    ) -> None:
        """Note what it gives; a system that fails or takes too long is stopped and leaves."""
        try:
            async with asyncio.timeout(patience):
                self._note(contender, await measuring)
        except (RuntimeError, OSError, TimeoutError, httpx2.HTTPError, SegueError) as error:
            reason = str(error) or f"took longer than {patience:.0f} s"
            print(f"{contender.system.name} leaves: {reason}", file=sys.stderr)
            self._results.missing[contender.system.name] = f"left: {reason.splitlines()[-1]}"
            contender.stop()
            self._contenders.remove(contender)

    def _note(self, contender: Contender, readings: Sequence[Reading]) -> None:
        self._results.samples += [Sample(contender.system.name, *reading) for reading in readings]


@contextmanager
def alone(locks: Sequence[Path]) -> Iterator[None]:
    """Hold these files locked, in order, as `flock FILE` would."""
    with ExitStack() as stack:
        for path in locks:
            file = stack.enter_context(path.open("a"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def chosen(options: argparse.Namespace) -> list[Figure]:
    if options.figures:
        return [figure for figure in FIGURES if figure.name in options.figures]
    return [figure for figure in FIGURES if figure.quick or not options.quick]


def parse() -> argparse.Namespace:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--peers", type=split, default=[], help="install these first: llama,openvino,vllm,transformers")
    words.add_argument("--systems", type=split, default=[], help="only these; default: all that are installed")
    words.add_argument("--figures", type=split, default=[], help="only these: " + ", ".join(f.name for f in FIGURES))
    words.add_argument("--quick", action="store_true", help="only the figures that matter most; one start each")
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each system")
    words.add_argument("--out", type=Path, default=Path("dist/bench"), help="folder for the results")
    words.add_argument("--add", action="store_true", help="to the results that are in --out already")
    words.add_argument("--lock", type=Path, action="append", default=[], help="hold this file locked while measuring")
    options = words.parse_args()
    options.out = options.out.resolve()
    check(words, "--peers", options.peers, installation.INSTALLERS)
    check(words, "--figures", options.figures, [figure.name for figure in FIGURES])
    return options


def split(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def check(words: argparse.ArgumentParser, option: str, given: Sequence[str], known: Collection[str]) -> None:
    if unknown := [name for name in given if name not in known]:
        words.error(f"{option} knows no {', '.join(unknown)}; it knows {', '.join(known)}")


if __name__ == "__main__":
    sys.exit(main())
