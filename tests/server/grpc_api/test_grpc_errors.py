"""Everything that can go wrong, as a client sees it."""

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from grpc import aio
from grpc_status import rpc_status

from segue.v1 import (
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
)
from segue.v1 import types_pb2 as t
from segue_server import errors
from segue_server.cache.segments import Tier
from segue_server.errors import FieldInvalid, FieldViolation, Quota, SegueError
from segue_server.events import Failed, Started
from segue_server.grpc_api.handlers import service_handler
from segue_server.grpc_api.interceptors import Guard
from segue_server.grpc_api.server import bind, build_admin_server
from segue_server.grpc_api.status import MAX_DETAIL_BYTES, PUSHBACK_HEADER, to_status

DETAILS = (
    error_details_pb2.ErrorInfo,
    error_details_pb2.BadRequest,
    error_details_pb2.ResourceInfo,
    error_details_pb2.QuotaFailure,
    error_details_pb2.RetryInfo,
    error_details_pb2.RequestInfo,
)


class Seen:
    """An error as it arrived: code, message, unpacked details by type name, trailers."""

    def __init__(self, error: aio.AioRpcError) -> None:
        self.code = error.code()
        self.message = error.details()
        self.trailers = dict(error.trailing_metadata())
        self.details = {}
        status = rpc_status.from_call(_Call(error))
        for packed in status.details if status else ():
            for kind in DETAILS:
                if packed.Is(kind.DESCRIPTOR):
                    self.details[kind.__name__] = kind.FromString(packed.value)

    @property
    def reason(self):
        return self.details["ErrorInfo"].reason

    @property
    def violations(self):
        return {v.field: v.description for v in self.details["BadRequest"].field_violations}


class _Call:
    """AioRpcError has what from_call reads of a blocking call."""

    def __init__(self, error):
        self.code, self.details = error.code, error.details
        self.trailing_metadata = lambda: tuple(error.trailing_metadata())


async def failure(call):
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    return Seen(caught.value)


async def drain(stream):
    return [event async for event in stream]


def tree(root=SegueError):
    for kind in root.__subclasses__():
        if "reason" in vars(kind):
            yield kind
        yield from tree(kind)


def example(kind):
    """One error of each class, with all that it can carry."""
    if kind is FieldInvalid:
        return FieldInvalid([FieldViolation("stop.max_tokens", "must be at least 1"), FieldViolation("b", "bad")])
    if issubclass(kind, errors._AboutSession):
        return kind("s-1", "no such session", expireTime="2030-01-01T00:00:00Z")
    return kind("it went wrong: é", quota=Quota("kv_bytes", 1 << 33), neededBytes="123")


