"""Segments of KV outside the pool, the tiers they lie in, and what can be ordered of their bytes. Integers only.

A segment is the KV of up to `segment_tokens` positions of a ledger, beginning at a multiple of that.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

from segue_server.cache.pages import PageId

SegmentKey = NewType("SegmentKey", int)


class Tier(Enum):
    """Where KV can be; the values are those of the proto enum."""

    DEVICE = 1
    HOST = 2
    DISK = 3
    NONE = 4


LOWER = (Tier.HOST, Tier.DISK)


@dataclass(slots=True, eq=False)
class Segment:
    """KV of positions `start` .. `start + tokens - 1`, for every owner."""

    key: SegmentKey
    start: int
    tokens: int
    size: int  # bytes
    tier: Tier
    owners: set[str] = field(default_factory=set)
    spare: bool = False  # its one owner has it in the pool too
    asked: bool = False  # of disk: it is being read ahead, or has been
    ready: bool = False  # of disk: it has been read ahead


@dataclass(slots=True)
class Slot:
    """What of a segment is valid for one owner: fewer positions than it holds after a rewind or a fork."""

    segment: Segment
    tokens: int

    @property
    def end(self) -> int:
        return self.segment.start + self.tokens


@dataclass(slots=True)
class TierUse:
    """One tier's account."""

    budget: int
    used: int = 0
    tokens: int = 0
    dropped: int = 0  # segments that fell out for want of room, since the start
    dropped_bytes: int = 0
    segments: "OrderedDict[SegmentKey, Segment]" = field(default_factory=OrderedDict)  # the first one goes first

    def add(self, segment: Segment) -> None:
        self.segments[segment.key] = segment
        self.used += segment.size
        self.tokens += segment.tokens

    def remove(self, segment: Segment) -> None:
        del self.segments[segment.key]
        self.used -= segment.size
        self.tokens -= segment.tokens


@dataclass(frozen=True, slots=True)
class Write:
    """Copy the first `tokens` positions of pages into host memory under `key`."""

    key: SegmentKey
    pages: Sequence[PageId]
    tokens: int


@dataclass(frozen=True, slots=True)
class Demote:
    """Move a segment from host memory to disk."""

    key: SegmentKey


@dataclass(frozen=True, slots=True)
class Promote:
    """Move a segment that has been read ahead from disk to host memory."""

    key: SegmentKey


@dataclass(frozen=True, slots=True)
class Read:
    """Begin to read a segment from disk, so that it is there when it is needed."""

    key: SegmentKey


@dataclass(frozen=True, slots=True)
class Unread:
    """What was read ahead is not needed after all; the file stays."""

    key: SegmentKey


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget a segment, wherever it is."""

    key: SegmentKey


Order = Write | Demote | Promote | Read | Unread | Drop
