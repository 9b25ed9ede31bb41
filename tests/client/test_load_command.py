"""`segue load` as a command: every experiment once, files of results, refused words, and a test that is broken off."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tests.client.fake_schedule import Schedule, ScheduledOpenAi, ScheduledSegue, serving_openai, serving_segue
from typer.testing import CliRunner, Result

from segue_client.cli.app import app
from segue_client.load.datasets import read_conversations, read_trace
from segue_client.load.distributions import SpecError
from segue_client.load.results import ContextKind, Experiment, Outcome, Request, Results
from segue_client.load.summary import goodput

COMMAND = [sys.executable, "-c", "from segue_client.cli import main; main()"]
SHORT = ("--warm-up", "0", "--prompt", "8", "--output", "3")
Load = Callable[..., tuple[Result, Results | None]]


class Served:
    """Both fakes on an event loop of their own thread: the command has its own."""

    def __init__(self) -> None:
        self.started, self.stop = threading.Event(), asyncio.Event()
        self.servicer: ScheduledSegue | None = None
        self.segue = self.openai = ""

    async def serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        pace = Schedule(first=lambda _: 0.002, gap=lambda _: 0.002)
        self.servicer = ScheduledSegue(pace)
        async with serving_segue(self.servicer) as self.segue, serving_openai(ScheduledOpenAi(pace)) as self.openai:
            self.started.set()
            await self.stop.wait()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    one = Served()
    thread = threading.Thread(target=asyncio.run, args=(one.serve(),))
    thread.start()
    assert one.started.wait(30)
    yield one
    one.loop.call_soon_threadsafe(one.stop.set)
    thread.join()


@pytest.fixture
def load(served: Served, tmp_path: Path) -> Load:
    """Runs an experiment against the fake; what it printed, and the results it wrote."""

    def run(*words: str, target: str = "") -> tuple[Result, Results | None]:
        file = tmp_path / "results.json"
        arguments = ["load", *words, "--target", target or served.segue, "--json", str(file), "--seed", "4"]
        result = CliRunner().invoke(app, arguments)
        return result, Results.from_json(file.read_bytes()) if file.exists() else None

    return run


def done(told: tuple[Result, Results | None]) -> Results:
    result, results = told
    assert result.exit_code == 0, result.output
    assert results is not None
    return results


def test_run_writes_every_request_and_what_it_takes_to_run_it_again(load: Load, served: Served) -> None:
    results = done(load("run", "--rate", "40", "--count", "6", *SHORT))
    assert results.experiment is Experiment.RUN
    assert len(results.requests) == 6
    metadata = results.metadata
    assert (metadata.seed, metadata.target.address, metadata.target.model) == (4, served.segue, "scheduled")
    assert metadata.workload["prompt"] == "8"
    assert metadata.machine.cores > 0
    assert set(metadata.versions) == {"segue", "python", "grpcio"}
    assert "--rate" not in metadata.workload


def test_lengths_and_arrivals_repeat_with_the_seed_and_prompts_do_not(load: Load, served: Served) -> None:
    """A second run finds nothing of the first one in the server's cache, and asks for the same otherwise."""
    words = ("run", "--rate", "40", "--count", "8", "--warm-up", "0", "--output", "uniform:2,9")
    assert served.servicer is not None
    performed = served.servicer.schedule.performed
    performed.clear()
    first, second = (done(load(*words)).requests for _ in range(2))
    lengths = [sorted((one.prompt_tokens or 0, one.generated_tokens or 0) for one in ones) for ones in (first, second)]
    assert lengths[0] == lengths[1]
    gaps = [[round(one.intended - ones[0].intended, 6) for one in ones] for ones in map(by_arrival, (first, second))]
    assert gaps[0] == gaps[1]
    prompts = [tuple(one.request.token_ids.ids) for one in performed]
    assert len(set(prompts)) == len(prompts) == 16


def by_arrival(requests: Sequence[Request]) -> list[Request]:
    return sorted(requests, key=lambda one: one.intended)


def test_concurrency(load: Load) -> None:
    results = done(load("concurrency", "--streams", "1,2", "--duration", "0.2", *SHORT))
    assert [point.streams for point in results.points] == [1, 2]


def test_mixed(load: Load) -> None:
    words = ("--users", "2", "--long-rate", "20", "--long-prompt", "99", "--duration", "0.3")
    results = done(load("mixed", *words, *SHORT))
    assert {one.group for one in results.requests} == {"stream", "long"}


def test_context(load: Load) -> None:
    results = done(load("context", "--history", "0,64", "--repeat", "1", "--output-tokens", "3"))
    modes = [ContextKind.NEW, ContextKind.WARM, ContextKind.RESTORED, ContextKind.RECOMPUTED]
    assert [point.context for point in results.points] == modes
    assert [one.context for one in results.requests] == modes