@pytest.mark.parametrize("kind", list(tree()), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("streamed", [False, True], ids=["unary", "stream"])
async def test_every_error_arrives(channel, service, kind, streamed):
    """Code, reason, metadata, and each detail exactly when the error has it, from unary calls and streams alike."""
    service.error = error = example(kind)
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    request = generation_pb2.GenerateRequest(request_id="r-7")
    seen = await failure(drain(stub.GenerateStream(request)) if streamed else stub.Generate(request))

    assert (seen.code.name, seen.message, seen.reason) == (kind.code, str(error), kind.reason)
    assert seen.details["ErrorInfo"].domain == "segue"
    assert dict(seen.details["ErrorInfo"].metadata) == error.metadata
    assert ("BadRequest" in seen.details) == (kind is FieldInvalid)
    assert ("ResourceInfo" in seen.details) == (error.resource is not None)
    assert ("QuotaFailure" in seen.details) == (error.quota is not None)
    assert ("RetryInfo" in seen.details) == ((kind.retry_after or -1) > 0)
    assert ("RequestInfo" in seen.details) == (kind.code == "INTERNAL")
    assert (PUSHBACK_HEADER in seen.trailers) == (kind.retry_after is not None)


async def test_details_of_errors(channel, service):
    stub = generation_pb2_grpc.GenerationServiceStub(channel)

    async def seen(kind):
        service.error = example(kind)
        return await failure(stub.Generate(generation_pb2.GenerateRequest(request_id="r-7")))

    invalid = await seen(FieldInvalid)
    assert invalid.violations == {"stop.max_tokens": "must be at least 1", "b": "bad"}
    missing = (await seen(errors.SessionNotFound)).details["ResourceInfo"]
    assert (missing.resource_type, missing.resource_name) == ("segue.v1.Session", "s-1")
    budget = await seen(errors.KvBudget)
    quota = budget.details["QuotaFailure"].violations[0]
    assert (quota.quota_metric, quota.quota_value) == ("kv_bytes", 1 << 33)
    assert budget.details["RetryInfo"].retry_delay == Duration(seconds=1)
    assert budget.trailers[PUSHBACK_HEADER] == "1000"
    impossible = await seen(errors.KvBudgetImpossible)
    assert impossible.trailers[PUSHBACK_HEADER] == "-1"
    engine = await seen(errors.EngineError)
    assert engine.details["RequestInfo"].request_id == "r-7"


async def test_an_error_in_the_middle_of_a_stream(channel, service):
    """The events before it arrive; there is no in-band copy of the error."""

    async def script(_request):
        yield Started("r", "s", 0, 1, 1, Tier.DEVICE, 0)
        yield Failed(errors.EngineError("the step raised", requestId="assigned-1"), 0)

    service.script = script
    stream = generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(generation_pb2.GenerateRequest())
    assert (await stream.read()).WhichOneof("event") == "started"
    seen = await failure(stream.read())
    assert (seen.code, seen.reason) == (grpc.StatusCode.INTERNAL, "ENGINE_ERROR")
    assert seen.details["RequestInfo"].request_id == "assigned-1"
    assert service.left[0].by is errors.EngineError


async def test_retry_policy_of_grpc_obeys_the_pushback(address, service):
    """With a client's service config, -1 means one attempt, and a delay means several."""
    config = (
        '{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 3, "initialBackoff": "0.01s", '
        '"maxBackoff": "0.01s", "backoffMultiplier": 1, "retryableStatusCodes": ["RESOURCE_EXHAUSTED"]}}]}'
    )

    class SoonAgain(errors.KvBudget):
        retry_after = 0.01

    async with aio.insecure_channel(address, options=[("grpc.service_config", config)]) as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        for error, attempts in ((errors.KvBudgetImpossible("too big"), 1), (SoonAgain("full"), 3)):
            service.asked, service.error = [], error
            await failure(stub.CreateSession(session_pb2.CreateSessionRequest()))
            assert len(service.asked) == attempts


@pytest.mark.parametrize("count", [1, 20, 5000])
def test_details_stay_below_their_limit(count):
    """However long the texts: gRPC would replace an error beyond 8 KiB by one that says nothing."""
    long = "é" * 3000
    error = FieldInvalid([FieldViolation(f"f{i}.{long}", long) for i in range(count)])
    error.quota = Quota("kv_bytes", 1 << 40)
    error.metadata = {f"key{i}": long for i in range(50)}
    status = to_status(error, "r")
    details = dict(status.trailers)["grpc-status-details-bin"]
    print(f"\n{count} violations of 12 KB each: {len(details)} B of details")
    assert len(details) < MAX_DETAIL_BYTES


async def test_many_violations_arrive_with_their_number(channel, service):
    service.error = FieldInvalid([FieldViolation(f"stop.stop_sequences[{i}]", "too long") for i in range(300)])
    seen = await failure(generation_pb2_grpc.GenerationServiceStub(channel).Generate(generation_pb2.GenerateRequest()))
    shown = len(seen.violations) - 1
    assert shown > 20
    assert seen.violations["..."] == f"and {300 - shown} more violations"


async def test_all_violations_of_form_at_once(channel, service):
    """Unknown enum values and bad durations are named by path and value, all of them, before the service is asked."""
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    request = generation_pb2.GenerateRequest(
        session_id="a",
        commit_policy=99,
        busy_policy=-3,
        queue_timeout=Duration(seconds=-1),
        detach_grace=Duration(nanos=-1),
        stop=t.StopConditions(time_limit=Duration(seconds=1, nanos=-1)),
        output=t.OutputOptions(
            max_event_delay=Duration(nanos=1_000_000_000), heartbeat_interval=Duration(seconds=1 << 40)
        ),
    )
    seen = await failure(stub.Generate(request, metadata=[("x-session-id", "b")]))
    assert (seen.code, seen.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "FIELD_INVALID")
    assert set(seen.violations) == {
        "session_id",
        "commit_policy",
        "busy_policy",
        "queue_timeout",
        "detach_grace",
        "stop.time_limit",
        "output.max_event_delay",
        "output.heartbeat_interval",
    }
    assert "99" in seen.violations["commit_policy"]
    assert "negative" in seen.violations["queue_timeout"]
    assert "'a'" in seen.violations["session_id"]
    assert "'b'" in seen.violations["session_id"]
    assert service.asked == []


async def test_violations_of_session_requests(channel):
    stub = session_pb2_grpc.SessionServiceStub(channel)
    settings = session_pb2.SessionSettings(
        ttl=Duration(seconds=-5),
        kv_dtype=17,
        context_policy=8,
        commit_policy=9,
        default_stop=t.StopConditions(time_limit=Duration(seconds=-1)),
    )
    created = await failure(stub.CreateSession(session_pb2.CreateSessionRequest(settings=settings)))
    assert set(created.violations) == {
        "settings.ttl",
        "settings.kv_dtype",
        "settings.context_policy",
        "settings.commit_policy",
        "settings.default_stop.time_limit",
    }
    listed = await failure(stub.ListSessions(session_pb2.ListSessionsRequest(states=[1, 0, 77])))
    assert set(listed.violations) == {"states[1]", "states[2]"}


@pytest.mark.parametrize(
    ("target", "field"), [({}, "target"), ({"request_id": ""}, "request_id"), ({"session_id": ""}, "session_id")]
)
async def test_cancel_needs_a_target(channel, service, target, field):
    """An empty id must not mean "all"."""
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    request = generation_pb2.CancelGenerationRequest(commit_policy=50, **target)
    seen = await failure(stub.CancelGeneration(request))
    assert set(seen.violations) == {field, "commit_policy"}
    assert service.asked == []


async def test_tokenize_needs_an_input(channel):
    seen = await failure(model_pb2_grpc.ModelServiceStub(channel).Tokenize(model_pb2.TokenizeRequest()))
    assert set(seen.violations) == {"input"}


@pytest.mark.parametrize("method", ["Generate", "GenerateStream", "AppendContext"])
async def test_session_header_must_agree_in_turns(channel, service, method):
    """Equal: served. Different, or for a call without session: refused."""
    rpc = getattr(generation_pb2_grpc.GenerationServiceStub(channel), method)
    kind = generation_pb2.AppendContextRequest if method == "AppendContext" else generation_pb2.GenerateRequest

    async def call(session_id):
        started = rpc(kind(session_id=session_id), metadata=[("x-session-id", "mine")])
        return await (started if method == "Generate" else drain(started))

    await call("mine")
    for other in ("yours", ""):
        assert set((await failure(call(other))).violations) == {"session_id"}
    assert len(service.asked) == 1


async def test_session_header_elsewhere(channel, service):
    """Checked wherever the body names a session; a cancel by request id may carry it for routing alone."""
    header = [("x-session-id", "mine")]
    sessions = session_pb2_grpc.SessionServiceStub(channel)
    generation = generation_pb2_grpc.GenerationServiceStub(channel)
    for refused in (
        sessions.GetSession(session_pb2.GetSessionRequest(session_id="yours"), metadata=header),
        sessions.DeleteSession(session_pb2.DeleteSessionRequest(session_id="yours"), metadata=header),
        sessions.CreateSession(session_pb2.CreateSessionRequest(session_id="yours"), metadata=header),
        generation.CancelGeneration(generation_pb2.CancelGenerationRequest(session_id="yours"), metadata=header),
    ):
        assert set((await failure(refused)).violations) == {"session_id"}
    await sessions.GetSession(session_pb2.GetSessionRequest(session_id="mine"), metadata=header)
    await generation.CancelGeneration(generation_pb2.CancelGenerationRequest(request_id="r"), metadata=header)
    await sessions.ListSessions(session_pb2.ListSessionsRequest(), metadata=header)
    assert [asked[0] for asked in service.asked] == ["get_session", "cancel", "list_sessions"]


def tag(number, data):
    """A length-delimited field on the wire."""
    return bytes([number << 3 | 2, len(data)]) + data


@pytest.mark.parametrize(
    ("raw", "fields"),
    [
        (tag(5, b"\xff\xfe"), {"text"}),
        (tag(1, b"\xc3") + tag(6, tag(1, tag(2, b"ok\x80"))), {"session_id", "chat.messages.content"}),
        (tag(8, tag(3, b"\xed\xa0\x80")), {"stop.stop_sequences"}),
        (b"\x0a\x7fshort", {"request"}),
        (b"\xff" * 12, {"request"}),
    ],
)
@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_bad_bytes_are_the_callers_fault(channel, service, calls, raw, fields, method):
    """Strings that are not UTF-8 and messages that are not protobuf: INVALID_ARGUMENT that names the fields."""
    path = f"/segue.v1.GenerationService/{method}"
    rpc = channel.unary_unary(path) if method == "Generate" else channel.unary_stream(path)
    seen = await failure(rpc(raw) if method == "Generate" else drain(rpc(raw)))
    assert (seen.code, seen.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "FIELD_INVALID")
    assert set(seen.violations) == fields
    assert service.asked == []
    assert await calls.all_ended() == [(path[1:], "INVALID_ARGUMENT")]


async def test_unknown_request_fields_are_ignored(channel):
    """A newer client may send what this server does not know."""
    raw = tag(1, b"s") + b"\xf8\x07\x01"
    await channel.unary_unary("/segue.v1.GenerationService/Generate")(raw)


async def test_message_beyond_the_limit(channel, service):
    request = generation_pb2.GenerateRequest(text="x" * (5 << 20))
    seen = await failure(generation_pb2_grpc.GenerationServiceStub(channel).Generate(request))
    assert seen.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert service.asked == []


@pytest.mark.parametrize("streamed", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize("request_id", ["", "r-7"])
async def test_a_bug_tells_the_caller_nothing_and_the_log_all(channel, service, caplog, streamed, request_id):
    """INTERNAL without a word of the exception; one log record with traceback and the id that the caller got."""
    service.error = ZeroDivisionError("secret path /etc/segue")
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    request = generation_pb2.GenerateRequest(request_id=request_id)
    seen = await failure(drain(stub.GenerateStream(request)) if streamed else stub.Generate(request))
    assert (seen.code, seen.reason) == (grpc.StatusCode.INTERNAL, "ENGINE_ERROR")
    wire = (seen.message + repr(seen.trailers)).lower()
    assert not any(word in wire for word in ("secret", "zerodivision", "/etc", "traceback", "fakes"))
    told = seen.details["RequestInfo"].request_id
    assert told == request_id if request_id else told
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info[0] is ZeroDivisionError
    assert told in caplog.text


IMPLEMENTED = {
    "segue.v1.SessionService": {
        "CreateSession",
        "GetSession",
        "ListSessions",
        "DeleteSession",
        "ForkSession",
        "RewindSession",
        "UpdateSession",
        "ReadSessionTokens",
        "WatchSessions",
        "MoveSessionCache",
        "ExportSession",
        "ImportSession",
    },
    "segue.v1.GenerationService": {
        "Generate",
        "GenerateStream",
        "AttachGeneration",
        "CancelGeneration",
        "AppendContext",
        "ScoreTokens",
        "EstimateGeneration",
    },
    "segue.v1.ModelService": {"GetModelInfo", "GetServerInfo", "GetLoad", "Tokenize", "Detokenize"},
}


def absent_methods(*files):
    for file in files:
        for service in file.DESCRIPTOR.services_by_name.values():
            offered = IMPLEMENTED.get(service.full_name, set())
            yield from (method for method in service.methods if method.name not in offered)


async def call_raw(channel, method):
    path = f"/{method.containing_service.full_name}/{method.name}"
    if method.client_streaming:
        return await channel.stream_unary(path)(iter([b""]))
    if method.server_streaming:
        return await drain(channel.unary_stream(path)(b""))
    return await channel.unary_unary(path)(b"")


async def check_absent(channel, methods):
    for method in methods:
        seen = await failure(call_raw(channel, method))
        assert (seen.code, seen.reason) == (grpc.StatusCode.UNIMPLEMENTED, "FEATURE_ABSENT"), method.full_name
        assert method.full_name in seen.message


async def test_the_whole_contract_is_offered():
    assert not list(absent_methods(session_pb2, generation_pb2, model_pb2))


async def test_an_rpc_without_a_servicer_is_feature_absent(calls):
    server = aio.server(interceptors=[Guard(calls)])
    services = [s for file in (session_pb2, generation_pb2) for s in file.DESCRIPTOR.services_by_name.values()]
    server.add_generic_rpc_handlers([service_handler(service, None) for service in services])
    port = bind(server, "127.0.0.1:0")
    await server.start()
    try:
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await check_absent(channel, [method for service in services for method in service.methods])
    finally:
        await server.stop(None)


async def test_offered_rpcs_are_not_absent(channel, service):
    """The complement, so that the list above cannot hide one."""
    service.hub.close(errors.Draining("a watch would go on for ever"))
    for file in (session_pb2, generation_pb2, model_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                if method.name in IMPLEMENTED[service.full_name]:
                    try:
                        await call_raw(channel, method)
                    except aio.AioRpcError as error:
                        assert error.code() is not grpc.StatusCode.UNIMPLEMENTED, method.full_name  # noqa: PT017


async def test_the_operators_port_does_not_serve_callers(health, calls):
    """What it does serve is in test_admin.py."""
    server = build_admin_server(None, health=health, observer=calls)
    port = bind(server, "127.0.0.1:0")
    await server.start()
    try:
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            seen = await failure(model_pb2_grpc.ModelServiceStub(channel).GetLoad(model_pb2.GetLoadRequest()))
            assert (seen.code, seen.details) == (grpc.StatusCode.UNIMPLEMENTED, {})
    finally:
        await server.stop(None)
