"""Requests and answers, field by field, over a socket."""

import asyncio
from dataclasses import fields

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from segue.v1 import generation_pb2, generation_pb2_grpc, model_pb2, model_pb2_grpc, session_pb2, session_pb2_grpc
from segue.v1 import types_pb2 as t
from segue_model.sampling import TokenLogprob
from segue_server import events
from segue_server.cache.segments import Tier
from segue_server.requests import (
    AppendRequest,
    BusyPolicy,
    ChatMessage,
    ChatTurn,
    CommitPolicy,
    ContextPolicy,
    CreateSessionRequest,
    FinishReason,
    GenerateRequest,
    ListSessionsRequest,
    OutputOptions,
    SamplingParams,
    SessionSettings,
    StopConditions,
    TextInput,
    TokenInput,
)

SAMPLING = t.SamplingParams(
    temperature=0.0,
    top_p=0.5,
    top_k=4,
    min_p=0.25,
    repetition_penalty=1.5,
    frequency_penalty=-1.0,
    presence_penalty=2.0,
    penalty_last_tokens=0,
    seed=0,
    logit_bias={7: -100.0},
)
SAMPLING_PARAMS = SamplingParams(
    temperature=0.0,
    top_p=0.5,
    top_k=4,
    min_p=0.25,
    repetition_penalty=1.5,
    frequency_penalty=-1.0,
    presence_penalty=2.0,
    penalty_last_tokens=0,
    seed=0,
    logit_bias={7: -100.0},
)
STOP = t.StopConditions(
    max_tokens=9,
    min_tokens=1,
    stop_sequences=["\n", "é"],
    stop_token_ids=[3],
    ignore_eos=False,
    include_stop=True,
    time_limit=Duration(seconds=1, nanos=500_000_000),
)
STOP_CONDITIONS = StopConditions(
    max_tokens=9,
    min_tokens=1,
    stop_sequences=("\n", "é"),
    stop_token_ids=(3,),
    ignore_eos=False,
    include_stop=True,
    time_limit=1.5,
)


@pytest.mark.parametrize(
    ("message", "domain"),
    [
        (t.SamplingParams, SamplingParams),
        (t.StopConditions, StopConditions),
        (t.OutputOptions, OutputOptions),
        (session_pb2.SessionSettings, SessionSettings),
        (session_pb2.ListSessionsRequest, ListSessionsRequest),
    ],
)
def test_protos_and_domain_have_the_same_fields(message, domain):
    """Conversion copies by name, so a field that only one side has would be lost or fail."""
    assert {field.name for field in message.DESCRIPTOR.fields} == {field.name for field in fields(domain)}


@pytest.mark.parametrize(
    ("message", "domain", "oneof"),
    [
        (generation_pb2.GenerateRequest, GenerateRequest, "input"),
        (generation_pb2.AppendContextRequest, AppendRequest, "input"),
        (session_pb2.CreateSessionRequest, CreateSessionRequest, "prefix"),
    ],
)
def test_requests_with_input_have_the_same_fields(message, domain, oneof):
    names = {field.name for field in message.DESCRIPTOR.fields} - {"token_ids", "text", "chat"} | {oneof}
    assert names == {field.name for field in fields(domain)}


async def test_generate_passes_every_field(channel, service):
    await generation_pb2_grpc.GenerationServiceStub(channel).Generate(
        generation_pb2.GenerateRequest(
            session_id="s",
            request_id="r",
            expected_position=0,
            token_ids=t.TokenIds(ids=[1, -2]),
            sampling=SAMPLING,
            stop=STOP,
            output=t.OutputOptions(
                return_text=False,
                return_token_ids=False,
                top_logprobs=0,
                prompt_logprobs=True,
                max_tokens_per_event=8,
                max_event_delay=Duration(nanos=20_000_000),
                heartbeat_interval=Duration(),
            ),
            commit_policy=t.COMMIT_POLICY_ROLLBACK,
            priority=0,
            queue_timeout=Duration(seconds=3),
            detach_grace=Duration(seconds=4),
            busy_policy=generation_pb2.BUSY_POLICY_REPLACE,
            bypass_prefix_cache=True,
        )
    )
    expected = GenerateRequest(
        session_id="s",
        request_id="r",
        expected_position=0,
        input=TokenInput((1, -2)),
        sampling=SAMPLING_PARAMS,
        stop=STOP_CONDITIONS,
        output=OutputOptions(
            return_text=False,
            return_token_ids=False,
            top_logprobs=0,
            prompt_logprobs=True,
            max_tokens_per_event=8,
            max_event_delay=0.02,
            heartbeat_interval=0.0,
        ),
        commit_policy=CommitPolicy.ROLLBACK,
        priority=0,
        queue_timeout=3.0,
        detach_grace=4.0,
        busy_policy=BusyPolicy.REPLACE,
        bypass_prefix_cache=True,
    )
    assert service.asked == [("generate", expected, "")]


