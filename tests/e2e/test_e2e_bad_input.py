"""Bad input over the socket: each kind gets its status, its reason and the field's name, and the server goes on."""

import math

import grpc
import pytest

from segue.v1 import generation_pb2, types_pb2
from segue_client import (
    AlreadyExists,
    ContextExceeded,
    InvalidArgument,
    KvBudgetImpossible,
    RequestIdReused,
    ResourceExhausted,
    SessionNotFound,
)

GENERATE = "segue.v1.GenerationService/Generate"


@pytest.fixture
def live(serve):
    return serve(kv_bytes=40 * 8192, max_context_tokens=2048)  # 40 pages: 640 positions


@pytest.fixture(autouse=True)
def still_serves(live):
    """After each test a plain turn works on a new connection."""
    yield
    assert live.client().generate(text="ok", max_tokens=2, ignore_eos=True).usage.generated_tokens == 2


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"text": ""}, "input.text", "must not be empty"),
        ({"tokens": []}, "input.token_ids", "must not be empty"),
        ({"messages": []}, "input.chat.messages", "must not be empty"),
        ({}, "input", "must be given: the session's ledger is empty"),
        ({"tokens": [1, 259]}, "input.token_ids[1]", "must be in [0, 259), got 259"),
        ({"tokens": [-1]}, "input.token_ids[0]", "got -1"),
        ({"text": "a", "temperature": math.nan}, "sampling.temperature", "must be in [0, 2], got nan"),
        ({"text": "a", "temperature": math.inf}, "sampling.temperature", "got inf"),
        ({"text": "a", "top_p": 0.0}, "sampling.top_p", "must be in (0, 1]"),
        ({"text": "a", "logit_bias": {300: 1.0}}, "sampling.logit_bias[0]", "got 300"),
        ({"text": "a", "stop": [f"stop {n}" for n in range(10_000)]}, "stop.stop_sequences", "at most 16 sequences"),
        ({"text": "a", "stop": ["x" * 5000]}, "stop.stop_sequences[0]", "at most 256 characters, got 5000"),
        ({"text": "a", "max_tokens": 0}, "stop.max_tokens", "got 0"),
        ({"text": "a", "max_tokens": -5}, "stop.max_tokens", "got -5"),
        ({"text": "a", "top_logprobs": 1000}, "output.top_logprobs", "must be in [0, 20]"),
        ({"text": "a", "request_id": "r" * 1000}, "request_id", "at most 128 characters"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "chat", "has no chat template"),
    ],
)
def test_a_bad_field_is_named_with_its_limit(live, options, field, words):
    """INVALID_ARGUMENT / FIELD_INVALID, the field's path, and what it must be."""
    with pytest.raises(InvalidArgument) as caught:
        live.client().generate(**options)
    assert [violation.field for violation in caught.value.violations] == [field]
    assert words in caught.value.violations[0].description
    assert caught.value.reason == "FIELD_INVALID"


def test_all_bad_fields_are_named_at_once(live):
    """A caller mends a request in one round."""
    with pytest.raises(InvalidArgument) as caught:
        live.client().generate(text="", temperature=5, top_p=2, min_p=-1, max_tokens=0, top_logprobs=99)
    assert {violation.field for violation in caught.value.violations} == {
        "input.text",
        "sampling.temperature",
        "sampling.top_p",
        "sampling.min_p",
        "stop.max_tokens",
        "output.top_logprobs",
    }


def test_a_prompt_longer_than_the_context_is_out_of_range(live):
    """CONTEXT_EXCEEDED with both numbers; the session stays as it was."""
    client = live.client()
    session = client.create_session(max_context_tokens=64)
    with pytest.raises(ContextExceeded) as caught:
        session.generate(tokens=[1] * 64, max_tokens=4)
    assert (caught.value.max_context_tokens, caught.value.needed_tokens) == (64, 65)
    assert session.refresh().position == 0
    assert session.generate(tokens=[1] * 63, max_tokens=4, ignore_eos=True).position == 64