def test_context_goes_to_the_limit_that_the_server_tells(load: Load) -> None:
    results = done(load("context", "--modes", "warm", "--repeat", "1", "--output-tokens", "16"))
    assert [point.history_tokens for point in results.points] == [0, 256, 512, 1024, 2048 - 16 - 16 - 64]


def test_sweep(load: Load) -> None:
    words = ("--start", "20", "--highest", "40", "--duration", "0.3", "--ttft-p99", "30", "--inter-token-p99", "30")
    results = done(load("sweep", *words, *SHORT))
    assert [point.rate for point in results.points] == [20, 40]
    found = goodput(results)
    assert found.point is not None
    assert (found.point.rate, found.failed_rate) == (40, None)


def test_the_same_workload_runs_against_an_openai_compatible_server(load: Load, served: Served) -> None:
    results = done(load("run", "--users", "2", "--count", "4", *SHORT, target=f"openai={served.openai}"))
    assert {one.outcome for one in results.requests} == {Outcome.OK}
    assert results.metadata.target.model == "peer"
    assert "httpx2" in results.metadata.versions


def test_html_is_written_beside_the_json(load: Load, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done(load("run", "--rate", "40", "--count", "3", *SHORT, "--html", str(page)))
    assert page.read_text().lstrip().lower().startswith("<!doctype html")


def test_a_load_of_which_nothing_went_well_ends_with_1(load: Load, served: Served) -> None:
    assert served.servicer is not None
    served.servicer.refusing = True
    try:
        result, results = load("run", "--users", "1", "--count", "2", *SHORT)
    finally:
        served.servicer.refusing = False
    assert result.exit_code == 1
    assert results is not None
    assert {one.outcome for one in results.requests} == {Outcome.REFUSED}


@pytest.mark.parametrize(
    ("words", "option", "complaint"),
    [
        (("run",), "--rate", "give one of --rate, --users and --trace"),
        (("run", "--rate", "0"), "--rate", "must be above 0"),
        (("run", "--rate", "inf"), "--rate", "and finite"),
        (("run", "--rate", "1", "--trace", "/nowhere.jsonl"), "--rate", "give one of --rate, --users and --trace"),
        (("run", "--rate", "1", "--top-p", "5"), "--top-p", "above 0 and at most 1"),
        (("run", "--rate", "1", "--html", "/nowhere/page.html"), "--html", "there is no folder /nowhere"),
        (("run", "--rate", "1", "--html", "/"), "--html", "no file can be written there"),
        (("run", "--rate", "1", "--prompt", "gauss:1"), "--prompt", "known are fixed"),
        (("run", "--rate", "1", "--fork", "2"), "--fork", "nothing to share"),
        (("run", "--rate", "1", "--duration", "0"), "--duration", "above 0 seconds"),
        (("run", "--rate", "1", "--data", "/nowhere.jsonl"), "--data", "No such file"),
        (("run", "--trace", "/nowhere.jsonl"), "--trace", "No such file"),
        (("concurrency", "--streams", "1,x"), "--streams", "not a list of numbers"),
        (("concurrency", "--streams", "0"), "--streams", "the least is 1"),
        (("context", "--modes", "cold"), "--modes", "known are warm"),
        (("sweep", "--start", "0.01"), "--start", "must hold of lowest, start, highest"),
    ],
)
def test_a_word_that_cannot_be_meant_is_refused_before_anything_is_sent(
    load: Load, words: tuple[str, ...], option: str, complaint: str
) -> None:
    result, results = load(*words, target="127.0.0.1:1")
    told = " ".join(result.output.replace("│", "").split())
    assert (result.exit_code, results) == (2, None)
    assert option in told
    assert complaint in told


def test_a_server_that_never_answers_is_named(load: Load) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        result, results = load("run", "--users", "1", "--timeout", "0.3", target=f"openai={address}")
    assert (result.exit_code, results) == (1, None)
    assert f"{address} does not answer in time" in result.output


def test_ctrl_c_keeps_the_points_that_were_measured(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "partial.json"
    words = ["load", "concurrency", "--streams", "1,2", "--duration", "2", *SHORT, "--target", served.segue]
    with subprocess.Popen([*COMMAND, *words, "--json", str(file)], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "1 stream" in process.stderr.readline()  # the first point is over
        process.send_signal(signal.SIGINT)
        process.stderr.read()
        assert process.wait(30) == 0
    results = Results.from_json(file.read_bytes())
    assert len(results.points) in (1, 2)  # 2: the signal came after the end
    assert {one.point for one in results.requests} == set(range(len(results.points)))
    last = results.points[-1]
    assert "interrupted before the test was over" in results.notes or last.end - last.start > 1.9


def test_ctrl_c_in_the_only_point_keeps_what_has_come_until_then(served: Served, tmp_path: Path) -> None:
    assert served.servicer is not None
    file, performed = tmp_path / "partial.json", served.servicer.schedule.performed
    words = ["load", "run", "--users", "2", "--duration", "inf", *SHORT, "--target", served.segue]
    enough = len(performed) + 20
    with subprocess.Popen([*COMMAND, *words, "--json", str(file)], stdout=subprocess.DEVNULL) as process:
        try:
            while len(performed) < enough:
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()
    results = Results.from_json(file.read_bytes())
    (point,) = results.points
    assert point.end > max(one.intended for one in results.requests)
    assert (
        sum(one.outcome is Outcome.OK for one in results.requests) >= 15
    )  # those that were answered before the signal
    cut, interrupted = results.notes
    assert cut.startswith("2 streams: cut short")
    assert interrupted == "interrupted before the test was over"


def test_a_test_whose_requests_all_fall_into_the_warm_up_says_so_and_fails(load: Load) -> None:
    result, results = load("run", "--users", "1", "--count", "2", "--warm-up", "30", "--prompt", "8", "--output", "3")
    assert result.exit_code == 1
    assert results is not None
    assert results.notes == ("1 stream: there is no request that counts; all 2 were due within its warm-up of 30 s",)


def test_without_the_extra_the_command_says_what_to_install_and_others_work() -> None:
    without = "import sys; sys.modules['msgspec'] = None; from segue_client.cli import main; main()"
    told = subprocess.run(
        [sys.executable, "-c", without, "load", "run", "--rate", "1"], capture_output=True, text=True, check=False
    )
    assert told.returncode == 1
    assert "pip install 'segue[load]'" in told.stderr
    assert (
        subprocess.run([sys.executable, "-c", without, "--version"], capture_output=True, check=False).returncode == 0
    )


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_data_of_both_forms_becomes_turns(load: Load, served: Served, tmp_path: Path) -> None:
    share = {"conversations": [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "x" * 40}]}
    chat = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Two?"},
            {"role": "assistant", "content": "y" * 8},
            {"role": "user", "content": "unanswered"},
        ]
    }
    file = write(tmp_path / "data.jsonl", share, "", chat)
    assert read_conversations(file) == [[("One?", 10)], [("Two?", 2)]]
    results = done(load("run", "--users", "1", "--count", "12", "--data", str(file), "--warm-up", "0"))
    assert {one.generated_tokens for one in results.requests} == {10, 2}
    assert served.servicer is not None
    assert {one.request.text for one in served.servicer.schedule.performed[-12:]} == {"One?", "Two?"}


