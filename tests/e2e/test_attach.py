"""Turns over connections that are cut: every client sees each token exactly once, and the server keeps nothing."""

import asyncio
import random
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from tests.e2e.cutting_proxy import Cut, CuttingProxy, random_cuts

from segue.v1 import generation_pb2, generation_pb2_grpc
from segue_client import AsyncClient, Client, ConnectionLost, Finished, FinishReason, RequestIdReused, Tokens

OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
TOKENS = 40
BYTES = 3000  # of a whole stream of so many tokens, with what HTTP/2 adds, about
SAMPLING = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}


def prompt(number):
    return f"This is stream number {number}, and it goes on:"


def uncut(client, count):
    """The answers over a connection that holds."""
    with ThreadPoolExecutor(16) as threads:
        asked = [threads.submit(client.generate, text=prompt(n), **SAMPLING, top_logprobs=2) for n in range(count)]
        return [answer.result() for answer in asked]


def attached(server):
    """Calls of AttachGeneration that the server has begun to answer."""
    name = "segue.v1.GenerationService/AttachGeneration"
    return sum(
        value for labels, value in server.metrics().items() if labels == ("grpc_server_call_started_total", name)
    )


def assert_whole(server, session, turn, expected, same_choices):
    """What the client has read is what the ledger holds, each token once, and what an uncut run says."""
    tokens = list(turn.token_ids)
    assert len(tokens) == TOKENS
    assert server.ledger(session)[-TOKENS:] == tokens
    assert turn.finish_reason is FinishReason.MAX_TOKENS
    session.refresh()
    assert session.info.turn_count == 1, "the turn ran once"
    same_choices(turn.completion, expected)