def test_unknown_sessions_are_not_found(live):
    """SESSION_NOT_FOUND from every call that names one."""
    client = live.client()
    for call in (client.get_session, client.delete_session, lambda name: client.generate(name, text="a")):
        with pytest.raises(SessionNotFound, match="no session 'never-was'"):
            call("never-was")
    assert client.delete_session("never-was", allow_missing=True) == 0


def test_a_taken_session_id_and_a_malformed_one_are_refused(live):
    """ALREADY_EXISTS for another creation, the same answer for the same request id, and a pattern for ids."""
    client = live.client()
    one = client.create_session(session_id="my-session", request_id="creation-1")
    with pytest.raises(AlreadyExists):
        client.create_session(session_id="my-session")
    assert client.create_session(session_id="my-session", request_id="creation-1").etag == one.etag
    with pytest.raises(InvalidArgument, match="must match"):
        client.create_session(session_id="../etc/passwd")


def test_a_request_id_that_is_in_flight_cannot_be_used_for_another_turn(live):
    """REQUEST_ID_REUSED; the turn in flight is not harmed."""
    client = live.client()
    with client.stream(text="a", ignore_eos=True, max_tokens=300, request_id="mine") as turn:
        events = turn.events()
        next(events)
        with pytest.raises(RequestIdReused):
            client.generate(text="b", request_id="mine")
        list(events)
    assert turn.usage.generated_tokens == 300


def test_a_message_of_5_mib_is_refused_by_size(live):
    """Beyond 4 MiB gRPC answers RESOURCE_EXHAUSTED before anything is parsed."""
    with pytest.raises(ResourceExhausted, match=r"larger than max|5242"):
        live.client().generate(text="x" * (5 << 20))


def test_text_that_is_not_utf8_is_named(live):
    """Bytes that no library of ours would send: FIELD_INVALID with the field, not a parse error of gRPC."""
    message = generation_pb2.GenerateRequest(text="mark").SerializeToString().replace(b"mark", b"\xff\xfe\xff\xfe")
    with grpc.insecure_channel(live.target) as channel:
        send = channel.unary_unary(f"/{GENERATE}", request_serializer=bytes, response_deserializer=bytes)
        with pytest.raises(grpc.RpcError) as caught:
            send(message, timeout=10)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "text: is not valid UTF-8" in caught.value.details()


def test_an_unknown_enum_value_is_refused(live):
    """Proto3 enums are open: a number of the future must not be taken for a default."""
    message = generation_pb2.GenerateRequest(text="a", commit_policy=99)
    with grpc.insecure_channel(live.target) as channel:
        send = channel.unary_unary(
            f"/{GENERATE}", types_pb2.TokenIds.SerializeToString, generation_pb2.GenerateResponse.FromString
        )
        with pytest.raises(grpc.RpcError, match="unknown enum value 99") as caught:
            send(message, timeout=10)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("max_tokens", [600, None])
def test_a_turn_that_no_pool_of_this_size_can_hold_is_refused_once(live, max_tokens):
    """KV_BUDGET_IMPOSSIBLE tells the client not to retry: exactly one attempt reaches the server."""
    before = live.metrics()["grpc_server_call_started_total", GENERATE]
    tokens = [1] * (100 if max_tokens else 640)
    with pytest.raises(KvBudgetImpossible) as caught:
        live.client().generate(tokens=tokens, max_tokens=max_tokens, ignore_eos=True)
    assert live.metrics()["grpc_server_call_started_total", GENERATE] == before + 1
    assert caught.value.retry_after is None
    assert int(caught.value.metadata["neededBytes"]) > 40 * 8192


def test_a_prompt_that_the_pool_holds_exactly_runs_to_its_last_position(live):
    """The edge beside the refusal above: 640 positions in a pool of 640."""
    turn = live.client().generate(tokens=[1] * 600, max_tokens=40, ignore_eos=True)
    assert (turn.usage.generated_tokens, turn.position) == (40, 640)
