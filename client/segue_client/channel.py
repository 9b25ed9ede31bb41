"""How a channel is opened: retries, keepalive, deadlines, and the headers that keep a session on its host."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

DEFAULT_TARGET = "127.0.0.1:50051"

SESSION_ID_HEADER = "x-session-id"
SESSION_HOST_HEADER = "x-session-host"

ChannelOption = tuple[str, int | str]
Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Deadlines in seconds of calls that are not given one of their own; there is no call without a deadline.

    Attributes:
        unary: calls that only read or change bookkeeping.
        turn: calls that run the model: generate, stream, append_context and creating a session with a prefix. Long,
            because a prompt of many thousand tokens on a CPU takes many minutes; bound the tokens by `time_limit`.
        cancel: how long leaving a turn waits for the server to say where the session stands.

    Example:
        >>> Client("127.0.0.1:50051", timeouts=Timeouts(turn=120))
    """

    unary: float = 30.0
    turn: float = 3600.0
    cancel: float = 5.0


def service_config() -> str:
    """The gRPC service config: which failures are tried again (gRFC A6), as JSON.

    Every request that runs the model carries a request id, so that trying again cannot run a turn twice. The server's
    pushback overrides the backoff, and stops the retries where it is negative.
    """
    policy = {
        "maxAttempts": 4,
        "initialBackoff": "0.2s",
        "maxBackoff": "5s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
    }
    services = ["SessionService", "GenerationService", "ModelService"]
    names = [{"service": f"segue.v1.{service}"} for service in services]
    return json.dumps({"methodConfig": [{"name": names, "retryPolicy": policy}]})


def channel_options(extra: Iterable[ChannelOption] = ()) -> list[ChannelOption]:
    """The channel's options; `extra` come last and win."""
    options: dict[str, int | str] = {
        "grpc.service_config": service_config(),
        "grpc.keepalive_time_ms": 30_000,
        # The keepalive timeout has no effect in gRPC core; the ping timeout is what ends a dead connection.
        "grpc.http2.ping_timeout_ms": 10_000,
        # Without this, pings stop after two on a silent stream and a dead server goes unnoticed.
        "grpc.http2.max_pings_without_data": 0,
        # gRPC's own backoff grows to two minutes, longer than a server takes to restart.
        "grpc.initial_reconnect_backoff_ms": 200,
        "grpc.max_reconnect_backoff_ms": 5_000,
    }
    return list((options | dict(extra)).items())


class SessionHeaders:
    """The metadata of calls: the caller's own, the session's id, and the host a proxy keeps the session on.

    Remembers the hosts of the sessions used last, at most `capacity` of them.
    """

    def __init__(self, own: Sequence[tuple[str, str | bytes]] = (), capacity: int = 4096) -> None:
        self._own: Metadata = tuple(own)
        self._capacity = capacity
        self._hosts: dict[str, str] = {}

    def of(self, session_id: str) -> Metadata:
        """What a call of this session carries; an empty id means a call of no session."""
        if not session_id:
            return self._own
        host = self._hosts.get(session_id)
        affinity: Metadata = ((SESSION_HOST_HEADER, host),) if host else ()
        return (*self._own, (SESSION_ID_HEADER, session_id), *affinity)

    def learn(self, session_id: str, answer: Iterable[tuple[str, str | bytes]]) -> None:
        """Takes the session's host from the headers of an answer, if a proxy has set it."""
        host = next((value for key, value in answer if key == SESSION_HOST_HEADER), None)
        if session_id and isinstance(host, str):
            self._hosts.pop(session_id, None)
            self._hosts[session_id] = host
            if len(self._hosts) > self._capacity:
                self.forget(next(iter(self._hosts)))

    def forget(self, session_id: str) -> None:
        """Lets the proxy choose again: the session is gone, or its host does not answer."""
        self._hosts.pop(session_id, None)