async def test_what_is_not_set_stays_unset(channel, service):
    """Zero and absent differ: an empty request is all defaults, not all zeros."""
    await generation_pb2_grpc.GenerationServiceStub(channel).Generate(generation_pb2.GenerateRequest())
    await session_pb2_grpc.SessionServiceStub(channel).CreateSession(session_pb2.CreateSessionRequest())
    await session_pb2_grpc.SessionServiceStub(channel).ListSessions(session_pb2.ListSessionsRequest())
    assert service.asked == [
        ("generate", GenerateRequest(), ""),
        ("create_session", CreateSessionRequest(), ""),
        ("list_sessions", ListSessionsRequest()),
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"text": ""}, TextInput("")),
        ({"text": "naïve"}, TextInput("naïve")),
        ({"token_ids": t.TokenIds()}, TokenInput(())),
        (
            {"chat": t.ChatTurn(messages=[t.ChatMessage(role="user", content="hi")])},
            ChatTurn((ChatMessage("user", "hi"),), add_generation_prompt=True),
        ),
        ({"chat": t.ChatTurn(add_generation_prompt=False)}, ChatTurn((), add_generation_prompt=False)),
        ({}, None),
    ],
)
async def test_inputs(channel, service, given, expected):
    await generation_pb2_grpc.GenerationServiceStub(channel).Generate(generation_pb2.GenerateRequest(**given))
    assert service.asked[0][1].input == expected


async def test_append_context(channel, service):
    request = generation_pb2.AppendContextRequest(
        session_id="s", request_id="r", expected_position=4, text="more", defer_compute=True
    )
    stream = generation_pb2_grpc.GenerationServiceStub(channel).AppendContext(request)
    kinds = [event.WhichOneof("event") async for event in stream]
    expected = AppendRequest(
        session_id="s", request_id="r", expected_position=4, input=TextInput("more"), defer_compute=True
    )
    assert service.asked == [("append", expected, "")]
    assert kinds == ["started", "tokens", "finished"]


async def test_create_session_both_ways(channel, service):
    settings = session_pb2.SessionSettings(
        ttl=Duration(seconds=60),
        max_context_tokens=128,
        kv_dtype=t.KV_DTYPE_BFLOAT16,
        context_policy=t.CONTEXT_POLICY_SLIDE,
        keep_tokens=0,
        commit_policy=t.COMMIT_POLICY_KEEP_PROMPT,
        priority=-5,
        pinned=False,
        cache_salt="",
        default_sampling=SAMPLING,
        default_stop=STOP,
    )
    domain = SessionSettings(
        ttl=60.0,
        max_context_tokens=128,
        kv_dtype="bfloat16",
        context_policy=ContextPolicy.SLIDE,
        keep_tokens=0,
        commit_policy=CommitPolicy.KEEP_PROMPT,
        priority=-5,
        pinned=False,
        cache_salt="",
        default_sampling=SAMPLING_PARAMS,
        default_stop=STOP_CONDITIONS,
    )
    service.settings = domain
    session = await session_pb2_grpc.SessionServiceStub(channel).CreateSession(
        session_pb2.CreateSessionRequest(
            session_id="new", request_id="r", display_name="n", labels={"a": "b"}, settings=settings, text="system"
        )
    )
    expected = CreateSessionRequest(
        session_id="new",
        request_id="r",
        display_name="n",
        labels={"a": "b"},
        settings=domain,
        prefix=TextInput("system"),
    )
    assert service.asked == [("create_session", expected, "")]
    assert session.settings == settings
    assert session.cache == t.CacheUsage(
        tier=t.CACHE_TIER_DEVICE,
        kv_dtype=t.KV_DTYPE_BFLOAT16,
        used_bytes=1000,
        reserved_bytes=2000,
        shared_bytes=500,
        cached_tokens=11,
        estimated_rebuild=Duration(nanos=250_000_000),
    )


