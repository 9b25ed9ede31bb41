"""Options become a frozen configuration; what cannot work is refused with the option's name and the limit."""

import argparse
import math
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from segue_server.config import ConfigError, ServerConfig, add_options, parse_bytes, parse_config


def test_defaults_are_what_the_fields_say_and_listen_on_this_machine_only() -> None:
    config = parse_config([])
    assert config == ServerConfig()
    assert (config.host, config.metrics_host) == ("127.0.0.1", "127.0.0.1")


def test_every_field_is_an_option_with_a_help_text() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    shown = parser.format_help()
    for field in fields(ServerConfig):
        assert f"--{field.name.replace('_', '-')}" in shown


def test_words_reach_their_fields() -> None:
    config = parse_config(
        ["--model", "/m", "--kv-bytes", "1.5GiB", "--max-running", "3", "--queue-timeout", "0", "--dtype", "bfloat16"]
    )
    assert config.model == Path("/m")
    assert config.kv_bytes == 3 << 29
    assert (config.max_running, config.queue_timeout, config.dtype) == (3, 0.0, "bfloat16")
    assert parse_config(["--metrics-aliases", "otel, vllm,otel,"]).metrics_aliases == ("otel", "vllm")
    with pytest.raises(FrozenInstanceError):
        config.port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("port", 65536, "between 0 and 65535"),
        ("metrics_aliases", ("vllm", "sglang"), "be of vllm, otel"),
        ("metrics_port", -1, "between 0 and 65535"),
        ("kv_bytes", 0, "above 0"),
        ("max_running", 0, "above 0"),
        ("max_sessions", -1, "above 0"),
        ("max_queued", -1, "not be negative"),
        ("threads", -1, "not be negative"),
        ("max_context_tokens", -5, "not be negative"),
        ("queue_timeout", -0.1, "not be negative"),
        ("queue_timeout", math.nan, "not be negative"),
        ("drain_grace", math.nan, "not be negative"),
        ("slow_reader_limit", 0.0, "above 0"),
        ("default_ttl", math.nan, "above 0"),
        ("default_ttl", 1e9, "not be above --max-ttl"),
        ("prefill_chunk_tokens", 15, "at least a page, 16"),
        ("draft_tokens", 8, "between 0 and 7"),
        ("kv_host_bytes", -1, "not be negative"),
        ("kv_disk_bytes", -1, "not be negative"),
        ("kv_high_watermark", 1.1, "at most 1"),
        ("kv_low_watermark", math.nan, "above 0"),
        ("kv_low_watermark", 0.95, "not be above --kv-high-watermark"),
        ("dtype", "float16", "one of float32, bfloat16"),
        ("log_level", "loud", "one of debug"),
        ("isa", "sse2", "avx512vnni, avx2, portable"),
    ],
)
def test_what_cannot_work_is_refused_by_name(name: str, value: object, limit: str) -> None:
    with pytest.raises(ConfigError) as error:
        ServerConfig(**{name: value})  # type: ignore[arg-type]
    assert f"--{name.replace('_', '-')} must" in str(error.value)
    assert limit in str(error.value)
    assert str(value) in str(error.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1073741824", 1 << 30), ("512MiB", 1 << 29), (" 1.5 gib ", 3 << 29), ("0.5KiB", 512), ("4kib", 4096)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "1.5", "-1", "0", "0MiB", "nanGiB", "infGiB", "1e999MiB", "12MB", "x"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"not a number of bytes|out of range"):
        parse_bytes(text)


def test_unknown_options_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--max-runing", "3"], ["--dtype", "int8"], ["--kv-bytes", "many"]):
        with pytest.raises(SystemExit):
            parse_config(words)
    assert "--kv-bytes" in capsys.readouterr().err
