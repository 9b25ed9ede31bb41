"""Updating, reading, watching, scoring, estimating and forking many, from the library and the command line."""

import json
import subprocess
import sys
import threading
import time

import grpc
import pytest
from typer.testing import CliRunner

from segue.v1 import generation_pb2, session_pb2, types_pb2
from segue_client import AsyncClient, Client, EtagMismatch, EventHistoryLost, Unavailable
from segue_client.cli.app import app

COMMAND = [sys.executable, "-c", "from segue_client.cli import main; main()"]


@pytest.fixture
def client(server):
    with Client(server.target) as client:
        yield client


@pytest.fixture
def segue(server):
    def run(*arguments):
        return CliRunner().invoke(app, [*arguments, "--target", server.target])

    return run


# Updates


def update(request, _):
    session = session_pb2.Session()
    session.CopyFrom(request.session)
    session.position, session.etag = 5, "e-new"
    return session


async def test_an_update_names_what_is_given_zeros_and_none_included(server, client):
    """None is the default again; the session's etag goes along and is replaced."""
    server.on("UpdateSession", update)
    session = client.create_session()
    session.generate(text="x")
    session.update(ttl=60, priority=0, pinned=False, commit_policy=None, labels={"a": "b"})
    request = server.calls("UpdateSession")[0].request
    assert list(request.update_mask.paths) == [
        "settings.ttl",
        "settings.priority",
        "settings.pinned",
        "settings.commit_policy",
        "labels",
    ]
    settings = request.session.settings
    assert (settings.ttl.seconds, settings.HasField("priority"), settings.HasField("pinned")) == (60, True, True)
    assert (settings.commit_policy, request.session.etag) == (types_pb2.COMMIT_POLICY_UNSPECIFIED, "e5")
    assert (session.etag, session.position) == ("e-new", 5)
    assert server.calls("UpdateSession")[0].metadata["x-session-id"] == session.id
    with pytest.raises(ValueError, match="at least one option"):
        session.update(timeout=3)
    with pytest.raises(TypeError, match="unknown option cache_salt"):
        session.update(cache_salt="x")
    async with AsyncClient(server.target) as aclient:
        again = await aclient.get_session(session.id)
        await again.update(display_name="n")
        assert again.etag == "e-new"


def test_an_update_of_a_session_that_changed_meanwhile(server, client):
    def refuse(_, context):
        server.fail(context, grpc.StatusCode.ABORTED, "ETAG_MISMATCH", metadata={"etag": "other"})

    server.on("UpdateSession", refuse)
    session = client.create_session()
    with pytest.raises(EtagMismatch):
        session.update(priority=1)
    assert session.etag == "e0"


# Forks


async def test_forks_of_many_are_a_list(server, client):
    def fork(request, _):
        ids = [f"{request.new_session_id}-{n}" for n in range(request.count)] if request.HasField("count") else ["one"]
        return session_pb2.ForkSessionResponse(sessions=[session_pb2.Session(session_id=name) for name in ids])

    server.on("ForkSession", fork)
    session = client.create_session()
    assert [child.id for child in session.fork(count=3, new_session_id="kid")] == ["kid-0", "kid-1", "kid-2"]
    assert [child.id for child in session.fork(count=1, new_session_id="kid")] == ["kid-0"]
    assert session.fork().id == "one"
    async with AsyncClient(server.target) as aclient:
        children = await (await aclient.get_session(session.id)).fork(count=2, new_session_id="b")
        assert [child.id for child in children] == ["b-0", "b-1"]


# Reading


CHUNKS = [
    session_pb2.ReadSessionTokensResponse(start_position=2, token_ids=[1, 2], text="ab"),
    session_pb2.ReadSessionTokensResponse(
        start_position=4, token_ids=[3], text="c", turns=[session_pb2.TurnSpan(turn=0, end_position=5, request_id="r")]
    ),
]


async def test_a_ledger_is_read_whole(server, client):
    server.on("ReadSessionTokens", lambda *_: iter(CHUNKS))
    session = client.create_session()
    part = session.read_tokens(2, text=True)
    assert (part.start_position, part.token_ids, part.text) == (2, (1, 2, 3), "abc")
    assert [turn.request_id for turn in part.turns] == ["r"]
    request = server.calls("ReadSessionTokens")[0].request
    assert (request.start_position, request.HasField("end_position"), request.return_text) == (2, False, True)
    async with AsyncClient(server.target) as aclient:
        assert await (await aclient.get_session(session.id)).read_tokens(2, 0) == part
    assert server.calls("ReadSessionTokens")[1].request.HasField("end_position")


