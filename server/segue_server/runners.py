"""Which runner computes: the native kernels where they can be built, plain torch elsewhere."""

import logging
import os
from typing import NamedTuple

from segue_model.checkpoint import Checkpoint
from segue_model.runner import native
from segue_model.runner.base import Runner
from segue_model.runner.native import NativeRunner, NativeUnavailable
from segue_server.config import ConfigError, ServerConfig

log = logging.getLogger(__name__)


class Built(NamedTuple):
    """A runner and the dtype it keeps KV in."""

    runner: Runner
    kv_dtype: str


def make_runner(config: ServerConfig, checkpoint: Checkpoint) -> Built:
    """The runner that the configuration asks for; "auto" falls back to torch and says why.

    Raises NativeUnavailable when native kernels were asked for and cannot be had, ConfigError for options that do not
    go together, ValueError for a pool that holds no page.
    """
    threads = config.threads or len(os.sched_getaffinity(0))
    if config.runner == "torch" or (config.runner == "auto" and config.device != "cpu"):
        return _torch(config, checkpoint, threads)
    try:
        return _native(config, checkpoint, threads)
    except NativeUnavailable as error:
        if config.runner == "native" or config.isa:
            raise
        log.warning("no native kernels, torch computes instead: %s", error)
        return _torch(config, checkpoint, threads)


def keep_on_cores(runner: Runner) -> None:
    """Bind a native runner's threads, of which the calling one is the first, if there is one for each core.

    With fewer threads than cores the system has a choice, and other processes may need it to choose well.
    """
    cores = sorted(os.sched_getaffinity(0))
    if isinstance(runner, NativeRunner) and runner.threads == len(cores):
        runner.keep_threads_on(cores)


def _native(config: ServerConfig, checkpoint: Checkpoint, threads: int) -> Built:
    if config.device != "cpu":
        raise ConfigError(f"--runner native computes on the CPU, not on {config.device}")
    kv_dtype = config.kv_dtype or "bfloat16"
    runner = NativeRunner(
        checkpoint.config,
        checkpoint.weights,
        num_pages=native.pages_for_bytes(checkpoint.config, kv_dtype, config.kv_bytes),
        kv_dtype=kv_dtype,
        threads=threads,
        weights_format=config.weights,
        isa=config.isa or None,
    )
    return Built(runner, kv_dtype)


def _torch(config: ServerConfig, checkpoint: Checkpoint, threads: int) -> Built:
    import torch  # noqa: PLC0415 - takes longer than the rest of a start, and the kernels do without

    from segue_model.runner import torch_runner  # noqa: PLC0415 - likewise

    if config.kv_dtype not in ("", config.dtype):
        raise ConfigError(f"--kv-dtype {config.kv_dtype} needs the native runner; torch keeps KV in --dtype")
    if config.weights != "auto":
        raise ConfigError(f"--weights {config.weights} needs the native runner")
    if config.isa:
        raise ConfigError(f"--isa {config.isa} needs the native runner")
    torch.set_num_threads(threads)
    dtype: torch.dtype = getattr(torch, config.dtype)
    runner = torch_runner.TorchRunner(
        checkpoint.config,
        checkpoint.weights,
        device=torch.device(config.device),
        dtype=dtype,
        num_pages=torch_runner.pages_for_bytes(checkpoint.config, dtype, config.kv_bytes),
    )
    return Built(runner, config.dtype)
