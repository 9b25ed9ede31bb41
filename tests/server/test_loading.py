"""The beginning of a start: what goes wrong is told where it can be answered, and nothing heavy is imported for it."""

import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from unittest.mock import Mock

import pytest

from segue_model.checkpoint import CheckpointError
from segue_model.runner.native import NativeUnavailable
from segue_server.__main__ import serve
from segue_server.app import load, run
from segue_server.config import ServerConfig
from segue_server.loading import CANNOT_START, Loading, begin_loading


def test_a_model_that_is_missing_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        begin_loading(ServerConfig(model=tmp_path / "none.gguf"))


def test_weights_are_packed_while_the_caller_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is there at once; what packing raises comes when the runner is wanted."""
    imported = threading.Event()

    def make_runner(*_: object) -> None:
        assert imported.wait(10)
        raise NativeUnavailable("no compiler")

    monkeypatch.setattr("segue_server.loading.make_runner", make_runner)
    config = ServerConfig()
    loading = begin_loading(config)
    assert loading.checkpoint.config.layers == 30
    assert not loading.built.done()
    imported.set()
    with pytest.raises(CANNOT_START, match="no compiler"):
        load(config, loading)


def test_what_has_begun_is_what_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is loaded twice, and the file is not kept mapped: the runner has all of it."""
    config = ServerConfig(kv_bytes=1 << 20)
    loading = begin_loading(config)
    assert not loading.checkpoint.weights
    monkeypatch.setattr("segue_server.app.begin_loading", None)
    served, runner = load(config, loading)
    assert runner is loading.built.result().runner
    assert served.fingerprint == loading.fingerprint.result()


@pytest.mark.parametrize(("ledger", "begun"), [(":memory:", True), ("file.db", False)])
def test_a_ledger_may_refuse_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, ledger: str, *, begun: bool
) -> None:
    seen: list[object] = []

    async def note(_: ServerConfig, loading: object) -> int:
        seen.append(loading)
        return 0

    monkeypatch.setattr("segue_server.loading.begin_loading", lambda _: "begun")
    monkeypatch.setattr("segue_server.logs.set_up", lambda *_: None)
    monkeypatch.setattr("segue_server.app.run", note)
    assert serve(ServerConfig(ledger=ledger)) == 0
    assert seen == ["begun" if begun else None]


async def test_the_server_finishes_what_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """All the way from `run`; a loading that was lost there would be a second one, in silence."""
    seen: list[object] = []

    def load(_: ServerConfig, loading: object) -> None:
        seen.append(loading)
        raise CheckpointError("no further")

    monkeypatch.setattr("segue_server.app.load", load)
    begun = Loading(Mock(), Future(), Future())
    with pytest.raises(CheckpointError, match="no further"):
        await run(ServerConfig(), begun)
    assert seen == [begun]


def test_it_needs_no_part_of_the_server_that_is_imported_meanwhile() -> None:
    heavy = ("grpc", "prometheus_client", "torch", "segue_server.app", "segue_server.engine", "segue_server.service")
    script = f"import sys, segue_server.loading; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"
