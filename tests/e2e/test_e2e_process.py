"""`segue-server` as a process: signals, exit codes, health, and a model from a folder."""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from transformers import LlamaForCausalLM

from segue.v1 import generation_pb2, generation_pb2_grpc, types_pb2
from segue_client import Client

FREE_PORTS = ("--port", "0", "--admin-port", "0", "--metrics-port", "0")
READINESS = "segue.v1.GenerationService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def endless(**fields):
    """A turn that only the end of the context would end."""
    return generation_pb2.GenerateRequest(
        text="Once",
        sampling=types_pb2.SamplingParams(temperature=0),
        stop=types_pb2.StopConditions(ignore_eos=True),
        **fields,
    )


class Watcher:
    """Readiness as a load balancer sees it, with the time of each change."""

    def __init__(self, channel):
        self._stream = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=READINESS))
        self.seen = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self):
        with contextlib.suppress(grpc.RpcError):
            for answer in self._stream:
                self.seen.append((answer.status, time.monotonic()))

    def join(self):
        self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_the_server(spawn, tiny_model, number):
    """NOT_SERVING at once, new turns DRAINING, running ones Finished{DRAINING} after the grace, exit code 0."""
    grace = 1.5
    server = spawn("--model", tiny_model, "--threads", 1, "--drain-grace", grace, *FREE_PORTS)
    with grpc.insecure_channel(server.target) as channel:
        generation = generation_pb2_grpc.GenerationServiceStub(channel)
        watcher = Watcher(channel)
        running = generation.GenerateStream(endless())
        next(running)
        told = time.monotonic()
        server.send(number)
        late = None
        messages = []
        for message in running:
            messages.append(message)
            if late is None and time.monotonic() - told > 0.9:
                late = generation.Generate.future(endless(), timeout=5)
        ended = time.monotonic()
        error = late.exception(timeout=5)
        assert server.wait() == 0
        watcher.join()
    assert messages[-1].finished.finish_reason == types_pb2.FINISH_REASON_DRAINING
    assert messages[-1].finished.position > 1
    assert grace <= ended - told < grace + 5
    assert [status for status, _ in watcher.seen] == [SERVING, NOT_SERVING]
    assert watcher.seen[-1][1] - told < 0.5, "NOT_SERVING comes before anything else"
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert b"DRAINING" in rpc_status.from_call(error).SerializeToString()
    print(f"drained in {ended - told:.2f} s with a grace of {grace} s")


def test_a_short_turn_finishes_within_the_grace(spawn, tiny_model):
    """The grace is no delay: the server ends as soon as its last turn has."""
    server = spawn("--model", tiny_model, "--threads", 1, "--drain-grace", 30, *FREE_PORTS)
    with Client(server.target) as client:
        with client.stream(text="a", temperature=0, ignore_eos=True, max_tokens=400) as turn:
            events = turn.events()
            next(events)
            server.send(signal.SIGTERM)
            list(events)
        assert turn.usage.generated_tokens == 400
    told = time.monotonic()
    assert server.wait() == 0
    assert time.monotonic() - told < 10


@pytest.mark.parametrize("option", ["--port", "--admin-port", "--metrics-port"])
def test_a_taken_port_is_a_clear_line_and_exit_code_2(spawn, tiny_model, option):
    """Each of the three ports: the address is named, no traceback is printed."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = spawn("--model", tiny_model, *FREE_PORTS, option, port)
        code = server.wait()
    log = server.text()
    assert code == 2, log
    assert f"segue-server: cannot listen on '127.0.0.1:{port}'" in log
    assert "Traceback" not in log


def test_a_missing_model_and_an_impossible_option_are_exit_code_2(spawn, tmp_path):
    """One line each, which names the path or the option."""
    missing = spawn("--model", tmp_path / "nothing", *FREE_PORTS)
    impossible = spawn("--prefill-chunk-tokens", 3, *FREE_PORTS)
    assert missing.wait() == 2, missing.text()
    assert impossible.wait() == 2, impossible.text()
    assert f"{tmp_path}/nothing: does not exist" in missing.text()
    assert "--prefill-chunk-tokens must be at least a page, 16, got 3" in impossible.text()
    assert "Traceback" not in missing.text() + impossible.text()


def test_the_health_command_tells_readiness_by_its_exit_code(spawn, tiny_model):
    """For container health checks: 0 when turns are taken, 1 when nobody answers."""
    server = spawn("--model", tiny_model, "--threads", 1, *FREE_PORTS)
    target = server.target
    command = [sys.executable, "-m", "segue_server", "health", "--target", target]
    assert subprocess.run(command, check=False, capture_output=True, timeout=60).returncode == 0
    server.send(signal.SIGTERM)
    assert server.wait() == 0
    assert subprocess.run(command, check=False, capture_output=True, timeout=60).returncode == 1


def test_a_folder_in_the_hugging_face_layout_is_served(spawn, tiny_model):
    """--model DIR: config, weights and tokenizer of a folder that transformers wrote; greedy text equals its own."""
    server = spawn("--model", tiny_model, "--runner", "torch", "--threads", 1, *FREE_PORTS)
    with Client(server.target) as client:
        info = client.model_info()
        assert (info.layer_count, info.vocab_size, info.head_dim, info.max_context_tokens) == (2, 259, 16, 8192)
        prompt = list(client.tokenize("A tiny model").token_ids)
        assert client.detokenize(prompt) == "A tiny model"
        ours = client.generate(text="A tiny model", temperature=0, max_tokens=24, ignore_eos=True)
    model = LlamaForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        theirs = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=24, min_new_tokens=24, eos_token_id=None
        )[0, len(prompt) :]
    assert list(ours.token_ids) == theirs.tolist()
