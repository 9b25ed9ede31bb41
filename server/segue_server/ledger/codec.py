"""Settings as JSON and tokens as bytes. Reading is strict: what does not fit raises ValueError, naming the place."""

import json
import sys
import types
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

from segue_server.requests import SessionSettings

ID_BYTES = 4
_CHECK_BYTES = 4


# Tokens: int32 little-endian, and a CRC-32 of them at the end, for SQLite itself does not notice a flipped bit.


def pack_ids(ids: Sequence[int]) -> bytes:
    """Raises OverflowError for an id beyond 31 bits."""
    raw = _native(array("i", ids)).tobytes()
    return raw + zlib.crc32(raw).to_bytes(_CHECK_BYTES, "little")


def unpack_ids(blob: bytes) -> "array[int]":
    """The ids of one row."""
    raw, check = blob[:-_CHECK_BYTES], blob[-_CHECK_BYTES:]
    if len(raw) % ID_BYTES or zlib.crc32(raw).to_bytes(_CHECK_BYTES, "little") != check:
        raise ValueError("tokens are damaged: the checksum differs")
    ids = array("i")
    ids.frombytes(raw)
    return _native(ids)


def count_ids(blob_bytes: int) -> int:
    """How many ids a row of so many bytes holds."""
    return (blob_bytes - _CHECK_BYTES) // ID_BYTES


def _native(ids: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


# Settings and labels. Unset fields are left out, so that a field that is added later reads as unset.


def settings_to_json(settings: SessionSettings) -> str:
    return _dump(_plain(settings))


def settings_from_json(text: str) -> SessionSettings:
    settings = _read(SessionSettings, json.loads(text), "settings")
    if not isinstance(settings, SessionSettings):
        raise ValueError("settings: must be an object")
    return settings


def labels_to_json(labels: Mapping[str, str]) -> str:
    return _dump(dict(labels))


def labels_from_json(text: str) -> dict[str, str]:
    labels = json.loads(text)
    if not isinstance(labels, dict):
        raise ValueError("labels: must be an object")
    return {key: _scalar(str, value, f"labels.{key}") for key, value in labels.items()}


def _dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _plain(value: object) -> object:
    """What JSON can say; a mapping becomes a list of pairs, since its keys may be integers."""
    match value:
        case Enum():
            return value.name
        case bool() | int() | float() | str():
            return value
        case tuple():
            return [_plain(item) for item in value]
        case Mapping():
            return [[_plain(key), _plain(item)] for key, item in value.items()]
        case _ if is_dataclass(value):
            given = ((item.name, getattr(value, item.name)) for item in fields(value))
            return {name: _plain(item) for name, item in given if item is not None}
    raise TypeError(f"a setting of type {type(value).__name__} cannot be stored")


def _read(kind: Any, value: object, where: str) -> Any:
    """`value` as the annotation `kind` wants it; the inverse of `_plain`."""
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(option for option in get_args(kind) if option is not types.NoneType)
    if is_dataclass(kind):
        return _read_dataclass(kind, value, where)
    if get_origin(kind) is tuple:
        return tuple(_read(get_args(kind)[0], item, where) for item in _list(value, where))
    if get_origin(kind) is Mapping:
        return dict(_read_pair(get_args(kind), pair, where) for pair in _list(value, where))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _read_enum(kind, value, where)
    return _scalar(kind, value, where)


def _read_dataclass(kind: Any, value: object, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: must be an object")
    hints = get_type_hints(kind)
    if unknown := sorted(set(value) - set(hints)):
        raise ValueError(f"{where}: unknown field {unknown[0]!r}")
    return kind(**{name: _read(hints[name], item, f"{where}.{name}") for name, item in value.items()})


def _read_pair(kinds: tuple[Any, ...], pair: object, where: str) -> tuple[Any, Any]:
    key, item = _list(pair, where, length=2)
    return _read(kinds[0], key, where), _read(kinds[1], item, where)


def _read_enum(kind: type[Enum], value: object, where: str) -> Enum:
    if not isinstance(value, str) or value not in kind.__members__:
        raise ValueError(f"{where}: must be one of {', '.join(kind.__members__)}, got {value!r}")
    return kind[value]


def _list(value: object, where: str, length: int | None = None) -> list[object]:
    if not isinstance(value, list) or (length is not None and len(value) != length):
        raise ValueError(f"{where}: must be a list" + (f" of {length}" if length else ""))
    return value


def _scalar(kind: Any, value: object, where: str) -> Any:
    if type(value) is not kind:  # a bool is no int here, and an int no float
        if kind is float and type(value) is int:
            return float(value)
        raise ValueError(f"{where}: must be {kind.__name__}, got {value!r}")
    return value
