"""docs/metrics.md lists exactly what the server exports."""

import re
from pathlib import Path

from tests.e2e.conftest import LiveServer, scrape

DOC = Path(__file__).parents[2] / "docs" / "metrics.md"
SUFFIXES = re.compile(r"_(bucket|count|sum|created)$")


def test_every_metric_is_documented_and_every_documented_one_exists(server: LiveServer) -> None:
    """Neither a name that Prometheus finds and nobody explained, nor one that was explained and is gone."""
    documented = set(re.findall(r"^\| `(\w+)` \|", DOC.read_text(encoding="utf-8"), re.MULTILINE))
    server.client().server_info()  # durations of calls have no children before there is one
    samples = scrape(f"http://127.0.0.1:{server.running.ports.metrics}/metrics")
    names = {sample[0] for sample in samples}
    exported = {name if name in documented else SUFFIXES.sub("", name) for name in names}
    assert {name for name in exported if not name.startswith(("process_", "python_"))} == documented
