"""The GGUF container, read as if it were hostile: every count, length and offset is checked against the file's size.

Format: ggml-org/ggml, docs/gguf.md, versions 2 and 3, little-endian. GGUFReader of the package `gguf` trusts the
header, so it is read here. Tensor data stays in the mapped file.
"""

import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from segue_model.checkpoint import CheckpointError
from segue_model.loaders.block_types import BlockType

MAX_ARRAY: Final = 2**24  # elements of one metadata array; the largest vocabularies have under 2**19
MAX_NAME_BYTES: Final = 2**16  # the specification's limit for keys
MAX_DIMS: Final = 4
DEFAULT_ALIGNMENT: Final = 32

_STRING, _ARRAY = 8, 9  # enum gguf_metadata_value_type; the others are numbers of fixed size
_SCALARS: Final = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies. `shape` is in torch order (rows first), GGUF stores it reversed."""

    name: str
    quant: BlockType
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the data section
    num_bytes: int

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.quant.values * self.quant.size


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A checked header over a mapped file."""

    path: Path
    metadata: dict[str, object]  # int, float, bool, str, or a list of one of them
    tensors: dict[str, TensorInfo]
    data: mmap.mmap
    data_start: int

    def rows(self, name: str) -> npt.NDArray[np.uint8]:
        """A tensor's bytes as stored, (rows, bytes of a row): a read-only view into the mapped file."""
        info = self.tensors[name]
        flat = np.frombuffer(self.data, np.uint8, info.num_bytes, self.data_start + info.offset)
        return flat.reshape(-1, info.row_bytes)


