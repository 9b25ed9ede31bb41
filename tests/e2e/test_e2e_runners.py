"""Which runner a configuration gets, and which configurations get none."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.e2e.conftest import ServerProcess, wait_until

from segue_model.checkpoint import Checkpoint
from segue_model.loaders import load_checkpoint
from segue_model.runner.native import NativeRunner, NativeUnavailable, build
from segue_server import runners
from segue_server.config import ConfigError, ServerConfig, parse_config

CONFIG = ServerConfig(threads=1, kv_bytes=1 << 20)
FREE_PORTS = ("--port", 0, "--admin-port", 0, "--metrics-port", 0)


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


def affinities(pid: int) -> list[set[int]]:
    """The cores that each thread of a process may run on."""
    return [os.sched_getaffinity(int(thread.name)) for thread in Path(f"/proc/{pid}/task").iterdir()]


def bound_to(pid: int) -> list[int]:
    """The cores that have a thread bound to them, once for each such thread."""
    return sorted(next(iter(cores)) for cores in affinities(pid) if len(cores) == 1)


CORES = sorted(os.sched_getaffinity(0))
needs_cores = pytest.mark.skipif(len(CORES) < 2, reason="one core: there is nowhere else to go")


@needs_cores
def test_with_a_compute_thread_for_each_core_each_stays_on_its_own(
    spawn: Callable[..., ServerProcess], tiny_model: Path
) -> None:
    server = spawn("--model", tiny_model, "--runner", "native", *FREE_PORTS)
    assert server.target
    wait_until(lambda: bound_to(server.process.pid) == CORES, "a thread on each core", 10.0)
    assert any(cores == set(CORES) for cores in affinities(server.process.pid)), "gRPC and the event loop go anywhere"


@needs_cores
def test_fewer_threads_than_cores_go_where_the_system_puts_them(
    spawn: Callable[..., ServerProcess], tiny_model: Path
) -> None:
    server = spawn("--model", tiny_model, "--runner", "native", "--threads", len(CORES) - 1, *FREE_PORTS)
    assert server.target
    assert all(cores == set(CORES) for cores in affinities(server.process.pid))


@needs_cores
def test_threads_are_bound_to_as_many_cores_as_there_are(checkpoint: Checkpoint) -> None:
    runner = NativeRunner(checkpoint.config, checkpoint.weights, num_pages=1, threads=2)
    with pytest.raises(ValueError, match="cores must be 2, one for each thread, got 1"):
        runner.keep_threads_on(CORES[:1])
    with pytest.raises(ValueError, match=r"of those this thread may use, got \[4096\]"):
        runner.keep_threads_on([CORES[0], 4096])
    assert os.sched_getaffinity(0) == set(CORES)
