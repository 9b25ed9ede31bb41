"""Streamed turns over a real socket, blocking and asyncio: events, positions, cancellation, broken grammar."""

import asyncio
import threading
import time

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
    Finished,
    FinishReason,
    PositionMismatch,
    PrefillProgress,
    ProtocolError,
    SessionBusy,
    Started,
    Tokens,
)


@pytest.fixture
def client(server):
    with Client(server.target) as client:
        yield client


async def test_a_turn_streams_its_text_and_sums_up(server, client):
    session = client.create_session()
    with session.chat("Hello") as turn:
        assert list(turn) == ["w0 ", "w1 ", "w2 "]
    check_whole_turn(turn, session)

    async with AsyncClient(server.target) as aclient:
        asession = await aclient.create_session()
        async with asession.chat("Hello") as aturn:
            assert [piece async for piece in aturn] == ["w0 ", "w1 ", "w2 "]
        check_whole_turn(aturn, asession)


def check_whole_turn(turn, session):
    assert turn.text == "w0 w1 w2 "
    assert list(turn.token_ids) == [0, 1, 2]
    assert turn.finish_reason is FinishReason.EOS
    assert turn.usage.generated_tokens == 3
    assert turn.timings.time_to_first_token == 0.125
    assert turn.timings.queue is None
    assert turn.session_id == session.id
    assert session.position == 5
    assert session.etag == "e5"


def test_events_are_typed_and_in_order(server, client):
    prefill = [generation_pb2.PrefillProgress(processed_tokens=n, total_tokens=2) for n in (1, 2)]

    def stream(request, context):
        started, *rest = server.turn(request, words=1)
        queued, beat = generation_pb2.Queued(queue_position=1), generation_pb2.Heartbeat()
        return server.events(queued, started, prefill[0], beat, prefill[1], rest[0], beat, rest[1])

    server.on("GenerateStream", stream)
    with client.stream(text="Hello") as turn:
        names = [type(event).__name__ for event in turn.events()]
    assert names == [
        "Queued",
        "Started",
        "PrefillProgress",
        "Heartbeat",
        "PrefillProgress",
        "Tokens",
        "Heartbeat",
        "Finished",
    ]


def test_position_follows_the_ledger_and_is_sent_with_every_turn(server, client):
    session = client.create_session(system="You are terse.")
    assert session.position == 4
    session.generate(text="a")
    session.stream(tokens=[7]).result()
    assert session.position == 4 + 5 + 5
    expected = [call.request.expected_position for call in server.received if "Generate" in call.method]
    assert expected == [4, 9]


def test_expected_position_none_switches_the_check_off(server, client):
    session = client.create_session()
    session.generate(text="a", expected_position=None)
    session.generate(text="a", expected_position=3)
    first, second = (call.request for call in server.calls("Generate"))
    assert not first.HasField("expected_position")
    assert second.expected_position == 3


@pytest.mark.parametrize("way", ["break in with", "break without with", "exception", "close"])
def test_leaving_early_cancels_the_turn_and_the_session_goes_on(server, client, way):
    server.on("GenerateStream", server.slow_turn)
    session = client.create_session()
    leave_early(session, way)
    (turn_id, finished), *_ = server.cancelled.items()
    assert server.calls("CancelGeneration")[0].request.request_id == turn_id
    assert session.position == finished.position > 2
    server.on("GenerateStream", server.__class__.GenerateStream.__get__(server))
    assert session.chat("again").result().text == "w0 w1 w2 "
    assert server.calls("GenerateStream")[-1].request.expected_position == finished.position


def interrupted(turn):
    with turn:
        pieces = iter(turn)
        next(pieces)
        raise KeyboardInterrupt


def leave_early(session, way):
    match way:
        case "break in with":
            with session.chat("Hello") as turn:
                for _ in turn:
                    break
            assert turn.finish_reason is FinishReason.CANCELLED
        case "break without with":
            for _ in session.chat("Hello"):
                break
        case "exception":
            with pytest.raises(KeyboardInterrupt):
                interrupted(session.chat("Hello"))
        case "close":
            turn = session.chat("Hello")
            pieces = iter(turn)
            next(pieces)
            turn.close()
            assert list(turn) == []


async def test_cancelling_the_task_cancels_the_turn(server):
    server.on("GenerateStream", server.slow_turn)
    async with AsyncClient(server.target) as client:
        session = await client.create_session()
        first = asyncio.Event()

        async def read():
            async with session.chat("Hello") as turn:
                async for _ in turn:
                    first.set()

        task = asyncio.create_task(read())
        await first.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (finished,) = server.cancelled.values()
        assert session.position == finished.position


