"""How the server is set up: frozen, built once from the command line, each value checked where it enters."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from segue_model.paging import PAGE_TOKENS
from segue_server.drafts import LONGEST

MIB = 1 << 20
METRICS_ALIASES = ("vllm", "otel")
IN_MEMORY = ":memory:"  # instead of a ledger's file


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Sizes in bytes, times in seconds. A field's name is its command-line option with dashes."""

    model: Path | None = None  # None = the embedded SmolLM2
    host: str = "127.0.0.1"
    port: int = 50051
    admin_port: int = 50052  # loopback only
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 9464
    metrics_aliases: tuple[str, ...] = ()
    runner: Literal["auto", "native", "torch"] = "auto"
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    kv_dtype: Literal["", "float32", "bfloat16", "int8"] = ""
    weights: Literal["auto", "bf16", "int8", "int4"] = "auto"
    isa: Literal["", "avx512amx", "avx512bf16", "avx512vnni", "avx2", "portable"] = ""  # empty = the best here
    threads: int = 0  # 0 = one per core
    kv_bytes: int = 1024 * MIB
    kv_host_bytes: int = 0
    kv_disk_bytes: int = 0
    kv_disk_dir: Path | None = None  # None: a directory for temporary files
    kv_high_watermark: float = 0.9
    kv_low_watermark: float = 0.8
    ledger: str = IN_MEMORY
    max_context_tokens: int = 0  # 0 = the model's
    max_running: int = 64
    max_queued: int = 256
    max_sessions: int = 4096
    prefill_chunk_tokens: int = 128
    draft_tokens: int = 7
    queue_timeout: float = 300.0
    default_ttl: float = 3600.0
    max_ttl: float = 7 * 24 * 3600.0
    expiry_notice: float = 60.0
    max_pinned_bytes: int | None = None  # None = a quarter of the pool
    tombstone_ttl: float = 3600.0
    slow_reader_limit: float = 30.0
    drain_grace: float = 20.0
    log_level: str = "info"
    log_format: Literal["console", "json"] = "console"
    log_prompts: bool = False
    traces: Literal["none", "otlp"] = "none"

    def __post_init__(self) -> None:
        for name in ("port", "admin_port", "metrics_port"):
            self._require(name, "be between 0 and 65535", lambda value: 0 <= value <= 65535)
        self._require("max_pinned_bytes", "not be negative", lambda value: value is None or value >= 0)
        for name in _ABOVE_ZERO:
            self._require(name, "be above 0", lambda value: value > 0)  # NaN is not
        for name in _NOT_NEGATIVE:
            self._require(name, "not be negative", lambda value: value >= 0)
        for name, choices in _CHOICES.items():
            self._require(name, f"be one of {', '.join(choices)}", choices.__contains__)
        known = METRICS_ALIASES
        self._require(
            "metrics_aliases", f"be of {', '.join(known)}", lambda names: all(name in known for name in names)
        )
        self._require("prefill_chunk_tokens", f"be at least a page, {PAGE_TOKENS}", lambda value: value >= PAGE_TOKENS)
        self._require("draft_tokens", f"be between 0 and {LONGEST}", lambda value: 0 <= value <= LONGEST)
        for name in ("kv_high_watermark", "kv_low_watermark"):
            self._require(name, "be above 0 and at most 1", lambda value: 0 < value <= 1)
        highest = self.kv_high_watermark
        self._require("kv_low_watermark", "not be above --kv-high-watermark", lambda value: value <= highest)
        self._require("default_ttl", "not be above --max-ttl", lambda value: value <= self.max_ttl)

    def _require(self, name: str, what: str, fits: Callable[[Any], bool]) -> None:
        if not fits(value := getattr(self, name)):
            raise ConfigError(f"--{_option(name)} must {what}, got {value}")


class ConfigError(ValueError):
    """An option has a value that cannot work; names the option and the limit."""


