"""A turn whose stream broke: whether, when and with which call it is taken up again. No I/O.

A broken stream says nothing about its turn, and its status code nothing about the cause. The turn is asked for by its
request id, from the event after the last one seen; one that has said nothing yet is sent again as it was, which the
server knows to be the same turn. Neither can run a turn twice or lose an event.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace

import grpc

from segue.v1.generation_pb2 import GenerateRequest
from segue_client import calls
from segue_client.calls import StreamCall, TurnCall
from segue_client.channel import Timeouts
from segue_client.events import TurnRecord
from segue_client.failures import is_broken

FIRST_PAUSE = 0.05  # seconds, doubled with each try in vain
LONGEST_PAUSE = 2.0
UNHEARD = 5.0  # seconds a turn that has said nothing is sent again; gRPC's own retries come on top


class Resumption:
    """The tries of one turn. Without a `detach_grace` the server keeps no turn, and nothing is tried."""

    def __init__(self, call: TurnCall, timeouts: Timeouts) -> None:
        self._call = call
        self._timeouts = timeouts
        self._grace = _grace(call)
        self._deadline = float("inf")
        self._broken_since: float | None = None
        self._tries = 0

    def begin(self) -> None:
        """The turn is sent: its deadline holds for all tries together."""
        self._deadline = time.monotonic() + self._call.deadline(self._timeouts)

    def progress(self) -> None:
        """An event has come."""
        self._broken_since = None
        self._tries = 0

    def pause(self, failure: grpc.RpcError, record: TurnRecord) -> float:
        """Seconds to wait before the next try. Raises `failure` when there is none."""
        now = time.monotonic()
        self._tries += 1
        self._broken_since = now if self._broken_since is None else self._broken_since
        pause = min(math.ldexp(FIRST_PAUSE, self._tries - 1), LONGEST_PAUSE) * random.uniform(0.5, 1.0)  # noqa: S311
        patience = self._grace if record.begun else min(self._grace, UNHEARD)
        if not is_broken(failure) or now + pause >= min(self._broken_since + patience, self._deadline):
            raise failure
        return pause

    def call(self, record: TurnRecord) -> StreamCall:
        """What is sent for the next try."""
        timeout = max(self._deadline - time.monotonic(), 0.0)
        if record.begun:
            return calls.attach(record.request_id, record.last_sequence, self._call.session_id, timeout)
        return replace(self._call, timeout=timeout)


def _grace(call: TurnCall) -> float:
    request = call.request
    return request.detach_grace.ToTimedelta().total_seconds() if isinstance(request, GenerateRequest) else 0.0
