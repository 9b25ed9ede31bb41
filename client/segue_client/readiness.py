"""Waiting for a server: how long still, and what it said last. No I/O."""

from __future__ import annotations

import time

from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from segue_client import calls
from segue_client.calls import Call
from segue_client.errors import DeadlineExceeded, NotFound, SegueError, Unavailable

NOT_YET = (Unavailable, NotFound, DeadlineExceeded)  # failures of a check that a server on its way up may give
_INTERVAL = 0.2  # seconds between two checks


class ReadyWait:
    """The course of one wait."""

    def __init__(self, target: str, timeout: float) -> None:
        self._target = target
        self._timeout = timeout
        self._end = time.monotonic() + timeout
        self._last = ""

    def call(self) -> Call[StringValue, Int32Value]:
        """The next check."""
        return calls.check_ready(max(self._remaining(), 0.001))

    def is_ready(self, answer: Int32Value) -> bool:
        """Takes an answer."""
        self._last = f"{calls.READY_SERVICE} is not serving"
        return answer.value == calls.SERVING

    def failed(self, error: SegueError) -> None:
        """Takes a failure. That a check found no time tells less than what was heard before."""
        if not (self._last and isinstance(error, DeadlineExceeded)):
            self._last = str(error)

    def pause(self) -> float:
        """Seconds to sleep before the next check.

        Raises:
            DeadlineExceeded: no time is left; says what the last check said.
        """
        if self._remaining() <= 0:
            raise DeadlineExceeded(f"{self._target} is not ready after {self._timeout:g} s: {self._last}")
        return min(_INTERVAL, self._remaining())

    def _remaining(self) -> float:
        return self._end - time.monotonic()
