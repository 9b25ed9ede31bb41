"""docs/operations.md: the options and commands it names exist, its arithmetic is right, and its procedures work."""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from tests.e2e.conftest import LiveServer
from tests.e2e.crashing import OTHER_PORTS, QUICK, SMALL, Forked
from typer.main import get_command

from segue_client import AdminClient, Client, Draining
from segue_client.cli.app import app
from segue_model.loaders import find_embedded_model, load_checkpoint
from segue_model.paging import PAGE_TOKENS
from segue_model.runner.native.native_runner import page_bytes
from segue_server.__main__ import main
from segue_server.config import ServerConfig

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
FENCED = re.findall(r"^```\n(.*?)^```", DOC, re.MULTILINE | re.DOTALL)
SPANS = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", DOC, flags=re.MULTILINE | re.DOTALL))
COMMANDS = [line.strip() for block in FENCED for line in block.splitlines()] + [s for s in SPANS if " " in s]
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 8}

Serve = Callable[..., LiveServer]


def options_in(text: str) -> set[str]:
    return set(re.findall(r"--[a-z][a-z-]*", text))


def commands_of(program: str) -> list[str]:
    return sorted({command for command in COMMANDS if command.split()[0] == program})


def server_options(*subcommand: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    with pytest.raises(SystemExit, match="0"):
        main([*subcommand, "--help"])
    return options_in(capsys.readouterr().out)


def cli_options(words: list[str]) -> set[str]:
    """Of `segue words...`. Raises KeyError when there is no such command."""
    command = get_command(app)
    while words and hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


def all_cli_options(command: "typer.core.TyperCommand | typer.core.TyperGroup") -> Iterator[str]:
    for child in getattr(command, "commands", {}).values():
        yield from all_cli_options(child)
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)


@pytest.mark.parametrize("command", commands_of("segue"))
def test_a_client_command_exists_with_its_options(command: str) -> None:
    words = [word for word in command.split()[1:] if not word.startswith("-")]
    assert options_in(command) <= cli_options(words)


@pytest.mark.parametrize("command", commands_of("segue-server"))
def test_a_server_command_exists_with_its_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    subcommand = [word for word in command.split()[1:2] if not word.startswith("-")]
    assert options_in(command) <= server_options(*subcommand, capsys=capsys)


def test_every_option_named_alone_exists(capsys: pytest.CaptureFixture[str]) -> None:
    named = {option for span in SPANS if span.startswith("--") for option in options_in(span)}
    assert len(named) > 20
    assert named <= server_options(capsys=capsys) | set(all_cli_options(get_command(app)))


def test_every_metric_named_is_in_the_list_of_metrics() -> None:
    listed = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/metrics.md").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"\bsegue_[a-z_]+", DOC))
    assert named
    assert named <= listed


def test_every_file_and_target_named_exists() -> None:
    linked = set(re.findall(r"\]\(([\w.]+)\)", DOC))
    assert linked
    assert all((ROOT / "docs" / name).is_file() for name in linked)
    for path in (span for span in SPANS if re.fullmatch(r"(deploy|bench)/[\w./]*", span)):
        assert (ROOT / path).exists(), path
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {span.removeprefix("make ") for span in SPANS if span.startswith("make ")} <= targets


def test_every_panel_named_is_on_a_board() -> None:
    """Italics beside a board's name are the titles of panels, or begin them."""
    boards = "".join(path.read_text() for path in (ROOT / "deploy/grafana/dashboards").glob("*.json"))
    for title in (
        "Time to first token",
        "Engine time",
        "Where prompt tokens came from",
        "Sequences in a step",
        "Recomputed",
        "Gap between two turns",
        "Memory of the process",
        "Queued, by what is short",
    ):
        assert f"*{title}" in DOC.replace("\n", " ")
        assert f'"title": "{title}' in boards


def test_the_arithmetic_of_the_pool() -> None:
    """The table's rows, from the model that is served and the runner's own page size."""
    config = load_checkpoint(find_embedded_model()).config
    for dtype in ("bfloat16", "float32", "int8"):
        page = page_bytes(config, dtype)
        figures = (page // PAGE_TOKENS, page, ServerConfig().kv_bytes // page * PAGE_TOKENS)
        (row,) = [line for line in DOC.splitlines() if line.startswith(f"| {dtype}")]
        assert [cell.strip() for cell in row.split("|")[2:5]] == [f"{figure:,}" for figure in figures]


# ------------------------------------------------------------------------------------------------------- procedures


def test_a_copy_of_a_stopped_servers_ledger_is_a_backup(tmp_path: Path, tiny_model: Path) -> None:
    """The one file is all there is, and a server that starts on a copy of it has the session and its tokens."""
    ledger, copy = tmp_path / "there" / "ledger.sqlite", tmp_path / "here" / "ledger.sqlite"
    for path in (ledger, copy):
        path.parent.mkdir()
    tokens = [_converse(tmp_path / "first.log", tiny_model, ledger)]
    assert [path.name for path in ledger.parent.iterdir()] == [ledger.name]
    shutil.copy(ledger, copy)
    tokens.append(_converse(tmp_path / "second.log", tiny_model, copy))
    assert tokens[1][: len(tokens[0])] == tokens[0]
    assert len(tokens[1]) > len(tokens[0])


def _converse(log: Path, model: Path, ledger: Path) -> list[int]:
    """One turn, in the session that is there or a new one, on a server that then stops; the session's tokens."""
    server = Forked(log, "--model", model, "--ledger", ledger, "--port", 0, *OTHER_PORTS, *SMALL)
    try:
        with Client(server.target) as client:
            names = [info.session_id for info in client.list_sessions()] or [client.create_session().id]
            session = client.get_session(names[0])
            session.generate(text="Once upon a time", **GREEDY)
            tokens = list(session.read_tokens().token_ids)
        server.stop()
        return tokens
    finally:
        server.kill()


def test_sessions_leave_a_draining_server_with_their_kv(tmp_path: Path, serve: Serve) -> None:
    """Upgrade beside: drain, export, import; the new server computes nothing of the past again."""
    old, new = serve(), serve()
    session = old.client().create_session(session_id="one", text="Once upon a time there was")
    session.generate(text="a king", **GREEDY)
    with AdminClient(f"127.0.0.1:{old.running.ports.admin}") as admin:
        admin.drain()
    with pytest.raises(Draining):
        old.client(channel_options=QUICK).generate(text="no more", **GREEDY)
    session.export(tmp_path / "one.segue")
    moved = new.client().import_session(tmp_path / "one.segue", session_id="one")
    answer = moved.generate(text="and", **GREEDY)
    assert answer.position == session.position + len("and") + GREEDY["max_tokens"]
    assert answer.usage.computed_tokens == len("and") + 1  # and the last token, whose logits are needed
