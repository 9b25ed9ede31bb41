"""Words, numbers and documents for the terminal and for scripts."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from segue_client.events import Completion

_CONTROLS = {
    code: "\N{REPLACEMENT CHARACTER}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"
}


def printable(text: str) -> str:
    """Text without control characters: what a model or another caller wrote must not steer the terminal."""
    return text.translate(_CONTROLS)


def as_document(message: Message) -> dict[str, object]:
    """A message in proto3's JSON mapping, by the contract's field names; with zeros, 64-bit integers as strings."""
    document: dict[str, object] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return document


def event_line(event: Message) -> str:
    """One event of a stream as a line of JSON, its kind in "type"."""
    return json.dumps({"type": type(event).__name__.lower(), **as_document(event)}, ensure_ascii=False)


def summary(turn: Completion) -> str:
    """A turn's figures in one line."""
    usage, timings = turn.usage, turn.timings
    reused = usage.session_reused_tokens + usage.prefix_reused_tokens + usage.restored_tokens
    first = timings.time_to_first_token
    parts = [
        f"TTFT {first:.2f} s" if first is not None else "",
        decode_rate(usage.generated_tokens, timings.decode),
        f"computed {usage.computed_tokens}, reused {reused}",
        f"position {turn.position}",
        turn.finish_reason.value if turn.finish_reason.value != "eos" else "",
    ]
    return " · ".join(part for part in parts if part)


def decode_rate(tokens: int, decode_seconds: float | None) -> str:
    """Tokens per second while decoding; the first token belongs to the prefill."""
    if not decode_seconds or tokens < 2:
        return ""
    return f"{(tokens - 1) / decode_seconds:.1f} tok/s"


def size(count: int) -> str:
    """Bytes for people."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def since(moment: Timestamp) -> str:
    """How long ago, roughly."""
    seconds = (datetime.now(UTC) - moment.ToDatetime(UTC)).total_seconds()
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"
