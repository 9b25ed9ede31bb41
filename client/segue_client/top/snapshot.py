"""A server at one moment, as plain data. Times in seconds, sizes in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from segue.v1 import cache_pb2, model_pb2
from segue.v1.generation_pb2 import Finished
from segue.v1.session_pb2 import Session as SessionInfo
from segue.v1.session_pb2 import SessionState, TurnSpan
from segue.v1.types_pb2 import CacheTier
from segue.v1.types_pb2 import FinishReason as Reason
from segue_client.events import Timings

CLASSES = ("active", "pinned", "idle", "prefix", "slack", "free")  # of a tier's bytes, as the admin port tells them
ROUGH_CLASSES = ("in use", "evictable", "free")  # as everybody may know them


@dataclass(frozen=True, slots=True)
class Server:
    """Who answers."""

    target: str
    model: str
    version: str
    build: str  # the runner
    uptime: float
    max_sessions: int
    max_running: int

    @classmethod
    def of(cls, target: str, model: model_pb2.ModelInfo, info: model_pb2.ServerInfo) -> Server:
        """From the answers of GetModelInfo and GetServerInfo."""
        limits, uptime = info.limits, _seconds(info.uptime)
        return cls(
            target, model.model_id, info.version, info.build, uptime, limits.max_sessions, limits.max_running_requests
        )


@dataclass(frozen=True, slots=True)
class Latency:
    """A latency as counters since the server's start, and its quantiles of the last few seconds."""

    count: int = 0
    total: float = 0.0
    median: float | None = None
    p95: float | None = None

    @classmethod
    def of(cls, told: model_pb2.Latency) -> Latency:
        """From GetLoad."""
        median = _seconds(told.median) if told.HasField("median") else None
        p95 = _seconds(told.p95) if told.HasField("p95") else None
        return cls(told.count, _seconds(told.total), median, p95)


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the server is; token counts are since its start."""

    running: int = 0
    queued: int = 0
    sessions: int = 0
    prefilled: int = 0
    generated: int = 0
    first_token: Latency = field(default_factory=Latency)
    inter_token: Latency = field(default_factory=Latency)
    silence: float = 0.0  # since the last step
    draining: bool = False

    @classmethod
    def of(cls, load: model_pb2.Load) -> Load:
        """From GetLoad."""
        return cls(
            running=load.running_requests,
            queued=load.queued_requests,
            sessions=load.sessions,
            prefilled=load.prefilled_tokens,
            generated=load.generated_tokens,
            first_token=Latency.of(load.time_to_first_token),
            inter_token=Latency.of(load.inter_token),
            silence=_seconds(load.since_last_step),
            draining=load.draining,
        )


@dataclass(frozen=True, slots=True)
class Tier:
    """Where KV can be: bytes by class, of CLASSES or ROUGH_CLASSES, in that order."""

    name: str
    capacity: int
    parts: Mapping[str, int]

    @property
    def held(self) -> int:
        """Bytes that are not free."""
        return self.capacity - self.parts["free"]

    @classmethod
    def of(cls, tier: cache_pb2.TierStats) -> Tier:
        """From GetCacheStats, of the admin port."""
        parts = {name: int(getattr(tier, f"{name}_bytes")) for name in CLASSES}
        return cls(_word(CacheTier.Name(tier.tier), "CACHE_TIER_"), tier.capacity_bytes, parts)

    @classmethod
    def rough(cls, load: model_pb2.Load, limits: model_pb2.Limits) -> Tier:
        """The device tier as GetLoad tells it."""
        sizes = (load.kv_used_bytes, load.kv_evictable_bytes, load.kv_free_bytes)
        return cls("device", limits.kv_budget_bytes, dict(zip(ROUGH_CLASSES, sizes, strict=True)))


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session."""

    session_id: str
    state: str
    position: int
    used: int
    shared: int
    tier: str
    idle: float | None  # since the end of its last turn; None while it has one
    ttl: float | None  # until it expires; None while it cannot
    cached: int = 0
    turns: int = 0
    pinned: bool = False
    name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, info: SessionInfo, now: float) -> SessionRow:
        """From ListSessions; `now` in Unix seconds, of this machine's clock."""
        busy = bool(info.active_request_id)
        last_used = _unix(info.last_used_time) if info.HasField("last_used_time") else None
        expires = _unix(info.expire_time) if info.HasField("expire_time") else None
        return cls(
            session_id=info.session_id,
            state=_word(SessionState.Name(info.state), "SESSION_STATE_"),
            position=info.position,
            used=info.cache.used_bytes,
            shared=info.cache.shared_bytes,
            tier=_word(CacheTier.Name(info.cache.tier), "CACHE_TIER_"),
            idle=None if busy or last_used is None else max(now - last_used, 0.0),
            ttl=None if busy or expires is None else max(expires - now, 0.0),
            cached=info.cache.cached_tokens,
            turns=info.turn_count,
            pinned=info.settings.pinned,
            name=info.display_name,
            labels=dict(info.labels),
        )


@dataclass(frozen=True, slots=True)
class TurnRow:
    """A turn in the ledger of its session."""

    turn: int
    request_id: str
    start: int
    generated_start: int
    end: int
    reason: str  # why it ended; empty while it is in flight
    timings: Timings | None = None  # None: in flight, or ended too long ago

    @property
    def prompt(self) -> int:
        """Tokens it appended."""
        return self.generated_start - self.start

    @property
    def generated(self) -> int:
        """Tokens it sampled."""
        return self.end - self.generated_start

    @classmethod
    def of(cls, span: TurnSpan, finished: Finished | None) -> TurnRow:
        """From ReadSessionTokens, and the turn's last event where the server still has it."""
        return cls(
            turn=span.turn,
            request_id=span.request_id,
            start=span.start_position,
            generated_start=span.generated_start_position,
            end=span.end_position,
            reason=_word(Reason.Name(span.finish_reason), "FINISH_REASON_") if span.finish_reason else "",
            timings=Timings.from_finished(finished) if finished else None,
        )


@dataclass(frozen=True, slots=True)
class SessionTurns:
    """A session and its turns, the first one first."""

    session: SessionRow
    turns: tuple[TurnRow, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All of it."""

    time: float  # of a clock that never goes back
    server: Server
    load: Load
    tiers: tuple[Tier, ...]
    sessions: tuple[SessionRow, ...]
    note: str = ""  # what could not be asked, and why


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def _unix(moment: Timestamp) -> float:
    return moment.seconds + moment.nanos / 1e9


def _word(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower()
