"""A session as a stream of bytes: what is in it, how it is written, and what is believed of one that comes in.

    header      shape of the KV, settings, turns, how many bytes follow
    payload     token ids, int32 little-endian, one per position; then KV in blocks of BLOCK_TOKENS positions, each
                canonical (2, layers, kv_heads, positions, head_dim) in the header's dtype, little-endian
    trailer     SHA-256 of the payload

A snapshot comes from a caller. Its header is held against the limits before a byte is taken, its bytes lie in a file
nobody else can open, and nothing of it is used before the checksum has matched.
"""

import asyncio
import contextlib
import hashlib
import sys
import tempfile
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from segue_model.arrays import BFLOAT16, Floats
from segue_server.errors import FieldInvalid, FieldViolation, SnapshotCorrupt, SnapshotIncompatible
from segue_server.ledger.records import Record, TokensAppended, TurnBegan, TurnEnded
from segue_server.requests import FinishReason, SessionSettings
from segue_server.sessions import TurnRecord
from segue_server.views import TurnSpan

FORMAT_VERSION = 1
BLOCK_TOKENS = 256
CHUNK_BYTES = 1 << 20
SPOOL_BYTES = 8 << 20  # of a snapshot that are kept in memory; the rest goes to a file
MAX_TURNS = 100_000
MAX_SHAPE = 1 << 16  # of layers, heads and head size: far beyond every model, far below what overflows
TOKEN_ID_BYTES = 4

_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": BFLOAT16, "float16": np.dtype(np.float16)}


@dataclass(frozen=True, slots=True)
class KvShape:
    """What KV looks like outside a runner's pages."""

    dtype: str
    layers: int
    kv_heads: int
    head_dim: int

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * _DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotHeader:
    """As in session.proto."""

    format_version: int
    model_fingerprint: str
    kv: KvShape
    position: int
    cached_tokens: int
    payload_bytes: int
    settings: SessionSettings
    turns: tuple[TurnSpan, ...]


@dataclass(frozen=True, slots=True)
class SnapshotTrailer:
    sha256: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportRequest:
    """The first message of an import."""

    session_id: str = ""
    request_id: str = ""
    header: SnapshotHeader
    recompute_on_mismatch: bool = False


SnapshotPart = SnapshotHeader | bytes | SnapshotTrailer
ReadBlock = Callable[[int], Awaitable[Floats]]  # positions from `start` on -> canonical KV of up to a block


# Out


async def write(header: SnapshotHeader, tokens: Sequence[int], block: ReadBlock) -> AsyncGenerator[SnapshotPart, None]:
    """The parts of a snapshot, in chunks of CHUNK_BYTES; one block is in memory at a time."""
    yield header
    digest = hashlib.sha256()
    async for chunk in _chunks(_pieces(header, tokens, block)):
        await asyncio.to_thread(digest.update, chunk)
        yield chunk
    yield SnapshotTrailer(digest.digest())


async def _pieces(header: SnapshotHeader, tokens: Sequence[int], block: ReadBlock) -> AsyncIterator[memoryview]:
    if tokens:
        yield memoryview(_little_endian(array("i", tokens)).tobytes())
    for start in range(0, header.cached_tokens, BLOCK_TOKENS):
        kv = await block(start)
        yield np.ascontiguousarray(kv).reshape(-1).view(np.uint8).data


async def _chunks(pieces: AsyncIterator[memoryview]) -> AsyncIterator[bytes]:
    held = bytearray()
    async for piece in pieces:
        for start in range(0, len(piece), CHUNK_BYTES):
            held += piece[start : start + CHUNK_BYTES]
            if len(held) >= CHUNK_BYTES:
                yield bytes(held[:CHUNK_BYTES])
                del held[:CHUNK_BYTES]
    if held:
        yield bytes(held)


# In


