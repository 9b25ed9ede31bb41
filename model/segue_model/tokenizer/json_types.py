"""What `json.loads` can return, and checked ways into it."""

from typing import TypeAlias

from segue_model.tokenizer.errors import TokenizerError

Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"


def as_object(value: Json, key: str) -> dict[str, Json]:
    """`value` as a JSON object; TokenizerError that names `key` when it is not one."""
    if not isinstance(value, dict):
        raise TokenizerError(f"{key} must be an object, got {type(value).__name__}")
    return value


def as_list(value: Json, key: str) -> list[Json]:
    """`value` as a JSON list; TokenizerError that names `key` when it is not one."""
    if not isinstance(value, list):
        raise TokenizerError(f"{key} must be a list, got {type(value).__name__}")
    return value


def as_text(value: Json, key: str) -> str:
    """`value` as a string; TokenizerError that names `key` when it is not one."""
    if not isinstance(value, str):
        raise TokenizerError(f"{key} must be a string, got {type(value).__name__}")
    return value


def as_id(value: Json, key: str) -> int:
    """`value` as a token id; TokenizerError that names `key` when it is not one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TokenizerError(f"{key} must be a token id, got {value!r}")
    return value
