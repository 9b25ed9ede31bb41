"""What a result has to say about where it comes from."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from segue_client.load.results import Machine, Metadata, TargetInfo, TargetKind

_TRANSPORTS = {TargetKind.SEGUE: "grpcio", TargetKind.OPENAI: "httpx2"}


def describe(
    command: Sequence[str], seed: int, started: datetime, target: TargetInfo, workload: Mapping[str, str]
) -> Metadata:
    """The metadata of a test that ran in this process.

    Args:
        command: the program and its words.
        seed: of the workload.
        started: when, with its time zone.
        target: what was tested.
        workload: each part of it, as it was given.
    """
    transport = _TRANSPORTS[target.kind]
    return Metadata(
        command=(Path(command[0]).name, *command[1:]),
        seed=seed,
        started=started.astimezone(UTC).isoformat(timespec="seconds"),
        versions={"segue": version("segue"), "python": platform.python_version(), transport: version(transport)},
        machine=_machine(),
        target=target,
        workload=dict(workload),
    )


def _machine() -> Machine:
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        processor=_processor(),
        cores=os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


def _processor() -> str:
    """Its name; on Linux the standard library only knows the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