def read_gguf(path: Path) -> GgufFile:
    """Map a file and check its header. Raises CheckpointError for everything that is not a sound GGUF file."""
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    cursor = _Cursor(data, path)
    tensor_count, key_count = _read_preamble(cursor)
    metadata = _read_metadata(cursor, key_count)
    alignment = _alignment(metadata, path)
    tensors = _read_tensor_infos(cursor, tensor_count, alignment)
    data_start = -(-cursor.position // alignment) * alignment
    _check_extents(tensors.values(), len(data) - data_start, path)
    return GgufFile(path, metadata, tensors, data, data_start)


class _Cursor:
    """Reads forward and never past the end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.position = data, path, 0

    def fail(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {problem} (header, byte {self.position})")

    def take(self, size: int, what: str) -> bytes:
        if size > len(self.data) - self.position:
            left = len(self.data) - self.position
            raise self.fail(f"{what} needs {size} bytes, {left} are left: the file is truncated or damaged")
        self.position += size
        return self.data[self.position - size : self.position]

    def scalar(self, code: str, what: str) -> int | float | bool:
        value: int | float | bool = struct.unpack(code, self.take(struct.calcsize(code), what))[0]
        return value

    def u32(self, what: str) -> int:
        return int(self.scalar("<I", what))

    def u64(self, what: str) -> int:
        return int(self.scalar("<Q", what))

    def string(self, what: str, limit: int | None = None) -> str:
        size = self.u64(f"the length of {what}")
        if limit is not None and size > limit:
            raise self.fail(f"{what} has {size} bytes, at most {limit} are allowed")
        try:
            return self.take(size, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8") from error

    def strings(self, count: int, what: str) -> list[object]:
        """`string`, many times: a vocabulary has 100,000 of them, and the start of a server waits for it."""
        data, size_of, position = self.data, struct.Struct("<Q").unpack_from, self.position
        found: list[object] = []
        try:
            for _ in range(count):
                start = position + 8
                (size,) = size_of(data, position)
                position = start + size
                if position > len(data):
                    break
                found.append(data[start:position].decode("utf-8"))
                self.position = position
        except (struct.error, UnicodeDecodeError):
            pass  # read again below, where the error is told
        found += [self.string(what) for _ in range(count - len(found))]
        return found


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    """Magic and version; returns (tensor count, key count), not yet trusted."""
    if cursor.take(4, "the magic") != b"GGUF":
        raise CheckpointError(f"{cursor.path}: is not a GGUF file, its first bytes are {cursor.data[:4]!r}")
    version = cursor.u32("the version")
    if version & 0xFFFF == 0:
        raise CheckpointError(f"{cursor.path}: is a big-endian GGUF file, only little-endian files are supported")
    if version not in (2, 3):
        raise CheckpointError(f"{cursor.path}: has GGUF version {version}, versions 2 and 3 are supported")
    return cursor.u64("the tensor count"), cursor.u64("the key count")


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, object]:
    metadata: dict[str, object] = {}
    for _ in range(count):
        key = cursor.string("a key", MAX_NAME_BYTES)
        if key in metadata:
            raise cursor.fail(f"key {key} occurs twice")
        metadata[key] = _read_value(cursor, _value_type(cursor, key), key)
    return metadata


def _value_type(cursor: _Cursor, key: str) -> int:
    code = cursor.u32(f"the type of {key}")
    if code not in (_STRING, _ARRAY, *_SCALARS):
        raise cursor.fail(f"{key} has unknown value type {code}")
    return code


def _read_value(cursor: _Cursor, kind: int, key: str) -> object:
    if kind == _STRING:
        return cursor.string(key)
    if kind == _ARRAY:
        return _read_array(cursor, key)
    return cursor.scalar(_SCALARS[kind], key)


def _read_array(cursor: _Cursor, key: str) -> list[object]:
    kind = _value_type(cursor, key)
    count = cursor.u64(f"the length of {key}")
    if count > MAX_ARRAY:
        raise cursor.fail(f"{key} has {count} elements, at most {MAX_ARRAY} are read")
    if kind == _ARRAY:
        raise cursor.fail(f"{key} is an array of arrays, which is not supported")
    if kind == _STRING:
        return cursor.strings(count, key)
    code = np.dtype(_SCALARS[kind])
    values: list[object] = np.frombuffer(cursor.take(count * code.itemsize, key), code).tolist()
    return values


def _alignment(metadata: dict[str, object], path: Path) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or not 0 < value <= 2**20 or value & (value - 1):
        raise CheckpointError(f"{path}: general.alignment must be a power of two up to 2**20, got {value!r}")
    return value


def _read_tensor_infos(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for _ in range(count):
        info = _read_tensor_info(cursor, alignment)
        if info.name in tensors:
            raise cursor.fail(f"tensor {info.name} occurs twice")
        tensors[info.name] = info
    return tensors


def _read_tensor_info(cursor: _Cursor, alignment: int) -> TensorInfo:
    name = cursor.string("a tensor name", MAX_NAME_BYTES)
    rank = cursor.u32(f"the rank of {name}")
    if not 1 <= rank <= MAX_DIMS:
        raise cursor.fail(f"tensor {name} has {rank} dimensions, 1 to {MAX_DIMS} are allowed")
    shape = tuple(reversed([cursor.u64(f"a dimension of {name}") for _ in range(rank)]))
    quant = _quant_type(cursor, name)
    offset = cursor.u64(f"the offset of {name}")
    elements = _product(shape)
    if elements < 1 or shape[-1] % quant.values:
        found = f"tensor {name} has shape {shape}"
        raise cursor.fail(f"{found}: no whole rows of {quant.name} blocks ({quant.values} values)")
    if offset % alignment:
        raise cursor.fail(f"tensor {name} starts at offset {offset}, no multiple of the alignment {alignment}")
    return TensorInfo(name, quant, shape, offset, elements // quant.values * quant.size)


def _quant_type(cursor: _Cursor, name: str) -> BlockType:
    code = cursor.u32(f"the type of {name}")
    try:
        return BlockType(code)
    except ValueError as error:
        raise cursor.fail(f"tensor {name} has unknown block type {code}") from error


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:  # Python integers: no overflow, unlike numpy's
        product *= size
    return product


def _check_extents(tensors: Iterable[TensorInfo], data_bytes: int, path: Path) -> None:
    """Inside the file, and no byte used twice: a small file must not describe a large model."""
    end, previous = 0, ""
    for info in sorted(tensors, key=lambda info: info.offset):
        if info.offset < end:
            raise CheckpointError(f"{path}: tensors {previous} and {info.name} overlap")
        end, previous = info.offset + info.num_bytes, info.name
        if end > data_bytes:
            raise CheckpointError(
                f"{path}: tensor {info.name} ends at byte {end} of the data section, which has {data_bytes} bytes: "
                "the file is truncated or damaged"
            )
