"""docs/metrics.md is the contract: types, labels with every value they can have, and edges are as it says."""

import asyncio
import re
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from tests.server.service_bench import serving
from tests.server.test_metrics import METHODS
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


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Metric]:
    """One scrape of a server that has served nothing but one call, by name without _total; the aliases are in it."""

    async def scraped() -> list[Metric]:
        async with serving(tmp_path_factory.mktemp("model")) as bench:
            scrape = AliasedScraper(bench)
            scrape.calls.finished(METHODS[0], "OK", 0.1)
            return scrape().families

    return {family.name: family for family in asyncio.run(scraped())}


@pytest.mark.parametrize(("name", "kind", "cell"), ROWS, ids=[row[0] for row in ROWS])
def test_type_and_labels_are_as_documented(families: dict[str, Metric], name: str, kind: str, cell: str) -> None:
    family = families[name.removesuffix("_total")]
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
def test_edges_are_as_documented(families: dict[str, Metric], group: str) -> None:
    written = re.search(rf"^\* \*{group}\* \((.*?)\): (.*?)(?=^\*|^$)", DOC, re.MULTILINE | re.DOTALL)
    assert written is not None
    names, edges = re.findall(r"`(\w+)`", written[1]), [float(edge) for edge in re.findall(r"[\d.]+", written[2])]
    if "doubled" in written[2]:
        first, last = edges
        edges = [first * 2**n for n in range(50) if first * 2**n <= last]
    assert list(EDGES[group]) == edges
    for name in names:
        family = families.get(f"segue_{name}_seconds") or families[f"segue_{name}"]
        bounds = {float(s.labels["le"]) for s in family.samples if "le" in s.labels}
        assert sorted(bounds) == [*edges, float("inf")], name


def test_every_alias_is_documented_and_every_documented_one_exists(families: dict[str, Metric]) -> None:
    documented = set(re.findall(r"^\| (?:vllm|otel) \| `([\w:]+)` \|", DOC, re.MULTILINE))
    others = [family for name, family in families.items() if not name.startswith(("segue_", "grpc_"))]
    assert {f.name + "_total" * (f.type == "counter") for f in others} == documented


def test_every_family_is_documented(families: dict[str, Metric]) -> None:
    ours = {f.name + "_total" * (f.type == "counter") for n, f in families.items() if n.startswith(("segue_", "grpc_"))}
    assert ours == {name for name, _, _ in ROWS}
