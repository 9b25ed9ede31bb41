"""Dockerfile, docker-compose.yml and deploy/ name files, ports, commands and metrics: all of them exist."""

import ast
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from segue_server.__main__ import main
from segue_server.config import ServerConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PROMETHEUS: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
ALERTS: dict[str, Any] = yaml.safe_load((DEPLOY / "alerts.yml").read_text())
BOARDS = sorted((DEPLOY / "grafana/dashboards").glob("*.json"))
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SERVER_PORTS = {str(ServerConfig().port), str(ServerConfig().metrics_port)}


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, rest) for each instruction, continuation lines joined."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    joined = "\n".join(line for line in lines if not line.startswith("#")).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


DOCKERFILE = dockerfile()


def instruction(name: str) -> str:
    """The last one of that name, which is the one that counts in the final stage."""
    return [rest for word, rest in DOCKERFILE if word == name][-1]


def mounts(service: str) -> dict[str, str]:
    """Path in the container -> source."""
    return {target: source for source, target, *_ in (m.split(":") for m in SERVICES[service].get("volumes", []))}


def test_compose_mounts_files_that_exist_and_volumes_that_are_declared() -> None:
    for source in (source for service in SERVICES for source in mounts(service).values()):
        assert (ROOT / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], source


def test_compose_finds_nothing_wrong_with_its_file() -> None:
    program = shutil.which("docker-compose")
    if program is None:
        pytest.skip("docker-compose (Debian package: docker-compose) is not installed")
    command = [program, "--file", str(ROOT / "docker-compose.yml"), "config", "--quiet"]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_compose_publishes_every_port_on_loopback_only() -> None:
    published = [port for service in SERVICES.values() for port in service["ports"]]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_compose_waits_for_services_that_can_become_healthy() -> None:
    for service in SERVICES.values():
        for name, condition in service.get("depends_on", {}).items():
            assert condition == {"condition": "service_healthy"}
            assert SERVICES[name]["healthcheck"]["test"]


def test_compose_gives_the_server_time_to_drain() -> None:
    assert int(SERVICES["server"]["stop_grace_period"].removesuffix("s")) > ServerConfig().drain_grace


def test_server_ports_agree_everywhere() -> None:
    """Configuration, image, compose and scrape target."""
    targets = [target for job in PROMETHEUS["scrape_configs"] for c in job["static_configs"] for target in c["targets"]]
    assert set(instruction("EXPOSE").split()) == SERVER_PORTS
    assert {port.rpartition(":")[2] for port in SERVICES["server"]["ports"]} == SERVER_PORTS
    assert targets == [f"server:{ServerConfig().metrics_port}"]


def test_image_copies_files_that_exist_and_are_sent_to_the_builder() -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copies = [rest for name, rest in DOCKERFILE if name == "COPY" and "--from" not in rest]
    copied = {source for rest in copies for source in rest.split()[:-1]}
    assert all((ROOT / name).exists() for name in sent)
    assert copied - {"."} <= sent
    assert {"pyproject.toml", "README.md", "LICENSE", "client", "model", "protos", "server"} <= sent


def test_image_installs_extras_and_pins_that_exist() -> None:
    pip = " ".join(rest for name, rest in DOCKERFILE if name == "RUN" and "pip install" in rest)
    extras = {extra for group in re.findall(r"'\.\[(.+?)\]'", pip) for extra in group.split(",")}
    assert extras <= set(PROJECT["optional-dependencies"])
    assert "server" in extras
    assert all((ROOT / name).is_file() for name in re.findall(r"-c (\S+)", pip))


def test_image_runs_unprivileged_and_stops_by_draining() -> None:
    assert instruction("USER") not in {"root", "0"}
    assert instruction("STOPSIGNAL") == "SIGTERM"


def image_commands() -> list[list[str]]:
    """Every command line of the server that the image and compose run."""
    health = instruction("HEALTHCHECK").partition("CMD ")[2]
    start = json.loads(instruction("ENTRYPOINT")) + json.loads(instruction("CMD"))
    return [start, json.loads(health), SERVICES["server"]["healthcheck"]["test"][1:]]


@pytest.mark.parametrize("command", image_commands(), ids=" ".join)
def test_image_runs_commands_and_options_that_exist(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    program, *arguments = command
    subcommand = [word for word in arguments[:1] if not word.startswith("-")]
    assert program in PROJECT["scripts"]
    with pytest.raises(SystemExit, match="0"):
        main([*subcommand, "--help"])
    shown = capsys.readouterr().out
    for option in (word for word in arguments if word.startswith("--")):
        assert re.search(rf"{option}\b", shown), f"{option} is not an option of {' '.join([program, *subcommand])}"


def test_scrape_configuration_and_alert_rules_are_valid() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool (Debian package: prometheus) is not installed")
    command = [promtool, "check", "config", str(DEPLOY / "prometheus.yml")]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_rule_files_are_mounted_where_prometheus_looks() -> None:
    seen = mounts("prometheus")
    assert {f"--config.file={path}" for path in seen} & set(SERVICES["prometheus"]["command"])
    assert all(seen[f"/etc/prometheus/{name}"] == f"./deploy/{name}" for name in PROMETHEUS["rule_files"])


def test_grafana_finds_its_datasource_and_its_board() -> None:
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/segue.yml").read_text())["providers"]
    folder, _, board = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"].rpartition("/")
    host, port = source["url"].removeprefix("http://").split(":")
    used = {uid for path in BOARDS for uid in re.findall(r'"type": "prometheus",\s*"uid": "(.+?)"', path.read_text())}
    assert SERVICES[host]["ports"][0].endswith(f":{port}")
    assert used == {source["uid"]}
    assert provider["options"]["path"] == folder
    assert (ROOT / mounts("grafana")[folder] / board).is_file()


def expressions() -> list[str]:
    panels = [panel for path in BOARDS for panel in json.loads(path.read_text())["panels"]]
    drawn = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    return drawn + [rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]]


def test_board_expressions_parse(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool (Debian package: prometheus) is not installed")
    plain = [
        text.replace("$__rate_interval", "1m").replace("$instance", ".*").replace("$model", ".*")
        for text in expressions()
    ]
    rules = [{"record": f"board:expression:{index}", "expr": text} for index, text in enumerate(plain)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    command = [promtool, "check", "rules", str(tmp_path / "rules.yml")]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def strings_of(module: Path) -> set[str]:
    nodes = ast.walk(ast.parse(module.read_text()))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_boards_and_alerts_use_metrics_that_the_server_exports() -> None:
    """A renamed metric would leave a panel empty and an alert silent for ever."""
    modules = sorted((ROOT / "server/segue_server").glob("metrics*"))
    assert modules
    files = [file for module in modules for file in ([module] if module.is_file() else module.rglob("*.py"))]
    exported = set().union(*map(strings_of, files))
    known = {name.removeprefix("segue_").removesuffix("_total") for name in exported}
    used = {name for text in expressions() for name in re.findall(r"\bsegue_(\w+)", text)}
    unknown = {name for name in used if re.sub(r"_(total|bucket|sum|count)$", "", name) not in known}
    assert unknown == set()
