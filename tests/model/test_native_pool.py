"""The pool of compute threads: every item of every round once, and nothing of a round after its end."""

import subprocess
from pathlib import Path

import pytest

from segue_model.runner.native.build import NativeUnavailable, find_compiler

SOURCES = Path(__file__).parents[2] / "model/segue_model/runner/native/src"
HARNESS = Path(__file__).parent / "pool_stress.cpp"


SANITIZE = "-fsanitize=thread"
# It takes many rounds for a worker to be so late that it meets the next one, and the sanitizer slows them down.
ROUNDS = {"-O2": 200_000, SANITIZE: 20_000}


@pytest.fixture(scope="module", params=ROUNDS)
def stress(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The harness and its rounds, plain and where it can be had with a look at every access to memory."""
    program = tmp_path_factory.mktemp("pool") / "stress"
    try:
        compiler = find_compiler()
    except NativeUnavailable as error:
        pytest.skip(str(error))
    flags = ("-std=c++17", "-g", "-pthread", request.param, f"-I{SOURCES}")
    command = [*compiler, *flags, str(HARNESS), str(SOURCES / "pool.cpp"), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, check=False)
    if built.returncode:
        if request.param == SANITIZE:
            pytest.skip("the compiler has no thread sanitizer")
        pytest.fail(built.stderr.decode())
    return str(program), str(ROUNDS[request.param])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_item_of_every_round_is_done_once(stress: tuple[str, str], threads: int) -> None:
    program, rounds = stress
    ended = subprocess.run([program, str(threads), rounds], capture_output=True, text=True, timeout=300, check=False)
    if "unexpected memory mapping" in ended.stderr:
        pytest.skip("the thread sanitizer does not run on this kernel")
    assert ended.returncode == 0, ended.stdout + ended.stderr
