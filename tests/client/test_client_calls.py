"""Unary calls over a real socket: errors by reason, retries and pushback, deadlines, metadata, pages, readiness."""

import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health, health_pb2_grpc

import segue_client
from segue.v1 import session_pb2
from segue_client import (
    AsyncClient,
    Client,
    ContextExceeded,
    DeadlineExceeded,
    EtagMismatch,
    EventHistoryLost,
    InvalidArgument,
    KvBudget,
    NotFound,
    PositionMismatch,
    ResourceExhausted,
    SegueError,
    SessionBusy,
    SessionExpired,
    SessionNotFound,
    Timeouts,
    Unavailable,
    errors,
)
from segue_client.channel import SessionHeaders, channel_options


@pytest.fixture
def client(server):
    with Client(server.target) as client:
        yield client


# ------------------------------------------------------------------------------------------------------- errors

REASONS = [
    ("INVALID_ARGUMENT", "FIELD_INVALID", "InvalidArgument"),
    ("INVALID_ARGUMENT", "REQUEST_ID_REUSED", "RequestIdReused"),
    ("NOT_FOUND", "SESSION_NOT_FOUND", "SessionNotFound"),
    ("NOT_FOUND", "SESSION_EXPIRED", "SessionExpired"),
    ("NOT_FOUND", "REQUEST_NOT_FOUND", "RequestNotFound"),
    ("ALREADY_EXISTS", "SESSION_EXISTS", "SessionExists"),
    ("ABORTED", "SESSION_BUSY", "SessionBusy"),
    ("ABORTED", "POSITION_MISMATCH", "PositionMismatch"),
    ("ABORTED", "ETAG_MISMATCH", "EtagMismatch"),
    ("FAILED_PRECONDITION", "SNAPSHOT_INCOMPATIBLE", "SnapshotIncompatible"),
    ("FAILED_PRECONDITION", "FEATURE_DISABLED", "FeatureDisabled"),
    ("OUT_OF_RANGE", "CONTEXT_EXCEEDED", "ContextExceeded"),
    ("OUT_OF_RANGE", "POSITION_BEYOND_END", "PositionBeyondEnd"),
    ("OUT_OF_RANGE", "EVENT_HISTORY_LOST", "EventHistoryLost"),
    ("RESOURCE_EXHAUSTED", "KV_BUDGET", "KvBudget"),
    ("RESOURCE_EXHAUSTED", "SESSION_LIMIT", "SessionLimit"),
    ("RESOURCE_EXHAUSTED", "QUEUE_FULL", "QueueFull"),
    ("RESOURCE_EXHAUSTED", "QUEUE_TIMEOUT", "QueueTimeout"),
    ("RESOURCE_EXHAUSTED", "TENANT_QUOTA", "TenantQuota"),
    ("RESOURCE_EXHAUSTED", "KV_BUDGET_IMPOSSIBLE", "KvBudgetImpossible"),
    ("UNAVAILABLE", "LOADING", "Loading"),
    ("UNAVAILABLE", "DRAINING", "Draining"),
    ("UNAVAILABLE", "LEDGER_FAILED", "LedgerUnavailable"),
    ("DATA_LOSS", "SNAPSHOT_CORRUPT", "SnapshotCorrupt"),
    ("UNIMPLEMENTED", "FEATURE_ABSENT", "FeatureAbsent"),
    ("INTERNAL", "ENGINE_ERROR", "EngineError"),
    # Without a reason, or with one of a later server, the status code decides.
    ("NOT_FOUND", "", "NotFound"),
    ("ABORTED", "SOMETHING_NEW", "Aborted"),
    ("UNAUTHENTICATED", "", "Unauthenticated"),
    ("PERMISSION_DENIED", "", "PermissionDenied"),
    ("DEADLINE_EXCEEDED", "", "DeadlineExceeded"),
    ("CANCELLED", "", "Cancelled"),
    ("UNKNOWN", "", "SegueError"),
]


@pytest.mark.parametrize(("code", "reason", "name"), REASONS)
async def test_each_reason_is_its_own_error(server, client, code, reason, name):
    server.on("GetSession", lambda _, context: server.fail(context, grpc.StatusCode[code], reason, pushback_ms=-1))
    async with AsyncClient(server.target) as aclient:
        with pytest.raises(SegueError, match="refused") as awaited:
            await aclient.get_session("abc")
    with pytest.raises(SegueError, match="refused") as blocked:
        client.get_session("abc")
    for caught in (awaited.value, blocked.value):
        assert type(caught) is getattr(segue_client, name)
        assert caught.code is grpc.StatusCode[code]
        assert caught.reason == reason