def test_traces_of_both_forms_are_read_in_the_order_of_time(tmp_path: Path) -> None:
    own = write(
        tmp_path / "own.jsonl",
        {"timestamp": 2.5, "prompt_tokens": 9, "output_tokens": 1},
        {"timestamp": 2, "prompt_tokens": 5, "output_tokens": 3},
    )
    assert read_trace(own) == ([0.0, 0.5], [(5, 3), (9, 1)])
    mooncake = write(
        tmp_path / "mooncake.jsonl",
        {"timestamp": 0, "input_length": 5, "output_length": 3},
        {"timestamp": 250, "input_length": 9, "output_length": 1, "hash_ids": [1]},
    )
    assert read_trace(mooncake) == ([0.0, 0.25], [(5, 3), (9, 1)])


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("{", "bad.jsonl:2 is not JSON"),
        ([1], "bad.jsonl:2 is not a JSON object"),
        ({"text": "x"}, "bad.jsonl:2: there is no list under conversations or messages"),
        ({"messages": [{"role": "user"}]}, "bad.jsonl:2: a message needs role and content"),
    ],
)
def test_a_bad_line_of_data_is_named(tmp_path: Path, row: object, complaint: str) -> None:
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    with pytest.raises(SpecError, match=complaint):
        read_conversations(write(tmp_path / "bad.jsonl", good, row))


@pytest.mark.parametrize("value", [None, "1", -1, True])
def test_a_bad_number_of_a_trace_is_named(tmp_path: Path, value: object) -> None:
    row = {"timestamp": value, "prompt_tokens": 1, "output_tokens": 1}
    with pytest.raises(SpecError, match=r"bad.jsonl:1: timestamp is .* it must be a number, 0 or more"):
        read_trace(write(tmp_path / "bad.jsonl", row))
