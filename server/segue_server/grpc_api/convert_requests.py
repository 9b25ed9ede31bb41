"""Request protos -> the service's requests. Names agree on both sides, so what is set is copied by name.

`ListFields` yields an `optional` field exactly when it was set, zero included; what is left out stays unset.
"""

from collections.abc import Mapping
from typing import Any, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message

from segue.v1 import generation_pb2, session_pb2, types_pb2
from segue_server.grpc_api.form import Form
from segue_server.requests import (
    AppendRequest,
    BusyPolicy,
    ChatMessage,
    ChatTurn,
    CommitPolicy,
    ContextPolicy,
    CreateSessionRequest,
    ForkSessionRequest,
    GenerateRequest,
    Input,
    ListSessionsRequest,
    OutputOptions,
    ReadTokensRequest,
    RewindSessionRequest,
    SamplingParams,
    ScoreTokensRequest,
    SessionSettings,
    StopConditions,
    TextInput,
    TokenInput,
    UpdateSessionRequest,
    WatchSessionsRequest,
)
from segue_server.views import SessionState

KV_DTYPES: Mapping[int, str] = {
    types_pb2.KV_DTYPE_FLOAT32: "float32",
    types_pb2.KV_DTYPE_BFLOAT16: "bfloat16",
    types_pb2.KV_DTYPE_FLOAT16: "float16",
    types_pb2.KV_DTYPE_INT8: "int8",
}
COMMIT_POLICIES: Mapping[int, CommitPolicy] = {policy.value: policy for policy in CommitPolicy}
_CONTEXT_POLICIES: Mapping[int, ContextPolicy] = {policy.value: policy for policy in ContextPolicy}
_BUSY_POLICIES: Mapping[int, BusyPolicy] = {policy.value: policy for policy in BusyPolicy}
_STATES: Mapping[int, str] = {state.value: state.name for state in SessionState}


def generate_request(form: Form, message: generation_pb2.GenerateRequest) -> GenerateRequest:
    given = _given(message, "session_id", "request_id", "expected_position", "priority", "bypass_prefix_cache")
    given |= _durations(form, message, "", "queue_timeout", "detach_grace")
    return GenerateRequest(
        input=input_of(message, "input"),
        sampling=_sampling(message.sampling),
        stop=_stop(form, message.stop, "stop."),
        output=_output(form, message.output),
        commit_policy=form.choice("commit_policy", message.commit_policy, COMMIT_POLICIES),
        busy_policy=form.choice("busy_policy", message.busy_policy, _BUSY_POLICIES) or BusyPolicy.REJECT,
        **given,
    )


def append_request(form: Form, message: generation_pb2.AppendContextRequest) -> AppendRequest:
    given = _given(message, "request_id", "expected_position", "defer_compute")
    return AppendRequest(
        session_id=message.session_id,
        input=input_of(message, "input"),
        output=_output(form, message.output),
        **given,
    )


def create_session_request(form: Form, message: session_pb2.CreateSessionRequest) -> CreateSessionRequest:
    return CreateSessionRequest(
        labels=dict(message.labels),
        settings=settings_of(form, message.settings),
        prefix=input_of(message, "prefix"),
        **_given(message, "session_id", "request_id", "display_name"),
    )


def fork_session_request(form: Form, message: session_pb2.ForkSessionRequest) -> ForkSessionRequest:
    given = _given(message, "session_id", "new_session_id", "request_id", "position", "count")
    return ForkSessionRequest(settings=settings_of(form, message.settings), **given)


def update_session_request(form: Form, message: session_pb2.UpdateSessionRequest) -> UpdateSessionRequest:
    """Of the session only what the mask names is looked at."""
    named = session_pb2.Session()
    FieldMask(paths=filter(_is_session_field, message.update_mask.paths)).MergeMessage(message.session, named)
    return UpdateSessionRequest(
        session_id=message.session.session_id,
        paths=tuple(message.update_mask.paths),
        etag=message.session.etag,
        display_name=named.display_name,
        labels=dict(named.labels),
        settings=settings_of(form, named.settings),
    )


