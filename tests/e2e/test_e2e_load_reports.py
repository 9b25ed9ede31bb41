"""From a real server to a report: what the load tester asks for is what the server counts, and the report shows it."""

import subprocess
import sys

from segue_client.load.results import ContextKind, Results


def load(*words):
    """Runs `segue load`; returns the finished process."""
    command = [sys.executable, "-c", "from segue_client.cli import main; main()", "load", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_each_mode_of_a_context_test_is_where_the_server_says_its_kv_was(serve, tmp_path):
    """KV that has left the pool is restored or recomputed, though the prefix index could still find its pages."""
    live, file, page = serve(kv_host_bytes=64 << 20), tmp_path / "context.json", tmp_path / "context.html"
    words = ("--history", "64,256", "--repeat", "2", "--output-tokens", "4", "--json", file)
    measured = load("context", "--target", live.target, *words)
    assert measured.returncode == 0, measured.stderr

    results = Results.from_json(file.read_bytes())
    modes = (ContextKind.WARM, ContextKind.RESTORED, ContextKind.RECOMPUTED)
    assert [point.context for point in results.points] == [*modes, *modes]
    for request in results.requests:
        assert request.context is results.points[request.point].context

    reported = load("report", file, "--html", page)
    assert reported.returncode == 0, reported.stderr
    assert "Time to first token by history" in reported.stdout
    assert "by the server's count" not in reported.stdout
    assert "Time to first token against history" in page.read_text()