# Scores and estimates


async def test_scores_and_estimates(server, client):
    scores = generation_pb2.ScoreTokensResponse(position=3, logprobs=[types_pb2.TokenLogprob(token_id=4, logprob=-1)])
    estimate = generation_pb2.EstimateGenerationResponse(admissible=True, to_compute_tokens=9)
    server.on("ScoreTokens", lambda *_: scores)
    server.on("EstimateGeneration", lambda *_: estimate)
    session = client.create_session(tokens=[1])
    assert session.score([4], top_logprobs=0) == scores
    asked = server.calls("ScoreTokens")[0].request
    assert (list(asked.token_ids), asked.HasField("top_logprobs")) == ([4], True)
    assert session.estimate(text="x", max_tokens=3) == estimate
    assert server.calls("EstimateGeneration")[0].request.expected_position == 4
    assert client.estimate(text="x") == estimate
    assert not server.calls("EstimateGeneration")[1].request.session_id
    async with AsyncClient(server.target) as aclient:
        again = await aclient.get_session(session.id)
        assert await again.score([4]) == scores
        assert await again.estimate(text="x", expected_position=None) == estimate
        assert await aclient.estimate(text="x") == estimate


# Watching


class Script:
    """A watch that begins with its headers and then says what it is given, until it is left."""

    def __init__(self, server):
        self.server = server
        self.news = threading.Semaphore(0)
        self.events = []
        self.left = threading.Event()
        server.on("WatchSessions", self)

    def __call__(self, _, context):
        context.send_initial_metadata(())
        context.add_callback(self.left.set)
        return self._tell()

    def tell(self, sequence, session_id="abc"):
        session = session_pb2.Session(session_id=session_id, position=7)
        kind = session_pb2.SESSION_EVENT_TYPE_REWOUND
        self.events.append(session_pb2.SessionEvent(sequence=sequence, type=kind, session=session, reason="CALLER"))
        self.news.release()

    def end(self):
        self.events.append(None)
        self.news.release()

    def _tell(self):
        for number in range(1000):
            while not self.news.acquire(timeout=0.05):
                if self.left.is_set():
                    return
            if self.events[number] is None:
                return
            yield self.events[number]


def test_a_watch_has_begun_when_its_block_is_entered(server, client):
    """So nothing that happens in the block is missed; leaving it ends the call."""
    script = Script(server)
    with client.watch("abc", after_sequence=0) as events:
        assert server.calls("WatchSessions"), "the call is under way before anything is read"
        assert events.last_sequence == 0
        script.tell(4)
        script.tell(5)
        for event in events:
            if event.sequence == 5:
                break
        assert events.last_sequence == 5
    assert script.left.wait(5)
    call = server.calls("WatchSessions")[0]
    assert (call.request.session_id, call.metadata["x-session-id"]) == ("abc", "abc")
    assert call.request.HasField("after_sequence")


async def test_a_watch_ends_with_the_stream_and_for_asyncio_too(server, client):
    script = Script(server)
    script.tell(1)
    script.end()
    assert [event.sequence for event in client.watch()] == [1]
    assert not server.calls("WatchSessions")[0].request.HasField("after_sequence")
    script = Script(server)
    async with AsyncClient(server.target) as aclient, aclient.watch() as events:
        script.tell(2)
        script.end()
        assert [event.sequence async for event in events] == [2]
        assert events.last_sequence == 2


def test_a_watch_that_another_thread_closes_ends_quietly(server, client):
    script = Script(server)
    script.tell(1)
    with client.watch() as events:
        threading.Timer(0.2, events.close).start()
        assert [event.sequence for event in events] == [1]