async def test_get_session_answers_every_field(channel, service):
    session = await session_pb2_grpc.SessionServiceStub(channel).GetSession(
        session_pb2.GetSessionRequest(session_id="s")
    )
    assert service.asked == [("get_session", "s")]
    assert (session.session_id, session.display_name, dict(session.labels)) == ("s", "name", {"team": "x"})
    assert (session.state, session.position, session.etag) == (session_pb2.SESSION_STATE_RUNNING, 12, "e1")
    assert (session.turn_count, session.active_request_id, session.model_fingerprint) == (3, "r-9", "f")
    assert (session.create_time.seconds, session.create_time.nanos) == (1_700_000_000, 500_000_000)
    assert session.last_used_time.seconds == 1_700_000_001
    assert not session.HasField("expire_time"), "a session that never expires has no time of it"
    assert session.forked_from == session_pb2.ForkOrigin(session_id="parent", position=5)
    assert session.settings == session_pb2.SessionSettings(default_sampling={}, default_stop={})


async def test_list_and_delete_sessions(channel, service):
    stub = session_pb2_grpc.SessionServiceStub(channel)
    page = await stub.ListSessions(
        session_pb2.ListSessionsRequest(
            page_size=-1,
            page_token="p",  # noqa: S106 - no password
            states=[session_pb2.SESSION_STATE_IDLE, session_pb2.SESSION_STATE_EXPIRED],
            labels={"a": "b"},
            order_by="create_time desc",
        )
    )
    answer = await stub.DeleteSession(
        session_pb2.DeleteSessionRequest(session_id="s", etag="e", force=True, allow_missing=True)
    )
    request = ListSessionsRequest(
        page_size=-1,
        page_token="p",  # noqa: S106 - no password
        states=("IDLE", "EXPIRED"),
        labels={"a": "b"},
        order_by="create_time desc",
    )
    assert service.asked == [("list_sessions", request), ("delete_session", "s", "e", True, True)]
    assert ([session.session_id for session in page.sessions], page.next_page_token) == (["a", "b"], "next")
    assert answer.freed_bytes == 4096


async def test_cancel_generation(channel, service):
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    answer = await stub.CancelGeneration(
        generation_pb2.CancelGenerationRequest(request_id="r", commit_policy=t.COMMIT_POLICY_KEEP_PARTIAL)
    )
    assert answer.was_running
    assert (answer.finished.finish_reason, answer.finished.position) == (t.FINISH_REASON_CANCELLED, 4)
    service.cancelled = (False, None)
    answer = await stub.CancelGeneration(generation_pb2.CancelGenerationRequest(session_id="s"))
    assert not answer.was_running
    assert not answer.HasField("finished")
    assert service.asked == [("cancel", "r", "", CommitPolicy.KEEP_PARTIAL), ("cancel", "", "s", None)]


async def test_model_service(channel, service):
    stub = model_pb2_grpc.ModelServiceStub(channel)
    info = await stub.GetModelInfo(model_pb2.GetModelInfoRequest())
    server = await stub.GetServerInfo(model_pb2.GetServerInfoRequest())
    load = await stub.GetLoad(model_pb2.GetLoadRequest())
    unset = {"since_last_step"}  # no step yet: infinity has no Duration
    for message in (info, server, server.limits, load):
        given = {field.name for field, _ in message.ListFields()}
        assert {field.name for field in message.DESCRIPTOR.fields} - given <= unset | {"bos_token_id"}
    assert info.HasField("bos_token_id")
    assert info.default_sampling == t.SamplingParams(temperature=0.0, logit_bias={3: -1.5})
    assert list(info.eos_token_ids) == [1, 2]
    assert server.limits.max_ttl == Duration(seconds=3600, nanos=500_000_000)
    assert (load.kv_free_bytes, load.generated_tokens_per_second, load.draining) == (1 << 40, 7.5, True)
    assert (load.time_to_first_token.count, load.time_to_first_token.p95.ToMilliseconds()) == (2, 500)
    assert not load.inter_token.HasField("median"), "no gap yet is not a gap of 0"


async def test_tokenizer_rpcs(channel, service):
    stub = model_pb2_grpc.ModelServiceStub(channel)
    tokens = await stub.Tokenize(model_pb2.TokenizeRequest(text="hello", add_special_tokens=True))
    text = await stub.Detokenize(model_pb2.DetokenizeRequest(token_ids=[5, 6], skip_special_tokens=True))
    assert (list(tokens.token_ids), list(tokens.pieces), text.text) == ([5, 6], ["he", "llo"], "héllo")
    assert service.asked == [("tokenize", TextInput("hello"), True), ("detokenize", (5, 6), True)]


