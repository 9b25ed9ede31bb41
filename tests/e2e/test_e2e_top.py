"""`segue top` as a user runs it: in a real pseudo-terminal of 80x24, read off by a terminal emulator."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pyte
import pytest

COMMAND = [sys.executable, "-c", "from segue_client.cli import main; main()", "top"]
ROWS, COLUMNS = 24, 80
SECONDS = 60.0  # to wait for anything; a busy machine takes its time
LEFT_ALTERNATE_SCREEN, CURSOR_SHOWN = b"\x1b[?1049l", b"\x1b[?25h"


class Terminal:
    """A terminal with the command in it."""

    def __init__(self, *arguments: str) -> None:
        self._outer, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self._settings = termios.tcgetattr(inner)
        self._inner = inner  # kept, so that its settings can be read when the command has gone
        environment = {**os.environ, "TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            [*COMMAND, *arguments], stdin=inner, stdout=inner, stderr=inner, start_new_session=True, env=environment
        )
        self.written = b""
        self._screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self._screen)

    def press(self, keys: str) -> None:
        os.write(self._outer, keys.encode())

    def read(self) -> list[str]:
        """The lines of the screen, after what has been written by now."""
        while select.select([self._outer], [], [], 0.05)[0]:
            data = os.read(self._outer, 65536)
            self.written += data
            self._stream.feed(data)
        return self._screen.display

    def wait_for(self, what: str, condition: Callable[[list[str]], object]) -> list[str]:
        """Until the lines of the screen are so."""
        end = time.monotonic() + SECONDS
        while not condition(lines := self.read()):
            assert self.process.poll() is None, "the command has ended:\n" + "\n".join(lines)
            assert time.monotonic() < end, f"{what} has not come:\n" + "\n".join(lines)
        return lines

    def wait_for_text(self, text: str) -> list[str]:
        return self.wait_for(text, lambda lines: text in "\n".join(lines))

    def end(self) -> int:
        """The exit code; the terminal has to be as it was."""
        end = time.monotonic() + SECONDS
        while self.process.poll() is None:
            self.read()
            assert time.monotonic() < end, "the command does not end"
        self.read()
        assert self.written.rindex(LEFT_ALTERNATE_SCREEN) > self.written.rindex(b"segue top")
        assert self.written.rindex(CURSOR_SHOWN) > self.written.rindex(b"\x1b[?25l")
        assert termios.tcgetattr(self._inner) == self._settings, "echo and line mode are back"
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._inner)
        os.close(self._outer)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    with ExitStack() as stack:

        def start(*arguments: str) -> Terminal:
            opened = Terminal(*arguments)
            stack.callback(opened.close)
            return opened

        yield start


def table(lines: list[str]) -> list[list[str]]:
    """The words of each row of the table."""
    heading = next(index for index, line in enumerate(lines) if line.startswith(("id", "turn ")))
    return [line.split() for line in lines[heading + 1 : -1] if line.strip()]


def ids(lines: list[str]) -> list[str]:
    return [row[0] for row in table(lines)]


def test_a_server_is_watched_in_a_real_terminal(serve, terminal):
    """Sessions appear and grow, are sorted, filtered and opened; q leaves with 0 and the terminal as it was."""
    server = serve(kv_host_bytes=1 << 20)
    client = server.client()
    small = client.create_session(session_id="small-one", text="a few tokens")
    screen = terminal("--target", server.target, "--admin-target", f"127.0.0.1:{server.running.ports.admin}")
    lines = screen.wait_for_text("small-one")
    assert server.target in lines[0]
    screen.wait_for("both tiers", lambda lines: {"device", "host"} <= {line.split(" ")[0] for line in lines})

    large = client.create_session(session_id="the-large-one", text="many more tokens " * 8)
    screen.wait_for_text("the-large-one")
    answered = large.generate(text="go on", max_tokens=40, ignore_eos=True, temperature=0)
    screen.wait_for(
        "its new position",
        lambda lines: ["the-large-one", "idle", str(answered.position)] in [r[:3] for r in table(lines)],
    )
    screen.wait_for("gaps", lambda lines: "p95" in next(line for line in lines if line.startswith("inter-token")))

    screen.press("3")
    screen.wait_for("the longest first", lambda lines: ids(lines) == ["the-large-one", "small-one"])
    screen.press("r")
    screen.wait_for("the shortest first", lambda lines: ids(lines) == ["small-one", "the-large-one"])
    screen.press("/large\r")  # in one burst
    screen.wait_for("those with the word", lambda lines: ids(lines) == ["the-large-one"])

    screen.press("\r")
    lines = screen.wait_for_text("max_tokens")
    newest = table(lines)[0]
    start = answered.position - 45
    assert newest[:5] == ["1", f"{start}-{answered.position}", "5", "40", "max_tokens"]
    assert newest[5:].count("ms") == 3, "queue, TTFT and longest gap are told"
    assert small.position == client.get_session("small-one").position, "looking changes nothing"
    screen.press("q")
    assert screen.end() == 0


def test_a_turn_that_is_looked_at_goes_on(serve, terminal):
    """Opening a session in the middle of a turn neither ends nor pauses it; Ctrl-C then leaves with 130."""
    server = serve()
    session = server.client().create_session(session_id="at-work", text="begin")
    ends = []
    work = lambda: ends.append(session.generate(max_tokens=1500, ignore_eos=True, temperature=0))  # noqa: E731
    thread = threading.Thread(target=work)
    thread.start()
    screen = terminal("--target", server.target, "--interval", "0.2")
    lines = screen.wait_for_text("at-work")
    assert "--admin-target tells more" in "\n".join(lines), "it says what it cannot show"
    screen.press("\r")
    screen.wait_for_text("prompt generated")
    thread.join(SECONDS)
    (completion,) = ends
    assert completion.usage.generated_tokens == 1500
    screen.wait_for_text("max_tokens")
    screen.press("\x03")
    assert screen.end() == 130


def test_a_server_that_was_killed_is_missed_until_it_is_back(spawn, tiny_model, terminal):
    """kill -9 under the view, and a new process at the same address: the view says so, and then goes on by itself."""
    ports = ("--admin-port", "0", "--metrics-port", "0", "--kv-bytes", "16MiB")
    first = spawn("--model", tiny_model, "--port", "0", *ports)
    screen = terminal("--target", first.target, "--interval", "0.2")
    screen.wait_for_text("0 of 4096 sessions")
    first.process.kill()
    lines = screen.wait_for_text("No answer from")
    assert "0 of 4096 sessions" in "\n".join(lines), "what was known last stays"
    second = spawn("--model", tiny_model, "--port", first.target.rpartition(":")[2], *ports)
    assert second.target == first.target
    screen.wait_for("an answer", lambda lines: "No answer" not in "\n".join(lines))
    screen.process.send_signal(signal.SIGTERM)
    assert screen.end() == 143


def test_without_a_terminal_scripts_are_told_what_to_run():
    result = subprocess.run(COMMAND, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "segue sessions list --json" in result.stderr