@pytest.mark.parametrize(
    ("code", "reason", "error"),
    [
        (grpc.StatusCode.OUT_OF_RANGE, "EVENT_HISTORY_LOST", EventHistoryLost),
        (grpc.StatusCode.UNAVAILABLE, "", Unavailable),
    ],
)
async def test_a_watch_that_fails_raises_what_happened(server, client, code, reason, error):
    def fail(_, context):
        yield session_pb2.SessionEvent(sequence=8)
        server.fail(context, code, reason, metadata={"oldestSequence": "9"})

    server.on("WatchSessions", fail)
    events = client.watch()
    with pytest.raises(error) as caught:
        list(events)
    assert events.last_sequence == 8
    if error is EventHistoryLost:
        assert caught.value.oldest_sequence == 9
    async with AsyncClient(server.target) as aclient:
        with pytest.raises(error):
            _ = [event async for event in aclient.watch()]


# The command


def fork_two(request, _):
    names = [f"{request.new_session_id}-{n}" for n in range(request.count)]
    return session_pb2.ForkSessionResponse(sessions=[session_pb2.Session(session_id=name) for name in names])


def test_sessions_fork(server, segue):
    server.positions["abc"] = 3
    server.on("ForkSession", fork_two)
    arguments = ("sessions", "fork", "abc", "--count", "2", "--new-id", "kid", "--position", "1")
    assert segue(*arguments).stdout == "kid-0\nkid-1\n"
    assert server.calls("ForkSession")[0].request.position == 1
    assert [entry["session_id"] for entry in json.loads(segue(*arguments, "--json").stdout)] == ["kid-0", "kid-1"]


def test_sessions_rewind(server, segue):
    server.positions["abc"] = 3
    server.on("RewindSession", lambda r, _: session_pb2.Session(session_id=r.session_id, position=r.position))
    assert segue("sessions", "rewind", "abc", "--position", "2").stdout == "abc ends at 2\n"
    assert json.loads(segue("sessions", "rewind", "abc", "--turn", "-1", "--json").stdout)["session_id"] == "abc"
    assert server.calls("RewindSession")[1].request.turn == -1
    assert segue("sessions", "rewind", "abc").exit_code == 2


def test_sessions_update(server, segue):
    server.positions["abc"] = 3
    server.on("UpdateSession", update)
    arguments = (
        "sessions",
        "update",
        "abc",
        "--ttl",
        "9.5",
        "--unpin",
        "--label",
        "a=b=c",
        "--commit-policy",
        "rollback",
    )
    assert segue(*arguments).stdout == "updated abc\n"
    request = server.calls("UpdateSession")[0].request
    assert set(request.update_mask.paths) == {
        "settings.ttl",
        "settings.pinned",
        "settings.commit_policy",
        "labels",
    }
    assert dict(request.session.labels) == {"a": "b=c"}
    assert json.loads(segue(*arguments, "--json").stdout)["etag"] == "e-new"
    for wrong in (("--label", "a"), ("--commit-policy", "keep"), ()):
        assert segue("sessions", "update", "abc", *wrong).exit_code == 2


def test_sessions_tokens(server, segue):
    server.positions["abc"] = 5
    server.on("ReadSessionTokens", lambda *_: iter(CHUNKS))
    assert segue("sessions", "tokens", "abc", "--start", "2").stdout == "1 2 3\n"
    assert segue("sessions", "tokens", "abc", "--text").stdout == "abc\n"
    document = json.loads(segue("sessions", "tokens", "abc", "--text", "--json").stdout)
    assert (document["token_ids"], document["text"], document["turns"][0]["request_id"]) == ([1, 2, 3], "abc", "r")


def test_sessions_watch(server, segue):
    script = Script(server)
    script.tell(3)
    script.end()
    assert segue("sessions", "watch", "--after", "2").stdout == "3\trewound\tabc\t7\tCALLER\n"
    assert server.calls("WatchSessions")[0].request.after_sequence == 2
    script = Script(server)
    script.tell(3)
    script.end()
    document = json.loads(segue("sessions", "watch", "abc", "--json").stdout)
    assert (document["sequence"], document["type"]) == ("3", "SESSION_EVENT_TYPE_REWOUND")


def test_ctrl_c_ends_a_watch(server):
    """Lines come as they happen, also into a pipe; Ctrl-C is exit code 130."""
    script = Script(server)
    command = [*COMMAND, "sessions", "watch", "--target", server.target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        script.tell(1)
        assert process.stdout.readline().startswith("1\trewound")
        time.sleep(0.1)
        process.send_signal(2)
        assert process.wait(10) == 130
    assert script.left.wait(5)
