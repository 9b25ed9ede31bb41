"""What runs a tokenizer.json: the machine of the `tokenizers` library.

The library reads all of it from one text. Vocabulary and merges of BPE are most of that text, and of the time that a
start waits for it, so they are handed over as they are.
"""

import json
from typing import cast

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from segue_model.tokenizer.errors import TokenizerError
from segue_model.tokenizer.json_types import Json, as_list, as_object, as_text

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_OPTIONS = (
    *("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"),
    *("fuse_unk", "byte_fallback", "ignore_merges"),
)


def build(definition: dict[str, Json], model: dict[str, Json], added: list[dict[str, Json]]) -> Backend:
    """A machine for `definition` with this model and these added tokens. Raises TokenizerError."""
    try:
        if model.get("type") == "BPE":
            return _around_bpe(definition, _bpe(model), added)
        return _from_json(definition | {"model": model, "added_tokens": list[Json](added)})
    except TokenizerError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"the tokenizer definition was refused: {error}") from error


def _from_json(definition: dict[str, Json]) -> Backend:
    return Backend.from_str(json.dumps(definition, ensure_ascii=False))


def _around_bpe(definition: dict[str, Json], model: BPE, added: list[dict[str, Json]]) -> Backend:
    empty: Json = {"type": "BPE", "vocab": {}, "merges": []}
    backend = _from_json(definition | {"model": empty, "added_tokens": []})
    backend.model = model
    backend.add_tokens(list(map(added_token, added)))
    return backend


def added_token(entry: dict[str, Json]) -> AddedToken:
    """An entry of `added_tokens` as the library's own; its id is that of the vocabulary."""
    text = as_text(entry.get("content"), "added_tokens: content")
    return AddedToken(text, **{flag: entry[flag] for flag in _FLAGS if flag in entry})


def _bpe(model: dict[str, Json]) -> BPE:
    vocab = as_object(model.get("vocab"), "model.vocab")
    merges = [
        tuple(merge.split(" ") if isinstance(merge, str) else as_list(merge, "model.merges"))
        for merge in as_list(model.get("merges"), "model.merges")
    ]
    options = {option: model[option] for option in _OPTIONS if model.get(option) is not None}
    # The library looks at each of them.
    return BPE(vocab=cast("dict[str, int]", vocab), merges=cast("list[tuple[str, str]]", merges), **options)