_HELP = {
    "model": "a GGUF file, or a folder in the Hugging Face or Meta layout; default: the embedded SmolLM2-135M-Instruct",
    "host": "address of the gRPC port",
    "port": "gRPC port; 0 = any free one, printed at start",
    "admin_port": "port of CacheAdminService, on 127.0.0.1 only; 0 = any free one",
    "metrics_host": "address of the metrics port",
    "metrics_port": "port of /metrics; 0 = any free one",
    "metrics_aliases": f"further names for the same metrics, with commas between: {', '.join(METRICS_ALIASES)}",
    "device": "torch device, such as cpu or cuda",
    "runner": "native: C++ kernels for this CPU, built on first use; torch: plain torch; auto: native where possible",
    "dtype": "of the torch runner's activations and KV cache",
    "kv_dtype": "of the native runner's KV cache; empty = bfloat16",
    "weights": "of the native runner, for checkpoints in floating point: auto = bf16; GGUF blocks stay as they are",
    "isa": "of the native runner; empty = the best here. avx512vnni suits a single stream better than avx512amx",
    "threads": "compute threads; 0 = one per core",
    "kv_bytes": "bytes of the KV pool; a suffix KiB, MiB or GiB is understood",
    "kv_host_bytes": "bytes of host memory for the KV of idle sessions that the pool has no room for; 0 = none",
    "kv_disk_bytes": "bytes of disk for what does not fit there either; 0 = none",
    "kv_disk_dir": "folder for it, emptied at the end; default: one for temporary files",
    "kv_high_watermark": "share of the pool from which on idle KV goes down a tier though nobody needs its pages yet",
    "kv_low_watermark": "share of the pool at which that stops",
    "ledger": "file that keeps sessions and their tokens across restarts; :memory: = nothing is kept",
    "max_context_tokens": "longest context of a session; 0 = the model's own",
    "max_running": "turns in the batch at once",
    "max_queued": "turns waiting for a place; more are refused with QUEUE_FULL",
    "max_sessions": "sessions kept at once; more are refused with SESSION_LIMIT",
    "prefill_chunk_tokens": "prompt tokens computed in one step; smaller: running streams wait less",
    "draft_tokens": "tokens guessed ahead in a step of the native runner, from what the session has said; 0 = none",
    "queue_timeout": "seconds a turn waits for a place unless its request says otherwise",
    "default_ttl": "seconds of idleness after which a session expires",
    "max_ttl": "longest ttl a session may ask for",
    "expiry_notice": "seconds before a session expires at which those who watch are told",
    "max_pinned_bytes": "bytes of KV that pinned sessions may take; default: a quarter of the pool",
    "tombstone_ttl": "seconds an expired session still answers SESSION_EXPIRED",
    "slow_reader_limit": "seconds a turn may be paused by a reader that does not read",
    "drain_grace": "seconds running turns get after SIGTERM",
    "log_level": "debug, info, warning or error",
    "log_format": "console: lines for people; json: one object a line",
    "traces": "otlp: send a span for each turn, where the OTEL_* environment variables say; needs the extra otel",
    "log_prompts": "write prompts and answers to the log too",
}
_ABOVE_ZERO = (
    *("kv_bytes", "max_running", "max_sessions", "prefill_chunk_tokens"),
    *("default_ttl", "max_ttl", "slow_reader_limit"),
)
_NOT_NEGATIVE = (
    *("threads", "max_context_tokens", "max_queued", "queue_timeout"),
    *("expiry_notice", "tombstone_ttl", "drain_grace", "kv_host_bytes", "kv_disk_bytes"),
)
_CHOICES = {
    "runner": ("auto", "native", "torch"),
    "dtype": ("float32", "bfloat16"),
    "kv_dtype": ("", "float32", "bfloat16", "int8"),
    "weights": ("auto", "bf16", "int8", "int4"),
    "isa": ("", "avx512amx", "avx512bf16", "avx512vnni", "avx2", "portable"),
    "log_level": ("debug", "info", "warning", "error"),
    "log_format": ("console", "json"),
    "traces": ("none", "otlp"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """One option per field of ServerConfig."""
    for item in fields(ServerConfig):
        default = item.default
        if isinstance(default, bool):
            parser.add_argument(f"--{_option(item.name)}", action="store_true", help=_HELP[item.name])
            continue
        kind = _KINDS.get(item.name, type(default))
        shown = _HELP[item.name] + ("" if default in (None, ()) else f" (default: {default})")
        choices = _CHOICES.get(item.name)
        parser.add_argument(f"--{_option(item.name)}", type=kind, default=default, choices=choices, help=shown)


def from_arguments(arguments: argparse.Namespace) -> ServerConfig:
    """Raises ConfigError."""
    return ServerConfig(**{item.name: getattr(arguments, item.name) for item in fields(ServerConfig)})


def parse_config(arguments: Sequence[str]) -> ServerConfig:
    """A configuration from command-line words, for tests and embedding. Exits like argparse on unknown words."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    return from_arguments(parser.parse_args(arguments))


def parse_bytes(text: str) -> int:
    """Bytes from "1073741824", "512MiB" or "1.5 GiB". Raises ArgumentTypeError."""
    units = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
    number = text.strip().lower()
    for unit, factor in units.items():
        if number.endswith(unit):
            return _positive(number.removesuffix(unit), factor, text)
    return _positive(number, 1, text)


def _bytes_or_none_at_all(text: str) -> int:
    """As `parse_bytes`, and 0."""
    return 0 if text.strip() == "0" else parse_bytes(text)


def _words(text: str) -> tuple[str, ...]:
    """Words with commas between; each once."""
    return tuple(dict.fromkeys(word for part in text.split(",") if (word := part.strip())))


_KINDS: dict[str, Callable[[str], Any]] = {
    "model": Path,
    "metrics_aliases": _words,
    "kv_bytes": parse_bytes,
    "max_pinned_bytes": _bytes_or_none_at_all,
    "kv_host_bytes": _bytes_or_none_at_all,
    "kv_disk_bytes": _bytes_or_none_at_all,
    "kv_disk_dir": Path,
}


def _positive(number: str, factor: int, text: str) -> int:
    try:
        value = float(number) if factor > 1 else int(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes, such as 512MiB") from None
    if not 0 < value < 1 << 50:
        raise argparse.ArgumentTypeError(f"{text!r} is out of range")
    return int(value * factor)


def _option(name: str) -> str:
    return name.replace("_", "-")
