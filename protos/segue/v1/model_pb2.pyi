import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from segue.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("model_id", "fingerprint", "layer_count", "head_count", "kv_head_count", "head_dim", "vocab_size", "max_context_tokens", "eos_token_ids", "bos_token_id", "rope_theta", "weight_dtype", "weight_bytes", "parameter_count", "kv_bytes_per_token", "default_sampling", "has_chat_template")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    HEAD_COUNT_FIELD_NUMBER: _ClassVar[int]
    KV_HEAD_COUNT_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ROPE_THETA_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DTYPE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_COUNT_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    fingerprint: str
    layer_count: int
    head_count: int
    kv_head_count: int
    head_dim: int
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bos_token_id: int
    rope_theta: float
    weight_dtype: str
    weight_bytes: int
    parameter_count: int
    kv_bytes_per_token: int
    default_sampling: _types_pb2.SamplingParams
    has_chat_template: bool
    def __init__(self, model_id: _Optional[str] = ..., fingerprint: _Optional[str] = ..., layer_count: _Optional[int] = ..., head_count: _Optional[int] = ..., kv_head_count: _Optional[int] = ..., head_dim: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., bos_token_id: _Optional[int] = ..., rope_theta: _Optional[float] = ..., weight_dtype: _Optional[str] = ..., weight_bytes: _Optional[int] = ..., parameter_count: _Optional[int] = ..., kv_bytes_per_token: _Optional[int] = ..., default_sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., has_chat_template: _Optional[bool] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerInfo(_message.Message):
    __slots__ = ("version", "build", "capabilities", "limits", "uptime")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    version: str
    build: str
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    limits: Limits
    uptime: _duration_pb2.Duration
    def __init__(self, version: _Optional[str] = ..., build: _Optional[str] = ..., capabilities: _Optional[_Iterable[str]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., uptime: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("kv_budget_bytes", "max_sessions", "max_running_requests", "max_queued_requests", "max_prompt_tokens", "max_stop_sequences", "max_stop_sequence_chars", "max_logit_bias_count", "max_top_logprobs", "default_ttl", "max_ttl", "tombstone_ttl", "expiry_notice", "max_pinned_bytes", "prefill_chunk_tokens", "block_tokens")
    KV_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_SEQUENCE_CHARS_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGIT_BIAS_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_TTL_FIELD_NUMBER: _ClassVar[int]
    MAX_TTL_FIELD_NUMBER: _ClassVar[int]
    TOMBSTONE_TTL_FIELD_NUMBER: _ClassVar[int]
    EXPIRY_NOTICE_FIELD_NUMBER: _ClassVar[int]
    MAX_PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    kv_budget_bytes: int
    max_sessions: int
    max_running_requests: int
    max_queued_requests: int
    max_prompt_tokens: int
    max_stop_sequences: int
    max_stop_sequence_chars: int
    max_logit_bias_count: int
    max_top_logprobs: int
    default_ttl: _duration_pb2.Duration
    max_ttl: _duration_pb2.Duration
    tombstone_ttl: _duration_pb2.Duration
    expiry_notice: _duration_pb2.Duration
    max_pinned_bytes: int
    prefill_chunk_tokens: int
    block_tokens: int
    def __init__(self, kv_budget_bytes: _Optional[int] = ..., max_sessions: _Optional[int] = ..., max_running_requests: _Optional[int] = ..., max_queued_requests: _Optional[int] = ..., max_prompt_tokens: _Optional[int] = ..., max_stop_sequences: _Optional[int] = ..., max_stop_sequence_chars: _Optional[int] = ..., max_logit_bias_count: _Optional[int] = ..., max_top_logprobs: _Optional[int] = ..., default_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., tombstone_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., expiry_notice: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_pinned_bytes: _Optional[int] = ..., prefill_chunk_tokens: _Optional[int] = ..., block_tokens: _Optional[int] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Load(_message.Message):
    __slots__ = ("running_requests", "queued_requests", "kv_used_bytes", "kv_evictable_bytes", "kv_free_bytes", "sessions", "generated_tokens_per_second", "since_last_step", "draining", "prefilled_tokens", "generated_tokens", "time_to_first_token", "inter_token")
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    KV_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_EVICTABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    SINCE_LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    INTER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    running_requests: int
    queued_requests: int
    kv_used_bytes: int
    kv_evictable_bytes: int
    kv_free_bytes: int
    sessions: int
    generated_tokens_per_second: float
    since_last_step: _duration_pb2.Duration
    draining: bool
    prefilled_tokens: int
    generated_tokens: int
    time_to_first_token: Latency
    inter_token: Latency
    def __init__(self, running_requests: _Optional[int] = ..., queued_requests: _Optional[int] = ..., kv_used_bytes: _Optional[int] = ..., kv_evictable_bytes: _Optional[int] = ..., kv_free_bytes: _Optional[int] = ..., sessions: _Optional[int] = ..., generated_tokens_per_second: _Optional[float] = ..., since_last_step: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., draining: _Optional[bool] = ..., prefilled_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., time_to_first_token: _Optional[_Union[Latency, _Mapping]] = ..., inter_token: _Optional[_Union[Latency, _Mapping]] = ...) -> None: ...

class Latency(_message.Message):
    __slots__ = ("count", "total", "median", "p95")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_FIELD_NUMBER: _ClassVar[int]
    P95_FIELD_NUMBER: _ClassVar[int]
    count: int
    total: _duration_pb2.Duration
    median: _duration_pb2.Duration
    p95: _duration_pb2.Duration
    def __init__(self, count: _Optional[int] = ..., total: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., median: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., p95: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "chat", "add_special_tokens")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    text: str
    chat: _types_pb2.ChatTurn
    add_special_tokens: bool
    def __init__(self, text: _Optional[str] = ..., chat: _Optional[_Union[_types_pb2.ChatTurn, _Mapping]] = ..., add_special_tokens: _Optional[bool] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "pieces")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    pieces: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., pieces: _Optional[_Iterable[str]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("token_ids", "skip_special_tokens")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: _Optional[bool] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...
