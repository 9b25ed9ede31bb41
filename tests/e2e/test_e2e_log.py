"""The log of `segue-server` as a collector reads it: JSON on every line, and one line for each turn."""

import json
import signal

from segue_client import Client

FREE_PORTS = ("--port", "0", "--admin-port", "0", "--metrics-port", "0", "--threads", 1)


def test_every_line_is_json_and_each_turn_has_one_with_its_peer(spawn, tiny_model) -> None:
    """From start to drain. With --log-prompts, which warns at the start, what was said is in it."""
    server = spawn("--model", tiny_model, "--log-format", "json", "--log-prompts", *FREE_PORTS)
    with Client(server.find(r'"serving [^"]* on ([^"]+)"')) as client:
        session = client.create_session(text="A prefix. ")
        session.generate(text="Say xyzzy", max_tokens=3, ignore_eos=True)
        session.score([1, 2])
    server.send(signal.SIGTERM)
    assert server.wait() == 0
    lines = [json.loads(line) for line in server.text().splitlines()]
    turns = [line for line in lines if line["event"] == "turn"]
    assert [line["prompt"] for line in turns] == ["A prefix. ", "Say xyzzy", [1, 2]]
    assert all(line["peer"].startswith("ipv4:127.0.0.1:") for line in turns)
    assert any(line["level"] == "warning" and "--log-prompts" in line["event"] for line in lines)
    drained = next(line for line in lines if line["event"] == "drained")
    assert (drained["turns"], drained["generated_tokens"], drained["evictions"]) == (3, 3, 0)