ALL_EVENTS = (
    events.Queued(2),
    events.Started("r", "s", 10, 3, 13, Tier.NONE, -5),
    events.Prefill(8, 13, (TokenLogprob(1, -0.5),)),
    events.Heartbeat(5.0),
    events.Tokens(13, (4, 5), "é", (TokenLogprob(4, -0.25, ((4, -0.25), (6, -1.5))),)),
    events.Finished(
        FinishReason.STOP_SEQUENCE,
        15,
        usage=events.Usage(10, 3, 2, 13, 1, 2, 4),
        timings=events.Timings(0.5, 0.25, 1.0, 2.0, None, 0.125),
        cache=events.CacheUsage(cached_tokens=0),
        matched_text="end",
        ledger_overhang_tokens=1,
        dropped_tokens=2,
        etag="e",
    ),
)


async def play(_request):
    for event in ALL_EVENTS:
        yield event


async def test_stream_events_in_full(channel, service):
    service.script = play
    stream = generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(generation_pb2.GenerateRequest())
    queued, started, prefill, heartbeat, tokens, last = [event async for event in stream]
    assert [e.sequence for e in (queued, started, prefill, heartbeat, tokens, last)] == [1, 2, 3, 4, 5, 6]
    assert queued.queued.queue_position == 2
    assert started.started == generation_pb2.Started(
        request_id="r",
        session_id="s",
        position=10,
        prompt_tokens=3,
        to_compute_tokens=13,
        restored_from=t.CACHE_TIER_NONE,
        seed=-5,
    )
    assert prefill.prefill == generation_pb2.PrefillProgress(
        processed_tokens=8, total_tokens=13, prompt_logprobs=[t.TokenLogprob(token_id=1, logprob=-0.5)]
    )
    assert heartbeat.heartbeat.elapsed == Duration(seconds=5)
    top = [t.TopLogprob(token_id=4, logprob=-0.25), t.TopLogprob(token_id=6, logprob=-1.5)]
    assert tokens.tokens == generation_pb2.Tokens(
        position=13, token_ids=[4, 5], text="é", logprobs=[t.TokenLogprob(token_id=4, logprob=-0.25, top=top)]
    )
    assert last.finished == generation_pb2.Finished(
        finish_reason=t.FINISH_REASON_STOP_SEQUENCE,
        matched_stop=t.MatchedStop(text="end"),
        usage=t.Usage(
            prompt_tokens=3,
            generated_tokens=2,
            context_tokens=10,
            computed_tokens=13,
            session_reused_tokens=1,
            prefix_reused_tokens=2,
            restored_tokens=4,
            reuse_enabled=True,
        ),
        timings=t.Timings(
            queue=Duration(nanos=500_000_000),
            restore=Duration(nanos=250_000_000),
            prefill=Duration(seconds=1),
            decode=Duration(seconds=2),
            max_inter_token=Duration(nanos=125_000_000),
        ),
        position=15,
        etag="e",
        ledger_overhang_tokens=1,
        dropped_tokens=2,
        cache=t.CacheUsage(tier=t.CACHE_TIER_NONE, estimated_rebuild=Duration()),
    )


async def test_unary_generate_collects_the_stream(channel, service):
    service.script = play
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    answer = await stub.Generate(generation_pb2.GenerateRequest())
    assert (answer.request_id, answer.session_id, answer.text) == ("r-1", "s-1", "é")
    assert list(answer.token_ids) == [4, 5]
    assert (len(answer.logprobs), len(answer.prompt_logprobs), answer.finished.position) == (1, 1, 15)


@pytest.mark.parametrize("text", [True, False])
@pytest.mark.parametrize("ids", [True, False])
async def test_output_options_choose_text_and_ids(channel, service, text, ids):
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    request = generation_pb2.GenerateRequest(output=t.OutputOptions(return_text=text, return_token_ids=ids))
    events = [event async for event in stub.GenerateStream(request)]
    answer = await stub.Generate(request)
    for part in (events[1].tokens, answer):
        assert (part.text, list(part.token_ids)) == ("ab" if text else "", [10, 11] if ids else [])


async def test_blocking_client(address, service):
    """The synchronous stubs of grpcio work the same, streams included."""

    def talk():
        with grpc.insecure_channel(address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            kinds = [event.WhichOneof("event") for event in stub.GenerateStream(generation_pb2.GenerateRequest())]
            return kinds, stub.Generate(generation_pb2.GenerateRequest()).text

    assert await asyncio.to_thread(talk) == (["started", "tokens", "finished"], "ab")
