"""Where a call came from."""

from collections.abc import Mapping
from dataclasses import dataclass, field

TRACE_HEADERS = ("traceparent", "tracestate")  # W3C Trace Context


@dataclass(frozen=True, slots=True)
class Origin:
    """The caller's address, and the trace that the call is part of."""

    peer: str = ""  # as gRPC writes it, such as ipv4:127.0.0.1:40000
    trace: Mapping[str, str] = field(default_factory=dict)  # those of TRACE_HEADERS that were sent


UNKNOWN = Origin()
