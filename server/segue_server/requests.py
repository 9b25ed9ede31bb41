"""What callers ask for, in the server's own words: frozen, unset = None, merged field by field over defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Self

from segue_server.cache.segments import Tier


class CommitPolicy(Enum):
    """What happens to the ledger when a turn does not end by itself."""

    KEEP_PARTIAL = 1
    ROLLBACK = 2
    KEEP_PROMPT = 3


class ContextPolicy(Enum):
    """What happens when a session would pass its max_context_tokens."""

    REJECT = 1
    SLIDE = 2


class BusyPolicy(Enum):
    """What happens to a turn that finds another one in flight."""

    REJECT = 1
    QUEUE = 2
    REPLACE = 3


class FinishReason(Enum):
    """Why a turn ended; the values are those of the proto enum."""

    EOS = 1
    STOP_TOKEN = 2
    STOP_SEQUENCE = 3
    MAX_TOKENS = 4
    CONTEXT_FULL = 5
    TIME_LIMIT = 6
    CANCELLED = 7
    PREEMPTED = 8
    DRAINING = 9
    ERROR = 10

    @property
    def cut_short(self) -> bool:
        """Somebody ended the turn before its time: its caller, or the server that stops."""
        return self in (FinishReason.CANCELLED, FinishReason.DRAINING)


class CancelCause(Enum):
    """Who ended a turn before its time; values are metric labels."""

    RPC = "rpc"
    DISCONNECT = "disconnect"
    DEADLINE = "deadline"
    REPLACED = "replaced"
    DRAIN = "drain"
    SLOW_CLIENT = "slow_client"


class _Overlay:
    """Settings whose unset fields are taken from a default."""

    def over(self, default: Self) -> Self:
        """These settings, with every unset (None) field taken from `default`; groups of settings field by field."""
        merged = {}
        for item in fields(self):  # type: ignore[arg-type]
            value, below = getattr(self, item.name), getattr(default, item.name)
            if isinstance(value, _Overlay) and isinstance(below, _Overlay):
                merged[item.name] = value.over(below)
            elif value is not None:
                merged[item.name] = value
        return replace(default, **merged)  # type: ignore[type-var]


@dataclass(frozen=True, kw_only=True)
class SamplingParams(_Overlay):
    """As in types.proto; None = unset."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    penalty_last_tokens: int | None = None
    seed: int | None = None
    logit_bias: Mapping[int, float] | None = None


@dataclass(frozen=True, kw_only=True)
class StopConditions(_Overlay):
    """As in types.proto; None = unset."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_sequences: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None
    include_stop: bool | None = None
    time_limit: float | None = None  # seconds, from admission


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What the events of a turn carry. Durations in seconds."""

    return_text: bool = True
    return_token_ids: bool = True
    top_logprobs: int | None = None
    prompt_logprobs: bool = False
    max_tokens_per_event: int = 1
    max_event_delay: float = 0.0
    heartbeat_interval: float = 5.0  # 0 = none


@dataclass(frozen=True, kw_only=True)
class SessionSettings(_Overlay):
    """As in session.proto; None = unset, filled from the server's defaults when a session is created."""

    ttl: float | None = None  # seconds of idleness
    max_context_tokens: int | None = None
    kv_dtype: str | None = None  # "float32" or "bfloat16"
    context_policy: ContextPolicy | None = None
    keep_tokens: int | None = None
    commit_policy: CommitPolicy | None = None
    priority: int | None = None
    pinned: bool | None = None
    cache_salt: str | None = None
    default_sampling: SamplingParams = field(default_factory=SamplingParams)
    default_stop: StopConditions = field(default_factory=StopConditions)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ChatTurn:
    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool = True


@dataclass(frozen=True, slots=True)
class TextInput:
    text: str


@dataclass(frozen=True, slots=True)
class TokenInput:
    ids: tuple[int, ...]


Input = TokenInput | TextInput | ChatTurn | None  # None: continue from the last token of the ledger


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One turn, as GenerationService takes it."""

    session_id: str = ""  # "" = an ephemeral session, deleted at the end
    request_id: str = ""  # "" = the server assigns one
    expected_position: int | None = None
    input: Input = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: StopConditions = field(default_factory=StopConditions)
    output: OutputOptions = field(default_factory=OutputOptions)
    commit_policy: CommitPolicy | None = None
    priority: int | None = None
    queue_timeout: float | None = None  # seconds
    detach_grace: float = 0.0  # seconds
    busy_policy: BusyPolicy = BusyPolicy.REJECT
    bypass_prefix_cache: bool = False


@dataclass(frozen=True, kw_only=True)
class AppendRequest:
    """Tokens for the ledger, computed without sampling."""

    session_id: str
    request_id: str = ""
    expected_position: int | None = None
    input: Input = None
    output: OutputOptions = field(default_factory=OutputOptions)
    defer_compute: bool = False


@dataclass(frozen=True, kw_only=True)
class CreateSessionRequest:
    """A new session, with an optional prefix that is computed right away and counts as turn 0."""

    session_id: str = ""  # "" = the server assigns a UUID
    request_id: str = ""
    display_name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    settings: SessionSettings = field(default_factory=SessionSettings)
    prefix: Input = None


@dataclass(frozen=True, kw_only=True)
class ForkSessionRequest:
    """New sessions that share the beginning of one."""

    session_id: str
    new_session_id: str = ""  # with `count`, a prefix: "<id>-0", "<id>-1", ...
    request_id: str = ""
    position: int | None = None  # None = the whole ledger
    settings: SessionSettings = field(default_factory=SessionSettings)  # unset fields are taken over
    count: int | None = None  # None = one


@dataclass(frozen=True, kw_only=True)
class RewindSessionRequest:
    """Cut a ledger back, to a position or to the start of a turn; exactly one is given."""

    session_id: str
    etag: str = ""
    position: int | None = None
    turn: int | None = None  # -1 = the last one


@dataclass(frozen=True, kw_only=True)
class UpdateSessionRequest:
    """New values for the fields that `paths` names; the others are not looked at."""

    session_id: str
    paths: tuple[str, ...]  # of session.proto's Session, such as "settings.ttl"
    etag: str = ""
    display_name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    settings: SessionSettings = field(default_factory=SessionSettings)  # what is named and unset: the default again


@dataclass(frozen=True, kw_only=True)
class ReadTokensRequest:
    """A part of a ledger."""

    session_id: str
    start_position: int = 0
    end_position: int | None = None  # exclusive; None = the end
    return_text: bool = False


@dataclass(frozen=True, kw_only=True)
class WatchSessionsRequest:
    """Events of one session, or of all."""

    session_id: str = ""  # "" = all
    after_sequence: int | None = None  # None = from now on; 0 = from the first one on


@dataclass(frozen=True, kw_only=True)
class ScoreTokensRequest:
    """Tokens whose probability after a session's ledger is asked for."""

    session_id: str
    token_ids: tuple[int, ...]
    top_logprobs: int | None = None


@dataclass(frozen=True, kw_only=True)
class MoveCacheRequest:
    """Where the KV of a session shall be."""

    session_id: str
    tier: Tier
    from_position: int = 0  # only the KV from here on


@dataclass(frozen=True, kw_only=True)
class ListSessionsRequest:
    """A page of sessions."""

    page_size: int = 0  # 0 = 50
    page_token: str = ""
    states: tuple[str, ...] = ()  # SessionState names; () = all but EXPIRED
    labels: Mapping[str, str] = field(default_factory=dict)
    order_by: str = ""
