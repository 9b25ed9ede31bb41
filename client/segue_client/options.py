"""The keyword arguments of calls, each written down once; `Client` and `AsyncClient` share them.

An option that is left out, or None, is not sent: then the session's default holds, else the model's. Ranges are in
`segue/v1/types.proto`; the server checks them all and names every bad field at once (`InvalidArgument.violations`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

import grpc

from segue_client.channel import ChannelOption, Timeouts

CommitPolicy = Literal["keep_partial", "rollback", "keep_prompt"]
BusyPolicy = Literal["reject", "queue", "replace"]
ContextPolicy = Literal["reject", "slide"]
KvDtype = Literal["float32", "bfloat16", "float16", "int8"]
CacheTierName = Literal["device", "host", "disk", "none"]
SessionStateName = Literal["idle", "queued", "running", "moving", "expired"]


class Message(TypedDict):
    """One chat message; the server renders it with the model's chat template."""

    role: str  # "system" | "user" | "assistant"
    content: str


class ConnectionOptions(TypedDict, total=False):
    """Arguments of `Client` and `AsyncClient` beside the target."""

    credentials: grpc.ChannelCredentials | None  # TLS; default: plaintext
    timeouts: Timeouts | None  # deadlines of calls that are not given one of their own
    metadata: Sequence[tuple[str, str | bytes]]  # sent with every call, for example an authorization header
    channel_options: Sequence[ChannelOption]  # gRPC's, over those of this library


class InputOptions(TypedDict, total=False):
    """What is appended to the ledger: at most one of text, tokens and messages."""

    text: str | None
    tokens: Sequence[int] | None
    messages: Sequence[Message] | None
    add_generation_prompt: bool | None  # with messages: open an assistant turn after them


class SamplingOptions(TypedDict, total=False):
    """How the next token is drawn."""

    temperature: float | None  # 0 = greedy
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    penalty_last_tokens: int | None
    seed: int | None
    logit_bias: Mapping[int, float] | None


class StopOptions(TypedDict, total=False):
    """When a turn ends."""

    max_tokens: int | None
    min_tokens: int | None
    stop: Sequence[str] | None  # texts, matched across token borders
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop: bool | None
    time_limit: float | None  # seconds from admission


class OutputOptions(TypedDict, total=False):
    """What the answer holds, and how finely it is streamed."""

    return_text: bool | None
    return_token_ids: bool | None
    top_logprobs: int | None
    prompt_logprobs: bool | None
    max_tokens_per_event: int | None
    max_event_delay: float | None  # seconds
    heartbeat_interval: float | None  # seconds


class AppendOptions(InputOptions, OutputOptions, total=False):
    """Arguments of `append_context`."""

    request_id: str | None  # default: a new UUID4
    expected_position: int | None  # default: the position the session object knows; None = do not check
    defer_compute: bool | None  # only the ledger now, the KV at the next turn
    timeout: float | None  # seconds; default: Timeouts.turn


class TurnOptions(InputOptions, SamplingOptions, StopOptions, OutputOptions, total=False):
    """Arguments of `generate` and `stream`. Without an input the turn goes on from the last token."""

    request_id: str | None  # default: a new UUID4
    expected_position: int | None  # default: the position the session object knows; None = do not check
    commit_policy: CommitPolicy | None  # what the ledger keeps of a turn that does not end by itself
    busy_policy: BusyPolicy | None
    priority: int | None
    queue_timeout: float | None  # seconds
    detach_grace: float | None  # seconds the turn outlives a broken connection, to be taken up again; default 15
    bypass_prefix_cache: bool | None
    timeout: float | None  # seconds; default: Timeouts.turn


class PolicyOptions(TypedDict, total=False):
    """Settings of a session that may change while it lives."""

    ttl: float | None  # idle seconds until the session expires
    max_context_tokens: int | None
    context_policy: ContextPolicy | None
    keep_tokens: int | None
    commit_policy: CommitPolicy | None
    priority: int | None
    pinned: bool | None  # never evicted; takes room for max_context_tokens


class SettingOptions(PolicyOptions, SamplingOptions, StopOptions, total=False):
    """Settings of a session; sampling and stop options become the defaults of its turns."""

    kv_dtype: KvDtype | None
    cache_salt: str | None


class SessionOptions(InputOptions, SettingOptions, total=False):
    """Arguments of `create_session`. The input is the prefix, which is prefilled at once."""

    system: str | None  # short for messages=[{"role": "system", ...}]
    session_id: str | None  # default: a new UUID4
    request_id: str | None  # default: a new UUID4
    display_name: str | None
    labels: Mapping[str, str] | None
    timeout: float | None  # seconds; default: Timeouts.turn


class ForkOptions(SettingOptions, total=False):
    """Arguments of `fork`. Settings that are left out are taken over."""

    position: int | None  # default: the whole ledger
    new_session_id: str | None  # default: a new UUID4
    request_id: str | None  # default: a new UUID4
    timeout: float | None  # seconds; default: Timeouts.unary


class UpdateOptions(PolicyOptions, total=False):
    """Arguments of `update`. What is left out stays; None is the server's default again."""

    display_name: str | None
    labels: Mapping[str, str] | None  # all of them
    timeout: float | None  # seconds; default: Timeouts.unary


class ImportOptions(TypedDict, total=False):
    """Arguments of `import_session`."""

    session_id: str | None  # default: a new UUID4
    request_id: str | None  # default: a new UUID4
    recompute_on_mismatch: bool  # of another model, KV dtype or shape: take the tokens and compute them
    timeout: float | None  # seconds; default: Timeouts.turn


class ListOptions(TypedDict, total=False):
    """Arguments of `list_sessions`."""

    page_size: int | None
    states: Sequence[SessionStateName] | None  # default: all but expired
    labels: Mapping[str, str] | None  # all must match
    order_by: str | None  # for example "last_used_time desc"
    timeout: float | None  # seconds, of each page; default: Timeouts.unary


def check_names(options: Mapping[str, object], known: type) -> None:
    """A misspelt option must not pass in silence.

    Raises:
        TypeError: an option that `known`, a TypedDict, does not declare.
    """
    unknown = sorted(options.keys() - vars(known)["__optional_keys__"])
    if unknown:
        raise TypeError(f"unknown option {', '.join(unknown)}; see segue_client.{known.__name__}")
