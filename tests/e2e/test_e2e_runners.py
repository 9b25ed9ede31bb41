"""Which runner a configuration gets, and which configurations get none."""

import dataclasses
from pathlib import Path

import pytest

from segue_model.checkpoint import Checkpoint
from segue_model.loaders import load_checkpoint
from segue_model.runner.native import NativeUnavailable, build
from segue_server import runners
from segue_server.config import ConfigError, ServerConfig, parse_config

CONFIG = ServerConfig(threads=1, kv_bytes=1 << 20)


@pytest.fixture(scope="module")
def checkpoint(tiny_model: Path) -> Checkpoint:
    return load_checkpoint(tiny_model)


def test_the_kernels_of_the_instruction_set_that_was_asked_for(checkpoint: Checkpoint) -> None:
    built = runners.make_runner(dataclasses.replace(CONFIG, isa="portable"), checkpoint)
    assert built.runner.name == "native-portable-bfloat16"


@pytest.mark.parametrize("isa", ["", *build.ISAS])
def test_every_instruction_set_can_be_asked_for(isa: str) -> None:
    assert parse_config(["--isa", isa]).isa == isa


@pytest.mark.parametrize("runner", ["auto", "native"])
def test_an_instruction_set_that_this_cpu_lacks_is_refused(
    checkpoint: Checkpoint, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch instead would be a hundred times slower than what was asked for, and says other bits."""
    monkeypatch.setattr(build, "cpu_features", lambda: frozenset({"avx2"}))
    config = dataclasses.replace(CONFIG, runner=runner, isa="avx512vnni")
    with pytest.raises(NativeUnavailable, match=r"this CPU cannot run avx512vnni: it lacks .*avx512_vnni"):
        runners.make_runner(config, checkpoint)


@pytest.mark.parametrize(("option", "value"), [("isa", "avx2"), ("weights", "int8"), ("kv_dtype", "int8")])
def test_torch_knows_nothing_of_what_the_kernels_offer(checkpoint: Checkpoint, option: str, value: str) -> None:
    config = dataclasses.replace(CONFIG, runner="torch", **{option: value})
    with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')} {value} needs the native runner"):
        runners.make_runner(config, checkpoint)
