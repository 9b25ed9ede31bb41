"""The project as pip, make and an importing program find it."""

import importlib
import os
import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = PYPROJECT["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
DEV: list[str] = PYPROJECT["dependency-groups"]["dev"]
REQUIREMENTS = [*PROJECT["dependencies"], *chain.from_iterable(EXTRAS.values()), *DEV]
PINS = {
    canonicalize_name(name): Version(version)
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
}
TARGETS = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
FIELD = re.compile(r"^\s+(?:optional |repeated )?(?:map<.+>|[\w.]+)\s+\w+\s*=\s*\d+;\s*(//.+)?$")


@pytest.mark.parametrize("requirement", REQUIREMENTS)
def test_constraints_pin_every_requirement_inside_its_range(requirement: str) -> None:
    parsed = Requirement(requirement)
    pin = PINS.get(canonicalize_name(parsed.name))
    assert pin is not None, f"{parsed.name} is not pinned in constraints.txt"
    assert parsed.specifier.contains(pin), f"{parsed.name}=={pin} does not meet {parsed.specifier}"


def test_every_constraint_is_a_name_and_one_version() -> None:
    """`pip freeze` also writes paths and addresses, which another machine does not have."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == len(PINS)


def test_grpcio_floor_is_the_version_that_wrote_the_generated_code() -> None:
    """Generated stubs refuse an older grpcio at import; the declared range must not admit one."""
    stub = (ROOT / "protos/segue/v1/session_pb2_grpc.py").read_text()
    generated = re.search(r"GRPC_GENERATED_VERSION = '(.+)'", stub)
    floors = {str(r.specifier) for r in map(Requirement, REQUIREMENTS) if r.name in {"grpcio", "grpcio-status"}}
    assert generated is not None
    assert floors == {f"<2,>={generated[1]}"}


def test_each_package_of_the_wheel_is_typed_and_alone_in_its_folder() -> None:
    """A component folder holds one import package, so that no module can be imported past it."""
    packages = [ROOT / path for path in PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]
    for package in packages:
        assert (package / "py.typed").is_file()
        assert {entry for entry in package.parent.iterdir() if entry.name != "__pycache__"} == {package}


@pytest.mark.parametrize("script", PROJECT["scripts"].items(), ids=lambda item: str(item[0]))
def test_console_script_exists(script: tuple[str, str]) -> None:
    module, _, function = script[1].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_client_imports_without_numbers_and_prints_what_it_costs() -> None:
    """`pip install segue` is the client: an import of torch or numpy anywhere below it would break that."""
    program = (
        "import sys, time; start = time.perf_counter()\n"
        "import segue_client, segue.v1.session_pb2_grpc, segue.v1.generation_pb2_grpc\n"
        "took = time.perf_counter() - start\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'segue_model', 'segue_server'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}') if heavy else print(f'{took * 1000:.0f} ms')\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    print(f"importing the client: {run.stdout.strip()}")


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, timeout=60, check=False)


def test_make_alone_lists_every_target_with_a_line() -> None:
    phony = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert set(TARGETS) == set(phony[1].split())
    listed = re.findall(r"^  make ([a-z-]+) +\S+", make().stdout, re.MULTILINE)
    assert listed == TARGETS


def test_a_missing_python_is_named_with_the_way_out(tmp_path: Path) -> None:
    result = make("PYTHON=no-such-python", f"VENV={tmp_path / 'venv'}", f"{tmp_path / 'venv'}/bin/python")
    assert result.returncode != 0
    assert "no-such-python" in result.stderr
    assert "3.11" in result.stderr


def test_an_old_python_is_refused(tmp_path: Path) -> None:
    old = tmp_path / "python-old"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && { echo Python 3.9.2; exit 0; }\nexit 1\n')
    old.chmod(0o755)
    result = make(f"PYTHON={old}", f"VENV={tmp_path / 'venv'}", f"{tmp_path / 'venv'}/bin/python")
    assert result.returncode != 0
    assert "needs Python 3.11 or later" in result.stderr
    assert "3.9.2" in result.stderr


def test_ci_runs_the_targets_a_contributor_runs() -> None:
    script = ROOT / ".ci/run"
    called = re.findall(r"^make (.+)$", script.read_text(), re.MULTILINE)
    assert os.access(script, os.X_OK)
    assert {target for line in called for target in line.split()} == {"lint", "type", "check-protos", "test"}
    assert {"lint", "type", "check-protos", "test"} <= set(TARGETS)


@pytest.mark.parametrize("proto", sorted((ROOT / "protos/segue/v1").glob("*.proto")), ids=lambda path: path.name)
def test_every_proto_field_says_what_it_means(proto: Path) -> None:
    lines = proto.read_text().splitlines()
    silent = [
        line.strip()
        for above, line in zip(["", *lines], lines, strict=False)
        if (match := FIELD.match(line)) and not match[1] and not above.lstrip().startswith("//")
    ]
    assert silent == []
