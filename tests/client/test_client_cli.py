"""The `segue` command: output for people and for scripts, exit codes, and a chat in a real terminal."""

import builtins
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import grpc
import pytest
from typer.testing import CliRunner

from segue.v1 import generation_pb2, types_pb2
from segue_client import cli, errors
from segue_client.cli.app import app
from segue_client.cli.exits import EXIT_CODES, exit_code
from segue_client.cli.text import decode_rate, printable, size

COMMAND = [sys.executable, "-c", "from segue_client.cli import main; main()"]


@pytest.fixture
def segue(server):
    """Runs a command against the server."""

    def run(*arguments, stdin=None):
        return CliRunner().invoke(app, [*arguments, "--target", server.target], input=stdin)

    return run


# ----------------------------------------------------------------------------------------------------- generate


def test_generate_streams_the_text(server, segue):
    result = segue("generate", "Hello", "--temperature", "0", "--max-tokens", "7", "--stop", "a", "--stop", "b")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "w0 w1 w2 ", "")
    request = server.calls("GenerateStream")[0].request
    assert request.text == "Hello"
    assert request.sampling.HasField("temperature")
    assert request.stop.max_tokens == 7
    assert list(request.stop.stop_sequences) == ["a", "b"]


@pytest.mark.parametrize("arguments", [["-"], []])
def test_generate_reads_stdin(server, segue, arguments):
    assert segue("generate", *arguments, "--chat", stdin="from stdin").exit_code == 0
    assert server.calls("GenerateStream")[0].request.chat.messages[0].content == "from stdin"


def test_generate_appends_to_a_session(server, segue):
    server.positions["abc"] = 9
    result = segue("generate", "Hello", "--session", "abc", "--stats")
    assert result.stdout == "w0 w1 w2 "
    assert result.stderr.strip() == "TTFT 0.12 s · 4.0 tok/s · computed 2, reused 9 · position 14"
    assert server.calls("GenerateStream")[0].request.expected_position == 9


def test_generate_as_json_is_a_line_for_each_event(segue):
    lines = [json.loads(line) for line in segue("generate", "Hello", "--json").stdout.splitlines()]
    assert [line["type"] for line in lines] == ["started", "tokens", "tokens", "tokens", "finished"]
    assert "".join(line.get("text", "") for line in lines) == "w0 w1 w2 "
    assert lines[-1]["finish_reason"] == "FINISH_REASON_EOS"
    assert lines[-1]["usage"]["prefix_reused_tokens"] == 0, "zeros are there, so that scripts need no defaults"


# --------------------------------------------------------------------------------------------- sessions and info


def test_sessions_are_listed_for_people_and_for_scripts(server, segue):
    server.positions.update({"abc": 3, "def": 4})
    lines = segue("sessions", "list").stdout.splitlines()
    assert lines[0].split()[:3] == ["id", "state", "position"]
    assert [line.split()[:3] for line in lines[1:]] == [["abc", "idle", "3"], ["def", "idle", "4"]]
    documents = json.loads(segue("sessions", "list", "--json").stdout)
    assert [(entry["session_id"], entry["position"]) for entry in documents] == [("abc", 3), ("def", 4)]


def test_a_list_has_columns_at_a_terminal_and_tabs_in_a_pipe(server, segue, terminal):
    name = "a" * 63
    server.positions.update({name: 1, "abc": 2})
    assert segue("sessions", "list").stdout.splitlines()[1].split("\t")[:3] == [name, "idle", "1"]
    screen = terminal("sessions", "list", "--target", server.target, COLUMNS="140")
    screen.wait_for("position")
    assert "\t" not in screen.wait_for("abc ")
    assert screen.process.wait(10) == 0


def test_a_session_is_shown_and_deleted(server, segue):
    server.positions["abc"] = 3
    assert re.search(r"^cache\.used_bytes\t3072$", segue("sessions", "show", "abc").stdout, re.MULTILINE)
    assert json.loads(segue("sessions", "show", "abc", "--json").stdout)["position"] == 3
    assert json.loads(segue("sessions", "delete", "abc", "--json").stdout) == {
        "session_id": "abc",
        "freed_bytes": 4096,
    }
    server.positions["abc"] = 3
    assert segue("sessions", "delete", "abc", "--force").stdout == "deleted abc, 4.0 KiB freed\n"
    assert server.calls("DeleteSession")[1].request.force


def test_info_shows_server_model_and_load(segue):
    document = json.loads(segue("info", "--json").stdout)
    assert document["model"]["model_id"] == "tiny"
    assert document["server"]["version"] == "0.1.0"
    assert document["load"]["kv_free_bytes"] == str(1 << 20)
    assert re.search(r"^server\.capabilities\tfork, rewind$", segue("info").stdout, re.MULTILINE)


