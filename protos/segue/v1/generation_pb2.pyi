import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from segue.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BusyPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BUSY_POLICY_UNSPECIFIED: _ClassVar[BusyPolicy]
    BUSY_POLICY_REJECT: _ClassVar[BusyPolicy]
    BUSY_POLICY_QUEUE: _ClassVar[BusyPolicy]
    BUSY_POLICY_REPLACE: _ClassVar[BusyPolicy]
BUSY_POLICY_UNSPECIFIED: BusyPolicy
BUSY_POLICY_REJECT: BusyPolicy
BUSY_POLICY_QUEUE: BusyPolicy
BUSY_POLICY_REPLACE: BusyPolicy

class GenerateRequest(_message.Message):
    __slots__ = ("session_id", "request_id", "expected_position", "token_ids", "text", "chat", "sampling", "stop", "output", "commit_policy", "priority", "queue_timeout", "detach_grace", "busy_policy", "bypass_prefix_cache")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    COMMIT_POLICY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    DETACH_GRACE_FIELD_NUMBER: _ClassVar[int]
    BUSY_POLICY_FIELD_NUMBER: _ClassVar[int]
    BYPASS_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    request_id: str
    expected_position: int
    token_ids: _types_pb2.TokenIds
    text: str
    chat: _types_pb2.ChatTurn
    sampling: _types_pb2.SamplingParams
    stop: _types_pb2.StopConditions
    output: _types_pb2.OutputOptions
    commit_policy: _types_pb2.CommitPolicy
    priority: int
    queue_timeout: _duration_pb2.Duration
    detach_grace: _duration_pb2.Duration
    busy_policy: BusyPolicy
    bypass_prefix_cache: bool
    def __init__(self, session_id: _Optional[str] = ..., request_id: _Optional[str] = ..., expected_position: _Optional[int] = ..., token_ids: _Optional[_Union[_types_pb2.TokenIds, _Mapping]] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[_types_pb2.ChatTurn, _Mapping]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., stop: _Optional[_Union[_types_pb2.StopConditions, _Mapping]] = ..., output: _Optional[_Union[_types_pb2.OutputOptions, _Mapping]] = ..., commit_policy: _Optional[_Union[_types_pb2.CommitPolicy, str]] = ..., priority: _Optional[int] = ..., queue_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., detach_grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., busy_policy: _Optional[_Union[BusyPolicy, str]] = ..., bypass_prefix_cache: _Optional[bool] = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("sequence", "queued", "started", "prefill", "tokens", "heartbeat", "finished")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    queued: Queued
    started: Started
    prefill: PrefillProgress
    tokens: Tokens
    heartbeat: Heartbeat
    finished: Finished
    def __init__(self, sequence: _Optional[int] = ..., queued: _Optional[_Union[Queued, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., prefill: _Optional[_Union[PrefillProgress, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class Queued(_message.Message):
    __slots__ = ("queue_position", "estimated_wait")
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_WAIT_FIELD_NUMBER: _ClassVar[int]
    queue_position: int
    estimated_wait: _duration_pb2.Duration
    def __init__(self, queue_position: _Optional[int] = ..., estimated_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("request_id", "session_id", "position", "prompt_tokens", "to_compute_tokens", "restored_from", "seed")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TO_COMPUTE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FROM_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    session_id: str
    position: int
    prompt_tokens: int
    to_compute_tokens: int
    restored_from: _types_pb2.CacheTier
    seed: int
    def __init__(self, request_id: _Optional[str] = ..., session_id: _Optional[str] = ..., position: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., to_compute_tokens: _Optional[int] = ..., restored_from: _Optional[_Union[_types_pb2.CacheTier, str]] = ..., seed: _Optional[int] = ...) -> None: ...

class PrefillProgress(_message.Message):
    __slots__ = ("processed_tokens", "total_tokens", "prompt_logprobs")
    PROCESSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    processed_tokens: int
    total_tokens: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprob]
    def __init__(self, processed_tokens: _Optional[int] = ..., total_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("position", "token_ids", "text", "logprobs")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprob]
    def __init__(self, position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("elapsed",)
    ELAPSED_FIELD_NUMBER: _ClassVar[int]
    elapsed: _duration_pb2.Duration
    def __init__(self, elapsed: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("finish_reason", "matched_stop", "usage", "timings", "position", "etag", "ledger_overhang_tokens", "dropped_tokens", "cache")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    LEDGER_OVERHANG_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    finish_reason: _types_pb2.FinishReason
    matched_stop: _types_pb2.MatchedStop
    usage: _types_pb2.Usage
    timings: _types_pb2.Timings
    position: int
    etag: str
    ledger_overhang_tokens: int
    dropped_tokens: int
    cache: _types_pb2.CacheUsage
    def __init__(self, finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., matched_stop: _Optional[_Union[_types_pb2.MatchedStop, _Mapping]] = ..., usage: _Optional[_Union[_types_pb2.Usage, _Mapping]] = ..., timings: _Optional[_Union[_types_pb2.Timings, _Mapping]] = ..., position: _Optional[int] = ..., etag: _Optional[str] = ..., ledger_overhang_tokens: _Optional[int] = ..., dropped_tokens: _Optional[int] = ..., cache: _Optional[_Union[_types_pb2.CacheUsage, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "session_id", "token_ids", "text", "logprobs", "prompt_logprobs", "finished")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    session_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprob]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprob]
    finished: Finished
    def __init__(self, request_id: _Optional[str] = ..., session_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprob, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprob, _Mapping]]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class AttachGenerationRequest(_message.Message):
    __slots__ = ("request_id", "after_sequence")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    after_sequence: int
    def __init__(self, request_id: _Optional[str] = ..., after_sequence: _Optional[int] = ...) -> None: ...

class CancelGenerationRequest(_message.Message):
    __slots__ = ("request_id", "session_id", "commit_policy")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    COMMIT_POLICY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    session_id: str
    commit_policy: _types_pb2.CommitPolicy
    def __init__(self, request_id: _Optional[str] = ..., session_id: _Optional[str] = ..., commit_policy: _Optional[_Union[_types_pb2.CommitPolicy, str]] = ...) -> None: ...

class CancelGenerationResponse(_message.Message):
    __slots__ = ("was_running", "finished")
    WAS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    was_running: bool
    finished: Finished
    def __init__(self, was_running: _Optional[bool] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class AppendContextRequest(_message.Message):
    __slots__ = ("session_id", "request_id", "expected_position", "token_ids", "text", "chat", "output", "defer_compute")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    DEFER_COMPUTE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    request_id: str
    expected_position: int
    token_ids: _types_pb2.TokenIds
    text: str
    chat: _types_pb2.ChatTurn
    output: _types_pb2.OutputOptions
    defer_compute: bool
    def __init__(self, session_id: _Optional[str] = ..., request_id: _Optional[str] = ..., expected_position: _Optional[int] = ..., token_ids: _Optional[_Union[_types_pb2.TokenIds, _Mapping]] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[_types_pb2.ChatTurn, _Mapping]] = ..., output: _Optional[_Union[_types_pb2.OutputOptions, _Mapping]] = ..., defer_compute: _Optional[bool] = ...) -> None: ...

class ScoreTokensRequest(_message.Message):
    __slots__ = ("session_id", "token_ids", "top_logprobs")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: int
    def __init__(self, session_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[int] = ...) -> None: ...

class ScoreTokensResponse(_message.Message):
    __slots__ = ("logprobs", "position")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprob]
    position: int
    def __init__(self, logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprob, _Mapping]]] = ..., position: _Optional[int] = ...) -> None: ...

class EstimateGenerationResponse(_message.Message):
    __slots__ = ("admissible", "refusal_reason", "to_compute_tokens", "needed_bytes", "would_evict_bytes", "estimated_time_to_first_token")
    ADMISSIBLE_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_REASON_FIELD_NUMBER: _ClassVar[int]
    TO_COMPUTE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEEDED_BYTES_FIELD_NUMBER: _ClassVar[int]
    WOULD_EVICT_BYTES_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    admissible: bool
    refusal_reason: str
    to_compute_tokens: int
    needed_bytes: int
    would_evict_bytes: int
    estimated_time_to_first_token: _duration_pb2.Duration
    def __init__(self, admissible: _Optional[bool] = ..., refusal_reason: _Optional[str] = ..., to_compute_tokens: _Optional[int] = ..., needed_bytes: _Optional[int] = ..., would_evict_bytes: _Optional[int] = ..., estimated_time_to_first_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
