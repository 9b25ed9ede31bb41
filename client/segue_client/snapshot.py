"""A session in a file: the messages of ExportSession, each behind its length, so that ImportSession takes them as is.

The file holds the conversation in the clear. `private` makes one that its owner alone can read, and that is there
whole or not at all.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from google.protobuf.message import DecodeError

from segue.v1.session_pb2 import ExportSessionResponse, ImportSessionHeader, ImportSessionRequest
from segue_client.errors import SnapshotCorrupt

MAGIC = b"segue snapshot 1\n"
MAX_MESSAGE_BYTES = 4 << 20  # what a gRPC channel takes
_LENGTH = struct.Struct("<I")


def begin(file: BinaryIO) -> None:
    """Writes what tells a snapshot from other files."""
    file.write(MAGIC)


def write(file: BinaryIO, message: ExportSessionResponse) -> None:
    """Appends one message."""
    data = message.SerializeToString()
    file.write(_LENGTH.pack(len(data)) + data)


def read(file: BinaryIO) -> Iterator[ExportSessionResponse]:
    """The messages of a snapshot.

    Raises:
        SnapshotCorrupt: this is no snapshot, or only a part of one.
    """
    if file.read(len(MAGIC)) != MAGIC:
        raise SnapshotCorrupt("this is not a snapshot of a session")
    while prefix := file.read(_LENGTH.size):
        size = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else MAX_MESSAGE_BYTES + 1
        data = file.read(size) if size <= MAX_MESSAGE_BYTES else b""
        if len(data) != size:
            raise SnapshotCorrupt("the snapshot is cut or damaged")
        try:
            yield ExportSessionResponse.FromString(data)
        except DecodeError:
            raise SnapshotCorrupt("the snapshot is damaged") from None


class Upload:
    """The messages of an import. gRPC asks for them on a thread of its own; what goes wrong there waits in `error`."""

    def __init__(self, file: BinaryIO, session_id: str, request_id: str, recompute_on_mismatch: bool) -> None:
        self._parts = read(file)
        first = next(self._parts, None)
        if first is None or first.WhichOneof("part") != "header":
            raise SnapshotCorrupt("the snapshot has no header")
        header = ImportSessionHeader(
            session_id=session_id,
            request_id=request_id,
            snapshot=first.header,
            recompute_on_mismatch=recompute_on_mismatch,
        )
        self._first: ImportSessionRequest | None = ImportSessionRequest(header=header)
        self.error: SnapshotCorrupt | None = None

    def __iter__(self) -> Iterator[ImportSessionRequest]:
        return self

    def __next__(self) -> ImportSessionRequest:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        try:
            part = next(self._parts)
        except SnapshotCorrupt as error:
            self.error = error
            raise StopIteration from None  # the server misses the trailer, and changes nothing
        if part.WhichOneof("part") == "chunk":
            return ImportSessionRequest(chunk=part.chunk)
        return ImportSessionRequest(trailer=part.trailer)


@contextmanager
def private(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file of mode 0600 that takes the name `path` when the block ends well, and is removed when it does not."""
    target = Path(path)
    fd, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)  # mode 0600
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