def check(header: SnapshotHeader, *, max_context_tokens: int) -> None:
    """Could this header belong to a snapshot? Raises FieldInvalid with everything that is wrong."""
    faults = [*_shape_faults(header, max_context_tokens), *_turn_faults(header)]
    if faults:
        raise FieldInvalid(faults)
    expected = header.position * TOKEN_ID_BYTES + header.cached_tokens * header.kv.token_bytes
    if header.payload_bytes != expected:
        text = f"position, cached_tokens and the shape make it {expected}, got {header.payload_bytes}"
        raise FieldInvalid.one("snapshot.payload_bytes", text)


def _shape_faults(header: SnapshotHeader, max_context_tokens: int) -> Iterator[FieldViolation]:
    limits = {
        "format_version": (header.format_version, FORMAT_VERSION, FORMAT_VERSION),
        "position": (header.position, 0, max_context_tokens),
        "cached_tokens": (header.cached_tokens, 0, header.position),
        "layer_count": (header.kv.layers, 1, MAX_SHAPE),
        "kv_head_count": (header.kv.kv_heads, 1, MAX_SHAPE),
        "head_dim": (header.kv.head_dim, 1, MAX_SHAPE),
    }
    for name, (value, low, high) in limits.items():
        if not low <= value <= high:
            yield FieldViolation(f"snapshot.{name}", f"must be in [{low}, {high}], got {value}")
    if header.kv.dtype not in _DTYPES:
        yield FieldViolation("snapshot.kv_dtype", f"must be one of {', '.join(_DTYPES)}, got {header.kv.dtype!r}")


def _turn_faults(header: SnapshotHeader) -> Iterator[FieldViolation]:
    if len(header.turns) > MAX_TURNS:
        yield FieldViolation("snapshot.turns", f"at most {MAX_TURNS}, got {len(header.turns)}")
        return
    before = 0
    for number, turn in enumerate(header.turns):
        if not before <= turn.start <= turn.generated_start <= turn.end <= header.position or turn.start == turn.end:
            yield FieldViolation(f"snapshot.turns[{number}]", "does not lie in the ledger behind the one before it")
            return
        before = turn.end


def mismatch(header: SnapshotHeader, *, fingerprint: str, kv: KvShape, kv_dtype: str) -> SnapshotIncompatible | None:
    """Why the KV of a snapshot is not this server's; None when it is. `kv_dtype`: of the pool."""
    differing = {
        "fingerprint": (header.model_fingerprint, fingerprint),
        "kvDtype": (header.settings.kv_dtype or header.kv.dtype, kv_dtype),
        "kvShape": (str(header.kv), str(kv)),
    }
    for name, (theirs, ours) in differing.items():
        if theirs != ours:
            return SnapshotIncompatible(
                f"the snapshot's {name} is {theirs}; this server's is {ours}", quota=None, **{name: ours}
            )
    return None


@dataclass(frozen=True, slots=True)
class Received:
    """A snapshot whose checksum has matched."""

    tokens: "array[int]"
    sha256: bytes
    kv: "KvFile | None"  # None: it holds none, or none that is wanted


class KvFile:
    """The KV of a snapshot, block by block."""

    def __init__(self, file: BinaryIO, header: SnapshotHeader) -> None:
        self._file = file
        self._header = header

    def blocks(self) -> Iterator[tuple[int, Floats]]:
        """(start, canonical KV). Raises FieldInvalid when it holds what no model computes."""
        header, shape = self._header, self._header.kv
        self._file.seek(header.position * TOKEN_ID_BYTES)
        for start in range(0, header.cached_tokens, BLOCK_TOKENS):
            tokens = min(BLOCK_TOKENS, header.cached_tokens - start)
            data = bytearray(self._file.read(tokens * shape.token_bytes))
            flat: Floats = np.frombuffer(data, _DTYPES[shape.dtype])
            kv = flat.reshape(2, shape.layers, shape.kv_heads, tokens, shape.head_dim)
            if not np.isfinite(kv).all():
                raise FieldInvalid.one("chunk", f"KV from position {start} on holds values that are not finite")
            yield start, kv


