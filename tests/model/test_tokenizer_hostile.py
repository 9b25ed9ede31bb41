"""Damaged and hostile vocabularies: one TokenizerError that names the key."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from segue_model.tokenizer import Tokenizer, TokenizerError

Keys: TypeAlias = dict[str, object]


def gguf_bytelevel() -> Keys:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["<s>", "a", "b", "c", "ab", "abc", "<tool>", "pad"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1, 4, 5],
        "tokenizer.ggml.merges": ["a b", "ab c"],
        "tokenizer.ggml.bos_token_id": 0,
    }


def gguf_sentencepiece() -> Keys:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "▁", "a", "▁a", "s", "<", ">", "s>"],
        "tokenizer.ggml.scores": [0.0, 0.0, -3.0, -2.0, -1.0, -4.0, -5.0, -6.0, -7.0],
        "tokenizer.ggml.token_type": [2, 3, 1, 1, 1, 1, 1, 1, 1],
    }


def test_the_undamaged_vocabularies_are_read() -> None:
    bytelevel = Tokenizer.from_gguf(gguf_bytelevel())
    assert bytelevel.encode("abcab<tool>") == [5, 4, 6]
    assert bytelevel.special_ids == {0}
    assert bytelevel.vocab_size == 8
    assert Tokenizer.from_gguf(gguf_sentencepiece()).encode("a a") == [4, 4]


@pytest.mark.parametrize(
    ("make", "key", "value"),
    [
        (gguf_bytelevel, "model", None),
        (gguf_bytelevel, "model", "bert"),
        (gguf_bytelevel, "model", 7),
        (gguf_bytelevel, "pre", "no-such-thing"),
        (gguf_bytelevel, "pre", 3),
        (gguf_bytelevel, "tokens", None),
        (gguf_bytelevel, "tokens", []),
        (gguf_bytelevel, "tokens", "abc"),
        (gguf_bytelevel, "tokens", ["<s>", "a", "b", "c", "ab", "abc", 6, "pad"]),
        (gguf_bytelevel, "tokens", ["<s>", "a", "b", "c", "ab", "a", "<tool>", "pad"]),
        (gguf_bytelevel, "tokens", ["<s>", "a", "b", "c", "ab", "", "<tool>", "pad"]),
        (gguf_bytelevel, "token_type", [1, 1]),
        (gguf_bytelevel, "token_type", [3, 1, 1, 1, 1, 1, 4, 99]),
        (gguf_bytelevel, "token_type", [3, 1, 1, 1, 1, 1, 4, "1"]),
        (gguf_bytelevel, "merges", None),
        (gguf_bytelevel, "merges", ["a b", "x y"]),
        (gguf_bytelevel, "merges", ["b a"]),
        (gguf_bytelevel, "merges", ["ab"]),
        (gguf_bytelevel, "merges", [["a", "b"]]),
        (gguf_bytelevel, "bos_token_id", 8),
        (gguf_bytelevel, "bos_token_id", -1),
        (gguf_bytelevel, "eos_token_id", "0"),
        (gguf_bytelevel, "eos_token_id", True),
        (gguf_bytelevel, "add_bos_token", "yes"),
        (gguf_sentencepiece, "scores", None),
        (gguf_sentencepiece, "scores", [0.0]),
        (gguf_sentencepiece, "scores", [0.0] * 8 + [float("nan")]),
        (gguf_sentencepiece, "scores", [0.0] * 8 + ["x"]),
        (gguf_sentencepiece, "add_space_prefix", 1),
    ],
)
def test_a_bad_gguf_key_is_named(make: Callable[[], Keys], key: str, value: object) -> None:
    metadata = make()
    metadata[f"tokenizer.ggml.{key}"] = value
    if value is None:
        del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(TokenizerError, match=rf"tokenizer\.ggml\.{key}\b"):
        Tokenizer.from_gguf(metadata)


def test_an_unknown_pre_tokenizer_lists_the_known_ones() -> None:
    with pytest.raises(TokenizerError, match=r"supported: .*llama-bpe.*qwen2.*smollm.*tekken"):
        Tokenizer.from_gguf(gguf_bytelevel() | {"tokenizer.ggml.pre": "novel"})


def test_scores_that_would_merge_text_into_a_control_token_do_not() -> None:
    """ "<" and "s>" are tokens and "<s>" scores best, yet text never becomes it."""
    tokenizer = Tokenizer.from_gguf(gguf_sentencepiece())
    assert tokenizer.encode("<s>") == [2, 6, 8]
    assert tokenizer.encode("<s>", allow_special=True) == [1]


def tokenizer_json() -> dict[str, object]:
    return {
        "version": "1.0",
        "added_tokens": [{"id": 3, "content": "<s>", "special": True, "single_word": False, "lstrip": False,
                          "rstrip": False, "normalized": True}],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True},
        "model": {"type": "BPE", "vocab": {"<": 0, "s": 1, ">": 2, "<s>": 3, "s>": 4},
                  "merges": [["s", ">"], ["<", "s>"]], "ignore_merges": True},
    }  # fmt: skip


def write(folder: Path, definition: object, config: object = None) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(definition if isinstance(definition, str) else json.dumps(definition))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_merges_and_normalisers_cannot_reach_a_control_token(tmp_path: Path, ignore_merges: bool) -> None:
    """The file merges up to "<s>", or takes whole words as tokens, cuts nothing, and lower-cases: text stays text."""
    definition = tokenizer_json() | {"pre_tokenizer": None}
    model = definition["model"]
    assert isinstance(model, dict)
    model["ignore_merges"] = ignore_merges
    tokenizer = Tokenizer.from_file(write(tmp_path, definition))
    assert tokenizer.encode("<s>") == [0, 4]
    assert tokenizer.encode("<S>") == [0, 4]
    assert tokenizer.encode("<s>", allow_special=True) == [3]
    assert tokenizer.encode_guarded("<s><\ufdd0s>", "\ufdd0") == [3, 0, 4]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": None}, "model"),
        ({"model": {"type": "Unigram", "vocab": []}}, "model.type 'Unigram'"),
        ({"model": {"type": "BPE", "vocab": []}}, "model.vocab"),
        ({"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}, "model.vocab['a']"),
        ({"model": {"type": "BPE", "vocab": {"a": 1 << 60}, "merges": []}}, "model.vocab"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "zz"]]}}, "tokenizer definition"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [[1, 2]]}}, "tokenizer definition"),
        ({"added_tokens": {"a": 1}}, "added_tokens"),
        ({"added_tokens": [{"id": 3}]}, "added_tokens[0].content"),
        ({"added_tokens": [{"id": "3", "content": "<s>"}]}, "added_tokens[0].id"),
        ({"added_tokens": [{"id": 77, "content": "<x>", "special": True, "single_word": False, "lstrip": False,
                            "rstrip": False, "normalized": False}]}, "'<x>' claims id 77"),
        ({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "decoder 'WordPiece'"),
        ({"pre_tokenizer": {"type": "Imaginary"}}, "tokenizer definition"),
    ],
)  # fmt: skip
def test_a_bad_tokenizer_json_is_named(tmp_path: Path, change: dict[str, object], named: str) -> None:
    with pytest.raises(TokenizerError, match=re.escape(named)):
        Tokenizer.from_file(write(tmp_path, tokenizer_json() | change))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[" * 100_000, "\udcff".encode("utf-8", "surrogatepass").decode("latin-1")]
)
def test_a_file_that_is_no_json_object_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.from_file(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")


def test_a_bos_token_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="bos_token names '<none>'"):
        Tokenizer.from_file(write(tmp_path, tokenizer_json(), {"bos_token": "<none>"}))


def test_the_config_says_whether_bos_is_added(tmp_path: Path) -> None:
    path = write(tmp_path, tokenizer_json(), {"bos_token": {"content": "<s>"}, "add_bos_token": True})
    tokenizer = Tokenizer.from_file(path)
    assert tokenizer.adds_bos
    assert tokenizer.encode("s", add_special_tokens=True) == [3, 1]
    assert tokenizer.encode("s") == [1]


@pytest.mark.parametrize("token_id", [-1, 8, 1 << 40])
def test_ids_outside_the_vocabulary_are_refused(token_id: int) -> None:
    tokenizer = Tokenizer.from_gguf(gguf_bytelevel())
    with pytest.raises(TokenizerError, match=f"token id {token_id} is outside the vocabulary"):
        tokenizer.decode([1, token_id])
    with pytest.raises(TokenizerError, match=f"token id {token_id} is outside the vocabulary"):
        tokenizer.piece(token_id)


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(TokenizerError, match="lone surrogate"):
        Tokenizer.from_gguf(gguf_bytelevel()).encode("a\ud800")
