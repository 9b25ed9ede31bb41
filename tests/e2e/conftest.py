"""Real servers on loopback sockets: in this process, where their pages can be counted, and in processes of their own.

After each test, and before a server of this process stops, no turn may be left, and once the sessions are deleted no
page may have an owner.
"""

import asyncio
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import grpc
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import LlamaConfig, LlamaForCausalLM

from segue_client import Client, Completion, Session
from segue_server.app import Running, serving
from segue_server.config import ServerConfig

CLOSE_CALL = 1e-3  # of log probability: where the two best are closer, float32 rounding may decide
START_TIMEOUT = 120.0  # seconds
LEAVE_TIMEOUT = 20.0  # seconds in which every turn must have left after a test

Samples = dict[tuple[str, ...], float]  # (name, label values in the order of the label names) -> value


@dataclass
class LiveServer:
    """A server that runs on an event loop and a thread of its own, inside this process."""

    config: ServerConfig
    running: Running
    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event
    _clients: list[Client] = field(default_factory=list)

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.running.ports.grpc}"

    @property
    def steps(self) -> int:
        """Forward passes so far."""
        return sum(self.running.engine.stats.step_batch_size.counts)

    @property
    def full_steps(self) -> int:
        """Forward passes over more than 24 sequences."""
        sizes = self.running.engine.stats.step_batch_size
        return sum(count for count, edge in zip(sizes.counts[1:], sizes.edges, strict=True) if edge >= 24)

    @property
    def page_bytes(self) -> int:
        return self.running.engine.runner.page_bytes

    def client(self, **options: object) -> Client:
        """A client with a connection of its own, closed at the end of the test."""
        options.setdefault("channel_options", [("grpc.use_local_subchannel_pool", 1)])
        self._clients.append(Client(self.target, **options))
        return self._clients[-1]

    def ledger(self, session: Session) -> list[int]:
        """The tokens of an idle session."""
        return list(self.running.engine.tokens(session.id))

    def metrics(self) -> Samples:
        return scrape(f"http://127.0.0.1:{self.running.ports.metrics}/metrics")

    def in_flight(self) -> int:
        """Turns in the batch, in the queue, or waiting for another of their session."""
        load = self.running.service.load()
        return load.running_requests + load.queued_requests + self.running.service.waiting_behind

    def wait_idle(self, timeout: float = LEAVE_TIMEOUT) -> None:
        """Until no turn is in flight."""
        wait_until(lambda: not self.in_flight(), "no turn is in flight", timeout)

    def settle(self) -> None:
        """Until the engine has done what it was told before this call, such as to close an ephemeral session."""
        engine = self.running.service._engine
        asyncio.run_coroutine_threadsafe(engine.call(lambda: None), self.loop).result(LEAVE_TIMEOUT)

    def leave_nothing(self) -> None:
        """Close this test's clients, delete all sessions, and count the pages."""
        for client in self._clients:
            client.close()
        self._clients.clear()
        self.wait_idle()
        asyncio.run_coroutine_threadsafe(self._empty(), self.loop).result(LEAVE_TIMEOUT)

    async def _empty(self) -> None:
        service = self.running.service
        for session in service._sessions:
            await service.delete_session(session.session_id)
        await service._engine.call(self._check_pages)

    def _check_pages(self) -> None:
        scheduler, holdings = self.running.engine.scheduler, self.running.engine.holdings
        scheduler.check_integrity()
        holdings.prefixes.flush()
        assert not holdings.sequences, f"sequences of no session: {list(holdings.sequences)}"
        assert holdings.pool.held == 0, f"{holdings.pool.held} pages without an owner"
        mover = self.running.engine.mover
        mover.carry_out()  # what the last sessions left is dropped before the next step
        assert not mover.store.keys(), f"segments without an owner: {mover.store.keys()}"


@contextmanager
def live_server(config: ServerConfig) -> Iterator[LiveServer]:
    """Runs a server for as long as the block lasts. Raises what starting it raises."""
    ready: Future[LiveServer] = Future()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(config, ready)), name="server")
    thread.start()
    server = ready.result(START_TIMEOUT)
    try:
        yield server
    finally:
        try:
            server.leave_nothing()
        finally:
            server.loop.call_soon_threadsafe(server.stop.set)
            thread.join(START_TIMEOUT)
            assert not thread.is_alive(), "the server does not stop"


async def _serve(config: ServerConfig, ready: "Future[LiveServer]") -> None:
    stop = asyncio.Event()
    try:
        async with serving(config) as running:
            ready.set_result(LiveServer(config, running, asyncio.get_running_loop(), stop))
            await stop.wait()
    except BaseException as error:
        if ready.done():
            raise
        ready.set_exception(error)


