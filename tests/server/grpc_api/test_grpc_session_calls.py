"""Updates, reads, watches, scores and estimates, field by field, over a socket."""

import asyncio
from dataclasses import fields

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from grpc import aio

from segue.v1 import generation_pb2, generation_pb2_grpc, session_pb2, session_pb2_grpc
from segue.v1 import types_pb2 as t
from segue_server.errors import Draining
from segue_server.requests import (
    CommitPolicy,
    GenerateRequest,
    ReadTokensRequest,
    ScoreTokensRequest,
    SessionSettings,
    StopConditions,
    TokenInput,
    UpdateSessionRequest,
    WatchSessionsRequest,
)
from segue_server.views import Estimate
from segue_server.watch import EventHub, EventType


@pytest.fixture
def sessions(channel):
    return session_pb2_grpc.SessionServiceStub(channel)


@pytest.fixture
def generation(channel):
    return generation_pb2_grpc.GenerationServiceStub(channel)


@pytest.mark.parametrize(
    ("message", "domain"),
    [
        (session_pb2.ReadSessionTokensRequest, ReadTokensRequest),
        (session_pb2.WatchSessionsRequest, WatchSessionsRequest),
        (generation_pb2.ScoreTokensRequest, ScoreTokensRequest),
        (generation_pb2.EstimateGenerationResponse, None),
    ],
)
def test_protos_and_domain_have_the_same_fields(message, domain):
    names = {field.name for field in message.DESCRIPTOR.fields}
    if domain is None:
        domain, names = Estimate, {name.removeprefix("estimated_") for name in names}
    assert names == {field.name for field in fields(domain)}


async def test_an_update_carries_what_its_mask_names(sessions, service):
    """Also zeros; and of the rest not even the form is looked at."""
    settings = session_pb2.SessionSettings(
        ttl=Duration(seconds=90),
        priority=0,
        pinned=False,
        commit_policy=t.COMMIT_POLICY_ROLLBACK,
        context_policy=77,
        default_stop=t.StopConditions(max_tokens=5),
    )
    session = session_pb2.Session(
        session_id="s-1", etag="e", display_name="n", labels={"a": "b"}, settings=settings, position=7
    )
    paths = [
        "settings.ttl",
        "settings.priority",
        "settings.commit_policy",
        "settings.default_stop",
        "labels",
        "no.such",
    ]
    answer = await sessions.UpdateSession(
        session_pb2.UpdateSessionRequest(session=session, update_mask=FieldMask(paths=paths)),
        metadata=(("x-session-id", "s-1"),),
    )
    assert answer.session_id == "s-1"
    assert service.asked == [
        (
            "update_session",
            UpdateSessionRequest(
                session_id="s-1",
                paths=tuple(paths),
                etag="e",
                labels={"a": "b"},
                settings=SessionSettings(
                    ttl=90.0,
                    priority=0,
                    commit_policy=CommitPolicy.ROLLBACK,
                    default_stop=StopConditions(max_tokens=5),
                ),
            ),
        )
    ]


@pytest.mark.parametrize(
    ("settings", "header", "field"),
    [
        (session_pb2.SessionSettings(commit_policy=99), "s-1", "settings.commit_policy"),
        (session_pb2.SessionSettings(), "s-2", "session_id"),
    ],
)
async def test_the_form_of_an_update_is_checked(sessions, settings, header, field):
    request = session_pb2.UpdateSessionRequest(
        session=session_pb2.Session(session_id="s-1", settings=settings),
        update_mask=FieldMask(paths=["settings.commit_policy"]),
    )
    with pytest.raises(aio.AioRpcError) as caught:
        await sessions.UpdateSession(request, metadata=(("x-session-id", header),))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith(f"{field}: ")


async def test_a_ledger_is_streamed(sessions, service):
    request = session_pb2.ReadSessionTokensRequest(session_id="s-1", start_position=3, end_position=0, return_text=True)
    first, last = [chunk async for chunk in sessions.ReadSessionTokens(request)]
    asked = ReadTokensRequest(session_id="s-1", start_position=3, end_position=0, return_text=True)
    assert service.asked == [("read_tokens", asked)]
    assert first == session_pb2.ReadSessionTokensResponse(start_position=3, token_ids=[10, 11], text="ab")
    turns = [
        session_pb2.TurnSpan(
            turn=0,
            request_id="r-1",
            start_position=0,
            generated_start_position=2,
            end_position=5,
            finish_reason=t.FINISH_REASON_EOS,
        ),
        session_pb2.TurnSpan(turn=1, request_id="r-2", start_position=5, generated_start_position=6, end_position=7),
    ]
    assert last == session_pb2.ReadSessionTokensResponse(start_position=5, token_ids=[12], text="c", turns=turns)


