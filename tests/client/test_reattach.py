"""A turn whose stream breaks is taken up again by request id and last event, blocking and asyncio."""

import _thread
import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from segue.v1 import generation_pb2, types_pb2
from segue_client import (
    AsyncClient,
    Cancelled,
    Client,
    ConnectionLost,
    DeadlineExceeded,
    EngineError,
    FinishReason,
    Heartbeat,
    Tokens,
    Unavailable,
)

BROKEN = ["UNAVAILABLE", "INTERNAL", "UNKNOWN", "CANCELLED"]
Events = Iterator[generation_pb2.GenerateEvent]


@dataclass
class Line:
    """The stream of one turn that breaks after some number of events, then again, ...; attaching goes on behind it.

    Each entry of `breaks` is the number of events of one try; after the last entry nothing breaks any more.
    """

    server: Any
    breaks: list[int]
    code: str = "UNAVAILABLE"
    words: int = 6
    holds: float = 0.0  # seconds before it breaks
    turn: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.server.on("GenerateStream", self.generate)
        self.server.on("AttachGeneration", self.attach)

    def generate(self, request: Any, context: grpc.ServicerContext) -> Events:
        self.turn = self.turn or list(self.server.turn(request, self.words))
        return self.after(0, context)

    def attach(self, request: Any, context: grpc.ServicerContext) -> Events:
        return self.after(request.after_sequence, context)

    def after(self, sequence: int, context: grpc.ServicerContext) -> Events:
        events = self.turn[sequence:]
        count = self.breaks.pop(0) if self.breaks else len(events) + 1
        yield from self.server.events(*events[:count], first=sequence + 1)
        if count <= len(events):
            time.sleep(self.holds)
            context.abort(grpc.StatusCode[self.code], "the line is cut")

    @property
    def asked(self) -> list[tuple[str, int]]:
        """(RPC, after_sequence) of each try."""
        calls = [c for c in self.server.received if c.method in ("GenerateStream", "AttachGeneration")]
        return [(c.method, getattr(c.request, "after_sequence", 0)) for c in calls]


@pytest.fixture
def client(server: Any) -> Iterator[Client]:
    with Client(server.target) as client:
        yield client


@pytest.fixture(params=["blocking", "asyncio"])
def result(request: pytest.FixtureRequest, server: Any) -> Callable[..., Any]:
    """`result(options)` runs one turn of a new session and returns (turn, session)."""

    def blocking(**options: Any) -> Any:
        with Client(server.target) as client:
            session = client.create_session()
            turn = session.chat("Hello", **options)
            turn.result()
            return turn, session

    async def awaiting(**options: Any) -> Any:
        async with AsyncClient(server.target) as client:
            session = await client.create_session()
            turn = session.chat("Hello", **options)
            await turn.result()
            return turn, session

    return blocking if request.param == "blocking" else lambda **options: asyncio.run(awaiting(**options))


@pytest.mark.parametrize("code", BROKEN)
def test_a_broken_stream_goes_on_where_it_broke_whatever_the_code(server, result, code):
    line = Line(server, [3, 1, 2], code=code)
    turn, session = result()
    assert line.asked == [
        ("GenerateStream", 0),
        ("AttachGeneration", 3),
        ("AttachGeneration", 4),
        ("AttachGeneration", 6),
    ]
    assert list(turn.token_ids) == list(range(6)), "each token once"
    assert turn.text == "w0 w1 w2 w3 w4 w5 "
    assert turn.finish_reason is FinishReason.EOS
    assert session.position == turn.completion.position == 8
    assert not server.calls("CancelGeneration")


def test_the_attach_names_the_turn_the_session_and_what_is_left_of_the_deadline(server, result):
    line = Line(server, [2], holds=0.5)
    result(timeout=8)  # beyond 10 s gRPC sends whole seconds
    sent, attached = server.calls("GenerateStream")[0], server.calls("AttachGeneration")[0]
    assert attached.request.request_id == sent.request.request_id
    assert attached.metadata["x-session-id"] == sent.request.session_id
    assert 2 < attached.time_remaining < sent.time_remaining - 0.2 < 8.2
    assert sent.request.detach_grace.ToSeconds() == 15
    assert line.turn