# ---------------------------------------------------------------------------------------------------- the models


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 0.2 M parameters in the Hugging Face layout. Its tokens are bytes; a step takes about 1 ms."""
    folder = tmp_path_factory.mktemp("tiny-model")
    torch.manual_seed(20)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=0.3,  # wide: clear choices, few close calls
        bos_token_id=256,
        eos_token_id=257,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokens = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(byte_tokens, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>", "<pad>")])
    backend.save(str(folder / "tokenizer.json"))
    return folder


@contextmanager
def smollm2(runner: Literal["auto", "torch"]) -> Iterator[LiveServer]:
    """SmolLM2; in float32 if torch computes."""
    threads = torch.get_num_threads()
    config = ServerConfig(port=0, admin_port=0, metrics_port=0, runner=runner, threads=1, kv_bytes=512 << 20)
    with live_server(config) as live:
        yield live
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    """SmolLM2, shared by all tests that need real answers, as users get it: on the kernels where they can be built."""
    with smollm2("auto") as live:
        yield live


@pytest.fixture
def serve(tiny_model: Path) -> Iterator[Callable[..., LiveServer]]:
    """Starts servers of the tiny model: `serve(max_running=1)`."""
    threads = torch.get_num_threads()
    with ExitStack() as servers:

        def start(**options: object) -> LiveServer:
            defaults = {"port": 0, "admin_port": 0, "metrics_port": 0, "runner": "torch", "kv_bytes": 64 << 20}
            config = ServerConfig(model=tiny_model, threads=1, **{**defaults, **options})
            return servers.enter_context(live_server(config))

        yield start
    torch.set_num_threads(threads)


@pytest.fixture
def client(server: LiveServer) -> Client:
    return server.client()


@pytest.fixture(autouse=True)
def no_page_without_an_owner(request: pytest.FixtureRequest) -> Iterator[None]:
    """The ownership check after each test that used the shared server; the others check when they stop."""
    yield
    if "server" in request.fixturenames:
        live: LiveServer = request.getfixturevalue("server")
        live.leave_nothing()


# ---------------------------------------------------------------------------------------------- servers as processes


@dataclass
class ServerProcess:
    """`segue-server` in a process of its own."""

    process: "subprocess.Popen[str]"
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self._read_log)
        self.reader.start()

    def _read_log(self) -> None:
        for line in self.process.stderr or ():
            self.log.append(line)

    def wait(self, timeout: float = 60.0) -> int:
        """The exit code."""
        return self.process.wait(timeout)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def text(self) -> str:
        """All that an ended process has said."""
        self.reader.join(START_TIMEOUT)
        return "".join(self.log)

    def find(self, pattern: str, timeout: float = START_TIMEOUT) -> str:
        """What the first group of `pattern` matches in the log, once it does."""
        wait_until(lambda: self._match(pattern) or self.process.poll() is not None, pattern, timeout)
        found = self._match(pattern)
        assert found, f"no {pattern!r} in the log:\n{''.join(self.log)}"
        return found[1]

    def _match(self, pattern: str) -> "re.Match[str] | None":
        return re.search(pattern, "".join(self.log))

    @property
    def target(self) -> str:
        return self.find(r"serving .* on (\S+)\n")

    @property
    def metrics_url(self) -> str:
        return self.find(r"metrics on (\S+)\n")


@pytest.fixture
def spawn() -> Iterator[Callable[..., ServerProcess]]:
    """Starts `segue-server` with the words given; kills what is left of it after the test.

    On the runner that users get: the kernels start in a second, without importing torch.
    """
    with ExitStack() as stack:

        def start(*words: object) -> ServerProcess:
            command = [sys.executable, "-m", "segue_server", *map(str, words)]
            process = stack.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
            server = ServerProcess(process)
            stack.callback(server.reader.join)
            stack.callback(process.kill)
            return server

        yield start


# --------------------------------------------------------------------------------------------------------- helpers


def wait_until(condition: Callable[[], object], what: str, timeout: float) -> None:
    """Raises AssertionError when `what` is not so within `timeout` seconds."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"not within {timeout:g} s: {what}"
        time.sleep(0.005)


def scrape(url: str) -> Samples:
    """The samples at /metrics, by name and label values; the constant label `model` is left out."""
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - an address of our own server
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        (sample.name, *(value for name, value in sorted(sample.labels.items()) if name != "model")): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.fixture
def same_choices() -> Callable[[Completion, Completion], None]:
    """Are two greedy answers equal, token for token, up to the first close call?

    The second one, the reference, has `top_logprobs=2`. Float32 sums depend on the shapes they are computed in: where
    the two best tokens of the reference are closer than CLOSE_CALL either may be chosen; the rest is not compared then.
    """

    def compare(got: Completion, expected: Completion) -> None:
        difference = first_difference(got.token_ids, expected.token_ids)
        if difference is None:
            return
        margin = margin_of(expected.logprobs[difference].top)
        ours, theirs = got.token_ids[difference:][:1], expected.token_ids[difference:][:1]
        print(f"token {difference}: {ours} for {theirs}, margin {margin:.1e}")
        assert margin <= CLOSE_CALL, f"{got.token_ids} differs from {expected.token_ids} at {difference}"

    return compare


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two answers part; a missing token is a difference."""
    if list(one) == list(other):
        return None
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def margin_of(top: Sequence[object]) -> float:
    """Log probability between the best and the second token."""
    best, second = top[:2]
    return best.logprob - second.logprob


@pytest.fixture
def channel(server: LiveServer) -> Iterator[grpc.Channel]:
    """A plain gRPC channel: no retries, no library of ours."""
    with grpc.insecure_channel(server.target) as plain:
        yield plain
