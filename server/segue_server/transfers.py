"""Sessions whose KV is being moved, written to a snapshot or taken from one: the part that runs on the event loop.

The engine does each portion between two steps, and what runs in the batch goes on meanwhile. The session itself is
MOVING: it takes no turn until the end.
"""

import asyncio
import contextlib
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from functools import partial

import numpy as np

from segue_model.arrays import Floats
from segue_server import snapshots
from segue_server.cache.segments import Tier
from segue_server.engine_thread import EngineThread
from segue_server.errors import SessionNotFound
from segue_server.kv_control import Guarded, KvControl, Progress
from segue_server.recording import created
from segue_server.served import ServedModel
from segue_server.sessions import Session
from segue_server.snapshots import BLOCK_TOKENS, FORMAT_VERSION, KvShape, Received, SnapshotHeader, SnapshotPart

SegmentReader = Callable[[int], Awaitable[Floats]]  # from its first position, a multiple of a segment
DISK_POLL = 0.002  # seconds between two looks for what is being read from disk


class Transfers:
    """One per server."""

    def __init__(self, engine: EngineThread, model: ServedModel) -> None:
        self._engine = engine
        self._model = model
        self._control = KvControl(engine.engine)
        self.shape = _shape_of(engine)

    @contextlib.contextmanager
    def moving(self, session: Session) -> Iterator[None]:
        """The session takes no turns; it has none."""
        ended = session.moving = asyncio.Event()
        try:
            yield
        finally:
            session.moving = None
            ended.set()

    async def move(self, session: Session, tier: Tier, start: int) -> None:
        """Bring the KV from `start` on into `tier`. Raises FeatureDisabled, KvBudget, SessionNotFound."""
        session_id = session.session_id
        portion = partial(self._control.move, session_id, tier, start)
        try:
            while (progress := await self._engine.call(portion)) is not Progress.DONE:
                if progress is Progress.WAIT:
                    await asyncio.sleep(DISK_POLL)
            if tier is Tier.DISK:
                await asyncio.to_thread(self._engine.engine.mover.store.settle)  # the files are whole
        finally:
            self._engine.post(partial(self._control.moved, session_id))

    # Out

    async def export(self, session: Session, *, tokens_only: bool) -> AsyncGenerator[SnapshotPart, None]:
        """The parts of a snapshot. What is read stays where it is until the iterator is closed."""
        tokens = list(self._engine.engine.tokens(session.session_id)[: session.position])
        async with self.guarded(session) as (guarded, segment):
            header = self._header(session, cached=0 if tokens_only else min(guarded.tokens, len(tokens)))
            written = snapshots.write(header, tokens, partial(_block, segment, header.cached_tokens))
            async with contextlib.aclosing(written) as parts:
                async for part in parts:
                    yield part

    @contextlib.asynccontextmanager
    async def guarded(self, session: Session) -> AsyncIterator[tuple[Guarded, SegmentReader]]:
        """What there is of a session's KV stays where it is, and can be read segment by segment."""
        guarded = await self._engine.call(partial(self._control.guard, session.session_id))
        try:
            yield guarded, partial(self._segment, guarded)
        finally:
            self._engine.post(partial(self._control.unguard, guarded))

    def _header(self, session: Session, *, cached: int) -> SnapshotHeader:
        return SnapshotHeader(
            format_version=FORMAT_VERSION,
            model_fingerprint=self._model.fingerprint,
            kv=self.shape,
            position=session.position,
            cached_tokens=cached,
            payload_bytes=session.position * snapshots.TOKEN_ID_BYTES + cached * self.shape.token_bytes,
            settings=session.settings,
            turns=session.spans(session.position),
        )

    async def _segment(self, guarded: Guarded, start: int) -> Floats:
        block = await self._engine.call(partial(self._control.read, guarded, start))
        kv = block.kv if block else None
        if block and kv is None and block.key is not None:
            kv = await asyncio.to_thread(self._engine.engine.mover.store.load, block.key)
        if block is None or kv is None or not block.tokens:
            session_id = guarded.sequence.session_id
            raise SessionNotFound(session_id, f"KV of session {session_id!r} was lost while it was read")
        return kv[:, :, :, : block.tokens]

    # In

    async def take_in(self, session: Session, received: Received, *, mismatch: bool) -> None:
        """Make the engine and the ledger know a session that has come in whole. Raises LedgerUnavailable."""
        settings, session_id = session.settings, session.session_id
        tokens = received.tokens
        opened = partial(
            self._engine.engine.restore,
            *(session_id, array("i", tokens)),
            priority=settings.priority or 0,
            pinned=bool(settings.pinned),
            salt=settings.cache_salt,
        )
        await self._engine.call(opened)
        private = received.kv is not None
        await self._engine.call(partial(self._control.arrived, session_id, private=private, mismatch=mismatch))
        if received.kv is not None:
            await self._take_kv(session_id, received.kv)
        history = snapshots.records(session_id, tokens, session.turns, session.last_used_time)
        await self._engine.record(created(session, self._model.fingerprint), *history)
        session.version += sum(turn.end > turn.start for turn in session.turns)  # as the ledger counts them

    async def _take_kv(self, session_id: str, kv: snapshots.KvFile) -> None:
        """A segment at a time; what finds no room is computed when it is needed."""
        blocks = kv.blocks()
        size = self._engine.engine.holdings.tiers.segment_tokens
        while (block := await asyncio.to_thread(next, blocks, None)) is not None:
            start, whole = block
            for offset in range(0, whole.shape[3], size):
                part = np.ascontiguousarray(whole[:, :, :, offset : offset + size])
                if not await self._engine.call(partial(self._control.adopt, session_id, start + offset, part)):
                    return


async def _block(segment: SegmentReader, cached: int, start: int) -> Floats:
    """Positions `start` .. `start + BLOCK_TOKENS - 1`, as far as there are so many."""
    parts: list[Floats] = []
    at, end = start, min(start + BLOCK_TOKENS, cached)
    while at < end:
        kv = await segment(at)
        parts.append(kv[:, :, :, : end - at])
        at += parts[-1].shape[3]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=3)


def _shape_of(engine: EngineThread) -> KvShape:
    runner = engine.engine.runner
    config = runner.config
    return KvShape(runner.export_pages((), 0).dtype.name, config.layers, config.kv_heads, config.head_dim)