def test_the_tree_in_the_docstring_is_the_tree_in_the_code():
    drawn = [line.split("── ")[1].split()[0] for line in errors.__doc__.splitlines() if "── " in line]
    coded = [cls.__name__ for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, SegueError)]
    assert drawn == [name for name in coded if name != "SegueError"]


def test_every_violated_field_is_named(server, client):
    violations = [("sampling.top_p", "must lie in (0, 1]"), ("stop.max_tokens", "must be positive")]
    detail = error_details_pb2.BadRequest(
        field_violations=[
            error_details_pb2.BadRequest.FieldViolation(field=field, description=text) for field, text in violations
        ]
    )
    server.on(
        "Generate",
        lambda _, context: server.fail(
            context, grpc.StatusCode.INVALID_ARGUMENT, "FIELD_INVALID", "2 fields are wrong", details=[detail]
        ),
    )
    with pytest.raises(InvalidArgument) as caught:
        client.generate(text="x", top_p=0, max_tokens=0)
    assert list(caught.value.violations) == violations
    assert str(caught.value) == (
        "FIELD_INVALID: 2 fields are wrong\n  sampling.top_p: must lie in (0, 1]\n  stop.max_tokens: must be positive"
    )


@pytest.mark.parametrize(
    ("code", "reason", "metadata", "error", "attribute", "value"),
    [
        ("ABORTED", "POSITION_MISMATCH", {"actualPosition": "7"}, PositionMismatch, "actual_position", 7),
        ("ABORTED", "POSITION_MISMATCH", {}, PositionMismatch, "actual_position", None),
        ("ABORTED", "POSITION_MISMATCH", {"actualPosition": "x"}, PositionMismatch, "actual_position", None),
        ("ABORTED", "SESSION_BUSY", {"activeRequestId": "r"}, SessionBusy, "active_request_id", "r"),
        ("ABORTED", "ETAG_MISMATCH", {"etag": "e9"}, EtagMismatch, "etag", "e9"),
        ("OUT_OF_RANGE", "CONTEXT_EXCEEDED", {"neededTokens": "9"}, ContextExceeded, "needed_tokens", 9),
        ("OUT_OF_RANGE", "CONTEXT_EXCEEDED", {"maxContextTokens": "8"}, ContextExceeded, "max_context_tokens", 8),
        ("OUT_OF_RANGE", "EVENT_HISTORY_LOST", {"oldestSequence": "5"}, EventHistoryLost, "oldest_sequence", 5),
        ("NOT_FOUND", "SESSION_EXPIRED", {"expireTime": "2026-01-01T00:00:00Z"}, SessionExpired, "expire_time",
         "2026-01-01T00:00:00Z"),
        ("RESOURCE_EXHAUSTED", "KV_BUDGET", {"neededBytes": "64"}, KvBudget, "needed_bytes", 64),
    ],
)  # fmt: skip
def test_metadata_become_attributes(server, client, code, reason, metadata, error, attribute, value):
    server.on(
        "GetSession",
        lambda _, context: server.fail(context, grpc.StatusCode[code], reason, metadata=metadata, pushback_ms=-1),
    )
    with pytest.raises(error) as caught:
        client.get_session("abc")
    assert getattr(caught.value, attribute) == value


def test_a_reason_of_another_domain_is_not_ours(server, client):
    server.on(
        "GetSession",
        lambda _, context: server.fail(context, grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND", domain="proxy.example"),
    )
    with pytest.raises(NotFound) as caught:
        client.get_session("abc")
    assert type(caught.value) is NotFound
    assert caught.value.reason == ""


def test_details_that_contradict_the_status_are_left_aside(server, client):
    """A proxy that replaces the code leaves the old details in the trailers."""

    def get(_, context):
        rich = error_details_pb2.ErrorInfo(reason="SESSION_NOT_FOUND", domain="segue")
        context.set_trailing_metadata((("grpc-status-details-bin", rich.SerializeToString()),))
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "no")

    server.on("GetSession", get)
    with pytest.raises(segue_client.PermissionDenied):
        client.get_session("abc")


# ------------------------------------------------------------------------------------------------------- retries


def failing(server, times, code, **details):
    """A GetSession that fails so often, and then answers; with the times of the calls."""
    seen = []

    def get(request, context):
        seen.append(time.monotonic())
        if len(seen) <= times:
            server.fail(context, grpc.StatusCode[code], **details)
        return session_pb2.Session(session_id=request.session_id)

    server.on("GetSession", get)
    return seen


