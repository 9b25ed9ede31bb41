"""Requests against the declared limits: every violation at once, each with its field and its limit."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue_server.errors import FieldInvalid
from segue_server.requests import (
    AppendRequest,
    ChatMessage,
    ChatTurn,
    ContextPolicy,
    CreateSessionRequest,
    GenerateRequest,
    Input,
    ListSessionsRequest,
    OutputOptions,
    SamplingParams,
    SessionSettings,
    StopConditions,
    TextInput,
    TokenInput,
)
from segue_server.validation import SESSION_ID, Checker
from segue_server.views import Limits

LIMITS = Limits(
    kv_budget_bytes=1,
    max_sessions=1,
    max_running_requests=1,
    max_queued_requests=1,
    max_prompt_tokens=100,
    max_stop_sequences=2,
    max_stop_sequence_chars=8,
    max_logit_bias_count=3,
    max_top_logprobs=5,
    default_ttl=1,
    max_ttl=1,
    tombstone_ttl=1,
    expiry_notice=0,
    max_pinned_bytes=0,
    prefill_chunk_tokens=16,
    block_tokens=16,
)


def violations(request: GenerateRequest | AppendRequest | CreateSessionRequest | ListSessionsRequest) -> dict[str, str]:
    """What is wrong, by field."""
    checker = Checker(LIMITS, vocab_size=50)
    match request:
        case GenerateRequest():
            checker.generate(request)
        case AppendRequest():
            checker.append(request)
        case CreateSessionRequest():
            checker.create_session(request, "float32")
        case ListSessionsRequest():
            checker.list_sessions(request)
    if not checker.violations:
        checker.done()
        return {}
    with pytest.raises(FieldInvalid) as error:
        checker.done()
    for violation in error.value.violations:
        assert f"{violation.field}: {violation.description}" in str(error.value)
    return {violation.field: violation.description for violation in error.value.violations}


def test_what_is_unset_is_fine() -> None:
    assert violations(GenerateRequest()) == {}
    assert violations(CreateSessionRequest()) == {}
    assert violations(AppendRequest(session_id="abc")) == {}
    assert violations(ListSessionsRequest()) == {}


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", (0, 0.5, 2), (-0.1, 2.1, math.nan, math.inf)),
        ("top_p", (0.01, 1), (0, 1.01, math.nan)),
        ("top_k", (1, 10**9), (0, -1)),
        ("min_p", (0, 0.99), (-0.1, 1, math.nan)),
        ("repetition_penalty", (0.1, 1, 100), (0, -1, 101, math.nan)),
        ("frequency_penalty", (-2, 0, 2), (-2.1, 2.1, math.nan)),
        ("presence_penalty", (-2, 0, 2), (-2.1, 2.1, math.nan)),
        ("penalty_last_tokens", (0, 5), (-1,)),
        ("seed", (-(2**63), 0, 2**63 - 1), ()),
    ],
)
def test_sampling_ranges(name: str, good: tuple[float, ...], bad: tuple[float, ...]) -> None:
    for value in good:
        assert violations(GenerateRequest(sampling=SamplingParams(**{name: value}))) == {}  # type: ignore[arg-type]
    for value in bad:
        found = violations(GenerateRequest(sampling=SamplingParams(**{name: value})))  # type: ignore[arg-type]
        assert list(found) == [f"sampling.{name}"]
        assert "must be in" in found[f"sampling.{name}"]
        assert f"got {value:g}" in found[f"sampling.{name}"]


@pytest.mark.parametrize(
    ("stop", "field"),
    [
        (StopConditions(max_tokens=0), "stop.max_tokens"),
        (StopConditions(min_tokens=-1), "stop.min_tokens"),
        (StopConditions(min_tokens=6, max_tokens=5), "stop.min_tokens"),
        (StopConditions(time_limit=0), "stop.time_limit"),
        (StopConditions(time_limit=math.nan), "stop.time_limit"),
        (StopConditions(stop_token_ids=(1, 50)), "stop.stop_token_ids[1]"),
        (StopConditions(stop_sequences=("a", "")), "stop.stop_sequences[1]"),
        (StopConditions(stop_sequences=("a", "b", "c")), "stop.stop_sequences"),
        (StopConditions(stop_sequences=("123456789",)), "stop.stop_sequences[0]"),
    ],
)
def test_stop_conditions(stop: StopConditions, field: str) -> None:
    assert list(violations(GenerateRequest(stop=stop))) == [field]
    defaults = SessionSettings(default_stop=stop)
    assert list(violations(CreateSessionRequest(settings=defaults))) == [f"settings.default_{field}"]


@pytest.mark.parametrize(
    ("output", "field"),
    [
        (OutputOptions(top_logprobs=6), "output.top_logprobs"),
        (OutputOptions(top_logprobs=-1), "output.top_logprobs"),
        (OutputOptions(max_tokens_per_event=0), "output.max_tokens_per_event"),
        (OutputOptions(max_event_delay=11), "output.max_event_delay"),
        (OutputOptions(heartbeat_interval=-1), "output.heartbeat_interval"),
    ],
)
def test_output_options(output: OutputOptions, field: str) -> None:
    assert list(violations(GenerateRequest(output=output))) == [field]
    assert list(violations(AppendRequest(session_id="abc", output=output))) == [field]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (TokenInput(()), "input.token_ids"),
        (TokenInput((0, 49, 50, 99)), "input.token_ids[2]"),
        (TokenInput((-1,)), "input.token_ids[0]"),
        (TextInput(""), "input.text"),
        (ChatTurn(()), "input.chat.messages"),
        (ChatTurn((ChatMessage("user", ""), ChatMessage("", "x"))), "input.chat.messages[1].role"),
    ],
)
def test_inputs(given: Input, field: str) -> None:
    assert list(violations(GenerateRequest(input=given))) == [field]
    assert list(violations(AppendRequest(session_id="abc", input=given))) == [field]
    prefix = field.replace("input", "prefix")
    assert list(violations(CreateSessionRequest(prefix=given))) == [prefix]


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        (SessionSettings(ttl=0), "ttl"),
        (SessionSettings(ttl=math.nan), "ttl"),
        (SessionSettings(max_context_tokens=0), "max_context_tokens"),
        (SessionSettings(priority=101), "priority"),
        (SessionSettings(keep_tokens=-1), "keep_tokens"),
        (SessionSettings(kv_dtype="int8"), "kv_dtype"),
        (SessionSettings(context_policy=ContextPolicy.SLIDE, max_context_tokens=64, keep_tokens=63), "keep_tokens"),
        (SessionSettings(default_sampling=SamplingParams(top_p=2)), "default_sampling.top_p"),
    ],
)
def test_session_settings(wanted: SessionSettings, field: str) -> None:
    assert list(violations(CreateSessionRequest(settings=wanted))) == [f"settings.{field}"]


def test_logit_bias_has_a_size_a_vocabulary_and_a_range() -> None:
    def found(bias: dict[int, float]) -> list[str]:
        return list(violations(GenerateRequest(sampling=SamplingParams(logit_bias=bias))))

    assert found({1: -1000, 2: 1000}) == []
    assert found({1: 1001}) == ["sampling.logit_bias[1]"]
    assert found({1: math.nan}) == ["sampling.logit_bias[1]"]
    assert found({50: 1}) == ["sampling.logit_bias[0]"]
    assert found(dict.fromkeys(range(4), 1.0)) == ["sampling.logit_bias"]


def test_names_and_labels_have_sizes() -> None:
    assert list(violations(CreateSessionRequest(display_name="x" * 257))) == ["display_name"]
    assert list(violations(CreateSessionRequest(labels={str(n): "" for n in range(17)}))) == ["labels"]
    assert list(violations(CreateSessionRequest(labels={"k": "v" * 256}))) == ["labels['k']"]
    assert list(violations(GenerateRequest(request_id="x" * 129))) == ["request_id"]
    assert list(violations(ListSessionsRequest(page_size=-1))) == ["page_size"]


def test_everything_that_is_wrong_is_told_at_once() -> None:
    request = GenerateRequest(
        session_id="NO",
        expected_position=-1,
        input=TokenInput((77,)),
        sampling=SamplingParams(temperature=9, top_k=0),
        stop=StopConditions(max_tokens=-1),
        priority=-101,
        queue_timeout=-1,
    )
    assert list(violations(request)) == [
        "session_id",
        "expected_position",
        "input.token_ids[0]",
        "sampling.temperature",
        "sampling.top_k",
        "stop.max_tokens",
        "priority",
        "queue_timeout",
    ]


@settings(deadline=None)
@given(st.text(max_size=80))
def test_a_session_id_is_safe_in_file_names_and_headers(text: str) -> None:
    refused = "session_id" in violations(AppendRequest(session_id=text))
    safe = 3 <= len(text) <= 63 and set(text) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") and text[0] != "-"
    assert refused == (not safe)


@settings(deadline=None, max_examples=40)
@given(st.from_regex(SESSION_ID, fullmatch=True))
def test_every_id_of_the_pattern_is_taken(text: str) -> None:
    assert violations(AppendRequest(session_id=text)) == {}


def test_a_hostile_request_gets_a_short_answer() -> None:
    """A million bad tokens, or a key of a megabyte, do not come back in the error."""
    for request in (
        GenerateRequest(input=TokenInput((99,) * 100_000)),
        GenerateRequest(session_id="X" * 100_000),
        CreateSessionRequest(labels={"k" * 100_000: "v"}),
    ):
        found = violations(request)
        assert len(found) == 1
        assert len(str(found)) < 400
