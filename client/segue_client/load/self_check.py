"""Watches the tester itself: a tester that is late or out of breath measures itself, and has to say so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Self

from segue_client.load.results import Request, SelfCheck
from segue_client.load.summary import Spread, first_token_times, inter_token_times, percentile

BEAT = 0.01  # seconds between two looks at the event loop
BUSY = 0.85  # of a core, above which queues build up in the tester
NOTICEABLE = 0.2  # of a latency's p99
TIMER = 0.002  # seconds; the event loop's timers are no finer, so that less says nothing


class SelfWatch:
    """Measures this process while its block lasts.

    Example:
        >>> async with SelfWatch() as watch:
        ...     await load()
        >>> watch.check(requests).bottleneck
    """

    async def __aenter__(self) -> Self:
        self._lags: list[float] = []
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        self._beating = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._beating.cancel()
        self._wall, self._cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu

    async def _beat(self) -> None:
        while True:
            due = time.perf_counter() + BEAT
            await asyncio.sleep(BEAT)
            self._lags.append(time.perf_counter() - due)

    def check(self, requests: Sequence[Request]) -> SelfCheck:
        """What was seen, and whether the latencies of these requests are the server's."""
        lags = sorted(self._lags) or [0.0]
        late = sorted(request.sent - request.intended for request in requests) or [0.0]
        share = self._cpu / max(self._wall, 1e-9)
        loop_lag, send_lag = percentile(lags, 0.99), percentile(late, 0.99)
        return SelfCheck(
            cpu_share=share,
            loop_lag_p99=loop_lag,
            loop_lag_max=lags[-1],
            send_lag_p99=send_lag,
            send_lag_max=late[-1],
            bottleneck=bottleneck(
                share,
                loop_lag,
                send_lag,
                Spread.of(first_token_times(requests)),
                Spread.of(inter_token_times(requests)),
            ),
        )


def bottleneck(
    cpu_share: float, loop_lag: float, send_lag: float, ttft: Spread | None, inter_token: Spread | None
) -> str:
    """Why the tester bounded the figures; empty if it did not. Lags are p99 in seconds."""
    reasons = [
        f"it used {cpu_share:.0%} of a core" if cpu_share > BUSY else "",
        _late("its event loop was late by", loop_lag, "inter-token latency", inter_token),
        _late("it sent requests late by", send_lag, "TTFT", ttft),
    ]
    return "; ".join(reason for reason in reasons if reason)


def _late(what: str, lag: float, of: str, spread: Spread | None) -> str:
    if spread is None or lag <= max(TIMER, NOTICEABLE * spread.p99):
        return ""
    return f"{what} {lag * 1e3:.1f} ms (p99) where the p99 of the {of} is {spread.p99 * 1e3:.1f} ms"