@pytest.mark.parametrize("code", ["UNAVAILABLE", "RESOURCE_EXHAUSTED"])
async def test_calls_are_tried_again_after_the_servers_pushback(server, client, code):
    seen = failing(server, 3, code, pushback_ms=60)
    assert client.get_session("abc").id == "abc"
    gaps = [after - before for before, after in itertools.pairwise(seen)]
    print("gaps after a pushback of 60 ms:", [f"{gap * 1000:.0f} ms" for gap in gaps])
    assert len(gaps) == 3
    assert all(0.055 < gap < 0.5 for gap in gaps)
    seen.clear()
    async with AsyncClient(server.target) as aclient:
        assert (await aclient.get_session("abc")).id == "abc"
    assert len(seen) == 4


def test_four_attempts_are_all(server, client):
    seen = failing(server, 9, "RESOURCE_EXHAUSTED", reason="QUEUE_FULL", pushback_ms=1, retry_after=0.25)
    with pytest.raises(segue_client.QueueFull) as caught:
        client.get_session("abc")
    assert len(seen) == 4
    assert caught.value.retry_after == 0.25


@pytest.mark.parametrize(("code", "pushback"), [("RESOURCE_EXHAUSTED", -1), ("ABORTED", None), ("INTERNAL", None)])
def test_what_cannot_help_is_not_tried_again(server, client, code, pushback):
    seen = failing(server, 9, code, pushback_ms=pushback)
    with pytest.raises(SegueError):
        client.get_session("abc")
    assert len(seen) == 1


def test_a_stream_refused_before_it_began_is_tried_again_with_the_same_request_id(server, client):
    def refuse_once(request, context):
        if len(server.calls("GenerateStream")) == 1:
            server.fail(context, grpc.StatusCode.UNAVAILABLE, "LOADING", pushback_ms=1)
        return server.GenerateStream(request, context)

    server.on("GenerateStream", refuse_once)
    assert client.stream(text="x").result().text == "w0 w1 w2 "
    first, second = server.calls("GenerateStream")
    assert first.request == second.request


# ------------------------------------------------------------------------------------- options, deadlines, metadata


def test_the_channel_has_the_documented_options():
    options = dict(channel_options([("grpc.keepalive_time_ms", 10_000), ("grpc.mine", 1)]))
    assert options["grpc.keepalive_time_ms"] == 10_000, "the caller's options win"
    assert options["grpc.mine"] == 1
    assert dict(channel_options())["grpc.keepalive_time_ms"] == 30_000
    (config,) = json.loads(options["grpc.service_config"])["methodConfig"]
    assert config["retryPolicy"]["maxAttempts"] == 4
    assert set(config["retryPolicy"]["retryableStatusCodes"]) == {"UNAVAILABLE", "RESOURCE_EXHAUSTED"}


async def test_every_call_has_a_deadline(server):
    timeouts = Timeouts(unary=11, turn=22, cancel=33)
    server.on("GenerateStream", server.slow_turn)
    with Client(server.target, timeouts=timeouts) as client:
        session = client.create_session()
        client.create_session(system="x")
        with session.chat("x") as turn:
            next(iter(turn))
        client.generate(text="x")
        client.load()
        client.load(timeout=44)
    async with AsyncClient(server.target, timeouts=timeouts) as aclient:
        await aclient.generate(text="x")
        await aclient.load()
    given = [(call.method, round(call.time_remaining)) for call in server.received]
    assert given == [
        ("CreateSession", 11),
        ("CreateSession", 22),
        ("GenerateStream", 22),
        ("CancelGeneration", 33),
        ("Generate", 22),
        ("GetLoad", 11),
        ("GetLoad", 44),
        ("Generate", 22),
        ("GetLoad", 11),
    ]


def test_defaults_are_deadlines_too():
    assert 0 < Timeouts().cancel < Timeouts().unary < Timeouts().turn < 86400


