"""A measured system as a process group that can be stopped in place, so that it takes no core from the others."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

STOP_TIMEOUT = 30.0  # seconds


class Group:
    """A process and its children, in a session of their own. Its standard error goes to `log`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, *, piped: bool) -> None:
        """piped: standard input and output are lines for the caller; otherwise output goes to the log too."""
        self.log = log
        self._sink: IO[bytes] = log.open("ab")
        channel = subprocess.PIPE if piped else None
        self.process = subprocess.Popen(
            [str(word) for word in command],
            env={**os.environ, **environment},
            stdin=channel or subprocess.DEVNULL,
            stdout=channel or self._sink,
            stderr=self._sink,
            start_new_session=True,
            cwd=log.parent,
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let it run inside, and stand still outside."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.pause()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def peak_bytes(self) -> int:
        """The largest resident sets of the group's processes, summed: pages they share count for each."""
        return sum(_peak(pid) for pid in _members(self.process.pid))

    def check_alive(self) -> None:
        """Raises RuntimeError with the end of the log."""
        if self.process.poll() is not None:
            lines = self.log.read_text(errors="replace").splitlines()[-12:]
            raise RuntimeError(f"ended with {self.process.returncode}; {self.log}:\n" + "\n".join(lines))

    def stop(self) -> None:
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_TIMEOUT)
        self._signal(signal.SIGKILL)  # children that outlived it
        self.process.wait(STOP_TIMEOUT)
        for pipe in (self.process.stdin, self.process.stdout, self._sink):
            if pipe is not None:
                pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _members(session: int) -> list[int]:
    """Processes of a session, whatever group they are in now."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if _session_of(pid) == session]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def _peak(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:")), 0)