def test_the_target_can_come_from_the_environment(server, monkeypatch):
    monkeypatch.setenv("SEGUE_TARGET", server.target)
    assert CliRunner().invoke(app, ["info"]).exit_code == 0


# ---------------------------------------------------------------------------------------------------- exit codes


@pytest.mark.parametrize(
    ("code", "reason", "status"),
    [
        ("INVALID_ARGUMENT", "FIELD_INVALID", 2),
        ("OUT_OF_RANGE", "CONTEXT_EXCEEDED", 2),
        ("NOT_FOUND", "SESSION_EXPIRED", 3),
        ("ABORTED", "SESSION_BUSY", 4),
        ("RESOURCE_EXHAUSTED", "KV_BUDGET_IMPOSSIBLE", 5),
        ("UNAVAILABLE", "DRAINING", 5),
        ("DEADLINE_EXCEEDED", "", 124),
        ("CANCELLED", "", 130),
        ("INTERNAL", "ENGINE_ERROR", 1),
        ("PERMISSION_DENIED", "", 1),
    ],
)
def test_failures_have_their_exit_codes_and_speak_on_stderr(server, segue, code, reason, status):
    def fail(_, context):
        server.fail(context, grpc.StatusCode[code], reason, "because", {"key": "value"}, pushback_ms=-1)

    server.on("GenerateStream", fail)
    result = segue("generate", "x")
    assert (result.exit_code, result.stdout) == (status, "")
    assert result.stderr == f"segue: {reason or code}: because\n"
    document = json.loads(segue("generate", "x", "--json").stderr)["error"]
    assert (document["code"], document["reason"]) == (code, reason)


def test_every_error_class_has_an_exit_code_of_the_table():
    table = {row.code for row in EXIT_CODES}
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(classes) > 40
    assert {exit_code(cls("x")) for cls in classes} == table - {0}


@pytest.mark.parametrize("arguments", [["generate", "--help"], ["--help"], ["sessions", "--help"]])
def test_help_lists_the_exit_codes(arguments):
    text = " ".join(CliRunner().invoke(app, arguments).stdout.split())
    assert "124 deadline exceeded; 130 interrupted." in text


@pytest.mark.parametrize(
    "arguments", [["generate", "x", "--no-such"], ["sessions", "show"], ["chat", "--session", "abc", "--system", "x"]]
)
def test_wrong_usage_is_exit_code_2(segue, arguments):
    assert segue(*arguments).exit_code == 2


def test_without_the_extra_the_command_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without_typer(name, *rest):
        if name.startswith("segue_client.cli.app"):
            raise ModuleNotFoundError(name="typer")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_typer)
    with pytest.raises(SystemExit, match=r"needs the package typer: pip install 'segue\[cli\]'"):
        cli.main()


# ---------------------------------------------------------------------------------------------------------- text


def test_control_characters_of_a_model_do_not_reach_the_terminal():
    assert printable("a\x1b[31mb\x9bc\r\n\tü") == "a�[31mb�c�\n\tü"