async def test_calls_of_a_session_carry_its_id_and_others_none(server, client):
    server.on("GenerateStream", server.slow_turn)
    session = client.create_session(session_id="abc")
    with session.chat("x") as turn:
        next(iter(turn))
    session.refresh()
    client.get_session("abc")
    client.load()
    client.generate(text="x")
    session.delete()
    async with AsyncClient(server.target) as aclient:
        await (await aclient.create_session(session_id="abc")).generate(text="x")
    ids = {(call.method, call.metadata.get("x-session-id")) for call in server.received}
    assert ids == {
        ("CreateSession", "abc"),
        ("GenerateStream", "abc"),
        ("CancelGeneration", "abc"),
        ("GetSession", "abc"),
        ("GetLoad", None),
        ("Generate", None),
        ("DeleteSession", "abc"),
        ("Generate", "abc"),
    }


def test_ids_are_fresh_uuids_made_here(server, client):
    for _ in range(2):
        client.create_session().generate(text="x")
    ids = [call.request.request_id for call in server.received]
    ids += [call.request.session_id for call in server.calls("CreateSession")]
    assert len(set(ids)) == 6
    assert all(len(id_) == 36 and id_[14] == "4" for id_ in ids)


async def test_the_host_a_proxy_names_is_echoed_for_that_session_only(server, client):
    def generate(request, context):
        context.send_initial_metadata((("x-session-host", "host-7"),))
        return server.Generate(request, context)

    def stream(request, context):
        context.send_initial_metadata((("x-session-host", "host-8"),))
        return server.GenerateStream(request, context)

    server.on("Generate", generate)
    server.on("GenerateStream", stream)
    session, other = client.create_session(), client.create_session()
    session.generate(text="x")
    session.chat("x").result()
    session.refresh()
    other.refresh()
    hosts = [call.metadata.get("x-session-host") for call in server.received]
    assert hosts == [None, None, None, "host-7", "host-8", None]

    async with AsyncClient(server.target) as aclient:
        asession = await aclient.create_session()
        await asession.generate(text="x")
        await asession.chat("x").result()
        await asession.refresh()
    assert server.received[-1].metadata["x-session-host"] == "host-8"


def test_a_host_that_does_not_answer_is_forgotten():
    headers = SessionHeaders(capacity=2)
    headers.learn("a", [("x-session-host", "h")])
    assert ("x-session-host", "h") in headers.of("a")
    headers.forget("a")
    assert headers.of("a") == (("x-session-id", "a"),)
    for session_id in "abc":
        headers.learn(session_id, [("x-session-host", "h")])
    assert [len(headers.of(session_id)) for session_id in "abc"] == [1, 2, 2], "the oldest gives way"


def test_own_metadata_go_with_every_call(server):
    with Client(server.target, metadata=[("authorization", "Bearer t")]) as client:
        client.load()
        client.stream(text="x").result()
    assert [call.metadata["authorization"] for call in server.received] == ["Bearer t"] * 2


# -------------------------------------------------------------------------------------------------- the calls


async def test_lists_go_over_all_pages_as_they_are_read(server, client):
    server.positions.update({f"s{index:02}": index for index in range(7)})
    listing = client.list_sessions(page_size=3, states=["idle"], order_by="create_time")
    assert not server.received, "nothing is asked before it is read"
    assert next(listing).session_id == "s00"
    assert len(server.received) == 1
    assert [info.position for info in listing] == [1, 2, 3, 4, 5, 6]
    requests = [call.request for call in server.calls("ListSessions")]
    assert [request.page_token for request in requests] == ["", "3", "6"]
    assert all(request.page_size == 3 and request.order_by == "create_time" for request in requests)
    async with AsyncClient(server.target) as aclient:
        assert len([info async for info in aclient.list_sessions(page_size=3)]) == 7


def test_options_reach_their_fields_zero_included(server, client):
    session = client.create_session(
        system="Be brief.", ttl=60, temperature=0, stop="END", context_policy="slide", labels={"a": "b"}, pinned=False
    )
    session.generate(
        text="x", temperature=0, top_p=0, seed=0, stop=["a", "b"], commit_policy="rollback", time_limit=1.5
    )
    created, generated = (server.calls(name)[0].request for name in ("CreateSession", "Generate"))
    assert created.chat.messages[0].role == "system"
    assert not created.chat.add_generation_prompt
    assert created.settings.ttl.seconds == 60
    assert created.settings.HasField("pinned")
    assert created.settings.default_sampling.HasField("temperature")
    assert list(created.settings.default_stop.stop_sequences) == ["END"]
    assert created.settings.context_policy == 2
    for name in ("temperature", "top_p", "seed"):
        assert generated.sampling.HasField(name)
        assert getattr(generated.sampling, name) == 0
    assert not generated.sampling.HasField("top_k")
    assert generated.commit_policy == 2
    assert generated.stop.time_limit.ToMilliseconds() == 1500
    assert not generated.HasField("output")


