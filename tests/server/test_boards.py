"""The Grafana boards: every panel can be read without asking anybody, and the JSON is what boards.py writes."""

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
BOARDS = {path.stem: json.loads(path.read_text()) for path in sorted((DEPLOY / "grafana/dashboards").glob("*.json"))}
SOURCES = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
SCRAPES = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
DATASOURCE = {"type": "prometheus", "uid": SOURCES[0]["uid"]}
COLUMNS = 24
UNITS = {"short", "s", "bytes", "binBps", "percentunit"}  # of Grafana's own; others must be a suffix

Panel = dict[str, Any]
PANELS = [
    pytest.param(panel, id=f"{name}: {panel['title']}")
    for name, board in BOARDS.items()
    for panel in board["panels"]
    if panel["type"] != "row"
]
every_panel = pytest.mark.parametrize("panel", PANELS)
every_board = pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)


def test_there_are_an_overview_and_a_cache_board() -> None:
    assert {name: board["uid"] for name, board in BOARDS.items()} == {
        "overview": "segue-overview",
        "cache": "segue-cache",
    }


def test_the_committed_boards_are_what_the_generator_writes(tmp_path: Path) -> None:
    """Whoever edits the JSON by hand learns it here, and not when the next run overwrites it."""
    subprocess.run([sys.executable, DEPLOY / "grafana/boards.py", tmp_path], check=True, timeout=60)
    written = {path.stem: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert written == BOARDS


@every_panel
def test_a_panel_says_what_it_shows_and_in_which_unit(panel: Panel) -> None:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    assert unit in UNITS or unit.startswith("suffix: ")
    assert len(panel["description"]) > len(panel["title"])
    assert panel["description"].endswith(".")
    if panel["type"] == "heatmap":
        assert panel["options"]["yAxis"]["unit"] == unit


@every_panel
def test_a_panel_asks_the_provisioned_datasource(panel: Panel) -> None:
    assert panel["targets"]
    assert panel["datasource"] == DATASOURCE
    assert all(target["datasource"] == DATASOURCE for target in panel["targets"])
    letters = [target["refId"] for target in panel["targets"]]
    assert len(set(letters)) == len(letters)


@every_panel
def test_lines_have_names_and_gaps_stay_gaps(panel: Panel) -> None:
    """Nothing measured is neither 0 nor a line between its neighbours."""
    assert all(target["legendFormat"] for target in panel["targets"])
    assert panel["fieldConfig"]["defaults"]["noValue"]
    if panel["type"] == "timeseries":
        assert panel["fieldConfig"]["defaults"]["custom"]["spanNulls"] is False
        assert panel["options"]["legend"]["showLegend"]


@every_panel
def test_labels_in_a_legend_are_labels_that_the_query_keeps(panel: Panel) -> None:
    """{{reason}} of a query that sums reasons up would name nothing."""
    for target in panel["targets"]:
        kept = {label for found in re.findall(r"\bby \(([^)]*)\)", target["expr"]) for label in found.split(", ")}
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept


@every_panel
def test_an_override_names_a_line_that_can_appear(panel: Panel) -> None:
    for override in panel["fieldConfig"]["overrides"]:
        legends = {target["legendFormat"] for target in panel["targets"]}
        assert override["matcher"]["options"] in legends or any("{{" in legend for legend in legends)


@every_panel
def test_counters_are_asked_over_the_interval_of_the_zoom(panel: Panel) -> None:
    """$__rate_interval spans several scrapes at every zoom; a fixed range fits one zoom only."""
    for target in panel["targets"]:
        assert set(re.findall(r"\[(.*?)\]", target["expr"])) <= {"$__rate_interval"}
        counters = re.findall(r"\w+_(?:total|count|sum|bucket)\b", target["expr"])
        assert len(counters) == len(re.findall(r"\b(?:rate|increase)\(", target["expr"]))


@every_panel
def test_a_query_heeds_the_choice_of_model_and_instance(panel: Panel) -> None:
    for target in panel["targets"]:
        selectors = re.findall(r"\b(\w+)\{(.*?)\}", target["expr"])
        assert selectors
        assert all('instance=~"$instance"' in labels for _, labels in selectors)
        assert all('model=~"$model"' in labels for name, labels in selectors if name.startswith("segue_"))


@every_board
def test_panels_lie_in_the_grid_and_not_on_each_other(board: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        cells = set(_cells(panel["gridPos"]))
        assert all(0 <= x < COLUMNS for x, _ in cells), panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells
    height = 1 + max(y for _, y in taken)
    empty = [y for y in range(height) if not any((x, y) in taken for x in range(COLUMNS))]
    assert empty == []


def _cells(grid: dict[str, int]) -> Iterator[tuple[int, int]]:
    return itertools.product(range(grid["x"], grid["x"] + grid["w"]), range(grid["y"], grid["y"] + grid["h"]))


@every_board
def test_a_board_has_unique_ids_a_description_and_a_link_to_the_other(board: dict[str, Any]) -> None:
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(set(numbers)) == len(numbers)
    assert board["description"]
    assert set(board["links"][0]["tags"]) <= set(board["tags"])


@every_board
def test_a_board_lets_its_reader_choose_model_and_instance(board: dict[str, Any]) -> None:
    variables = board["templating"]["list"]
    assert [variable["name"] for variable in variables] == ["model", "instance"]
    assert all(variable["datasource"] == DATASOURCE for variable in variables)
    assert all(variable["multi"] and variable["includeAll"] for variable in variables)
    assert {annotation["datasource"]["uid"] for annotation in board["annotations"]["list"]} == {DATASOURCE["uid"]}


def test_grafana_knows_the_scrape_interval() -> None:
    """$__rate_interval is derived from it; Grafana's guess of 15 s would smear peaks."""
    assert SOURCES[0]["jsonData"]["timeInterval"] == SCRAPES["global"]["scrape_interval"]


def test_the_lines_of_pressure_are_those_of_the_watermark_and_of_the_alert() -> None:
    panel = next(p for p in BOARDS["cache"]["panels"] if p["title"] == "How full the pool is")
    steps = [step["value"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]]
    assert steps == [None, 0.9, 0.98]
    assert panel["fieldConfig"]["defaults"]["custom"]["thresholdsStyle"]["mode"] == "dashed"
