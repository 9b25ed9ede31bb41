"""tokenizer.json and tokenizer_config.json."""

import json
from dataclasses import dataclass
from pathlib import Path

from segue_model.tokenizer.errors import TokenizerError
from segue_model.tokenizer.json_types import Json, as_id, as_list, as_object, as_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """A tokenizer.json, read or made up, and what lies beside it."""

    json: dict[str, Json]
    bos_token_id: int | None
    eos_token_id: int | None
    adds_bos: bool | None  # None: as the tokenizer.json's post-processor does, and so for EOS
    adds_eos: bool = False
    vocab_size: int = 0  # at least so many ids, where the highest ones name no token


def added_token(token_id: int, text: str, *, special: bool) -> dict[str, Json]:
    """An `added_tokens` entry that matches `text` exactly."""
    flags: dict[str, Json] = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": text, **flags, "special": special}


def read_files(path: Path) -> Definition:
    """The definition at `path`. Raises TokenizerError, naming the file and the entry."""
    definition = _read_object(path)
    config_path = path.with_name("tokenizer_config.json")
    config = _read_object(config_path) if config_path.is_file() else {}
    bos, eos = (_named_token(definition, config, f"{name}_token") for name in ("bos", "eos"))
    # transformers: one of the two flags is enough to overrule the post-processor for both.
    explicit = "add_bos_token" in config or "add_eos_token" in config
    return Definition(
        json=_with_special(definition, [named for named in (bos, eos) if named]),
        bos_token_id=bos and bos[0],
        eos_token_id=eos and eos[0],
        adds_bos=config.get("add_bos_token") is True if explicit else None,
        adds_eos=config.get("add_eos_token") is True,
    )


def _read_object(path: Path) -> dict[str, Json]:
    try:
        value: Json = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path.name} cannot be read: {error}") from error
    return as_object(value, path.name)


def _named_token(definition: dict[str, Json], config: dict[str, Json], key: str) -> tuple[int, str] | None:
    """(id, text) of a token that tokenizer_config.json names by its text, or by an object with its text."""
    value = config.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    if value is None:
        return None
    text = as_text(value, f"tokenizer_config.json {key}")
    for entry in _entries(definition):
        if entry.get("content") == text:
            return as_id(entry.get("id"), f"added_tokens id of {text!r}"), text
    vocab = as_object(as_object(definition.get("model"), "model").get("vocab"), "model.vocab")
    if text not in vocab:
        raise TokenizerError(f"tokenizer_config.json {key} names {text!r}, which is not in the vocabulary")
    return as_id(vocab[text], f"model.vocab[{text!r}]"), text


def _entries(definition: dict[str, Json]) -> list[dict[str, Json]]:
    entries = as_list(definition.get("added_tokens") or [], "added_tokens")
    return [as_object(entry, f"added_tokens[{i}]") for i, entry in enumerate(entries)]


def _with_special(definition: dict[str, Json], tokens: list[tuple[int, str]]) -> dict[str, Json]:
    """The definition in which `tokens` are special added tokens, whether it says so or not."""
    texts = {text for _, text in tokens}
    entries = [e | {"special": True} if e.get("content") in texts else e for e in _entries(definition)]
    known = {entry.get("content") for entry in entries}
    missing = {token_id: text for token_id, text in tokens if text not in known}
    entries += [added_token(token_id, text, special=True) for token_id, text in missing.items()]
    return definition | {"added_tokens": list[Json](entries)}
