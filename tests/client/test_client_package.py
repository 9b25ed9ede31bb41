"""The package as such: what it exports, what importing it costs, and that its table of calls is the contract's."""

import subprocess
import sys
import time

import pytest

import segue_client
from segue.v1 import generation_pb2, model_pb2, session_pb2
from segue_client import calls, client, session, turn

METHODS = [value for value in vars(calls).values() if isinstance(value, calls.Method) and "/segue.v1." in value.path]


def test_all_is_the_public_surface():
    submodules = {name for name in vars(segue_client) if f"segue_client.{name}" in sys.modules}
    public = {name for name in vars(segue_client) if not name.startswith("_")} - submodules
    assert sorted(segue_client.__all__) == segue_client.__all__
    assert public == set(segue_client.__all__)


def test_importing_brings_nothing_heavy():
    heavy = ["torch", "numpy", "typer", "click", "rich", "textual", "segue_server", "segue_model"]
    code = f"import sys, segue_client; print([name for name in {heavy} if name in sys.modules])"
    begin = time.monotonic()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    print(f"interpreter and import: {time.monotonic() - begin:.2f} s")
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.path)
def test_the_table_of_calls_is_the_contract(method):
    service, name = method.path.removeprefix("/segue.v1.").split("/")
    files = (generation_pb2, model_pb2, session_pb2)
    services = {key: value for file in files for key, value in file.DESCRIPTOR.services_by_name.items()}
    declared = services[service].methods_by_name[name]
    assert declared.input_type is method.request_type.DESCRIPTOR
    assert declared.output_type is method.response_type.DESCRIPTOR


@pytest.mark.parametrize(
    ("blocking", "awaited"),
    [
        (client.Client, client.AsyncClient),
        (session.Session, session.AsyncSession),
        (turn.Turn, turn.AsyncTurn),
    ],
)
def test_blocking_and_asyncio_offer_the_same(blocking, awaited):
    def public(cls):
        return {name for name in dir(cls) if not name.startswith("_")}

    assert public(blocking) == public(awaited)


def test_every_public_thing_is_documented():
    for cls in (client.Client, session.Session, turn.Turn):
        undocumented = [name for name, value in vars(cls).items() if name[0] != "_" and not value.__doc__]
        assert not undocumented
    own = [
        value for name in segue_client.__all__ if "segue_client" in (value := getattr(segue_client, name)).__module__
    ]
    assert not [value for value in own if not value.__doc__]
