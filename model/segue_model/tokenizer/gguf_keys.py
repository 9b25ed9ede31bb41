"""Checked reading of the `tokenizer.ggml.*` keys of a GGUF file."""

from collections.abc import Mapping
from enum import IntEnum

from segue_model.tokenizer.errors import TokenizerError

PREFIX = "tokenizer.ggml."


class TokenKind(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class GgufKeys:
    """Each reader raises TokenizerError that names the key and what was found."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata

    def text(self, name: str, default: str | None = None) -> str:
        value = self._metadata.get(PREFIX + name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "a string", value)
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._metadata.get(PREFIX + name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "a bool", value)
        return value

    def token_id(self, name: str, size: int) -> int | None:
        value = self._metadata.get(PREFIX + name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < size:
            raise TokenizerError(
                f"{PREFIX}{name} must be an id below {size}, the length of {PREFIX}tokens; got {value!r}"
            )
        return value

    def texts(self, name: str) -> list[str]:
        values = self._list(name)
        texts = [value for value in values if isinstance(value, str)]
        if len(texts) < len(values):
            i, bad = next((i, value) for i, value in enumerate(values) if not isinstance(value, str))
            raise self._wrong(f"{name}[{i}]", "a string", bad)
        return texts

    def scores(self, size: int) -> list[float]:
        values = self._list_of("scores", size)
        for i, value in enumerate(values):
            if not isinstance(value, (int, float)) or value != value:
                raise self._wrong(f"scores[{i}]", "a number", value)
        return [float(value) for value in values if isinstance(value, (int, float))]

    def kinds(self, size: int) -> list[TokenKind]:
        if PREFIX + "token_type" not in self._metadata:
            return [TokenKind.NORMAL] * size
        known = {kind.value: kind for kind in TokenKind}
        values = self._list_of("token_type", size)
        kinds = [known[value] for value in values if isinstance(value, int) and value in known]
        if len(kinds) < len(values):
            i, bad = next((i, v) for i, v in enumerate(values) if not isinstance(v, int) or v not in known)
            raise self._wrong(f"token_type[{i}]", f"one of {sorted(known)}", bad)
        return kinds

    def _list_of(self, name: str, size: int) -> list[object]:
        values = self._list(name)
        if len(values) != size:
            raise TokenizerError(f"{PREFIX}{name} has {len(values)} entries, {PREFIX}tokens has {size}")
        return values

    def _list(self, name: str) -> list[object]:
        value = self._metadata.get(PREFIX + name)
        if not isinstance(value, (list, tuple)):
            raise self._wrong(name, "a list", value)
        return list(value)

    @staticmethod
    def _wrong(name: str, wanted: str, value: object) -> TokenizerError:
        found = "is missing" if value is None else f"must be {wanted}, got {type(value).__name__} {value!r:.80}"
        return TokenizerError(f"{PREFIX}{name} {found}")