async def test_leaving_an_async_loop_early_cancels_the_turn(server):
    server.on("GenerateStream", server.slow_turn)
    async with AsyncClient(server.target) as client:
        session = await client.create_session()
        async with session.chat("Hello") as turn:
            async for _ in turn:
                break
        assert turn.finish_reason is FinishReason.CANCELLED
        assert session.position == next(iter(server.cancelled.values())).position


def test_closing_from_another_thread_ends_the_reader_with_cancelled(server, client):
    server.on("GenerateStream", server.slow_turn)
    turn = client.create_session().chat("Hello")
    threading.Timer(0.1, turn.close).start()
    with pytest.raises(Cancelled):
        list(turn)


async def test_closing_from_another_task_ends_the_reader_with_cancelled(server):
    server.on("GenerateStream", server.slow_turn)
    async with AsyncClient(server.target) as client:
        turn = (await client.create_session()).chat("Hello")

        async def close_soon():
            await asyncio.sleep(0.1)
            await turn.close()

        closing = asyncio.create_task(close_soon())
        with pytest.raises(Cancelled):
            async for _ in turn:
                pass
        await closing


def test_a_stream_left_with_its_lock_taken_blocks_no_other(server, client):
    """What a Ctrl-C at the wrong instruction leaves behind, made to happen: gRPC's lock of that stream stays taken.

    With gRPC's default, one thread that reads all streams, about one interrupt in 200 hung every later stream for ever.
    """
    server.on("CancelGeneration", lambda *_: generation_pb2.CancelGenerationResponse())
    interrupted = client.stream(text="x")
    pieces = iter(interrupted)
    next(pieces)
    locked, end = threading.Event(), threading.Event()

    def keep_the_lock():
        with interrupted._stream._state.condition:
            interrupted._stream.cancel()
            locked.set()
            end.wait(10)

    threading.Thread(target=keep_the_lock, daemon=True).start()
    assert locked.wait(10)
    texts = []
    other = threading.Thread(target=lambda: texts.append(client.stream(text="x").result().text), daemon=True)
    other.start()
    other.join(timeout=5)
    in_time = list(texts)
    end.set()
    other.join(timeout=5)
    assert in_time == ["w0 w1 w2 "]


def test_without_an_answer_to_the_cancel_the_session_asks_before_its_next_turn(server, client):
    server.on("GenerateStream", server.slow_turn)
    server.on("CancelGeneration", lambda _, context: server.fail(context, grpc.StatusCode.NOT_FOUND))
    session = client.create_session()
    with session.chat("Hello") as turn:
        next(iter(turn))
    wait_for(lambda: server.cancelled)
    assert session.generate(text="again").position == server.positions[session.id]
    assert [call.method for call in server.received[-2:]] == ["GetSession", "Generate"]


