"""Results of load tests with known truth, for the tests of what is made of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from segue_client.load.results import (
    Check,
    ContextKind,
    Experiment,
    Machine,
    Metadata,
    Outcome,
    Point,
    Request,
    Results,
    SelfCheck,
    TargetInfo,
    TargetKind,
    Verdict,
)

TESTER = SelfCheck(cpu_share=0.11, loop_lag_p99=0.0004, loop_lag_max=0.003, send_lag_p99=0.0006, send_lag_max=0.002)
METADATA = Metadata(
    command=("segue", "load", "run"),
    seed=7,
    started="2026-01-02T03:04:05Z",
    versions={"segue": "0.1.0", "python": "3.11.2", "grpcio": "1.85.3"},
    machine=Machine(system="Linux 6", processor="a processor", cores=2, memory_bytes=24 << 30),
    target=TargetInfo(kind=TargetKind.SEGUE, address="127.0.0.1:50051", model="small-model", server="0.1.0"),
    workload={"prompt": "lognormal:120,0.6", "output": "64", "turns": "4"},
)
MODES = (ContextKind.WARM, ContextKind.RESTORED, ContextKind.RECOMPUTED)


def results(
    experiment: Experiment, points: Sequence[Point], requests: Sequence[Request], **metadata: object
) -> Results:
    return Results(
        experiment=experiment,
        metadata=replace(METADATA, **metadata),  # type: ignore[arg-type]
        points=tuple(points),
        requests=tuple(requests),
    )


def point(label: str, start: float = 0.0, end: float = 60.0, **fields: object) -> Point:
    return Point(label=label, start=start, end=end, **{"tester": TESTER, **fields})  # type: ignore[arg-type]


def request(
    at: float, ttft: float, gaps: Sequence[float] = (), *, index: int = 0, user: int = 0, **fields: object
) -> Request:
    """A request that was due at `at` and got its pieces after `ttft` and the gaps."""
    times = tuple(accumulate(gaps, initial=at + ttft))
    known = {"generated_tokens": len(times), "prompt_tokens": 100, "computed_tokens": 100, "reused_tokens": 0}
    return Request(
        point=index,
        user=user,
        intended=at,
        sent=at,
        token_times=times,
        end=times[-1],
        **{"session": f"{index}/{user}", **known, **fields},  # type: ignore[arg-type]
    )


def lognormal(rng: random.Random, median: float, sigma: float = 0.3) -> float:
    return rng.lognormvariate(0.0, sigma) * median


def run(
    seed: int = 1, slower: float = 1.0, *, sessions: int = 50, turns: int = 4, pieces: int = 20, **metadata: object
) -> Results:
    """A plain run of 60 s, whose durations are lognormal: TTFT around 0.1 s, gaps around 20 ms, times `slower`.

    A session has a pace of its own, so its turns are alike: they are no independent observations.
    """
    rng = random.Random(seed)
    requests = []
    for user in range(sessions):
        at, pace = rng.uniform(0, 20), lognormal(rng, slower, 0.15)
        for turn in range(turns):
            gaps = [lognormal(rng, 0.02 * pace) for _ in range(pieces - 1)]
            context = ContextKind.NEW if turn == 0 else MODES[turn % 2]
            requests.append(request(at, lognormal(rng, 0.1 * pace), gaps, user=user, turn=turn, context=context))
            at = requests[-1].end + rng.uniform(2, 10)
    return results(Experiment.RUN, [point("run")], requests, **metadata)


def context(seed: int = 1) -> Results:
    """TTFT that grows with the history: not when warm, gently when restored, steeply when computed again."""
    rng, points, requests, clock = random.Random(seed), [], [], 0.0
    cost = {MODES[0]: 1e-6, MODES[1]: 3e-5, MODES[2]: 1e-3}
    for history in (256, 1024, 4096, 16384):
        for mode in MODES:
            start, index = clock, len(points)
            for user in range(12):
                ttft = lognormal(rng, 0.02 + cost[mode] * history, 0.1)
                gaps = [lognormal(rng, 0.02 + 5e-7 * history, 0.1) for _ in range(15)]
                requests.append(
                    request(clock, ttft, gaps, index=index, user=user, context=mode, history_tokens=history)
                )
                clock = requests[-1].end
            label = f"history {history:,}, {mode.value}"
            points.append(point(label, start, clock, history_tokens=history, context=mode))
            clock += 1.0
    return results(Experiment.CONTEXT, points, requests)


def concurrency(seed: int = 1) -> Results:
    """Gaps that grow with the streams from 4 on."""
    rng, points, requests, clock = random.Random(seed), [], [], 0.0
    for streams in (1, 2, 4, 8, 16, 32):
        start, index, slower = clock, len(points), max(1.0, streams / 4)
        for user in range(streams):
            at = start
            while at < start + 10:
                gaps = [lognormal(rng, 0.02 * slower, 0.2) for _ in range(30)]
                requests.append(request(at, lognormal(rng, 0.05 * slower), gaps, index=index, user=user))
                at = requests[-1].end
        clock = max(r.end for r in requests)
        points.append(point(f"{streams} streams", start, clock, streams=streams))
        clock += 1.0
    return results(Experiment.CONCURRENCY, points, requests)


def mixed(seed: int = 1) -> Results:
    """Four streams alone, then with a long prompt each 3 s, during which gaps are five times as long."""
    rng, requests = random.Random(seed), []
    arrivals = [22.0, 25.0, 28.0, 31.0, 34.0, 37.0]
    for index, start in enumerate((0.0, 20.0)):
        for user in range(4):
            at = start + user * 0.02
            while at < start + 18:
                moment, gaps = at + 0.05, []
                for _ in range(40):
                    busy = index == 1 and any(begin <= moment < begin + 1.2 for begin in arrivals)
                    gaps.append(lognormal(rng, 0.1 if busy else 0.02, 0.2))
                    moment += gaps[-1]
                requests.append(request(at, 0.05, gaps, index=index, user=user, group="stream"))
                at = requests[-1].end
    requests += [request(at, 1.2, index=1, user=4 + i, group="long") for i, at in enumerate(arrivals)]
    points = [
        point("streams alone", 0.0, 20.0, streams=4),
        point("with long prompts", 20.0, 40.0, streams=4, rate=1 / 3),
    ]
    return results(Experiment.MIXED, points, requests)


def sweep(seed: int = 1) -> Results:
    """Rates tried by bisection; up to 6 a second are held. The last one, beyond, loses requests too."""
    rng, points, requests, clock = random.Random(seed), [], [], 0.0
    for rate in (2.0, 4.0, 8.0, 6.0, 7.0):
        start, index, held = clock, len(points), rate <= 6
        slower = 1 / (1 - min(rate / 8.5, 0.95))
        for user in range(int(rate * 10)):
            at, gaps = start + user / rate, [lognormal(rng, 0.015 * slower**0.5, 0.2) for _ in range(15)]
            lost = (
                {"outcome": Outcome.REFUSED, "error": "RESOURCE_EXHAUSTED: queue full"}
                if rate > 7 and user % 5 == 0
                else {}
            )
            requests.append(request(at, lognormal(rng, 0.06 * slower), gaps, index=index, user=user, **lost))
        clock = max(r.end for r in requests)
        checks = (
            Check(objective="ttft_p99", limit=0.5, measured=0.13 * slower, held=held),
            Check(objective="inter_token_p99", limit=0.1, measured=0.024 * slower**0.5, held=True),
            Check(objective="failed", limit=0.0, measured=0.2 if rate > 7 else 0.0, held=rate <= 7),
        )
        verdict = Verdict(held=held, checks=checks)
        points.append(point(f"{rate:g} a second", start, clock, rate=rate, verdict=verdict))
        clock += 1.0
    return results(Experiment.SWEEP, points, requests)


EXPERIMENTS: dict[Experiment, Callable[[], Results]] = {
    Experiment.RUN: run,
    Experiment.CONTEXT: context,
    Experiment.CONCURRENCY: concurrency,
    Experiment.MIXED: mixed,
    Experiment.SWEEP: sweep,
}