def read_tokens_request(_form: Form, message: session_pb2.ReadSessionTokensRequest) -> ReadTokensRequest:
    given = _given(message, "start_position", "end_position", "return_text")
    return ReadTokensRequest(session_id=message.session_id, **given)


def watch_sessions_request(_form: Form, message: session_pb2.WatchSessionsRequest) -> WatchSessionsRequest:
    return WatchSessionsRequest(**_given(message))


def score_tokens_request(_form: Form, message: generation_pb2.ScoreTokensRequest) -> ScoreTokensRequest:
    return ScoreTokensRequest(
        session_id=message.session_id, token_ids=tuple(message.token_ids), **_given(message, "top_logprobs")
    )


def rewind_session_request(_form: Form, message: session_pb2.RewindSessionRequest) -> RewindSessionRequest:
    return RewindSessionRequest(**_given(message))


def list_sessions_request(form: Form, message: session_pb2.ListSessionsRequest) -> ListSessionsRequest:
    return ListSessionsRequest(
        states=tuple(_state(form, index, value) for index, value in enumerate(message.states)),
        labels=dict(message.labels),
        **_given(message, "page_size", "page_token", "order_by"),
    )


def input_of(message: Message, oneof: str) -> Input:
    """The member of a oneof {token_ids, text, chat} that is set; None when none is."""
    member = message.WhichOneof(oneof)
    if member is None:
        return None
    value = getattr(message, member)
    if member == "token_ids":
        return TokenInput(tuple(value.ids))
    return TextInput(value) if member == "text" else _chat(value)


def _is_session_field(path: str) -> bool:
    return FieldMask(paths=[path]).IsValidForDescriptor(cast("Descriptor", session_pb2.Session.DESCRIPTOR))


def _chat(message: types_pb2.ChatTurn) -> ChatTurn:
    messages = tuple(ChatMessage(m.role, m.content) for m in message.messages)
    return ChatTurn(messages, **_given(message, "add_generation_prompt"))


def _sampling(message: types_pb2.SamplingParams) -> SamplingParams:
    given = _given(message)
    if message.logit_bias:
        given["logit_bias"] = dict(sorted(message.logit_bias.items()))  # a map has no order: equal requests look equal
    return SamplingParams(**given)


def _stop(form: Form, message: types_pb2.StopConditions, path: str) -> StopConditions:
    given = _given(message) | _durations(form, message, path, "time_limit")
    for repeated in ("stop_sequences", "stop_token_ids"):
        if repeated in given:
            given[repeated] = tuple(given[repeated])
    return StopConditions(**given)


def _output(form: Form, message: types_pb2.OutputOptions) -> OutputOptions:
    return OutputOptions(
        **_given(message) | _durations(form, message, "output.", "max_event_delay", "heartbeat_interval")
    )


def settings_of(form: Form, message: session_pb2.SessionSettings) -> SessionSettings:
    given = _given(message, "max_context_tokens", "keep_tokens", "priority", "pinned", "cache_salt")
    return SessionSettings(
        kv_dtype=form.choice("settings.kv_dtype", message.kv_dtype, KV_DTYPES),
        context_policy=form.choice("settings.context_policy", message.context_policy, _CONTEXT_POLICIES),
        commit_policy=form.choice("settings.commit_policy", message.commit_policy, COMMIT_POLICIES),
        default_sampling=_sampling(message.default_sampling),
        default_stop=_stop(form, message.default_stop, "settings.default_stop."),
        **given | _durations(form, message, "settings.", "ttl"),
    )


def _state(form: Form, index: int, value: int) -> str:
    state = form.choice(f"states[{index}]", value, _STATES)
    if not value:
        form.refuse(f"states[{index}]", "must name a state")
    return state or ""


# The dataclasses check the names and mypy cannot: a field that only one side knows raises TypeError in the first test.
def _given(message: Message, *names: str) -> dict[str, Any]:
    """The fields that are set, by name; only those of `names` where names are given."""
    return {field.name: value for field, value in message.ListFields() if not names or field.name in names}


def _durations(form: Form, message: Message, path: str, *names: str) -> dict[str, float]:
    """The durations that are set, as seconds."""
    return {name: form.seconds(path + name, getattr(message, name)) for name in names if message.HasField(name)}
