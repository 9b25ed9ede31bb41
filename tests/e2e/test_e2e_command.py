"""The `segue` command in a process of its own, against the real server."""

import json
import subprocess
import sys

import pytest

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


@pytest.fixture
def segue(server):
    """Runs the command; returns the finished process."""

    def run(*words, stdin=""):
        command = [sys.executable, "-c", "from segue_client.cli import main; main()", *words]
        if words[0] != "--version":
            command += ["--target", server.target]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, check=False)

    return run


def test_generate_answers_from_an_argument_and_from_stdin(segue):
    """The answer alone is on stdout, so that it can be piped on."""
    words = ("--chat", "--temperature", "0", "--max-tokens", "24")
    result = segue("generate", QUESTION, *words)
    assert (result.returncode, result.stdout.strip(), result.stderr) == (0, ANSWER, "")
    assert segue("generate", *words, stdin=QUESTION).stdout == result.stdout


def test_generate_as_json_goes_on_in_a_session(server, client, segue):
    """--session reuses what the session holds; the last line of --json has the usage."""
    session = client.create_session(session_id="from-a-script", system="You are a helpful assistant.")
    words = ("--chat", "--temperature", "0", "--max-tokens", "24", "--json")
    result = segue("generate", QUESTION, "--session", session.id, *words)
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert [events[0]["type"], events[-1]["type"]] == ["started", "finished"]
    assert events[-1]["usage"]["session_reused_tokens"] == session.position
    assert "Paris" in "".join(event.get("text", "") for event in events)


def test_chat_holds_a_conversation_over_a_pipe(segue):
    """Two questions, two answers, one session; the second turn knows the first."""
    result = segue(
        "chat", "--temperature", "0", "--max-tokens", "24", stdin=f"{QUESTION}\nAnd what is it famous for?\n"
    )
    assert result.returncode == 0, result.stderr
    assert ANSWER in result.stdout
    assert "famous" in result.stdout.split(ANSWER, 1)[1]


def test_sessions_are_listed_shown_and_deleted(client, segue):
    """The list holds the session; deleting it tells how many bytes came free; a missing one is exit code 3."""
    client.create_session(session_id="on-the-list", text="Something to remember, some ten tokens or more of it")
    assert "on-the-list" in segue("sessions", "list").stdout
    assert segue("sessions", "delete", "on-the-list").returncode == 0
    assert "on-the-list" not in segue("sessions", "list").stdout
    missing = segue("sessions", "delete", "on-the-list")
    assert missing.returncode == 3
    assert "SESSION_NOT_FOUND" in missing.stderr


def test_info_describes_model_and_server(server, client, segue):
    """Model, limits and load in one look."""
    result = segue("info")
    assert result.returncode == 0, result.stderr
    told = dict(line.split("\t") for line in result.stdout.splitlines())
    info = client.model_info()
    assert told["model.model_id"] == info.model_id
    assert int(told["model.kv_bytes_per_token"]) == info.kv_bytes_per_token == server.page_bytes // 16
    assert told["load.sessions"] == "0"
