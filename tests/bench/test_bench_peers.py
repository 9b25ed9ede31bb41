"""The comparison's own arithmetic and plumbing, without a peer and without a clock."""

import importlib.util
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from segue_model.config import DecoderConfig

BENCH = Path(__file__).parents[2] / "bench"
WORKER = """
import sys
sys.path.append(sys.argv[1])
from peers.workers.loop import serve
class Counting:
    def run(self, prompts, new):
        print("chatter that is no answer", flush=True)
        for i in range(new):
            yield {stream: len(prompt) + i for stream, prompt in enumerate(prompts)}
sys.argv = ["worker", "--model", "none", "--threads", "1", "--context", "64"]
serve(lambda options: Counting())
"""


@pytest.fixture(scope="module")
def peers() -> Iterator[SimpleNamespace]:
    """bench/peers as a package by itself: the folder above it holds names that other packages look for."""
    package = BENCH / "peers"
    spec = importlib.util.spec_from_file_location(
        "peers", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    sys.modules["peers"] = importlib.util.module_from_spec(spec)
    names = ("figures", "generation", "limits", "process", "report", "results", "worker_backend", "workers.loop")
    yield SimpleNamespace(**{name.split(".")[-1]: importlib.import_module(f"peers.{name}") for name in names})
    for name in [name for name in sys.modules if name.split(".")[0] == "peers"]:
        del sys.modules[name]


def config() -> DecoderConfig:
    return DecoderConfig(
        vocab_size=100,
        dim=8,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=4,
        ffn_dim=16,
        max_context_tokens=64,
        tie_embeddings=True,
    )


class Clockwork:
    """A backend whose tokens come a second apart; `lost` of them do not come."""

    def __init__(self, peers: SimpleNamespace, lost: int = 0) -> None:
        self._peers, self._lost = peers, lost
        self.asked: list[list[int]] = []

    def chat(self) -> AbstractAsyncContextManager[object]:
        return self._peers.generation.resending(self._generate)

    async def together(self, prompts: Sequence[Sequence[int]], new: int) -> list[object]:
        return [await self._generate(prompt, new) for prompt in prompts]

    async def _generate(self, prompt: Sequence[int], new: int) -> object:
        self.asked.append(list(prompt))
        count = new - self._lost
        return self._peers.generation.Generation(0.0, list(range(count)), [2.0 + i for i in range(count)])


def bout(peers: SimpleNamespace, backend: Clockwork) -> object:
    work = peers.limits.Work(config(), weight_bytes=1000, kv_token_bytes=10)
    limits = peers.limits.Limits(read=1000.0, integer=1e9, bfloat16=1e9)
    return peers.figures.Bout(backend, peers.figures.Prompts(100), work, limits)


async def test_decode_is_timed_between_the_first_and_the_last_token(peers: SimpleNamespace) -> None:
    [reading] = await peers.figures.decode(16, 4)(bout(peers, Clockwork(peers)))
    assert reading.value == 1.0  # four gaps of a second
    assert reading.share == pytest.approx((1000 + 18 * 10) / 1000)  # weights and 18 positions, of a second each


async def test_prefill_and_streams_count_from_the_request_on(peers: SimpleNamespace) -> None:
    [prefill] = await peers.figures.prefill(32)(bout(peers, Clockwork(peers)))
    assert prefill.value == 16.0
    rate, wait, gap = await peers.figures.streams(4, 8)(bout(peers, Clockwork(peers)))
    assert rate.value == pytest.approx(4 * 8 / 9)
    assert (wait.value, gap.value) == (2000.0, 1000.0)


async def test_a_system_that_says_too_little_is_not_called_fast(peers: SimpleNamespace) -> None:
    with pytest.raises(RuntimeError, match="gave 4 tokens instead of 5"):
        await peers.figures.decode(16, 4)(bout(peers, Clockwork(peers, lost=1)))


async def test_a_chat_without_sessions_sends_everything_again(peers: SimpleNamespace) -> None:
    backend = Clockwork(peers)
    async with backend.chat() as chat:
        await chat.turn([7, 8], 2)
        await chat.turn([9], 1)
    assert backend.asked == [[7, 8], [7, 8, 0, 1, 9]]


def test_the_least_work_of_a_step_is_bytes_or_products_whichever_takes_longer(peers: SimpleNamespace) -> None:
    work = peers.limits.Work(config(), weight_bytes=1000, kv_token_bytes=10)
    slow_memory = peers.limits.Limits(read=1.0, integer=1e12, bfloat16=1.0)
    assert work.seconds(slow_memory, rows=4, logits=4, context=50, streams=4) == 1000 + 4 * 50 * 10
    slow_products = peers.limits.Limits(read=1e12, integer=1.0, bfloat16=1.0)
    body, head, attended = config().parameter_count - 800, 800, 8 + 7 + 6 + 5 + 4 + 3 + 2 + 1
    attention = 2 * 2 * 2 * 4 * attended  # scores and values, layers, heads, head_dim
    assert work.seconds(slow_products, rows=8, logits=1, context=8) == 8 * body + head + attention


@pytest.mark.parametrize(
    ("held", "prompt", "shared"),
    [([], [1], 0), ([1, 2, 3], [1, 2, 3], 2), ([1, 2, 3], [1, 2], 1), ([1, 9], [1, 2, 3], 1)],
)
def test_the_last_token_of_a_prompt_is_always_computed(
    peers: SimpleNamespace, held: list[int], prompt: list[int], shared: int
) -> None:
    assert peers.loop.shared_prefix(held, prompt) == shared


async def test_a_worker_answers_in_lines_and_stands_still_in_between(peers: SimpleNamespace, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WORKER, str(BENCH)]
    group = peers.process.Group(command, {}, tmp_path / "log", piped=True)
    try:
        backend = await peers.worker_backend.WorkerBackend.start(group)
        first, second = await backend.together([[5], [5, 6]], 3)
        assert (list(first.ids), list(second.ids)) == ([1, 2, 3], [2, 3, 4])
        assert first.began <= first.times[0] <= first.times[-1] <= time.perf_counter()
        group.pause()
        assert state(group) == "T"
        with group.running():
            assert len((await backend.together([[5]], 2))[0].ids) == 2
        assert state(group) == "T"
        assert group.peak_bytes() > 1 << 20
    finally:
        group.stop()
    assert "chatter" in (tmp_path / "log").read_text()


async def test_a_worker_that_dies_is_reported_with_its_last_words(peers: SimpleNamespace, tmp_path: Path) -> None:
    group = peers.process.Group(
        [sys.executable, "-c", "raise SystemExit('no such model')"], {}, tmp_path / "log", piped=True
    )
    with pytest.raises(RuntimeError, match="no such model"):
        await peers.worker_backend.WorkerBackend.start(group)
    group.stop()


def state(group: object) -> str:
    """One letter of the kernel's; T is stopped. A signal takes a moment to arrive."""
    until = time.monotonic() + 10
    while (letter := Path(f"/proc/{group.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]) != "T":
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    return letter


def test_results_survive_their_file_and_become_a_table(peers: SimpleNamespace, tmp_path: Path) -> None:
    sample = peers.results.Sample
    results = peers.results.Results("a machine", 2, systems={"segue": "Q4_1"}, missing={"vllm": "not installed"})
    results.samples += [sample("segue", "decode", "after 64", value, 0.5) for value in (90.0, 110.0, 100.0)]
    peers.report.write(results, tmp_path)
    assert peers.results.Results.read(tmp_path / "results.json") == results
    assert json.loads((tmp_path / "results.json").read_text())["samples"][1]["value"] == 110.0
    table = (tmp_path / "table.md").read_text()
    assert "| segue | 100 (90..110), 50% |" in table
    assert "- vllm: missing, not installed" in table
    peers.report.show(results, Console(quiet=True))
