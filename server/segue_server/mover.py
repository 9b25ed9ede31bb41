"""Moves the bytes of KV between the pool, host memory and disk, as the tiers' integers say. Engine thread only."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from segue_model.arrays import Floats
from segue_model.paging import PAGE_TOKENS
from segue_model.runner.base import Runner
from segue_model.runner.kv_store import KvDirectory, KvStore, canonical_token_bytes
from segue_server import restoring
from segue_server.cache.segments import Demote, Drop, Order, Promote, Read, SegmentKey, Unread, Write
from segue_server.cache.tiers import Tiers
from segue_server.plan import Restore
from segue_server.sequence import Sequence
from segue_server.stats import EngineStats

log = logging.getLogger(__name__)

SEGMENT_TOKENS = 256  # 12 MB of a 135M model in float32: copied in the time of one or two decode steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """What lies below the pool. Sizes in bytes, 0 = no such tier; watermarks as shares of the pool."""

    host_bytes: int = 0
    disk_bytes: int = 0
    disk_dir: Path | None = None  # None: a directory for temporary files
    high_watermark: float = 0.9
    low_watermark: float = 0.8
    segment_tokens: int = SEGMENT_TOKENS

    def tiers(self, runner: Runner) -> Tiers:
        return Tiers(
            segment_tokens=self.segment_tokens,
            token_bytes=canonical_token_bytes(runner),
            host_bytes=self.host_bytes,
            disk_bytes=self.disk_bytes,
        )

    def store(self) -> KvStore:
        """Raises OSError when the directory cannot be made."""
        return KvStore(KvDirectory(self.disk_dir) if self.disk_bytes else None)


@dataclass(frozen=True, slots=True)
class Block:
    """Up to a segment of KV."""

    kv: Floats | None  # canonical, not to be changed; None: it is in the file of `key`
    key: SegmentKey | None
    tokens: int


class KvMover:
    """Carries out what the tiers have decided, and tells them what has become of it."""

    def __init__(self, runner: Runner, tiers: Tiers, store: KvStore, stats: EngineStats, disk_dir: Path | None) -> None:
        self._disk_dir = disk_dir
        self._runner = runner
        self._tiers = tiers
        self.store = store
        self._stats = stats

    def take_news(self) -> None:
        """Hear what the disk has done."""
        news = self.store.take_news()
        for key in news.arrived:
            self._tiers.arrived(SegmentKey(key))
        for key in news.failed:
            self._tiers.lost(SegmentKey(key))
        for transfer in news.transfers:
            tiers = ("host", "disk") if transfer.to_disk else ("disk", "host")
            self._stats.moved(*tiers, size=transfer.size, seconds=transfer.seconds)

    def carry_out(self) -> bool:
        """Everything that has been ordered. To be called before a page is written. False: there was nothing."""
        orders = self._tiers.take_orders()
        for order in orders:
            self._carry_out(order)
        return bool(orders)

    def _carry_out(self, order: Order) -> None:
        match order:
            case Write(key, pages, tokens):
                began = time.perf_counter()
                kv = self._runner.export_pages(pages, tokens)
                self.store.put(key, kv)
                self._stats.moved("device", "host", size=kv.nbytes, seconds=time.perf_counter() - began)
            case Demote(key):
                self.store.to_disk(key)
            case Promote(key):
                self.store.to_host(key)
            case Read(key):
                self.store.read_ahead(key)
            case Unread(key):
                self.store.unread(key)
            case Drop(key):
                self.store.drop(key)

    def restore(self, restores: list[Restore]) -> None:
        """Bring planned segments back into their pages. What is damaged is forgotten, and will be computed."""
        for restore in restores:
            if self.store.get(restore.key) is None and self._tiers.is_on_disk(restore.key):
                restoring.postpone(restore)  # it had to make room for another one in this very step
                continue
            found = self.bring(restore.sequence, restore.start, restore.count, restore.key, restore.offset)
            restoring.settle(self._tiers, restore, found=found)

    def bring(self, sequence: Sequence, start: int, count: int, key: SegmentKey, offset: int) -> bool:
        """Write `count` positions, from `offset` of a segment on, into a sequence's pages. False: they are damaged."""
        kv = self.store.get(key)
        if kv is None:
            return False
        began = time.perf_counter()
        part = kv[:, :, :, offset : offset + count]
        try:
            self._runner.import_pages(sequence.cache.pages[start // PAGE_TOKENS :], part)
        except ValueError as error:
            log.warning("KV of session %s cannot be restored and is computed again: %s", sequence.session_id, error)
            return False
        size = count * self._tiers.token_bytes
        self._stats.moved("host", "device", size=size, seconds=time.perf_counter() - began)
        return True

    def block(self, sequence: Sequence, start: int) -> Block | None:
        """KV of up to a segment from `start` on, a multiple of it, wherever it is; None: there is none."""
        cache = sequence.cache
        slot = self._tiers.slots.at(sequence.session_id, start)
        tokens = min(self._tiers.segment_tokens, cache.computed - start)
        if tokens > 0 and (slot is None or slot.tokens <= tokens):
            return Block(self._runner.export_pages(cache.pages[start // PAGE_TOKENS :], tokens), None, tokens)
        if slot is None:
            return None
        return Block(self.store.get(slot.segment.key), slot.segment.key, slot.tokens)

    def open_disk(self) -> None:
        """Have a directory for files, if there is none yet. Raises OSError."""
        if not self.store.has_directory:
            self.store.open_directory(KvDirectory(self._disk_dir))

    def close(self) -> None:
        self.store.close()