async def test_a_hundred_streams_cut_at_random_points_lose_and_repeat_nothing(serve, same_choices):
    """Each line is cut up to five times, in three ways; then it holds."""
    server, dice, count = serve(max_running=100), random.Random(11), 100
    direct = server.client()
    expected = uncut(direct, count)
    sessions = [direct.create_session() for _ in range(count)]
    began = time.monotonic()
    with CuttingProxy(server.target) as proxy:
        plans = [random_cuts(dice, cuts, BYTES // cuts) for cuts in (dice.randrange(1, 6) for _ in range(count))]
        lines = [proxy.line(plan) for plan in plans]

        async def run(number):
            async with AsyncClient(lines[number], channel_options=OWN_CONNECTION) as client:
                turn = client.stream(sessions[number].id, text=prompt(number), expected_position=0, **SAMPLING)
                sequences, tokens = [], []
                async for event in turn.events():
                    sequences.append(turn._record.last_sequence)
                    tokens += event.token_ids if isinstance(event, Tokens) else ()
                assert sequences == list(range(1, len(sequences) + 1))
                assert tokens == list(turn.token_ids)
                return turn

        turns = await asyncio.gather(*(run(n) for n in range(count)))
        cuts = proxy.cuts
    attaches = attached(server)
    print(f"{count} streams, {cuts} cuts, {attaches:g} attaches, {time.monotonic() - began:.1f} s")
    assert cuts > count
    assert attaches > count / 2
    for session, turn, whole in zip(sessions, turns, expected, strict=True):
        assert_whole(server, session, turn, whole, same_choices)
    server.wait_idle()


def test_blocking_clients_too(serve, same_choices):
    server, dice, count = serve(max_running=16), random.Random(12), 12
    direct = server.client()
    expected = uncut(direct, count)
    sessions = [direct.create_session() for _ in range(count)]
    with CuttingProxy(server.target) as proxy, ThreadPoolExecutor(count) as threads:
        lines = [proxy.line(random_cuts(dice, 3, BYTES // 4)) for _ in range(count)]

        def run(number):
            with Client(lines[number], channel_options=OWN_CONNECTION) as client:
                turn = client.stream(sessions[number].id, text=prompt(number), **SAMPLING)
                turn.result()
                return turn

        turns = list(threads.map(run, range(count)))
        assert proxy.cuts > count
    for session, turn, whole in zip(sessions, turns, expected, strict=True):
        assert_whole(server, session, turn, whole, same_choices)


def test_unary_turns_are_tried_again_and_run_once(serve, same_choices):
    """The answer of a unary call is one message: gRPC's own retry sends the request again with its request id."""
    server, dice, count = serve(max_running=16), random.Random(13), 16
    direct = server.client()
    expected = uncut(direct, count)
    sessions = [direct.create_session() for _ in range(count)]
    with CuttingProxy(server.target) as proxy, ThreadPoolExecutor(count) as threads:
        # Cut before the answer's headers: the settings of HTTP/2 take some 60 bytes, the answer comes in one go.
        lines = [proxy.line(random_cuts(dice, 2, 60)) for _ in range(count)]

        def run(number):
            with Client(lines[number], channel_options=OWN_CONNECTION) as client:
                return client.generate(sessions[number].id, text=prompt(number), **SAMPLING)

        answers = list(threads.map(run, range(count)))
        assert proxy.cuts == 2 * count
    for session, answer, whole in zip(sessions, answers, expected, strict=True):
        assert session.refresh().info.turn_count == 1
        assert server.ledger(session)[-TOKENS:] == list(answer.token_ids)
        same_choices(answer, whole)


# What a client of another language does by hand


@pytest.fixture
def tiny(serve):
    return serve()


@pytest.fixture
def stub(tiny):
    with grpc.insecure_channel(tiny.target, OWN_CONNECTION) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


def request(**fields):
    message = generation_pb2.GenerateRequest(request_id="r-1", text="Once upon a time", **fields)
    message.stop.max_tokens, message.stop.ignore_eos = 300, True
    message.sampling.temperature = 0
    return message


def attach(request_id="r-1", after=0):
    return generation_pb2.AttachGenerationRequest(request_id=request_id, after_sequence=after)


def reason_of(call):
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value.code(), str(caught.value.trailing_metadata())


def test_attach_and_replay_on_the_wire(tiny, stub):
    """Left in the middle, attached to, attached to after its end, sent again, sent again with other content."""
    grace = {"detach_grace": {"seconds": 10}}
    first = stub.GenerateStream(request(**grace))
    seen = [next(first) for _ in range(5)]
    first.cancel()
    seen += stub.AttachGeneration(attach(after=5))
    assert [event.sequence for event in seen] == list(range(1, len(seen) + 1))
    assert sum(len(event.tokens.token_ids) for event in seen) == 300
    assert list(stub.AttachGeneration(attach(after=len(seen)))) == []
    assert list(stub.AttachGeneration(attach())) == seen
    assert list(stub.GenerateStream(request(**grace))) == seen
    whole = stub.Generate(request(**grace))
    assert list(whole.token_ids) == [token for event in seen for token in event.tokens.token_ids]
    assert whole.finished == seen[-1].finished
    cancelled = stub.CancelGeneration(generation_pb2.CancelGenerationRequest(request_id="r-1"))
    assert (cancelled.was_running, cancelled.finished) == (False, seen[-1].finished)
    code, trailers = reason_of(stub.GenerateStream(request(detach_grace={"seconds": 11})))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "REQUEST_ID_REUSED" in trailers


@pytest.mark.parametrize(
    ("asked", "code", "reason"),
    [
        (attach("never-heard-of"), "NOT_FOUND", "REQUEST_NOT_FOUND"),
        (attach(""), "INVALID_ARGUMENT", "FIELD_INVALID"),
        (attach(after=-1), "INVALID_ARGUMENT", "FIELD_INVALID"),
        (attach(after=10_000), "OUT_OF_RANGE", "POSITION_BEYOND_END"),
    ],
)
def test_what_cannot_be_attached_to(tiny, stub, asked, code, reason):
    list(stub.GenerateStream(request()))
    got, trailers = reason_of(stub.AttachGeneration(asked))
    assert got.name == code
    assert reason in trailers


def test_leaving_an_attached_stream_starts_the_grace_anew_and_its_end_frees_the_session(serve):
    """A turn of many tokens, left twice; nobody comes back the second time."""
    server = serve()
    session = server.client().create_session()
    with grpc.insecure_channel(server.target, OWN_CONNECTION) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        asked = request(session_id=session.id, detach_grace={"nanos": 500_000_000})
        asked.stop.max_tokens = 8000
        for method, message in ((stub.GenerateStream, asked), (stub.AttachGeneration, attach())):
            call = method(message)
            next(call)
            call.cancel()
            assert server.in_flight() == 1
            time.sleep(0.2)
        assert server.in_flight() == 1
        server.wait_idle()
        last = list(stub.AttachGeneration(attach()))[-1].finished
    assert FinishReason.from_finished(last) is FinishReason.CANCELLED
    assert session.refresh().position == last.position < 8000
    assert server.running.engine.stats.cancellations.values["decode", "disconnect"] == 1


def test_after_a_restart_the_client_says_connection_lost_and_the_server_is_not_asked_twice(serve):
    """The turn's server is replaced by another at the same address, which has never heard of the turn."""
    first, second = serve(), serve()
    with CuttingProxy(first.target) as proxy:
        line = proxy.line([Cut(400, "reset")])
        with Client(line, channel_options=OWN_CONNECTION) as client:
            events = client.stream(text="Once upon a time", max_tokens=2000, detach_grace=2.0).events()
            next(events)
            proxy.lead_to(second.target)
            with pytest.raises(ConnectionLost, match="does not have the turn any more"):
                list(events)
    assert second.steps == 0


def test_other_content_under_a_used_request_id_is_an_error_of_its_own(tiny):
    client = tiny.client()
    client.generate(text="one", request_id="r-9", max_tokens=2)
    with pytest.raises(RequestIdReused):
        client.generate(text="two", request_id="r-9", max_tokens=2)


def test_finished_is_the_last_event_of_a_turn_that_was_taken_up_again(serve):
    server = serve()
    with CuttingProxy(server.target) as proxy:
        line = proxy.line([Cut(500, "reset")] * 3)
        with Client(line, channel_options=OWN_CONNECTION) as client:
            events = list(client.stream(text="Once upon a time", **SAMPLING).events())
    assert isinstance(events[-1], Finished)
    assert sum(isinstance(event, Finished) for event in events) == 1
    assert proxy.cuts == 3