def test_figures_read_well():
    assert [size(count) for count in (0, 1023, 1024, 5 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 MiB",
        "3072.0 GiB",
    ]
    assert decode_rate(1, 1.0) == decode_rate(5, None) == ""
    assert decode_rate(5, 0.5) == "8.0 tok/s"


# ---------------------------------------------------------------------------------------------------------- chat


def test_chat_from_a_pipe_answers_every_line(server, segue):
    result = segue("chat", "--system", "Be brief.", stdin="one\n\ntwo\n/info\n/quit\nthree\n")
    assert result.exit_code == 0
    assert result.stdout == "w0 w1 w2 " * 2
    assert [call.request.chat.messages[0].content for call in server.calls("GenerateStream")] == ["one", "two"]
    assert [call.request.expected_position for call in server.calls("GenerateStream")] == [4, 9]
    (session_id,) = server.positions
    assert f"session {session_id}, position 14" in result.stderr
    assert f"segue chat --session {session_id}" in result.stderr


def test_chat_goes_on_with_a_session(server, segue):
    server.positions["abc"] = 7
    assert segue("chat", "--session", "abc", "--json", stdin="one\n").exit_code == 0
    assert server.calls("GenerateStream")[0].request.expected_position == 7
    assert segue("chat", "--session", "gone").exit_code == 3


def test_chat_from_a_pipe_ends_with_its_first_failure(server, segue):
    server.on("GenerateStream", lambda _, context: server.fail(context, grpc.StatusCode.ABORTED, "SESSION_BUSY"))
    result = segue("chat", stdin="one\ntwo\n")
    assert result.exit_code == 4
    assert len(server.calls("GenerateStream")) == 1


class Terminal:
    """A command in a pseudo-terminal of its own."""

    def __init__(self, *arguments, **environment):
        self._screen, inner = pty.openpty()
        own_terminal = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
        self.process = subprocess.Popen(
            [sys.executable, "-c", own_terminal + COMMAND[-1], *arguments],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", **environment},
        )
        os.close(inner)
        self.seen = ""

    def type(self, text):
        os.write(self._screen, text.encode())

    def wait_for(self, text, seconds=15):
        """Until the screen has shown the text after what was waited for before."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < end, f"{text!r} has not come: {self.seen!r}"
            if select.select([self._screen], [], [], 0.1)[0]:
                self.seen += os.read(self._screen, 4096).decode(errors="replace")
        before, _, self.seen = self.seen.partition(text)
        return before

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._screen)


@pytest.fixture
def terminal():
    opened = []

    def start(*arguments, **environment):
        opened.append(Terminal(*arguments, **environment))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_ctrl_c_in_a_chat_cancels_the_turn_and_the_chat_goes_on(server, terminal):
    """Typed into a real terminal: the interrupt reaches the process through the terminal's own line discipline."""
    server.on("GenerateStream", server.slow_turn)
    screen = terminal("chat", "--target", server.target)
    screen.wait_for("> ")
    screen.type("Hello\n")
    screen.wait_for("w3 ")
    begin = time.monotonic()
    screen.type("\x03")
    screen.wait_for("cancelled")
    screen.wait_for("> ")
    print(f"from Ctrl-C to the next prompt: {(time.monotonic() - begin) * 1000:.0f} ms")
    (finished,) = server.cancelled.values()
    assert finished.usage.generated_tokens >= 4

    server.handlers.clear()
    screen.type("again\n")
    screen.wait_for("w2 ")
    screen.wait_for(f"position {finished.position + 5}")
    assert server.calls("GenerateStream")[1].request.expected_position == finished.position
    screen.wait_for("> ")
    time.sleep(0.3)  # between its prompt and its select(), CPython's readline misses a signal until the next key
    screen.type("\x03")
    screen.wait_for("> ")
    screen.type("\x04")
    screen.wait_for("segue chat --session")
    assert screen.process.wait(10) == 0


def test_a_failed_turn_does_not_end_a_chat_at_a_terminal(server, terminal):
    server.on("GenerateStream", lambda _, context: server.fail(context, grpc.StatusCode.ABORTED, "SESSION_BUSY"))
    screen = terminal("chat", "--target", server.target)
    screen.wait_for("> ")
    screen.type("Hello\n")
    screen.wait_for("SESSION_BUSY")
    screen.wait_for("> ")
    screen.type("/quit\n")
    assert screen.process.wait(10) == 0


@pytest.mark.parametrize(("environment", "coloured"), [({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True)])
def test_a_long_prefill_shows_a_bar_at_a_terminal_only(server, terminal, segue, environment, coloured):
    def stream(request, context):
        started, *rest = server.turn(request, words=1)
        progress = [generation_pb2.PrefillProgress(processed_tokens=n, total_tokens=2000) for n in (500, 1500, 2000)]
        return server.events(started, *progress, *rest)

    server.on("GenerateStream", stream)
    screen = terminal("generate", "x", "--target", server.target, **environment)
    shown = screen.wait_for("w0 ")
    assert "prefill" in shown
    assert "2000/2000" in shown
    assert bool(re.search(r"\x1b\[(?:\d+;)*[39]\d[;\d]*m", shown)) is coloured
    assert screen.process.wait(10) == 0
    result = segue("generate", "x")
    assert (result.stdout, result.stderr) == ("w0 ", "")


def test_an_interrupted_generate_exits_with_130_and_cancels(server):
    server.on("GenerateStream", server.slow_turn)
    process = subprocess.Popen(
        [*COMMAND, "generate", "x", "--json", "--target", server.target], stdout=subprocess.PIPE, text=True
    )
    try:
        line = ""
        while '"tokens"' not in line:
            line = process.stdout.readline()
            assert line
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=10)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    last = json.loads(rest.splitlines()[-1])
    assert (last["type"], last["finish_reason"]) == ("finished", "FINISH_REASON_CANCELLED")
    assert types_pb2.FinishReason.Value(last["finish_reason"]) == next(iter(server.cancelled.values())).finish_reason