@pytest.mark.parametrize("code", BROKEN)
def test_a_stream_that_broke_before_it_began_is_sent_again_as_it_was(server, result, code):
    line = Line(server, [0, 0], code=code)
    turn, _ = result()
    requests = [call.request for call in server.calls("GenerateStream")]
    assert len(requests) == 3
    assert requests[0] == requests[1] == requests[2]
    assert line.asked[-1] == ("GenerateStream", 0)
    assert turn.text == "w0 w1 w2 w3 w4 w5 "


def test_a_goodbye_that_is_lost_is_no_loss(server, result):
    """The connection breaks between Finished and the status."""
    Line(server, [8])
    turn, session = result()
    assert turn.finish_reason is FinishReason.EOS
    assert session.position == 8
    assert not server.calls("AttachGeneration")


@pytest.mark.parametrize("reason", ["REQUEST_NOT_FOUND", "POSITION_BEYOND_END", "FEATURE_ABSENT"])
def test_a_server_that_does_not_have_the_turn_means_connection_lost_at_once(server, client, reason):
    """A server that was started anew. The session asks where it stands before its next turn."""
    Line(server, [3])
    server.on("AttachGeneration", lambda _, context: server.fail(context, grpc.StatusCode.NOT_FOUND, reason))
    session = client.create_session()
    began = time.monotonic()
    with pytest.raises(ConnectionLost, match=reason):
        session.chat("Hello").result()
    assert time.monotonic() - began < 2
    assert len(server.calls("AttachGeneration")) == 1
    server.positions[session.id] = 5
    session.generate(text="again")
    assert server.calls("Generate")[0].request.expected_position == 5


def test_an_error_of_the_turn_itself_is_raised_through_the_attached_stream(server, result):
    Line(server, [3])
    server.on("AttachGeneration", lambda _, context: server.fail(context, grpc.StatusCode.INTERNAL, "ENGINE_ERROR"))
    with pytest.raises(EngineError):
        result()


def test_tries_end_with_the_grace(server, result):
    """The server would have ended the turn by then."""
    Line(server, [3] + [0] * 1000)
    began = time.monotonic()
    with pytest.raises(ConnectionLost, match="the line is cut"):
        result(detach_grace=0.5)
    assert 0.2 < time.monotonic() - began < 3
    assert len(server.calls("AttachGeneration")) >= 3


def test_tries_end_with_the_deadline_of_the_turn(server, result):
    Line(server, [3] + [0] * 1000)
    began = time.monotonic()
    with pytest.raises((ConnectionLost, DeadlineExceeded)):
        result(timeout=0.5)
    assert time.monotonic() - began < 3


def test_an_event_gives_the_tries_their_time_again(server, result):
    """Thirty breaks in more time than the grace, with an event after each: the line is bad, but the turn goes on."""
    line = Line(server, [1] * 31, words=30)
    began = time.monotonic()
    turn, _ = result(detach_grace=0.3)
    print(f"{len(line.asked)} tries in {time.monotonic() - began:.1f} s")
    assert list(turn.token_ids) == list(range(30))
    assert len(line.asked) == 32


def test_without_a_grace_nothing_is_tried(server, result):
    line = Line(server, [3], code="INTERNAL")
    with pytest.raises(ConnectionLost):
        result(detach_grace=0)
    assert line.asked == [("GenerateStream", 0)]
    assert not server.calls("GenerateStream")[0].request.detach_grace.ToSeconds()


def test_an_append_is_not_kept_and_not_tried(server, client):
    server.on("AppendContext", lambda _, context: context.abort(grpc.StatusCode.INTERNAL, "the line is cut"))
    session = client.create_session()
    with pytest.raises(Exception, match="the line is cut"):
        session.append_context(text="Hello")
    assert len(server.calls("AppendContext")) == 1


def test_nobody_at_the_address_is_told_soon(unused_target):
    began = time.monotonic()
    with Client(unused_target) as client, pytest.raises(Unavailable):
        client.stream(text="Hello").result()
    print(f"given up after {time.monotonic() - began:.1f} s")
    assert time.monotonic() - began < 12


def test_closing_while_the_line_is_down_ends_the_reader_and_cancels_the_turn(server, client):
    Line(server, [3] + [0] * 1000)
    server.on("CancelGeneration", lambda *_: generation_pb2.CancelGenerationResponse(was_running=True))
    turn = client.create_session().chat("Hello")
    closing = threading.Timer(0.4, turn.close)
    closing.start()
    with pytest.raises(Cancelled):
        turn.result()
    closing.join()
    assert server.calls("CancelGeneration")[0].request.request_id == turn.request_id