@contextlib.asynccontextmanager
async def receive(
    header: SnapshotHeader, parts: AsyncIterator[SnapshotPart | ImportRequest], *, vocab_size: int, keep_kv: bool
) -> AsyncIterator[Received]:
    """Take in the rest of a stream; what was taken is gone at the end of the block.

    Raises FieldInvalid for a stream that breaks the rules, SnapshotCorrupt for one that is cut or damaged.
    """
    wanted = header.payload_bytes if keep_kv else header.position * TOKEN_ID_BYTES
    with tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES) as spool:
        file: BinaryIO = spool  # type: ignore[assignment]  # it has what is used of one
        sha256 = await _take(header.payload_bytes, parts, file, wanted)
        file.seek(0)
        tokens = _tokens(file.read(header.position * TOKEN_ID_BYTES), vocab_size)
        kv = KvFile(file, header) if keep_kv and header.cached_tokens else None
        if kv is not None:
            await asyncio.to_thread(_walk, kv)
        yield Received(tokens, sha256, kv)


async def _take(size: int, parts: AsyncIterator[SnapshotPart | ImportRequest], file: BinaryIO, wanted: int) -> bytes:
    """Put the first `wanted` bytes of the payload into a file; returns the checksum of all of it, which matched."""
    digest = hashlib.sha256()
    taken = 0
    async for part in parts:
        match part:
            case bytes():
                taken += len(part)
                _check_chunk(part, taken, size)
                await asyncio.to_thread(digest.update, part)
                if left := wanted - file.tell():
                    await asyncio.to_thread(file.write, part[:left])
            case SnapshotTrailer(sha256):
                if taken != size or sha256 != digest.digest():
                    raise SnapshotCorrupt(f"{taken} of {size} bytes came, or the checksum differs; nothing was changed")
                await _expect_end(parts)
                return sha256
            case _:
                raise FieldInvalid.one("header", "must come once, as the first message")
    raise SnapshotCorrupt(f"the stream ended without a trailer, after {taken} of {size} bytes; nothing was changed")


def _check_chunk(chunk: bytes, taken: int, size: int) -> None:
    if not 0 < len(chunk) <= CHUNK_BYTES:
        raise FieldInvalid.one("chunk", f"must hold 1 to {CHUNK_BYTES} bytes, got {len(chunk)}")
    if taken > size:
        raise FieldInvalid.one("chunk", f"more bytes came than the header's payload_bytes, {size}")


async def _expect_end(parts: AsyncIterator[SnapshotPart | ImportRequest]) -> None:
    async for _ in parts:
        raise FieldInvalid.one("trailer", "must be the last message")


def _tokens(data: bytes, vocab_size: int) -> "array[int]":
    tokens = array("i")
    tokens.frombytes(data)
    tokens = _little_endian(tokens)
    for position, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            raise FieldInvalid.one(f"tokens[{position}]", f"must be in [0, {vocab_size}), got {token}")
    return tokens


def _walk(kv: KvFile) -> None:
    """Look at every block before any is used."""
    for _ in kv.blocks():
        pass


def _little_endian(ids: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


# What the ledger keeps of it


def records(session_id: str, tokens: Sequence[int], turns: Sequence[TurnRecord], now: float) -> Iterator[Record]:
    """The tokens and turns of a session that came in whole, as if they had happened one after another."""
    at = 0
    for turn in turns:
        if turn.start > at:
            yield TokensAppended(session_id, at, tokens[at : turn.start])
        yield TurnBegan(session_id, turn.request_id, turn.start, tokens[turn.start : turn.generated_start])
        if turn.end > turn.generated_start:
            yield TokensAppended(session_id, turn.generated_start, tokens[turn.generated_start : turn.end])
        yield TurnEnded(session_id, turn.end, turn.finish_reason, now)
        at = turn.end
    if len(tokens) > at:
        yield TokensAppended(session_id, at, tokens[at:])


def turns_of(header: SnapshotHeader) -> list[TurnRecord]:
    """A turn whose end the header does not know ended with an error."""
    return [
        TurnRecord(t.request_id, t.start, t.generated_start, t.end, t.finish_reason or FinishReason.ERROR)
        for t in header.turns
    ]
