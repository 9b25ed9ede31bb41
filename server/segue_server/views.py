"""What the service answers: snapshots that a transport can translate and nobody can change."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from segue_model.sampling import TokenLogprob
from segue_server.events import CacheUsage
from segue_server.requests import FinishReason, SamplingParams, SessionSettings


class SessionState(Enum):
    """The values are those of the proto enum."""

    IDLE = 1
    QUEUED = 2
    RUNNING = 3
    MOVING = 4
    EXPIRED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionView:
    """A session as it stands now. Times are Unix seconds."""

    session_id: str
    display_name: str
    labels: Mapping[str, str]
    state: SessionState
    position: int  # ledger length
    etag: str
    turn_count: int
    active_request_id: str  # "" = no turn in flight
    cache: CacheUsage
    settings: SessionSettings
    create_time: float
    last_used_time: float
    expire_time: float
    model_fingerprint: str
    forked_from: tuple[str, int] | None = None  # (session id, position)


@dataclass(frozen=True, slots=True)
class SessionPage:
    sessions: tuple[SessionView, ...]
    next_page_token: str  # "" = the last page


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSpan:
    """Where a turn lies in the ledger."""

    turn: int  # 0, 1, 2, ...
    request_id: str
    start: int
    generated_start: int
    end: int  # exclusive
    finish_reason: FinishReason | None  # None: it is in flight


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """A piece of a ledger; `turns` are in the last one."""

    start_position: int
    token_ids: tuple[int, ...]
    text: str = ""
    turns: tuple[TurnSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class Scores:
    """The logprobs of given tokens, of which the first would stand at `position`."""

    logprobs: tuple[TokenLogprob, ...]
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a turn would meet if it came now."""

    admissible: bool = False  # it would start without waiting
    refusal_reason: str = ""  # of the error it would get
    to_compute_tokens: int = 0
    needed_bytes: int = 0
    would_evict_bytes: int = 0
    time_to_first_token: float | None = None  # seconds; None: nothing has been measured yet


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """As in model.proto."""

    model_id: str
    fingerprint: str
    layer_count: int
    head_count: int
    kv_head_count: int
    head_dim: int
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    rope_theta: float
    weight_dtype: str
    weight_bytes: int
    parameter_count: int
    kv_bytes_per_token: int
    default_sampling: SamplingParams
    has_chat_template: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """As in model.proto. Durations in seconds."""

    kv_budget_bytes: int
    max_sessions: int
    max_running_requests: int
    max_queued_requests: int
    max_prompt_tokens: int
    max_stop_sequences: int
    max_stop_sequence_chars: int
    max_logit_bias_count: int
    max_top_logprobs: int
    default_ttl: float
    max_ttl: float
    tombstone_ttl: float
    expiry_notice: float
    max_pinned_bytes: int
    prefill_chunk_tokens: int
    block_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    version: str
    build: str
    capabilities: tuple[str, ...]
    limits: Limits
    uptime: float  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """As in model.proto. Times in seconds."""

    count: int
    total: float
    median: float | None
    p95: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """As in model.proto."""

    running_requests: int
    queued_requests: int
    kv_used_bytes: int
    kv_evictable_bytes: int
    kv_free_bytes: int
    sessions: int
    generated_tokens_per_second: float
    since_last_step: float  # seconds
    draining: bool
    prefilled_tokens: int
    generated_tokens: int
    time_to_first_token: Latency
    inter_token: Latency
