"""The log: one line a turn, as JSON or for people, and nothing of what was said unless it is asked for."""

import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.service_bench import ServiceBench, read, serving

from segue_server.events import Tokens
from segue_server.logs import formatter
from segue_server.origin import Origin
from segue_server.reports import TurnReport
from segue_server.requests import (
    ChatMessage,
    ChatTurn,
    GenerateRequest,
    OutputOptions,
    StopConditions,
    TextInput,
    TokenInput,
)
from segue_server.turn_log import TurnLog

FIELDS = {
    *("event", "level", "logger", "timestamp"),
    *("request_id", "session_id", "turn", "position", "prompt_tokens", "computed_tokens", "reused_tokens"),
    *("prefix_tokens", "restored_tokens", "generated_tokens", "queue_seconds", "time_to_first_token_seconds"),
    *("total_seconds", "finish_reason", "error", "cause", "peer"),
}
ONE = StopConditions(max_tokens=1)
DOC = Path(__file__).parents[2] / "docs" / "logs.md"
PEER = Origin("ipv4:192.0.2.7:40000")


class Lines:
    """What the log has written, as JSON."""

    def __init__(self) -> None:
        self.stream = io.StringIO()
        self.handler = logging.StreamHandler(self.stream)
        self.handler.setFormatter(formatter("json"))

    def __call__(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]


@pytest.fixture
def lines() -> Iterator[Lines]:
    written, log = Lines(), logging.getLogger("segue_server")
    log.addHandler(written.handler)
    log.setLevel(logging.INFO)
    yield written
    log.removeHandler(written.handler)
    log.setLevel(logging.NOTSET)


async def mix(bench: ServiceBench) -> None:
    """A turn, a second one on its cache, one that is left, one that fails, one that never reaches the engine."""
    await bench.create()
    first = await bench.ask(range(40), max_tokens=3)
    await bench.ask([1], max_tokens=2)
    assert first.finished
    async with bench.turn(max_tokens=1000) as turn:
        async for _, event in turn:
            if isinstance(event, Tokens):
                break
    await bench.idle()
    bench.runner.failures.append(RuntimeError("a fault that was put there"))
    for prompt in ([1, 2], [1] * 1700):
        with pytest.raises(Exception, match=r"could not compute|limit is"):
            await bench.ask(prompt)


async def test_each_turn_is_one_line_of_json_with_its_tokens_times_and_end(tmp_path: Path, lines: Lines) -> None:
    async with serving(tmp_path, observers=[TurnLog(prompts=False)]) as bench:
        await mix(bench)
        turns = [line for line in lines() if line["event"] == "turn"]
    assert [line["finish_reason"] for line in turns] == ["max_tokens", "max_tokens", "cancelled", "error", "error"]
    assert all(line.keys() == FIELDS for line in turns)
    first, second, left, failed, refused = turns
    assert (first["turn"], first["position"], first["prompt_tokens"], first["generated_tokens"]) == (0, 43, 40, 3)
    assert (second["turn"], second["computed_tokens"], second["reused_tokens"]) == (1, 2, 42)
    assert isinstance(second["time_to_first_token_seconds"], float)
    assert 0 <= second["queue_seconds"] <= second["time_to_first_token_seconds"] <= second["total_seconds"]  # type: ignore[operator]
    assert (left["cause"], failed["cause"]) == ("disconnect", None)
    assert (failed["error"], failed["level"], failed["time_to_first_token_seconds"]) == (
        "ENGINE_ERROR",
        "warning",
        None,
    )
    assert refused["error"] == "CONTEXT_EXCEEDED"
    assert len({line["request_id"] for line in turns}) == 5


async def test_the_peer_and_the_session_are_named(tmp_path: Path, lines: Lines) -> None:
    async with serving(tmp_path, observers=[TurnLog(prompts=False)]) as bench:
        await bench.create()
        request = GenerateRequest(session_id="chat-1", request_id="mine", input=TokenInput((1,)), stop=ONE)
        async with bench.service.generate(request, caller="me", time_remaining=lambda: None, origin=PEER) as turn:
            await read(turn)
        (line,) = lines()
    assert (line["peer"], line["session_id"], line["request_id"]) == (PEER.peer, "chat-1", "mine")


SAID = "xyzzy plugh"


async def say(bench: ServiceBench) -> None:
    await bench.create()
    text = OutputOptions(return_text=True, heartbeat_interval=0)
    await bench.ask(input=TextInput(SAID), output=text, max_tokens=4)
    await bench.ask(input=ChatTurn((ChatMessage("user", SAID),)), output=text, max_tokens=4)
    await bench.ask([7, 8], output=OutputOptions(return_text=False, heartbeat_interval=0), max_tokens=4)


async def test_nothing_of_what_was_said_is_logged_by_default(tmp_path: Path, lines: Lines) -> None:
    async with serving(tmp_path, observers=[TurnLog(prompts=False)]) as bench:
        await say(bench)
        assert len(lines()) == 3
        assert "xyzzy" not in lines.stream.getvalue()
        assert not {"prompt", "output"} & set().union(*lines())


async def test_prompts_and_answers_are_logged_on_demand(tmp_path: Path, lines: Lines) -> None:
    """As they came: text, messages, token ids."""
    async with serving(tmp_path, observers=[TurnLog(prompts=True)]) as bench:
        await say(bench)
        text, chat, ids = lines()
        assert text["prompt"] == SAID
        assert chat["prompt"] == [{"role": "user", "content": SAID}]
        assert ids["prompt"] == [7, 8]
        assert ids["output"] == bench.ledger()[-4:]
        assert isinstance(text["output"], str)
        assert text["output"]


async def test_an_observer_that_fails_costs_nobody_a_session(tmp_path: Path, lines: Lines) -> None:
    def broken(_: TurnReport) -> None:
        raise RuntimeError("a fault that was put there")

    async with serving(tmp_path, observers=[broken, TurnLog(prompts=False)]) as bench:
        await bench.create()
        await bench.ask()
        await bench.ask()
        assert [line["event"] for line in lines()].count("turn") == 2


def test_lines_for_people_end_with_the_fields_and_keep_a_traceback() -> None:
    try:
        raise RuntimeError("a fault that was put there")
    except RuntimeError:
        record = logging.getLogger("segue_server.x").makeRecord(
            "segue_server.x", logging.ERROR, "f", 1, "turn %s", ("a",), None, extra={"peer": "a b", "error": None}
        )
        record.exc_info = sys.exc_info()
    line, *trace = formatter("console").format(record).splitlines()
    assert line.endswith('ERROR segue_server.x: turn a peer="a b"')
    assert trace[0].startswith("Traceback")
    assert trace[-1] == "RuntimeError: a fault that was put there"
    (only,) = formatter("json").format(record).splitlines()
    assert "RuntimeError: a fault" in json.loads(only)["exception"]


def test_every_field_is_documented() -> None:
    """docs/logs.md, its table and the words about the rest."""
    documented = set(re.findall(r"`(\w+)`", DOC.read_text(encoding="utf-8")))
    assert documented >= FIELDS | {"prompt", "output", "exception"}
