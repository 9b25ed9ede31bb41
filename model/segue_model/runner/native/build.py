"""Compile the kernels once for this machine and keep the library in the user's cache directory.

The key is a hash of sources, flags and processor features, so an upgrade or another machine on a shared home directory
builds its own. Concurrent builds are safe: each compiles in a directory of its own and renames its result into place.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

SOURCES: Final = Path(__file__).parent / "src"
COMPILERS: Final = ("g++", "clang++", "c++")
TIMEOUT_SECONDS: Final = 600

# -ffp-contract=off: the compiler must not fuse what the sources keep apart, or a tile of one row and a tile of many
# would round differently. -fno-trapping-math changes no result; it lets loops with a comparison become vectors. GCC 12
# warns about its own intrinsics headers.
FLAGS: Final = (
    "-std=c++17",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
)


class NativeUnavailable(RuntimeError):
    """The kernels cannot be built or run here; says why. The torch runner computes the same model."""


@dataclass(frozen=True, slots=True)
class Isa:
    """An instruction set the kernels are written for."""

    features: frozenset[str]  # of /proc/cpuinfo, all needed
    flags: tuple[str, ...]
    preferred_on: str | None = None  # a vendor; on others, only when asked for
    matrix_unit: bool = False  # needs the kernel's leave


_AVX512: Final = Isa(
    frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "fma", "f16c"}),
    ("-O3", "-DSEGUE_AVX512", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mfma", "-mf16c"),
)
ISAS: Final = {  # best first
    "avx512amx": Isa(
        _AVX512.features | {"avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16"},
        (*_AVX512.flags, "-mavx512bf16", "-DSEGUE_BF16_DOT", "-DSEGUE_AMX"),
        matrix_unit=True,
    ),
    # AMD multiplies pairs of bf16 as fast as floats; on Intel's cores up to Sapphire Rapids two FMAs take less time.
    "avx512bf16": Isa(
        _AVX512.features | {"avx512_bf16"},
        (*_AVX512.flags, "-mavx512bf16", "-DSEGUE_BF16_DOT"),
        preferred_on="AuthenticAMD",
    ),
    "avx512vnni": _AVX512,
    "avx2": Isa(frozenset({"avx2", "fma", "f16c"}), ("-O3", "-DSEGUE_AVX2", "-mavx2", "-mfma", "-mf16c")),
    "portable": Isa(frozenset(), ("-O3",)),
}


def build(isa: str | None = None) -> Path:
    """The shared library for an instruction set (a key of ISAS; None: the best this CPU has).

    Compiles it when the cache has none, which takes some seconds. Raises NativeUnavailable when that cannot be done.
    """
    chosen = choose_isa(isa)
    flags = (*FLAGS, *ISAS[chosen].flags)
    library = _cache_directory() / f"{chosen}-{_key(flags)}.so"
    if not library.exists():
        log.info("compiling the kernels for this CPU (%s), once", chosen)
        _compile(find_compiler(), flags, library)
    return library


def choose_isa(isa: str | None = None) -> str:
    """The named instruction set, or the best one here. Raises NativeUnavailable for one this CPU lacks."""
    if sys.byteorder != "little" or sys.maxsize < 2**32 or os.name != "posix":
        raise NativeUnavailable(f"the kernels need a 64-bit little-endian POSIX system, not {platform.platform()}")
    features = cpu_features()
    if isa is None:
        vendors = (None, _cpu_info("vendor_id"))
        suited = (n for n, each in ISAS.items() if each.features <= features and each.preferred_on in vendors)
        return next(n for n in suited if not ISAS[n].matrix_unit or may_use_matrix_unit())
    if isa not in ISAS:
        raise NativeUnavailable(f"isa must be one of {', '.join(ISAS)}, got {isa}")
    missing = ISAS[isa].features - features
    if missing:
        raise NativeUnavailable(f"this CPU cannot run {isa}: it lacks {', '.join(sorted(missing))}")
    if ISAS[isa].matrix_unit and not may_use_matrix_unit():
        raise NativeUnavailable(f"the system does not let this process use the matrix unit that {isa} needs")
    return isa


def may_use_matrix_unit() -> bool:
    """Ask Linux to let this process use the tiles of AMX; a thread that did without asking would be killed."""
    if not sys.platform.startswith("linux"):
        return False
    arch_prctl, req_xcomp_perm, xtiledata = 158, 0x1023, 18  # arch/x86/include/uapi/asm/prctl.h; 158 on x86-64
    return bool(ctypes.CDLL(None).syscall(arch_prctl, req_xcomp_perm, xtiledata) == 0)


def cpu_features() -> frozenset[str]:
    """Feature flags as Linux names them; none elsewhere."""
    return frozenset(_cpu_info("flags").split())


def _cpu_info(field: str) -> str:
    """A field of the first processor, empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.split(":")[0].strip() == field), "")


def _key(flags: Sequence[str]) -> str:
    digest = hashlib.sha256("\0".join((*flags, platform.machine(), os.environ.get("CXX", ""))).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:20]


def _cache_directory() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "segue" / "native"


def find_compiler() -> list[str]:
    """The command that compiles C++ here. Raises NativeUnavailable when there is none."""
    named = os.environ.get("CXX")
    command = shlex.split(named) if named else [next((name for name in COMPILERS if shutil.which(name)), "")]
    if not command[0] or shutil.which(command[0]) is None:
        wanted = f"CXX={named}" if named else "one of " + ", ".join(COMPILERS)
        raise NativeUnavailable(f"no C++ compiler found ({wanted}) to build the kernels with")
    return command


def _compile(compiler: Sequence[str], flags: Sequence[str], library: Path) -> None:
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            built = _link(compiler, flags, Path(scratch))
            built.replace(library)
    except OSError as error:
        raise NativeUnavailable(f"cannot write the kernels to {library.parent}: {error}") from error


def _link(compiler: Sequence[str], flags: Sequence[str], scratch: Path) -> Path:
    def compile_one(source: Path) -> Path:
        target = scratch / f"{source.stem}.o"
        _run([*compiler, *flags, "-c", str(source), "-o", str(target)])
        return target

    with ThreadPoolExecutor(os.cpu_count()) as workers:
        # Largest first: one file of kernels takes most of the time.
        sources = sorted(SOURCES.glob("*.cpp"), key=lambda source: source.name != "linear.cpp")
        objects = list(workers.map(compile_one, sources))
    library = scratch / "library.so"
    _run([*compiler, *flags, "-shared", *map(str, objects), "-o", str(library)])
    return library


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)  # noqa: S603
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailable(f"{command[0]} took longer than {TIMEOUT_SECONDS} s to build the kernels") from error
    if done.returncode:
        raise NativeUnavailable(f"{shlex.join(command)} failed:\n{done.stderr.strip()[-2000:]}")
