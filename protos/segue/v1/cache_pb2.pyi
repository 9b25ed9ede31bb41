import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from segue.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetCacheStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TierStats(_message.Message):
    __slots__ = ("tier", "capacity_bytes", "active_bytes", "pinned_bytes", "idle_bytes", "prefix_bytes", "slack_bytes", "free_bytes")
    TIER_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    IDLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLACK_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    tier: _types_pb2.CacheTier
    capacity_bytes: int
    active_bytes: int
    pinned_bytes: int
    idle_bytes: int
    prefix_bytes: int
    slack_bytes: int
    free_bytes: int
    def __init__(self, tier: _Optional[_Union[_types_pb2.CacheTier, str]] = ..., capacity_bytes: _Optional[int] = ..., active_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., idle_bytes: _Optional[int] = ..., prefix_bytes: _Optional[int] = ..., slack_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ...) -> None: ...

class CacheStats(_message.Message):
    __slots__ = ("tiers", "evictions", "evicted_tokens", "recomputed_tokens", "prefix_query_tokens", "prefix_hit_tokens")
    TIERS_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedCompositeFieldContainer[TierStats]
    evictions: int
    evicted_tokens: int
    recomputed_tokens: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    def __init__(self, tiers: _Optional[_Iterable[_Union[TierStats, _Mapping]]] = ..., evictions: _Optional[int] = ..., evicted_tokens: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., prefix_query_tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ...) -> None: ...

class ListCacheEntriesRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "tier")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    tier: _types_pb2.CacheTier
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., tier: _Optional[_Union[_types_pb2.CacheTier, str]] = ...) -> None: ...

class CacheEntry(_message.Message):
    __slots__ = ("entry_id", "session_ids", "start_position", "tokens", "size_bytes", "reference_count", "priority", "last_used_time", "estimated_rebuild", "protection")
    ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    START_POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_COUNT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    LAST_USED_TIME_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_REBUILD_FIELD_NUMBER: _ClassVar[int]
    PROTECTION_FIELD_NUMBER: _ClassVar[int]
    entry_id: str
    session_ids: _containers.RepeatedScalarFieldContainer[str]
    start_position: int
    tokens: int
    size_bytes: int
    reference_count: int
    priority: int
    last_used_time: _timestamp_pb2.Timestamp
    estimated_rebuild: _duration_pb2.Duration
    protection: str
    def __init__(self, entry_id: _Optional[str] = ..., session_ids: _Optional[_Iterable[str]] = ..., start_position: _Optional[int] = ..., tokens: _Optional[int] = ..., size_bytes: _Optional[int] = ..., reference_count: _Optional[int] = ..., priority: _Optional[int] = ..., last_used_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., estimated_rebuild: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., protection: _Optional[str] = ...) -> None: ...

class ListCacheEntriesResponse(_message.Message):
    __slots__ = ("entries", "next_page_token")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[CacheEntry]
    next_page_token: str
    def __init__(self, entries: _Optional[_Iterable[_Union[CacheEntry, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ("idle_sessions", "prefixes", "cache_salt")
    IDLE_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    idle_sessions: bool
    prefixes: bool
    cache_salt: str
    def __init__(self, idle_sessions: _Optional[bool] = ..., prefixes: _Optional[bool] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("freed_bytes", "sessions")
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    freed_bytes: int
    sessions: int
    def __init__(self, freed_bytes: _Optional[int] = ..., sessions: _Optional[int] = ...) -> None: ...

class SetCacheBudgetRequest(_message.Message):
    __slots__ = ("tier", "capacity_bytes")
    TIER_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    tier: _types_pb2.CacheTier
    capacity_bytes: int
    def __init__(self, tier: _Optional[_Union[_types_pb2.CacheTier, str]] = ..., capacity_bytes: _Optional[int] = ...) -> None: ...

class VerifyCacheRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class VerifyCacheResponse(_message.Message):
    __slots__ = ("compared_tokens", "max_abs_difference", "bit_equal", "argmax_equal")
    COMPARED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_ABS_DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    BIT_EQUAL_FIELD_NUMBER: _ClassVar[int]
    ARGMAX_EQUAL_FIELD_NUMBER: _ClassVar[int]
    compared_tokens: int
    max_abs_difference: float
    bit_equal: bool
    argmax_equal: bool
    def __init__(self, compared_tokens: _Optional[int] = ..., max_abs_difference: _Optional[float] = ..., bit_equal: _Optional[bool] = ..., argmax_equal: _Optional[bool] = ...) -> None: ...

class SubscribeCacheEventsRequest(_message.Message):
    __slots__ = ("after_sequence", "include_snapshot")
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    after_sequence: int
    include_snapshot: bool
    def __init__(self, after_sequence: _Optional[int] = ..., include_snapshot: _Optional[bool] = ...) -> None: ...

class CacheEventBatch(_message.Message):
    __slots__ = ("sequence", "time", "events")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    time: _timestamp_pb2.Timestamp
    events: _containers.RepeatedCompositeFieldContainer[CacheEvent]
    def __init__(self, sequence: _Optional[int] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., events: _Optional[_Iterable[_Union[CacheEvent, _Mapping]]] = ...) -> None: ...

class CacheEvent(_message.Message):
    __slots__ = ("stored", "removed", "cleared")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    stored: BlocksStored
    removed: BlocksRemoved
    cleared: AllBlocksCleared
    def __init__(self, stored: _Optional[_Union[BlocksStored, _Mapping]] = ..., removed: _Optional[_Union[BlocksRemoved, _Mapping]] = ..., cleared: _Optional[_Union[AllBlocksCleared, _Mapping]] = ...) -> None: ...

class BlocksStored(_message.Message):
    __slots__ = ("block_hashes", "parent_block_hash", "token_ids", "block_tokens", "tier", "cache_salt")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    PARENT_BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    parent_block_hash: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    block_tokens: int
    tier: _types_pb2.CacheTier
    cache_salt: str
    def __init__(self, block_hashes: _Optional[_Iterable[int]] = ..., parent_block_hash: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., block_tokens: _Optional[int] = ..., tier: _Optional[_Union[_types_pb2.CacheTier, str]] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class BlocksRemoved(_message.Message):
    __slots__ = ("block_hashes", "tier")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    tier: _types_pb2.CacheTier
    def __init__(self, block_hashes: _Optional[_Iterable[int]] = ..., tier: _Optional[_Union[_types_pb2.CacheTier, str]] = ...) -> None: ...

class AllBlocksCleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grace",)
    GRACE_FIELD_NUMBER: _ClassVar[int]
    grace: _duration_pb2.Duration
    def __init__(self, grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("running_requests",)
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    running_requests: int
    def __init__(self, running_requests: _Optional[int] = ...) -> None: ...