@pytest.mark.parametrize(
    ("options", "error", "complaint"),
    [
        ({"temprature": 0}, TypeError, "unknown option temprature"),
        ({"text": "a", "tokens": [1]}, ValueError, "at most one of text, tokens and messages"),
        ({"commit_policy": "keep"}, ValueError, "commit_policy must be one of keep_partial, rollback, keep_prompt"),
        ({"commit_policy": "unspecified"}, ValueError, "commit_policy must be one of"),
    ],
)
def test_a_wrong_option_is_named_before_anything_is_sent(server, client, options, error, complaint):
    with pytest.raises(error, match=complaint):
        client.stream(**options)
    assert not server.received


def test_a_wrong_connection_option_is_named():
    with pytest.raises(TypeError, match="unknown option timeout"):
        Client("127.0.0.1:1", timeout=3)


def test_forks_and_rewinds(server, client):
    def fork(request, _):
        server.positions[request.new_session_id] = request.position
        child = session_pb2.Session(session_id=request.new_session_id, position=request.position)
        return session_pb2.ForkSessionResponse(sessions=[child])

    def rewind(request, _):
        assert request.etag == "e5"
        return session_pb2.Session(session_id=request.session_id, position=request.position, etag="e2")

    server.on("ForkSession", fork)
    server.on("RewindSession", rewind)
    session = client.create_session()
    session.generate(text="x")
    child = session.fork(position=3)
    assert child.position == 3
    assert child.id != session.id
    session.rewind(position=2)
    assert (session.position, session.etag) == (2, "e2")
    with pytest.raises(ValueError, match="either position or turn"):
        session.rewind()


async def test_the_small_calls(server, client):
    assert client.model_info().model_id == "tiny"
    assert list(client.server_info().capabilities) == ["fork", "rewind"]
    assert client.load().kv_free_bytes == 1 << 20
    assert list(client.tokenize("ab").token_ids) == [97, 98]
    assert client.detokenize([97, 98]) == "ab"
    assert client.create_session(session_id="abc").delete() == 4096
    with pytest.raises(SessionNotFound):
        client.get_session("abc")
    with pytest.raises(ValueError, match="either request_id or session_id"):
        client.cancel()
    async with AsyncClient(server.target) as aclient:
        assert (await aclient.model_info()).model_id == "tiny"
        assert await aclient.detokenize((await aclient.tokenize("ab")).token_ids) == "ab"


# -------------------------------------------------------------------------------------------------- readiness


async def test_waiting_ends_when_the_server_serves(server, client):
    server.health = b"\x08\x02"
    threading.Timer(0.3, setattr, (server, "health", b"\x08\x01")).start()
    begin = time.monotonic()
    client.wait_ready(timeout=5)
    assert 0.25 < time.monotonic() - begin < 2
    async with AsyncClient(server.target) as aclient:
        await aclient.wait_ready(timeout=5)


async def test_waiting_in_vain_says_why(server, client, unused_target):
    server.health = b"\x08\x02"
    with pytest.raises(DeadlineExceeded, match=r"not ready after 0.3 s: segue.v1.GenerationService is not serving"):
        client.wait_ready(timeout=0.3)
    async with AsyncClient(unused_target) as nobody:
        with pytest.raises(DeadlineExceeded, match=r"not ready after 0.3 s: UNAVAILABLE: failed to connect"):
            await nobody.wait_ready(timeout=0.3)


def test_the_wait_speaks_the_health_protocol(server):
    """The borrowed wrapper messages against the real health servicer."""
    servicer = health.HealthServicer()
    real = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, real)
    port = real.add_insecure_port("127.0.0.1:0")
    real.start()
    with Client(f"127.0.0.1:{port}") as client:
        with pytest.raises(DeadlineExceeded, match="NOT_FOUND"):
            client.wait_ready(timeout=0.5)
        servicer.set("segue.v1.GenerationService", 1)
        client.wait_ready(timeout=1)
    real.stop(None).wait()


def test_nobody_at_the_address_is_unavailable(unused_target):
    with Client(unused_target) as client, pytest.raises(Unavailable, match="failed to connect"):
        client.load(timeout=5)


def test_exhausted_is_an_error_of_its_class(server, client):
    server.on("GetLoad", lambda _, context: context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too large"))
    with pytest.raises(ResourceExhausted, match="RESOURCE_EXHAUSTED: too large"):
        client.load(timeout=5)