async def test_a_watch_begins_with_its_headers(sessions, service):
    """Headers come before any event, so that a caller knows from when on nothing is missed."""
    watch = sessions.WatchSessions(session_pb2.WatchSessionsRequest(session_id="s-1"))
    await asyncio.wait_for(watch.initial_metadata(), 5)
    assert service.asked == [("watch_sessions", WatchSessionsRequest(session_id="s-1"))]
    service.hub.publish(EventType.EXPIRING, service.view("other"), "TTL")
    service.hub.publish(EventType.EXPIRING, service.view("s-1"), "TTL")
    event = await watch.read()
    assert (event.sequence, event.type, event.reason) == (2, session_pb2.SESSION_EVENT_TYPE_EXPIRING, "TTL")
    assert event.session.session_id == "s-1"
    assert event.HasField("time")
    service.hub.close(Draining("bye"))
    with pytest.raises(aio.AioRpcError) as caught:
        await watch.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_every_event_type_has_its_number(sessions, service):
    for kind in EventType:
        service.hub.publish(kind, service.view("s-1"), kind.name)
    watch = sessions.WatchSessions(session_pb2.WatchSessionsRequest(after_sequence=0))
    for _ in EventType:
        event = await watch.read()
        assert session_pb2.SessionEventType.Name(event.type) == f"SESSION_EVENT_TYPE_{event.reason}"
    assert service.asked == [("watch_sessions", WatchSessionsRequest(after_sequence=0))]
    watch.cancel()


async def test_lost_history_names_the_oldest_event(sessions, service):
    service.hub = EventHub(capacity=1)
    for _ in range(3):
        service.hub.publish(EventType.CREATED, service.view("s-1"), "CALLER")
    with pytest.raises(aio.AioRpcError) as caught:
        await sessions.WatchSessions(session_pb2.WatchSessionsRequest(after_sequence=1)).read()
    assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE
    assert "oldestSequence" in str(caught.value.trailing_metadata())


async def test_scores(generation, service):
    request = generation_pb2.ScoreTokensRequest(session_id="s-1", token_ids=[5, 7], top_logprobs=2)
    scores = await generation.ScoreTokens(request, timeout=9)
    (name, asked, caller, left), *_ = service.asked
    assert (name, caller) == ("score_tokens", "")
    assert asked == ScoreTokensRequest(session_id="s-1", token_ids=(5, 7), top_logprobs=2)
    assert 5 < left < 10
    assert scores == generation_pb2.ScoreTokensResponse(
        position=40,
        logprobs=[
            t.TokenLogprob(
                token_id=5,
                logprob=-0.5,
                top=[t.TopLogprob(token_id=5, logprob=-0.5), t.TopLogprob(token_id=6, logprob=-1.5)],
            ),
            t.TokenLogprob(token_id=7, logprob=-2.0),
        ],
    )


async def test_estimates(generation, service):
    service.estimated = Estimate(
        admissible=True,
        refusal_reason="X",
        to_compute_tokens=3,
        needed_bytes=1 << 40,
        would_evict_bytes=1 << 33,
        time_to_first_token=1.5,
    )
    request = generation_pb2.GenerateRequest(session_id="s-1", token_ids=t.TokenIds(ids=[1]))
    answer = await generation.EstimateGeneration(request)
    assert service.asked == [("estimate", GenerateRequest(session_id="s-1", input=TokenInput((1,))), "")]
    assert answer == generation_pb2.EstimateGenerationResponse(
        admissible=True,
        refusal_reason="X",
        to_compute_tokens=3,
        needed_bytes=1 << 40,
        would_evict_bytes=1 << 33,
        estimated_time_to_first_token=Duration(seconds=1, nanos=500_000_000),
    )
    service.estimated = Estimate()
    assert not (await generation.EstimateGeneration(request)).HasField("estimated_time_to_first_token")
