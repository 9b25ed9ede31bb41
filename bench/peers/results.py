"""What was measured: every single value, in a file that later runs can be added to."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading of one system; share: of the limit measured in the same round."""

    system: str
    table: str
    column: str
    value: float
    share: float | None


@dataclass(frozen=True, slots=True)
class Round:
    """What the machine was like. Rates per second; load: of the last minute, as the kernel counts it."""

    began: str
    load: float
    model: str  # whose bytes were read
    read: float  # bytes
    integer: float  # int8 multiply-adds
    bfloat16: float  # bfloat16 multiply-adds


@dataclass(slots=True)
class Results:
    machine: str
    threads: int
    systems: dict[str, str] = field(default_factory=dict)  # name -> what computes, with versions
    missing: dict[str, str] = field(default_factory=dict)  # peer or system -> why
    rounds: list[Round] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    @classmethod
    def of_this_machine(cls, threads: int) -> Self:
        return cls(machine=describe_machine(), threads=threads)

    @classmethod
    def read(cls, file: Path) -> Self:
        held = json.loads(file.read_text(encoding="utf-8"))
        rounds = [Round(**one) for one in held.pop("rounds")]
        samples = [Sample(**one) for one in held.pop("samples")]
        return cls(**held, rounds=rounds, samples=samples)

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    def columns(self, table: str) -> Sequence[str]:
        """In the order in which they were first measured."""
        return list(dict.fromkeys(sample.column for sample in self.samples if sample.table == table))

    def cell(self, system: str, table: str, column: str) -> Sequence[Sample]:
        wanted = (system, table, column)
        return [sample for sample in self.samples if (sample.system, sample.table, sample.column) == wanted]


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def load() -> float:
    return os.getloadavg()[0]


def describe_machine() -> str:
    """Processor, the instruction sets that matter here, cores and memory."""
    fields = dict(_cpu_fields())
    flags = set(fields.get("flags", "").split())
    sets = [name for name in ("avx2", "avx512_vnni", "avx512_bf16", "amx_int8") if name in flags]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    name = fields.get("model name", platform.machine())
    family = f"family {fields['cpu family']} model {fields['model']}, " if "model" in fields else ""
    return f"{name} ({family}{' '.join(sets) or 'no AVX'}), {os.cpu_count()} cores, {memory:.0f} GiB"


def _cpu_fields() -> Sequence[tuple[str, str]]:
    file = Path("/proc/cpuinfo")
    if not file.is_file():
        return []
    first = file.read_text(encoding="utf-8").split("\n\n", 1)[0]
    return [(name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in first.splitlines())]