async def test_closing_from_another_task_while_the_line_is_down(server):
    Line(server, [3] + [0] * 1000)
    server.on("CancelGeneration", lambda *_: generation_pb2.CancelGenerationResponse(was_running=True))
    async with AsyncClient(server.target) as client:
        turn = (await client.create_session()).chat("Hello")
        reading = asyncio.create_task(turn.result())
        await asyncio.sleep(0.4)
        await turn.close()
        with pytest.raises(Cancelled):
            await reading
    assert server.calls("CancelGeneration")[0].request.request_id == turn.request_id


def test_leaving_a_turn_that_was_taken_up_again_cancels_it(server, client):
    line = Line(server, [3], words=1000)
    server.on("CancelGeneration", lambda *_: generation_pb2.CancelGenerationResponse(was_running=True))
    with client.create_session().chat("Hello") as turn:
        for event in turn.events():
            if isinstance(event, Tokens) and event.token_ids[0] == 5:
                break
    assert ("AttachGeneration", 3) in line.asked
    assert server.calls("CancelGeneration")[0].request.request_id == turn.request_id


def test_closing_the_client_cancels_its_turns_for_they_would_outlive_it(server):
    server.on("GenerateStream", server.slow_turn)
    client = Client(server.target)
    turns = [client.create_session().chat("Hello") for _ in range(2)]
    pieces = [iter(turn) for turn in turns]
    for piece in pieces:
        next(piece)
    client.close()
    assert set(server.cancelled) == {turn.request_id for turn in turns}
    assert {call.request.request_id for call in server.calls("CancelGeneration")} == set(server.cancelled)
    assert [list(piece) for piece in pieces] == [[], []]


async def test_closing_an_asyncio_client_does_so_too(server):
    server.on("GenerateStream", server.slow_turn)
    client = AsyncClient(server.target)
    turn = (await client.create_session()).chat("Hello")
    events = turn.events()
    await anext(events)
    await client.close()
    assert list(server.cancelled) == [turn.request_id]
    await events.aclose()


def test_heartbeats_count_as_events_of_the_log(server, result):
    line = Line(server, [3])

    def turn(request: Any, words: int) -> Iterator[Any]:
        started, first, *rest = type(server).turn(server, request, words)
        yield from (started, first, generation_pb2.Heartbeat(), generation_pb2.Heartbeat(), *rest)

    server.turn = turn
    done, _ = result()
    assert ("AttachGeneration", 3) in line.asked
    assert list(done.token_ids) == list(range(6))
    assert sum(isinstance(event, type(Heartbeat())) for event in line.turn) == 2


# A turn that is one call


def stuck(server: Any) -> threading.Event:
    """Generate does not answer until the turn is cancelled."""
    gone = threading.Event()

    def generate(request: Any, context: grpc.ServicerContext) -> Any:
        gone.wait(10)
        return generation_pb2.GenerateResponse()

    def cancel(request: Any, context: grpc.ServicerContext) -> Any:
        gone.set()
        finished = generation_pb2.Finished(finish_reason=types_pb2.FINISH_REASON_CANCELLED, position=2)
        return generation_pb2.CancelGenerationResponse(was_running=True, finished=finished)

    server.on("Generate", generate)
    server.on("CancelGeneration", cancel)
    return gone


def test_ctrl_c_in_a_unary_turn_cancels_it_for_it_would_outlive_the_call(server, client):
    gone = stuck(server)
    session = client.create_session()

    threading.Timer(0.3, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        session.generate(text="Hello")
    assert gone.is_set()
    sent, cancelled = server.calls("Generate")[0].request, server.calls("CancelGeneration")[0].request
    assert cancelled.request_id == sent.request_id
    assert sent.detach_grace.ToSeconds() == 15


async def test_cancelling_the_task_of_a_unary_turn_cancels_the_turn(server):
    gone = stuck(server)
    async with AsyncClient(server.target) as client:
        session = await client.create_session()
        task = asyncio.create_task(session.generate(text="Hello"))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert gone.is_set()
        server.on("Generate", type(server).Generate.__get__(server))
        assert (await session.generate(text="again")).text == "w0 w1 w2 "
    assert [call.method for call in server.received[-2:]] == ["GetSession", "Generate"], "it asked where it stands"
