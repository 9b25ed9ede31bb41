"""The alert rules: each has cases in which it fires and does not, and a paragraph that says what to do."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
RULES: dict[str, dict[str, Any]] = {
    rule["alert"]: rule
    for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
}
CASES: list[dict[str, Any]] = [
    case
    for test in yaml.safe_load((DEPLOY / "alerts_test.yml").read_text())["tests"]
    for case in test["alert_rule_test"]
]
every_alert = pytest.mark.parametrize("name", RULES)


def promtool(*words: object) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool (Debian package: prometheus) is not installed")
    done = subprocess.run([program, *map(str, words)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_are_valid() -> None:
    promtool("check", "rules", DEPLOY / "alerts.yml")


def test_the_alerts_fire_when_they_should_and_only_then() -> None:
    """deploy/alerts_test.yml, which has the series."""
    promtool("test", "rules", DEPLOY / "alerts_test.yml")


@every_alert
def test_an_alert_has_cases_in_which_it_fires_and_in_which_it_does_not(name: str) -> None:
    fires = [bool(case["exp_alerts"]) for case in CASES if case["alertname"] == name]
    assert set(fires) == {True, False}


@every_alert
def test_an_alert_names_the_server_and_how_bad_it_is(name: str) -> None:
    assert "{{ $labels.instance }}" in RULES[name]["annotations"]["summary"]
    assert RULES[name]["labels"]["severity"] in {"critical", "warning"}


@every_alert
def test_an_alert_leads_to_a_paragraph_that_says_what_to_do(name: str) -> None:
    file, _, anchor = RULES[name]["annotations"]["runbook"].partition("#")
    paragraphs = sections((ROOT / file).read_text(encoding="utf-8"))
    assert len(paragraphs[anchor].split()) > 20, f"{file}#{anchor}"


def sections(markdown: str) -> dict[str, str]:
    """Anchor -> what stands under its heading, as GitHub makes anchors of headings."""
    parts = re.split(r"^#+ (.+)$", markdown, flags=re.MULTILINE)
    return {anchor(title): text.strip() for title, text in zip(parts[1::2], parts[2::2], strict=True)}


def anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
