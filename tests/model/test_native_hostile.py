"""The native runner refuses what it cannot compute, survives hostile input, sleeps when idle, and builds safely."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from segue_model.arrays import Floats
from segue_model.config import DecoderConfig
from segue_model.decoder import Decoder
from segue_model.runner.base import PAGE_TOKENS, Slice, Want
from segue_model.runner.native import NativeRunner, NativeUnavailable, pages_for_bytes
from segue_model.runner.native.build import ISAS, build, choose_isa
from segue_model.runner.native.native_runner import KvDtype

VOCAB, CONTEXT, PAGES = 80, 112, 40
KV_TYPES: tuple[KvDtype, ...] = ("bfloat16", "float32", "int8")


def small_config(**changes: object) -> DecoderConfig:
    sizes: dict[str, object] = {
        "vocab_size": VOCAB,
        "dim": 48,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "ffn_dim": 64,
        "max_context_tokens": CONTEXT,
    }
    return DecoderConfig(**(sizes | changes))  # type: ignore[arg-type]  # checked by the config itself


def weights_of(config: DecoderConfig) -> dict[str, Floats]:
    generator = torch.Generator().manual_seed(1)
    shapes = {name: tensor.shape for name, tensor in Decoder(config).state_dict().items()}
    return {n: (0.3 * torch.randn(shape, generator=generator) + ("norm" in n)).numpy() for n, shape in shapes.items()}


def make_runner(kv: KvDtype = "bfloat16", threads: int = 1, **changes: object) -> NativeRunner:
    config = small_config(**changes)
    return NativeRunner(config, weights_of(config), num_pages=PAGES, kv_dtype=kv, threads=threads)


def logits_of(runner: NativeRunner, item: Slice) -> torch.Tensor:
    (logits,) = runner.forward([item])
    assert logits is not None
    return torch.from_numpy(logits)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([], "at least one slice"),
        ([Slice([], 0, [0])], "slice 0: token_ids must hold"),
        ([Slice([], 0, [])], "slice 0: token_ids must hold"),
        ([Slice([1], 0, [0]), Slice([1, VOCAB], 0, [1])], "slice 1: token_ids must lie in 0 .. 79, got 80"),
        ([Slice([-1], 0, [0])], "token_ids must lie in 0 .. 79, got -1"),
        ([Slice([2**31], 0, [0])], "token_ids must lie in 0 .. 79, got 2147483648"),
        ([Slice([2**70], 0, [0])], "must fit into 64 bits"),
        ([Slice([1], -1, [0])], "positions -1 .. -1 must lie in 0 .. 111"),
        ([Slice([1], -(2**40), [0])], "must lie in 0 .. 111"),
        ([Slice([1], 2**62, [0])], "must lie in 0 .. 111"),
        ([Slice([1], 2**80, [0])], "must fit into 64 bits"),
        ([Slice([1], CONTEXT, list(range(8)))], "positions 112 .. 112 must lie in 0 .. 111"),
        ([Slice([1] * (CONTEXT + 1), 0, list(range(8)))], "positions 0 .. 112 must lie in 0 .. 111"),
        ([Slice([1], 16, [0])], "1 pages of 16 do not cover 17 positions"),
        ([Slice([1], 0, [])], "0 pages of 16 do not cover 1 positions"),
        ([Slice([1], 0, [PAGES])], "page ids must lie in 0 .. 39, got 40"),
        ([Slice([1], 0, [-1])], "page ids must lie in 0 .. 39, got -1"),
        ([Slice([1], 20, [2**40, 3])], "page ids must lie in 0 .. 39, got 1099511627776"),
        ([Slice([1], 0, [5]), Slice([1], 16, [5, 6])], "slice 0: page 5 is written here and used elsewhere"),
        ([Slice([1], 16, [6, 7]), Slice([1], 0, [6])], "slice 1: page 6 is written here and used elsewhere"),
        ([Slice([1] * 17, 0, [5, 5])], "slice 0: page 5 is written here and used elsewhere"),
    ],
)
def test_a_bad_batch_gets_an_error_that_names_slice_and_limit(batch: list[Slice], message: str) -> None:
    """Nothing is written, and the next batch is computed as if nothing had happened."""
    runner = make_runner()
    before = logits_of(runner, Slice([1, 2, 3], 0, [5, 6]))
    held = runner.export_pages(range(PAGES), PAGES * PAGE_TOKENS)
    with pytest.raises(ValueError, match=message):
        runner.forward(batch)
    assert np.array_equal(runner.export_pages(range(PAGES), PAGES * PAGE_TOKENS), held)
    assert torch.equal(logits_of(runner, Slice([1, 2, 3], 0, [5, 6])), before)


def test_bad_pages_and_arrays_are_refused() -> None:
    runner = make_runner()
    kv = np.zeros((2, 2, 2, 17, 16), np.float32)
    with pytest.raises(ValueError, match=r"0 \.\. 39, got 3 \.\. 40"):
        runner.copy_pages([(3, 5), (40, 6)])
    with pytest.raises(ValueError, match=r"0 \.\. 16, got 17"):
        runner.export_pages([0], 17)
    with pytest.raises(ValueError, match=r"0 \.\. 39"):
        runner.export_pages([0, 99], 3)
    with pytest.raises(ValueError, match="1 pages of 16 do not cover 17"):
        runner.import_pages([0], kv)
    with pytest.raises(ValueError, match=r"shape \(2, 2, 2, tokens, 16\), got \(2, 2, 1, 17, 16\)"):
        runner.import_pages([0, 1], kv[:, :, :1])
    with pytest.raises(ValueError, match="not finite"):
        runner.import_pages([0, 1], kv + np.inf)


def test_weights_and_arguments_that_do_not_fit_are_named() -> None:
    config = small_config()
    weights = weights_of(config)
    with pytest.raises(ValueError, match=r"layers\.1\.ffn\.up\.weight must have the shape \(64, 48\), got \(64, 47\)"):
        NativeRunner(config, weights | {"layers.1.ffn.up.weight": np.zeros((64, 47), np.float32)}, num_pages=1)
    with pytest.raises(ValueError, match=r"no tensor head\.weight"):
        NativeRunner(config, {n: w for n, w in weights.items() if n != "head.weight"}, num_pages=1)
    with pytest.raises(ValueError, match="num_pages must be at least 1"):
        NativeRunner(config, weights, num_pages=0)
    with pytest.raises(ValueError, match=r"threads must lie in 1 \.\. 256, got 0"):
        NativeRunner(config, weights, num_pages=1, threads=0)
    with pytest.raises(ValueError, match="kv_dtype must be one of"):
        NativeRunner(config, weights, num_pages=1, kv_dtype="float16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weights_format must be one of"):
        NativeRunner(config, weights, num_pages=1, weights_format="fp8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="head_dim must be at most 256"):
        NativeRunner(small_config(head_dim=258), weights, num_pages=1)
    with pytest.raises(MemoryError):
        NativeRunner(config, weights, num_pages=2**40)


@pytest.mark.parametrize("kv", KV_TYPES)
@pytest.mark.parametrize("path", ["computed", "imported"])
def test_what_a_page_held_before_cannot_reach_its_next_owner(path: str, kv: KvDtype) -> None:
    """All bytes 0xFF: NaN as float32, as bf16 and in the scales of int8."""
    clean, stale = make_runner(kv), make_runner(kv)
    stale.kernels.fill_pages(0xFF)
    text = [i % VOCAB for i in range(30)]
    clean.forward([Slice(text[:18], 0, [0, 1], Want.NOTHING)])
    if path == "computed":
        stale.forward([Slice(text[:18], 0, [3, 6], Want.NOTHING)])
    else:
        stale.import_pages([3, 6], clean.export_pages([0, 1], 18))
    expected = logits_of(clean, Slice(text[18:], 18, [0, 1], Want.ALL))
    assert bool(torch.isfinite(expected).all())
    assert torch.equal(logits_of(stale, Slice(text[18:], 18, [3, 6], Want.ALL)), expected)


def test_weights_that_are_not_finite_show_in_the_logits_and_stay_in_their_sequence() -> None:
    config = small_config()
    weights = weights_of(config)
    weights["embed.weight"][7] = np.nan
    runner = NativeRunner(config, weights, num_pages=PAGES, threads=2)
    healthy = logits_of(runner, Slice([1, 2, 3], 0, [0]))
    sick, beside = runner.forward([Slice([7, 8], 0, [1]), Slice([1, 2, 3], 0, [2])])
    assert sick is not None
    assert beside is not None
    assert not np.isfinite(sick).any()
    assert torch.equal(torch.from_numpy(beside), healthy)


def test_logits_stay_valid_while_they_are_held() -> None:
    runner = make_runner()
    first = logits_of(runner, Slice([1, 2], 0, [0], Want.ALL))
    kept = first.clone()
    row = logits_of(runner, Slice([3], 2, [0]))[0]
    kept_row = row.clone()
    for position in range(3, 10):
        logits_of(runner, Slice([4], position, [0]))
    assert torch.equal(first, kept)
    assert torch.equal(row, kept_row)


def test_unused_pages_of_a_long_table_are_ignored() -> None:
    runner = make_runner()
    expected = logits_of(runner, Slice([1, 2, 3], 0, [4]))
    assert torch.equal(logits_of(runner, Slice([1, 2, 3], 0, [4, 4, 4, 10**9])), expected)


@pytest.mark.parametrize("kv", KV_TYPES)
def test_the_pool_takes_the_bytes_it_declares(kv: KvDtype) -> None:
    runner = make_runner(kv)
    assert pages_for_bytes(runner.config, kv, 6 * runner.page_bytes + 1) == 6
    if kv != "int8":
        size = 2 if kv == "bfloat16" else 4
        assert runner.page_bytes == PAGE_TOKENS * runner.config.kv_bytes_per_token(size)
    with pytest.raises(ValueError, match="less than one page"):
        pages_for_bytes(runner.config, kv, 100)


def test_the_name_says_instruction_set_and_kv() -> None:
    assert make_runner("int8").name == f"native-{choose_isa()}-int8"


def test_an_idle_pool_uses_no_cpu() -> None:
    """Three workers that have just worked: after some yields they sleep."""
    runner = make_runner(threads=4)
    logits_of(runner, Slice([1, 2, 3], 0, [0]))
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(1.0)
    used = time.process_time() - before
    print(f"CPU used in one idle second: {used * 1e3:.2f} ms")
    assert used < 0.05


def test_runners_come_and_go() -> None:
    """Threads and memory end with the runner: a hundred of them leave no thread behind."""
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208  # numbers of threads, not paths
    for _ in range(100):
        logits_of(make_runner(threads=3), Slice([1], 0, [0]))
    assert len(os.listdir("/proc/self/task")) <= threads + 2  # noqa: PTH208


def test_no_compiler_is_said_clearly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NativeUnavailable, match="no C\\+\\+ compiler found \\(CXX=no-such-compiler\\)"):
        build("portable")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeUnavailable, match="one of g\\+\\+, clang\\+\\+, c\\+\\+"):
        build("portable")


def test_a_failing_compiler_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = tmp_path / "cxx"
    compiler.write_text("#!/bin/sh\necho 'sorry, no C++17' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(NativeUnavailable, match=r"sorry, no C\+\+17"):
        build("portable")
    assert not list((tmp_path / "segue" / "native").iterdir())


def test_a_cpu_without_the_instructions_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("segue_model.runner.native.build.cpu_features", lambda: frozenset({"avx2", "fma"}))
    with pytest.raises(NativeUnavailable, match="cannot run avx2: it lacks f16c"):
        choose_isa("avx2")
    with pytest.raises(NativeUnavailable, match="isa must be one of avx512amx, avx512bf16, avx512vnni, avx2, portable"):
        choose_isa("sse9")
    assert choose_isa() == "portable"


def test_intel_and_amd_get_the_bf16_kernels_that_suit_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("segue_model.runner.native.build.cpu_features", lambda: ISAS["avx512bf16"].features)
    for vendor, expected in (("AuthenticAMD", "avx512bf16"), ("GenuineIntel", "avx512vnni")):
        monkeypatch.setattr("segue_model.runner.native.build._cpu_info", lambda _, vendor=vendor: vendor)
        assert choose_isa() == expected


def test_a_refused_matrix_unit_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxes may forbid the system call that asks for it."""
    monkeypatch.setattr("segue_model.runner.native.build.cpu_features", lambda: ISAS["avx512amx"].features)
    monkeypatch.setattr("segue_model.runner.native.build._cpu_info", lambda _: "GenuineIntel")
    for granted, expected in ((True, "avx512amx"), (False, "avx512vnni")):
        monkeypatch.setattr("segue_model.runner.native.build.may_use_matrix_unit", lambda granted=granted: granted)
        assert choose_isa() == expected
    with pytest.raises(NativeUnavailable, match="does not let this process use the matrix unit"):
        choose_isa("avx512amx")


def test_concurrent_builds_end_with_one_whole_library(tmp_path: Path) -> None:
    """A slow stand-in for the compiler, so that four processes are sure to build at the same time."""
    compiler = tmp_path / "cxx"
    compiler.write_text('#!/bin/sh\nsleep 0.3\nfor last; do :; done\nprintf whole > "$last"\n')
    compiler.chmod(0o755)
    script = f"import runpy; print(runpy.run_path({build.__code__.co_filename!r})['build']('portable'))"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "CXX": str(compiler)}
    runs = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    (library,) = {Path(run.communicate(timeout=60)[0].strip()) for run in runs}
    assert [run.returncode for run in runs] == [0] * 4
    assert library.read_text() == "whole"
    assert list(library.parent.iterdir()) == [library]
