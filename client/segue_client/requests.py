"""Options in, request messages out. Nothing here talks to anybody."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, BinaryIO, TypeVar

from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message as ProtoMessage

from segue.v1 import generation_pb2, model_pb2, session_pb2, types_pb2
from segue_client.options import (
    AppendOptions,
    ForkOptions,
    ImportOptions,
    InputOptions,
    ListOptions,
    Message,
    OutputOptions,
    PolicyOptions,
    SamplingOptions,
    SessionOptions,
    SettingOptions,
    StopOptions,
    TurnOptions,
    UpdateOptions,
    check_names,
)
from segue_client.snapshot import Upload

MessageT = TypeVar("MessageT", bound=ProtoMessage)

DETACH_GRACE = 15.0  # seconds: a phone finds another network, a proxy starts again


def new_id() -> str:
    """A fresh UUID4, for requests and sessions: chosen here, so that a call that is tried again is the same call."""
    return str(uuid.uuid4())


def generate(session_id: str, options: TurnOptions) -> generation_pb2.GenerateRequest:
    check_names(options, TurnOptions)
    tokens, text, chat = _input(options)
    return generation_pb2.GenerateRequest(
        session_id=session_id,
        request_id=options.get("request_id") or new_id(),
        expected_position=options.get("expected_position"),
        token_ids=tokens,
        text=text,
        chat=chat,
        sampling=_sampling(options),
        stop=_stop(options),
        output=_output(options),
        commit_policy=enum_name(types_pb2.CommitPolicy, "commit_policy", options.get("commit_policy")),
        busy_policy=enum_name(generation_pb2.BusyPolicy, "busy_policy", options.get("busy_policy")),
        priority=options.get("priority"),
        queue_timeout=_seconds(options.get("queue_timeout")),
        detach_grace=_seconds(DETACH_GRACE if (grace := options.get("detach_grace")) is None else grace),
        bypass_prefix_cache=options.get("bypass_prefix_cache"),
    )


def append_context(session_id: str, options: AppendOptions) -> generation_pb2.AppendContextRequest:
    check_names(options, AppendOptions)
    tokens, text, chat = _input(options)
    return generation_pb2.AppendContextRequest(
        session_id=session_id,
        request_id=options.get("request_id") or new_id(),
        expected_position=options.get("expected_position"),
        token_ids=tokens,
        text=text,
        chat=chat,
        output=_output(options),
        defer_compute=options.get("defer_compute"),
    )


def cancel(
    request_id: str | None, session_id: str | None, commit_policy: str | None
) -> generation_pb2.CancelGenerationRequest:
    if (request_id is None) == (session_id is None):
        raise ValueError("give either request_id or session_id")
    return generation_pb2.CancelGenerationRequest(
        request_id=request_id,
        session_id=session_id,
        commit_policy=enum_name(types_pb2.CommitPolicy, "commit_policy", commit_policy),
    )


def create_session(options: SessionOptions) -> session_pb2.CreateSessionRequest:
    check_names(options, SessionOptions)
    tokens, text, chat = _prefix(options)
    return session_pb2.CreateSessionRequest(
        session_id=options.get("session_id") or new_id(),
        request_id=options.get("request_id") or new_id(),
        display_name=options.get("display_name"),
        labels=options.get("labels"),
        settings=_settings(options),
        token_ids=tokens,
        text=text,
        chat=chat,
    )


def update_session(session_id: str, etag: str, options: UpdateOptions) -> session_pb2.UpdateSessionRequest:
    check_names(options, UpdateOptions)
    own = ("display_name", "labels")
    paths = [name if name in own else f"settings.{name}" for name in options if name != "timeout"]
    if not paths:
        raise ValueError("give at least one option to change")
    session = session_pb2.Session(
        session_id=session_id,
        etag=etag,
        display_name=options.get("display_name"),
        labels=options.get("labels"),
        settings=session_pb2.SessionSettings(**_policies(options)),
    )
    return session_pb2.UpdateSessionRequest(session=session, update_mask=FieldMask(paths=paths))


def fork_session(session_id: str, count: int | None, options: ForkOptions) -> session_pb2.ForkSessionRequest:
    check_names(options, ForkOptions)
    return session_pb2.ForkSessionRequest(
        session_id=session_id,
        new_session_id=options.get("new_session_id") or new_id(),
        request_id=options.get("request_id") or new_id(),
        position=options.get("position"),
        settings=_settings(options),
        count=count,
    )


def rewind_session(
    session_id: str, position: int | None, turn: int | None, etag: str | None
) -> session_pb2.RewindSessionRequest:
    if (position is None) == (turn is None):
        raise ValueError("give either position or turn")
    return session_pb2.RewindSessionRequest(session_id=session_id, position=position, turn=turn, etag=etag)


def list_sessions(options: ListOptions, page_token: str) -> session_pb2.ListSessionsRequest:
    check_names(options, ListOptions)
    states = (enum_name(session_pb2.SessionState, "states", state) for state in options.get("states") or ())
    return session_pb2.ListSessionsRequest(
        page_size=options.get("page_size"),
        page_token=page_token,
        states=(state for state in states if state is not None),
        labels=options.get("labels"),
        order_by=options.get("order_by"),
    )


def move_cache(session_id: str, tier: str, from_position: int | None) -> session_pb2.MoveSessionCacheRequest:
    return session_pb2.MoveSessionCacheRequest(
        session_id=session_id, tier=enum_name(types_pb2.CacheTier, "tier", tier), from_position=from_position
    )


def upload(file: BinaryIO, options: ImportOptions) -> tuple[Upload, str]:
    """What an import sends, and the id of its session."""
    check_names(options, ImportOptions)
    session_id = options.get("session_id") or new_id()
    request_id = options.get("request_id") or new_id()
    return Upload(file, session_id, request_id, options.get("recompute_on_mismatch", False)), session_id


def tokenize(
    text: str | None, messages: Sequence[Message] | None, add_special_tokens: bool
) -> model_pb2.TokenizeRequest:
    if (text is None) == (messages is None):
        raise ValueError("give either text or messages")
    chat = _chat(messages, None) if messages is not None else None
    return model_pb2.TokenizeRequest(text=text, chat=chat, add_special_tokens=add_special_tokens)


def user_turn(content: str, options: TurnOptions) -> TurnOptions:
    """The options of a turn whose input is one user message.

    Raises:
        ValueError: they hold another input.
    """
    if any(options.get(name) is not None for name in ("text", "tokens", "messages")):
        raise ValueError("chat() takes its input as content; stream() takes text, tokens or messages")
    return {**options, "messages": [{"role": "user", "content": content}]}


def has_prefix(request: session_pb2.CreateSessionRequest) -> bool:
    """Whether creating this session runs the model."""
    return request.WhichOneof("prefix") is not None


def _prefix(
    options: SessionOptions,
) -> tuple[types_pb2.TokenIds | None, str | None, types_pb2.ChatTurn | None]:
    system = options.get("system")
    if system is None:
        return _input(options, open_turn=False)
    if any(options.get(name) is not None for name in ("text", "tokens", "messages")):
        raise ValueError("give at most one of text, tokens, messages and system")
    return None, None, _chat([{"role": "system", "content": system}], options.get("add_generation_prompt") or False)


def _input(
    options: InputOptions, open_turn: bool | None = None
) -> tuple[types_pb2.TokenIds | None, str | None, types_pb2.ChatTurn | None]:
    """The three arms of the `input` oneof, at most one of them set; `open_turn` replaces an unset generation prompt."""
    text, tokens, messages = options.get("text"), options.get("tokens"), options.get("messages")
    if sum(given is not None for given in (text, tokens, messages)) > 1:
        raise ValueError("give at most one of text, tokens and messages")
    asked = options.get("add_generation_prompt")
    chat = _chat(messages, open_turn if asked is None else asked) if messages is not None else None
    return (types_pb2.TokenIds(ids=tokens) if tokens is not None else None), text, chat


def _chat(messages: Sequence[Message], add_generation_prompt: bool | None) -> types_pb2.ChatTurn:
    turns = [types_pb2.ChatMessage(role=message["role"], content=message["content"]) for message in messages]
    return types_pb2.ChatTurn(messages=turns, add_generation_prompt=add_generation_prompt)


def _sampling(options: SamplingOptions) -> types_pb2.SamplingParams | None:
    return _unless_empty(
        types_pb2.SamplingParams(
            temperature=options.get("temperature"),
            top_p=options.get("top_p"),
            top_k=options.get("top_k"),
            min_p=options.get("min_p"),
            repetition_penalty=options.get("repetition_penalty"),
            frequency_penalty=options.get("frequency_penalty"),
            presence_penalty=options.get("presence_penalty"),
            penalty_last_tokens=options.get("penalty_last_tokens"),
            seed=options.get("seed"),
            logit_bias=options.get("logit_bias"),
        )
    )


def _stop(options: StopOptions) -> types_pb2.StopConditions | None:
    return _unless_empty(
        types_pb2.StopConditions(
            max_tokens=options.get("max_tokens"),
            min_tokens=options.get("min_tokens"),
            stop_sequences=_texts(options.get("stop")),
            stop_token_ids=options.get("stop_token_ids"),
            ignore_eos=options.get("ignore_eos"),
            include_stop=options.get("include_stop"),
            time_limit=_seconds(options.get("time_limit")),
        )
    )


def _output(options: OutputOptions) -> types_pb2.OutputOptions | None:
    return _unless_empty(
        types_pb2.OutputOptions(
            return_text=options.get("return_text"),
            return_token_ids=options.get("return_token_ids"),
            top_logprobs=options.get("top_logprobs"),
            prompt_logprobs=options.get("prompt_logprobs"),
            max_tokens_per_event=options.get("max_tokens_per_event"),
            max_event_delay=_seconds(options.get("max_event_delay")),
            heartbeat_interval=_seconds(options.get("heartbeat_interval")),
        )
    )


def _settings(options: SettingOptions) -> session_pb2.SessionSettings | None:
    return _unless_empty(
        session_pb2.SessionSettings(
            **_policies(options),
            kv_dtype=enum_name(types_pb2.KvDtype, "kv_dtype", options.get("kv_dtype")),
            cache_salt=options.get("cache_salt"),
            default_sampling=_sampling(options),
            default_stop=_stop(options),
        )
    )


def _policies(options: PolicyOptions) -> dict[str, Any]:
    return {
        "ttl": _seconds(options.get("ttl")),
        "max_context_tokens": options.get("max_context_tokens"),
        "context_policy": enum_name(types_pb2.ContextPolicy, "context_policy", options.get("context_policy")),
        "keep_tokens": options.get("keep_tokens"),
        "commit_policy": enum_name(types_pb2.CommitPolicy, "commit_policy", options.get("commit_policy")),
        "priority": options.get("priority"),
        "pinned": options.get("pinned"),
    }


def _unless_empty(message: MessageT) -> MessageT | None:
    return message if message.ByteSize() else None


def _seconds(value: float | None) -> timedelta | None:
    return None if value is None else timedelta(seconds=value)


def _texts(value: Sequence[str] | None) -> Sequence[str] | None:
    """A lone string is a sequence of its characters to Python, and never meant so."""
    return [value] if isinstance(value, str) else value


def enum_name(wrapper: EnumTypeWrapper, option: str, value: str | None) -> str | None:
    """The wire name of an option's word, e.g. "rollback" -> "COMMIT_POLICY_ROLLBACK"; None stays unset."""
    if value is None:
        return None
    prefix = wrapper.keys()[0].removesuffix("UNSPECIFIED")
    name = prefix + value.upper()
    if name not in wrapper.keys()[1:]:
        words = ", ".join(key.removeprefix(prefix).lower() for key in wrapper.keys()[1:])
        raise ValueError(f"{option} must be one of {words}, not {value!r}")
    return name
