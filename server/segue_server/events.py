"""What a turn reports while it runs.

Grammar: Queued? (Started (Prefill | Heartbeat)* (Tokens | Heartbeat)*)? (Finished | Failed).
"""

from dataclasses import dataclass, field, replace

from segue_model.sampling import TokenLogprob
from segue_server.cache.segments import Tier
from segue_server.errors import SegueError
from segue_server.requests import FinishReason


@dataclass(frozen=True, slots=True)
class Usage:
    """Where the tokens of a turn came from.

    context + prompt = computed + session_reused + prefix_reused + restored, counted when the turn was admitted.
    """

    context_tokens: int = 0  # ledger length before the turn
    prompt_tokens: int = 0  # appended by the request
    generated_tokens: int = 0  # sampled, EOS included
    computed_tokens: int = 0  # positions run through prefill
    session_reused_tokens: int = 0
    prefix_reused_tokens: int = 0
    restored_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds, from the arrival of the RPC on."""

    queue: float = 0.0
    restore: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    time_to_first_token: float | None = None  # None: no token came
    max_inter_token: float = 0.0


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """KV of one session: bytes with tokens in them, bytes taken, and positions covered."""

    used_bytes: int = 0
    reserved_bytes: int = 0
    shared_bytes: int = 0
    cached_tokens: int = 0
    estimated_rebuild: float = 0.0  # seconds
    kv_dtype: str = ""
    tier: Tier = Tier.NONE  # where the KV is, the lowest one when it is split


@dataclass(frozen=True, slots=True)
class Queued:
    queue_position: int  # 0 = next


@dataclass(frozen=True, slots=True)
class Started:
    request_id: str
    session_id: str
    position: int  # ledger length before this turn
    prompt_tokens: int
    to_compute_tokens: int
    restored_from: Tier  # where its KV was, the lowest tier of it; NONE: dropped, and computed again
    seed: int


@dataclass(frozen=True, slots=True)
class Prefill:
    processed_tokens: int
    total_tokens: int
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Tokens:
    position: int  # of the first token here
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Heartbeat:
    elapsed: float


@dataclass(frozen=True, slots=True)
class Finished:
    finish_reason: FinishReason
    position: int  # ledger length after commit or rollback
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    cache: CacheUsage = field(default_factory=CacheUsage)
    matched_token_id: int | None = None
    matched_text: str | None = None
    ledger_overhang_tokens: int = 0
    dropped_tokens: int = 0
    etag: str = ""  # the engine knows none; the service fills it in

    def with_etag(self, etag: str) -> "Finished":
        return replace(self, etag=etag)


@dataclass(frozen=True, slots=True)
class Failed:
    """The turn ended with an error instead of Finished; the ledger stands at `position`."""

    error: SegueError
    position: int
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)


Event = Queued | Started | Prefill | Tokens | Heartbeat | Finished | Failed
