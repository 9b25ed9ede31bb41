"""Where KV lies that is not in the pool: canonical arrays in host memory, or in files, by key.

Which key lies where is decided elsewhere (the server's tiers); here are only the bytes, and the one thread that reads
and writes files so that nobody else has to wait for a disk. A file is the array's bytes and nothing else; shape, type
and checksum stay in memory, so that a file which was cut, changed or exchanged is found out when it is read.

Files hold conversations. They lie, 0600, in a directory of the process's own (0700) that goes with it; what a process
that was killed has left behind is removed by the next one that is given the same parent directory.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from segue_model.arrays import Floats
from segue_model.runner.base import Runner

log = logging.getLogger(__name__)

_PREFIX = "segue-kv-"
_LOCK = "lock"
MAX_WRITES = 8  # segments on their way to the disk before `to_disk` waits: memory beyond the host budget


def canonical_token_bytes(runner: Runner) -> int:
    """Bytes of one position in the runner's canonical layout."""
    config = runner.config
    element = runner.export_pages((), 0).itemsize
    return 2 * config.layers * config.kv_heads * config.head_dim * element


@dataclass(frozen=True, slots=True)
class _File:
    """What a file must hold."""

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype[np.floating]
    checksum: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """A segment that went between host memory and disk."""

    to_disk: bool
    size: int  # bytes
    seconds: float


@dataclass(slots=True)
class News:
    """What the disk's thread has done."""

    arrived: list[int] = field(default_factory=list)  # keys that have been read
    failed: list[int] = field(default_factory=list)  # keys whose file could not be written or read
    transfers: list[Transfer] = field(default_factory=list)


