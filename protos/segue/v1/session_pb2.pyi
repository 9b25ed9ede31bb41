import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import field_mask_pb2 as _field_mask_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from segue.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SESSION_STATE_UNSPECIFIED: _ClassVar[SessionState]
    SESSION_STATE_IDLE: _ClassVar[SessionState]
    SESSION_STATE_QUEUED: _ClassVar[SessionState]
    SESSION_STATE_RUNNING: _ClassVar[SessionState]
    SESSION_STATE_MOVING: _ClassVar[SessionState]
    SESSION_STATE_EXPIRED: _ClassVar[SessionState]

class SessionEventType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SESSION_EVENT_TYPE_UNSPECIFIED: _ClassVar[SessionEventType]
    SESSION_EVENT_TYPE_CREATED: _ClassVar[SessionEventType]
    SESSION_EVENT_TYPE_TURN_STARTED: _ClassVar[SessionEventType]
    SESSION_EVENT_TYPE_TURN_FINISHED: _ClassVar[SessionEventType]
    SESSION_EVENT_TYPE_CACHE_MOVED: _ClassVar[SessionEventType]
    SESSION_EVENT_TYPE_REWOUND: _ClassVar[SessionEventType]
    SESSION_EVENT_TYPE_EXPIRING: _ClassVar[SessionEventType]
    SESSION_EVENT_TYPE_EXPIRED: _ClassVar[SessionEventType]
    SESSION_EVENT_TYPE_DELETED: _ClassVar[SessionEventType]
SESSION_STATE_UNSPECIFIED: SessionState
SESSION_STATE_IDLE: SessionState
SESSION_STATE_QUEUED: SessionState
SESSION_STATE_RUNNING: SessionState
SESSION_STATE_MOVING: SessionState
SESSION_STATE_EXPIRED: SessionState
SESSION_EVENT_TYPE_UNSPECIFIED: SessionEventType
SESSION_EVENT_TYPE_CREATED: SessionEventType
SESSION_EVENT_TYPE_TURN_STARTED: SessionEventType
SESSION_EVENT_TYPE_TURN_FINISHED: SessionEventType
SESSION_EVENT_TYPE_CACHE_MOVED: SessionEventType
SESSION_EVENT_TYPE_REWOUND: SessionEventType
SESSION_EVENT_TYPE_EXPIRING: SessionEventType
SESSION_EVENT_TYPE_EXPIRED: SessionEventType
SESSION_EVENT_TYPE_DELETED: SessionEventType

class Session(_message.Message):
    __slots__ = ("session_id", "display_name", "labels", "state", "position", "etag", "turn_count", "active_request_id", "cache", "settings", "create_time", "last_used_time", "expire_time", "forked_from", "model_fingerprint")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    DISPLAY_NAME_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    TURN_COUNT_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    LAST_USED_TIME_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    FORKED_FROM_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    display_name: str
    labels: _containers.ScalarMap[str, str]
    state: SessionState
    position: int
    etag: str
    turn_count: int
    active_request_id: str
    cache: _types_pb2.CacheUsage
    settings: SessionSettings
    create_time: _timestamp_pb2.Timestamp
    last_used_time: _timestamp_pb2.Timestamp
    expire_time: _timestamp_pb2.Timestamp
    forked_from: ForkOrigin
    model_fingerprint: str
    def __init__(self, session_id: _Optional[str] = ..., display_name: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., state: _Optional[_Union[SessionState, str]] = ..., position: _Optional[int] = ..., etag: _Optional[str] = ..., turn_count: _Optional[int] = ..., active_request_id: _Optional[str] = ..., cache: _Optional[_Union[_types_pb2.CacheUsage, _Mapping]] = ..., settings: _Optional[_Union[SessionSettings, _Mapping]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., last_used_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., forked_from: _Optional[_Union[ForkOrigin, _Mapping]] = ..., model_fingerprint: _Optional[str] = ...) -> None: ...

class ForkOrigin(_message.Message):
    __slots__ = ("session_id", "position")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    position: int
    def __init__(self, session_id: _Optional[str] = ..., position: _Optional[int] = ...) -> None: ...

class SessionSettings(_message.Message):
    __slots__ = ("ttl", "max_context_tokens", "kv_dtype", "context_policy", "keep_tokens", "commit_policy", "priority", "pinned", "cache_salt", "default_sampling", "default_stop")
    TTL_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_POLICY_FIELD_NUMBER: _ClassVar[int]
    KEEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_POLICY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_STOP_FIELD_NUMBER: _ClassVar[int]
    ttl: _duration_pb2.Duration
    max_context_tokens: int
    kv_dtype: _types_pb2.KvDtype
    context_policy: _types_pb2.ContextPolicy
    keep_tokens: int
    commit_policy: _types_pb2.CommitPolicy
    priority: int
    pinned: bool
    cache_salt: str
    default_sampling: _types_pb2.SamplingParams
    default_stop: _types_pb2.StopConditions
    def __init__(self, ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_context_tokens: _Optional[int] = ..., kv_dtype: _Optional[_Union[_types_pb2.KvDtype, str]] = ..., context_policy: _Optional[_Union[_types_pb2.ContextPolicy, str]] = ..., keep_tokens: _Optional[int] = ..., commit_policy: _Optional[_Union[_types_pb2.CommitPolicy, str]] = ..., priority: _Optional[int] = ..., pinned: _Optional[bool] = ..., cache_salt: _Optional[str] = ..., default_sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., default_stop: _Optional[_Union[_types_pb2.StopConditions, _Mapping]] = ...) -> None: ...

class CreateSessionRequest(_message.Message):
    __slots__ = ("session_id", "request_id", "display_name", "labels", "settings", "token_ids", "text", "chat")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DISPLAY_NAME_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    request_id: str
    display_name: str
    labels: _containers.ScalarMap[str, str]
    settings: SessionSettings
    token_ids: _types_pb2.TokenIds
    text: str
    chat: _types_pb2.ChatTurn
    def __init__(self, session_id: _Optional[str] = ..., request_id: _Optional[str] = ..., display_name: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., settings: _Optional[_Union[SessionSettings, _Mapping]] = ..., token_ids: _Optional[_Union[_types_pb2.TokenIds, _Mapping]] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[_types_pb2.ChatTurn, _Mapping]] = ...) -> None: ...

class GetSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "states", "labels", "order_by")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    ORDER_BY_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    states: _containers.RepeatedScalarFieldContainer[SessionState]
    labels: _containers.ScalarMap[str, str]
    order_by: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., states: _Optional[_Iterable[_Union[SessionState, str]]] = ..., labels: _Optional[_Mapping[str, str]] = ..., order_by: _Optional[str] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions", "next_page_token")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[Session]
    next_page_token: str
    def __init__(self, sessions: _Optional[_Iterable[_Union[Session, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class UpdateSessionRequest(_message.Message):
    __slots__ = ("session", "update_mask")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    UPDATE_MASK_FIELD_NUMBER: _ClassVar[int]
    session: Session
    update_mask: _field_mask_pb2.FieldMask
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ..., update_mask: _Optional[_Union[_field_mask_pb2.FieldMask, _Mapping]] = ...) -> None: ...

class DeleteSessionRequest(_message.Message):
    __slots__ = ("session_id", "etag", "force", "allow_missing")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    ALLOW_MISSING_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    etag: str
    force: bool
    allow_missing: bool
    def __init__(self, session_id: _Optional[str] = ..., etag: _Optional[str] = ..., force: _Optional[bool] = ..., allow_missing: _Optional[bool] = ...) -> None: ...

class DeleteSessionResponse(_message.Message):
    __slots__ = ("freed_bytes",)
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    freed_bytes: int
    def __init__(self, freed_bytes: _Optional[int] = ...) -> None: ...

class ForkSessionRequest(_message.Message):
    __slots__ = ("session_id", "new_session_id", "request_id", "position", "settings", "count")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NEW_SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    new_session_id: str
    request_id: str
    position: int
    settings: SessionSettings
    count: int
    def __init__(self, session_id: _Optional[str] = ..., new_session_id: _Optional[str] = ..., request_id: _Optional[str] = ..., position: _Optional[int] = ..., settings: _Optional[_Union[SessionSettings, _Mapping]] = ..., count: _Optional[int] = ...) -> None: ...

class ForkSessionResponse(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[Session]
    def __init__(self, sessions: _Optional[_Iterable[_Union[Session, _Mapping]]] = ...) -> None: ...

class RewindSessionRequest(_message.Message):
    __slots__ = ("session_id", "etag", "position", "turn")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    etag: str
    position: int
    turn: int
    def __init__(self, session_id: _Optional[str] = ..., etag: _Optional[str] = ..., position: _Optional[int] = ..., turn: _Optional[int] = ...) -> None: ...

class ReadSessionTokensRequest(_message.Message):
    __slots__ = ("session_id", "start_position", "end_position", "return_text")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    START_POSITION_FIELD_NUMBER: _ClassVar[int]
    END_POSITION_FIELD_NUMBER: _ClassVar[int]
    RETURN_TEXT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    start_position: int
    end_position: int
    return_text: bool
    def __init__(self, session_id: _Optional[str] = ..., start_position: _Optional[int] = ..., end_position: _Optional[int] = ..., return_text: _Optional[bool] = ...) -> None: ...

class ReadSessionTokensResponse(_message.Message):
    __slots__ = ("start_position", "token_ids", "text", "turns")
    START_POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    start_position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    turns: _containers.RepeatedCompositeFieldContainer[TurnSpan]
    def __init__(self, start_position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., turns: _Optional[_Iterable[_Union[TurnSpan, _Mapping]]] = ...) -> None: ...

class TurnSpan(_message.Message):
    __slots__ = ("turn", "start_position", "generated_start_position", "end_position", "finish_reason", "request_id")
    TURN_FIELD_NUMBER: _ClassVar[int]
    START_POSITION_FIELD_NUMBER: _ClassVar[int]
    GENERATED_START_POSITION_FIELD_NUMBER: _ClassVar[int]
    END_POSITION_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    turn: int
    start_position: int
    generated_start_position: int
    end_position: int
    finish_reason: _types_pb2.FinishReason
    request_id: str
    def __init__(self, turn: _Optional[int] = ..., start_position: _Optional[int] = ..., generated_start_position: _Optional[int] = ..., end_position: _Optional[int] = ..., finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., request_id: _Optional[str] = ...) -> None: ...

class MoveSessionCacheRequest(_message.Message):
    __slots__ = ("session_id", "tier", "from_position")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    FROM_POSITION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    tier: _types_pb2.CacheTier
    from_position: int
    def __init__(self, session_id: _Optional[str] = ..., tier: _Optional[_Union[_types_pb2.CacheTier, str]] = ..., from_position: _Optional[int] = ...) -> None: ...

class ExportSessionRequest(_message.Message):
    __slots__ = ("session_id", "tokens_only", "etag")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_ONLY_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    tokens_only: bool
    etag: str
    def __init__(self, session_id: _Optional[str] = ..., tokens_only: _Optional[bool] = ..., etag: _Optional[str] = ...) -> None: ...

class SnapshotHeader(_message.Message):
    __slots__ = ("format_version", "model_fingerprint", "kv_dtype", "layer_count", "kv_head_count", "head_dim", "position", "cached_tokens", "payload_bytes", "settings", "turns")
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    KV_HEAD_COUNT_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    format_version: int
    model_fingerprint: str
    kv_dtype: _types_pb2.KvDtype
    layer_count: int
    kv_head_count: int
    head_dim: int
    position: int
    cached_tokens: int
    payload_bytes: int
    settings: SessionSettings
    turns: _containers.RepeatedCompositeFieldContainer[TurnSpan]
    def __init__(self, format_version: _Optional[int] = ..., model_fingerprint: _Optional[str] = ..., kv_dtype: _Optional[_Union[_types_pb2.KvDtype, str]] = ..., layer_count: _Optional[int] = ..., kv_head_count: _Optional[int] = ..., head_dim: _Optional[int] = ..., position: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., settings: _Optional[_Union[SessionSettings, _Mapping]] = ..., turns: _Optional[_Iterable[_Union[TurnSpan, _Mapping]]] = ...) -> None: ...

class SnapshotTrailer(_message.Message):
    __slots__ = ("sha256",)
    SHA256_FIELD_NUMBER: _ClassVar[int]
    sha256: bytes
    def __init__(self, sha256: _Optional[bytes] = ...) -> None: ...

class ExportSessionResponse(_message.Message):
    __slots__ = ("header", "chunk", "trailer")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    TRAILER_FIELD_NUMBER: _ClassVar[int]
    header: SnapshotHeader
    chunk: bytes
    trailer: SnapshotTrailer
    def __init__(self, header: _Optional[_Union[SnapshotHeader, _Mapping]] = ..., chunk: _Optional[bytes] = ..., trailer: _Optional[_Union[SnapshotTrailer, _Mapping]] = ...) -> None: ...

class ImportSessionHeader(_message.Message):
    __slots__ = ("session_id", "request_id", "snapshot", "recompute_on_mismatch")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_ON_MISMATCH_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    request_id: str
    snapshot: SnapshotHeader
    recompute_on_mismatch: bool
    def __init__(self, session_id: _Optional[str] = ..., request_id: _Optional[str] = ..., snapshot: _Optional[_Union[SnapshotHeader, _Mapping]] = ..., recompute_on_mismatch: _Optional[bool] = ...) -> None: ...

class ImportSessionRequest(_message.Message):
    __slots__ = ("header", "chunk", "trailer")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    TRAILER_FIELD_NUMBER: _ClassVar[int]
    header: ImportSessionHeader
    chunk: bytes
    trailer: SnapshotTrailer
    def __init__(self, header: _Optional[_Union[ImportSessionHeader, _Mapping]] = ..., chunk: _Optional[bytes] = ..., trailer: _Optional[_Union[SnapshotTrailer, _Mapping]] = ...) -> None: ...

class WatchSessionsRequest(_message.Message):
    __slots__ = ("session_id", "after_sequence")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    after_sequence: int
    def __init__(self, session_id: _Optional[str] = ..., after_sequence: _Optional[int] = ...) -> None: ...

class SessionEvent(_message.Message):
    __slots__ = ("sequence", "type", "time", "session", "reason")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    type: SessionEventType
    time: _timestamp_pb2.Timestamp
    session: Session
    reason: str
    def __init__(self, sequence: _Optional[int] = ..., type: _Optional[_Union[SessionEventType, str]] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., session: _Optional[_Union[Session, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...
