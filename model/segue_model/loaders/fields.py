"""Typed reads out of a description somebody else wrote: config.json, params.json, GGUF metadata."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from segue_model.checkpoint import CheckpointError

MAX_INTEGER = 2**31 - 1  # sizes beyond this overflow 32-bit indices somewhere downstream
MAX_NUMBER = 1e12  # no rotary base or factor comes near
MAX_CONTEXT_TOKENS = 2**22  # the rotary table is built for the whole context: 4 Mi positions x 64 pairs are 2 GiB
MAX_JSON_BYTES = 64 * 1024**2  # a tokenizer.json of 250,000 tokens has about 35 MB


@dataclass(frozen=True, slots=True)
class Fields:
    """Named values of unknown type. Every read states type and range, or raises CheckpointError naming the field.

    A value of None counts as absent, as Hugging Face writes it.
    """

    values: Mapping[str, object]
    source: str  # for messages: the file, or file and section

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, default: int | None = None, *, low: int = 1, high: int = MAX_INTEGER) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(name, "an integer")
        if not low <= value <= high:
            raise self.wrong(name, f"within {low} and {high}")
        return value

    def number(self, name: str, default: float | None = None, *, above: float = 0.0) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "a number")
        if not above < value < MAX_NUMBER:  # NaN fails both
            raise self.wrong(name, f"a number above {above:g} and below {MAX_NUMBER:g}")
        return float(value)

    def boolean(self, name: str, default: bool | None = None) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def section(self, name: str) -> "Fields":
        """A nested object; empty when absent."""
        value = self.values.get(name)
        if value is None:
            return Fields({}, f"{self.source}: {name}")
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(value, f"{self.source}: {name}")

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id or a list of ids; empty when absent."""
        value = self.values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= MAX_INTEGER for i in ids):
            raise self.wrong(name, "a token id or a list of token ids")
        return tuple(ids)

    def refuse(self, name: str, *accepted: object) -> None:
        """Raise when the field is present with a value that would change the arithmetic and is not supported."""
        value = self.values.get(name)
        if value is not None and not any(type(value) is type(a) and value == a for a in accepted):
            listed = " or ".join(map(repr, accepted)) or "nothing"
            raise CheckpointError(f"{self.source}: {name} = {_short(value)} is not supported, only {listed}")

    def wrong(self, name: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {name} must be {expected}, got {_short(self.values.get(name))}")

    def _value(self, name: str, default: object) -> object:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self.source}: {name} is missing")
        return default


def read_json(path: Path) -> Fields:
    """A JSON object from a file. Raises CheckpointError when it is anything else."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return Fields(value, str(path))


def read_text(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: has {size} bytes, at most {MAX_JSON_BYTES} are read")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
