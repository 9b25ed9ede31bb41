"""docs/metrics.md is the contract: types, labels with every value they can have, and edges are as it says."""

import re
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from tests.server.service_bench import serving
from tests.server.test_metrics import METHODS, Scraper
from tests.server.test_metrics_aliases import AliasedScraper

from segue_server import stats

DOC = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \|", DOC, re.MULTILINE)
OF_THE_BUILD = ("segue_build_info", "segue_cache_config_info")  # their values differ from server to server
EDGES = {
    "TTFT": stats.TTFT_EDGES,
    "gaps": stats.INTER_TOKEN_EDGES,
    "durations": stats.DURATION_EDGES,
    "tokens": stats.TOKEN_EDGES,
    "sessions": stats.IDLE_EDGES,
    "moves": stats.MOVE_EDGES,
    "batch": stats.BATCH_EDGES,
}


def labels_of(cell: str) -> dict[str, set[str]]:
    """Label -> values, from "reason: a, b; tier: c"."""
    pairs = (part.partition(": ") for part in cell.split("; ") if part)
    return {name: set(values.split(", ")) for name, _, values in pairs}


def exported_labels(family: Metric) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for sample in family.samples:
        for name, value in sample.labels.items():
            if name not in ("model", "le"):
                found.setdefault(name, set()).add(value)
    return found


@pytest.mark.parametrize(("name", "kind", "cell"), ROWS, ids=[row[0] for row in ROWS])
async def test_type_and_labels_are_as_documented(tmp_path: Path, name: str, kind: str, cell: str) -> None:
    async with serving(tmp_path) as bench:
        scrape = Scraper(bench)
        scrape.calls.finished(METHODS[0], "OK", 0.1)
        family = next(f for f in scrape().families if f.name == name.removesuffix("_total"))
        assert family.type == kind
        documented, exported = labels_of(cell), exported_labels(family)
        if name in OF_THE_BUILD or name.startswith("grpc_"):
            assert documented.keys() == exported.keys()
        elif {"from_tier", "to_tier"} == documented.keys():
            moves = {(s.labels["from_tier"], s.labels["to_tier"]) for s in family.samples}
            assert moves == set(stats.MOVES)
        else:
            assert documented == exported
        constant = {sample.labels.get("model") for sample in family.samples}
        assert constant == ({None} if name.startswith("grpc_") else {"fake"})


@pytest.mark.parametrize("group", EDGES)
async def test_edges_are_as_documented(tmp_path: Path, group: str) -> None:
    written = re.search(rf"^\* \*{group}\* \((.*?)\): (.*?)(?=^\*|^$)", DOC, re.MULTILINE | re.DOTALL)
    assert written is not None
    names, edges = re.findall(r"`(\w+)`", written[1]), [float(edge) for edge in re.findall(r"[\d.]+", written[2])]
    if "doubled" in written[2]:
        first, last = edges
        edges = [first * 2**n for n in range(50) if first * 2**n <= last]
    assert list(EDGES[group]) == edges
    async with serving(tmp_path) as bench:
        families = {f.name.removeprefix("segue_").removesuffix("_seconds"): f for f in Scraper(bench)().families}
        for name in names:
            bounds = {float(s.labels["le"]) for s in families[name].samples if "le" in s.labels}
            assert sorted(bounds) == [*edges, float("inf")], name


async def test_every_alias_is_documented_and_every_documented_one_exists(tmp_path: Path) -> None:
    documented = set(re.findall(r"^\| (?:vllm|otel) \| `([\w:]+)` \|", DOC, re.MULTILINE))
    async with serving(tmp_path) as bench:
        families = AliasedScraper(bench)().families
        exported = {
            f.name + "_total" * (f.type == "counter") for f in families if not f.name.startswith(("segue", "grpc"))
        }
        assert exported == documented