class KvDirectory:
    """A directory of this process's own below `parent`, or below the system's for temporary files."""

    def __init__(self, parent: Path | None) -> None:
        """Raises OSError when it cannot be made."""
        if parent is not None:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_leftovers(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_WRONLY, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_leftovers(parent: Path) -> None:
    """Directories whose process is gone: nobody holds their lock any more."""
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(path / _LOCK, os.O_WRONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


class KvStore:
    """Arrays by key. Called from one thread; `take_news` tells what the disk's thread has done meanwhile."""

    def __init__(self, directory: KvDirectory | None = None, *, on_news: Callable[[], None] = lambda: None) -> None:
        """Without a directory nothing can go to disk. `on_news` is called on the disk's thread."""
        self._directory = directory
        self.on_news = on_news
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-disk")
        self._lock = threading.Lock()  # over everything below
        self._host: dict[int, Floats] = {}  # an array leaves it when its file is whole
        self._files: dict[int, _File] = {}
        self._read: dict[int, Floats] = {}
        self._wanted: set[int] = set()  # to be read, or read
        self._known: set[int] = set()
        self._news = News()
        self._room = threading.BoundedSemaphore(MAX_WRITES)

    @property
    def has_directory(self) -> bool:
        return self._directory is not None

    def open_directory(self, directory: KvDirectory) -> None:
        """From now on there is a disk; the directory goes with the store."""
        self._directory = directory

    def put(self, key: int, kv: Floats) -> None:
        """Keep an array in host memory. It must not change any more."""
        with self._lock:
            self._known.add(key)
            self._host[key] = kv

    def to_disk(self, key: int) -> None:
        """Write an array to a file; it stays in memory until the file is whole. Waits while too many are on the way."""
        self._room.acquire()
        self._disk.submit(self._write, key)

    def read_ahead(self, key: int) -> None:
        """Begin to read a file; `take_news` tells when it is there."""
        with self._lock:
            self._wanted.add(key)
        self._disk.submit(self._read_file, key)

    def to_host(self, key: int) -> None:
        """Keep in memory what has been read of a file, and remove the file."""
        with self._lock:
            self._wanted.discard(key)
            kv, file = self._read.pop(key, None), self._files.pop(key, None)
            if kv is not None:
                self._host[key] = kv
        if file:
            file.path.unlink(missing_ok=True)

    def unread(self, key: int) -> None:
        """What was read of a file is not needed."""
        with self._lock:
            self._wanted.discard(key)
            self._read.pop(key, None)

    def get(self, key: int) -> Floats | None:
        """The array, if it is in memory: put and not yet written, or read. Not to be changed."""
        with self._lock:
            found = self._read.get(key)
            return self._host.get(key) if found is None else found

    def load(self, key: int) -> Floats | None:
        """The array, from its file if need be; None when that is damaged or gone. Waits for the disk."""
        found = self.get(key)
        return found if found is not None else self._disk.submit(self._load, key).result()

    def drop(self, key: int) -> None:
        """Forget an array and its file."""
        with self._lock:
            self._known.discard(key)
            self._wanted.discard(key)
            self._host.pop(key, None)
            self._read.pop(key, None)
            file = self._files.pop(key, None)
        if file:
            file.path.unlink(missing_ok=True)

    def take_news(self) -> News:
        """What has happened since the last call."""
        with self._lock:
            news, self._news = self._news, News()
        return news

    @property
    def host_bytes(self) -> int:
        """Bytes of arrays in memory, those on their way to or from the disk included."""
        with self._lock:
            return sum(kv.nbytes for held in (self._host, self._read) for kv in held.values())

    @property
    def disk_bytes(self) -> int:
        with self._lock:
            return sum(file.path.stat().st_size for file in self._files.values() if file.path.exists())

    def keys(self) -> set[int]:
        """Every key that has not been dropped, for integrity checks."""
        with self._lock:
            return set(self._known)

    def settle(self) -> None:
        """Wait until the disk's thread has done what it was told so far."""
        self._disk.submit(lambda: None).result()

    def close(self) -> None:
        """Forget everything; the directory goes with its files."""
        self._disk.shutdown(wait=True, cancel_futures=True)
        if self._directory:
            self._directory.close()

    # On the disk's thread

    def _write(self, key: int) -> None:
        try:
            with self._lock:
                kv = self._host.get(key)
            if kv is not None and self._directory:
                began = time.perf_counter()
                self._written(key, _write_file(self._directory.path / f"{key:016x}", kv))
                self._note(Transfer(True, kv.nbytes, time.perf_counter() - began))
        except OSError as error:
            log.warning("KV could not be written to disk: %s", error)
            self._fail(key)
        finally:
            self._room.release()

    def _written(self, key: int, file: _File) -> None:
        with self._lock:
            dropped = key not in self._known
            if not dropped:
                self._files[key] = file
            self._host.pop(key, None)
        if dropped:
            file.path.unlink(missing_ok=True)

    def _read_file(self, key: int) -> None:
        with self._lock:
            if key not in self._wanted:
                return
        kv = self._load(key)
        with self._lock:
            if kv is None or key not in self._wanted:
                return
            self._read[key] = kv
            self._news.arrived.append(key)
        self.on_news()

    def _load(self, key: int) -> Floats | None:
        with self._lock:
            kv, file = self._host.get(key), self._files.get(key)
        if kv is not None:
            return kv
        began = time.perf_counter()
        try:
            kv = _read_checked(file) if file else None
        except (OSError, ValueError) as error:
            if key in self.keys():  # else it has been dropped meanwhile
                log.warning("KV on disk is lost and will be computed again: %s", error)
        if kv is None:
            self._fail(key)
        else:
            self._note(Transfer(False, kv.nbytes, time.perf_counter() - began))
        return kv

    def _note(self, transfer: Transfer) -> None:
        with self._lock:
            self._news.transfers.append(transfer)

    def _fail(self, key: int) -> None:
        with self._lock:
            if key in self._known:
                self._news.failed.append(key)
        self.on_news()


def _write_file(path: Path, kv: Floats) -> _File:
    data = _bytes_of(kv)
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with os.fdopen(fd, "wb", buffering=0) as file:
            written = 0
            while written < len(data):
                written += file.write(data[written:])
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return _File(path, kv.shape, kv.dtype, zlib.crc32(data))


def _read_checked(file: _File) -> Floats:
    """Raises ValueError when the bytes are not those that were written."""
    kv: Floats = np.empty(file.shape, file.dtype)
    data = _bytes_of(kv)
    with file.path.open("rb", buffering=0) as source:
        read = 0
        while count := source.readinto(data[read:]):
            read += count
        if read != len(data) or source.read(1) or zlib.crc32(data) != file.checksum:
            raise ValueError(f"{file.path.name} does not hold what was written")
    return kv


def _bytes_of(kv: Floats) -> memoryview:
    return np.ascontiguousarray(kv).reshape(-1).view(np.uint8).data