def wait_for(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def started(request=None):
    return generation_pb2.Started(session_id="s", position=0, prompt_tokens=2)


TOKENS = generation_pb2.Tokens(position=2, token_ids=[1], text="x")
FINISHED = generation_pb2.Finished(finish_reason=types_pb2.FINISH_REASON_EOS, position=3)
PREFILL = generation_pb2.PrefillProgress(processed_tokens=1, total_tokens=2)
QUEUED = generation_pb2.Queued()


@pytest.mark.parametrize(
    ("events", "complaint"),
    [
        ([(1, started()), (3, TOKENS)], "event 2 expected, 3 came"),
        ([(1, started()), (1, TOKENS)], "event 2 expected, 1 came"),
        ([(2, started())], "event 1 expected, 2 came"),
        ([(1, TOKENS)], "event 1 is tokens; queued or started or finished expected"),
        ([(1, QUEUED), (2, QUEUED)], "event 2 is queued; started or finished expected"),
        ([(1, started()), (2, TOKENS), (3, PREFILL)], "event 3 is prefill; tokens or heartbeat or finished expected"),
        ([(1, started()), (2, FINISHED), (3, TOKENS)], "event 3 is tokens; the end of the stream expected"),
        ([(1, started()), (2, TOKENS)], "the stream ended after event 2 without Finished"),
        ([], "the stream ended after event 0 without Finished"),
    ],
)
async def test_a_stream_against_the_grammar_is_a_protocol_error(server, client, events, complaint):
    def stream(request, context):
        for sequence, event in events:
            yield from server.events(event, first=sequence)

    server.on("GenerateStream", stream)
    server.on("CancelGeneration", lambda *_: generation_pb2.CancelGenerationResponse())
    with pytest.raises(ProtocolError, match=complaint), client.stream(text="x", request_id="r1") as turn:
        list(turn)
    async with AsyncClient(server.target) as aclient:
        with pytest.raises(ProtocolError, match=complaint) as caught:
            await aclient.stream(text="x", request_id="r1").result()
    assert caught.value.request_id == "r1"


def test_an_event_of_a_later_version_is_counted_and_skipped(server, client):
    def stream(request, context):
        yield from server.events(started())
        yield generation_pb2.GenerateEvent(sequence=2)
        yield from server.events(TOKENS, FINISHED, first=3)

    server.on("GenerateStream", stream)
    with client.stream(text="x") as turn:
        assert [type(event) for event in turn.events()] == [Started, Tokens, Finished]


@pytest.mark.parametrize("code", ["UNAVAILABLE", "INTERNAL", "UNKNOWN", "CANCELLED"])
def test_a_stream_broken_after_it_began_is_connection_lost_whatever_the_code(server, client, code):
    def stream(request, context):
        yield from server.events(started(), TOKENS)
        context.abort(grpc.StatusCode[code], "broken")

    server.on("GenerateStream", stream)
    session = client.create_session()
    with pytest.raises(ConnectionLost, match=code) as caught:
        session.chat("Hello", detach_grace=0).result()
    assert caught.value.request_id == server.calls("GenerateStream")[0].request.request_id
    assert len(server.calls("GenerateStream")) == 1, "a turn that began must not run twice"
    server.positions[session.id] = 9
    session.generate(text="again")
    assert server.calls("Generate")[0].request.expected_position == 9


def test_an_engine_error_in_mid_stream_keeps_its_name(server, client):
    def stream(request, context):
        yield from server.events(started(), TOKENS)
        server.fail(context, grpc.StatusCode.INTERNAL, "ENGINE_ERROR", "step raised")

    server.on("GenerateStream", stream)
    with pytest.raises(EngineError, match="ENGINE_ERROR: step raised"):
        client.stream(text="x").result()


def test_a_refused_turn_leaves_the_position_certain(server, client):
    session = client.create_session()
    server.on("GenerateStream", lambda _, context: server.fail(context, grpc.StatusCode.ABORTED, "SESSION_BUSY"))
    with pytest.raises(SessionBusy):
        session.chat("Hello").result()
    session.generate(text="x")
    assert not server.calls("GetSession")


def test_a_mismatch_persists_until_the_caller_refreshes(server, client):
    def generate(request, context):
        actual = server.positions[request.session_id]
        if request.expected_position != actual:
            metadata = {"actualPosition": str(actual)}
            server.fail(context, grpc.StatusCode.ABORTED, "POSITION_MISMATCH", metadata=metadata)
        return server.Generate(request, context)

    server.on("Generate", generate)
    session = client.create_session()
    server.positions[session.id] = 7
    for _ in range(2):
        with pytest.raises(PositionMismatch) as caught:
            session.generate(text="x")
        assert caught.value.actual_position == 7
    assert session.refresh().generate(text="x").position == 12


def test_the_deadline_of_a_stream_is_kept(server, client):
    server.on("GenerateStream", server.slow_turn)
    session = client.create_session()
    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        session.chat("Hello", timeout=0.3).result()
    assert time.monotonic() - begin < 2


def test_append_context_returns_when_the_tokens_are_in(server, client):
    def append(request, context):
        server.positions[request.session_id] += 2
        position = server.positions[request.session_id]
        usage = types_pb2.Usage(computed_tokens=2)
        return server.events(started(), PREFILL, generation_pb2.Finished(position=position, usage=usage))

    server.on("AppendContext", append)
    session = client.create_session()
    assert session.append_context(text="tool result").usage.computed_tokens == 2
    assert session.position == 2
    assert server.calls("AppendContext")[0].request.expected_position == 0


def test_logprobs_are_collected(server, client):
    logprob = types_pb2.TokenLogprob(token_id=1, logprob=-0.5)

    def stream(request, context):
        tokens = generation_pb2.Tokens(position=2, token_ids=[1], text="x", logprobs=[logprob])
        prefill = generation_pb2.PrefillProgress(prompt_logprobs=[logprob, logprob])
        return server.events(started(), prefill, tokens, FINISHED)

    server.on("GenerateStream", stream)
    completion = client.stream(text="x", top_logprobs=0, prompt_logprobs=True).result()
    assert list(completion.logprobs) == [logprob]
    assert list(completion.prompt_logprobs) == [logprob, logprob]


def test_a_turn_that_was_not_read_has_no_usage_yet(client):
    turn = client.stream(text="x")
    with pytest.raises(ValueError, match="not finished"):
        _ = turn.usage
    assert turn.finished is None


def test_prefill_progress_reaches_the_reader(server, client):
    server.on("GenerateStream", lambda *_: server.events(started(), PREFILL, TOKENS, FINISHED))
    with client.stream(text="x") as turn:
        progress = [event.processed_tokens for event in turn.events() if isinstance(event, PrefillProgress)]
    assert progress == [1]
