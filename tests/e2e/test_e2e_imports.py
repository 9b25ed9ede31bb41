"""A server that computes by the kernels never imports torch, which takes longer than the rest of its start."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.conftest import ServerProcess, scrape

from segue_client import Client
from segue_model.runner.native import NativeUnavailable
from segue_model.runner.native.build import build

# What some package below could bring along, or did.
HEAVY = {"torch", "gguf", "sentencepiece", "transformers", "yaml", "scipy", "matplotlib", "typer", "opentelemetry"}
SERVE = """
import json, sys
from segue_server.__main__ import main
code = main(sys.argv[1:])
print(json.dumps(sorted(sys.modules)))
sys.exit(code)
"""


@pytest.fixture(params=["gguf", "safetensors"])
def words(request: pytest.FixtureRequest) -> list[str]:
    try:
        build()
    except NativeUnavailable as error:
        pytest.skip(str(error).splitlines()[0])
    model = ["--model", str(request.getfixturevalue("tiny_model"))] if request.param == "safetensors" else []
    return ["--runner=native", "--kv-host-bytes=64MiB", "--port=0", "--admin-port=0", "--metrics-port=0", *model]


def test_a_native_server_imports_neither_torch_nor_what_comes_with_loaders(words: list[str], tmp_path: Path) -> None:
    """From its start over sampled turns, logprobs, an export, an import, a lower tier and a scrape to its end."""
    command = [sys.executable, "-c", SERVE, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        server = ServerProcess(process)
        try:
            with Client(server.target) as client:
                use(client, tmp_path / "snapshot")
            assert scrape(server.metrics_url)
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        modules = set(json.loads(process.stdout.read()))
        assert server.wait() == 0
        server.text()
    assert "segue_model.runner.native.native_runner" in modules
    assert "segue_model.runner.torch_runner" not in modules
    assert not modules & HEAVY


def use(client: Client, snapshot: Path) -> None:
    """A turn in each way that needs arrays of its own."""
    session = client.create_session(text="Once upon a time in a village by the sea")
    session.generate(text=" there was", max_tokens=8, ignore_eos=True, temperature=0.8, top_p=0.9, top_logprobs=2)
    session.export(snapshot)
    copy = client.import_session(snapshot)
    assert copy.position == session.position
    session.move("HOST")
    for each in (session, copy):
        each.generate(text=" and", max_tokens=4, ignore_eos=True, temperature=0.0)
