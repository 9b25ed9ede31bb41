"""A tokenizer.json made from the `tokenizer.ggml.*` keys of a GGUF file.

The keys: GGUF specification, "Tokenizer"; what they mean in doubt: llama.cpp, src/llama-vocab.cpp.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from segue_model.tokenizer.errors import TokenizerError
from segue_model.tokenizer.files import Definition, added_token
from segue_model.tokenizer.gguf_keys import PREFIX, GgufKeys, TokenKind
from segue_model.tokenizer.json_types import Json
from segue_model.tokenizer.pretokenizers import pre_tokenizer_named

_SPACE = "▁"  # how SentencePiece writes a space


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: list[str]  # by id
    kinds: list[TokenKind]
    bos: int | None
    eos: int | None

    @property
    def ids(self) -> dict[str, int]:
        """Tokens that text can become. A hole in the vocabulary stays a hole."""
        unused = TokenKind.UNUSED
        return {t: i for i, (t, kind) in enumerate(zip(self.tokens, self.kinds, strict=True)) if kind is not unused}

    def added(self) -> list[Json]:
        """Tokens that are matched whole: control tokens and what the model's authors added."""
        whole = (TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.USER_DEFINED)
        return [
            added_token(i, token, special=kind != TokenKind.USER_DEFINED)
            for i, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind in whole
        ]

    def first(self, kind: TokenKind) -> str | None:
        """The first token of a kind."""
        return next((token for token, k in zip(self.tokens, self.kinds, strict=True) if k == kind), None)


def read_gguf(metadata: Mapping[str, object]) -> Definition:
    """The definition that the metadata stands for. Raises TokenizerError, naming the key."""
    keys = GgufKeys(metadata)
    kind = keys.text("model")
    if kind not in ("gpt2", "llama"):
        raise TokenizerError(
            f"{PREFIX}model {kind!r} is not supported; supported: gpt2 (byte-level BPE), llama (SentencePiece)"
        )
    vocabulary = _vocabulary(keys)
    return _byte_level(keys, vocabulary) if kind == "gpt2" else _sentencepiece(keys, vocabulary)


def _vocabulary(keys: GgufKeys) -> _Vocabulary:
    tokens = keys.texts("tokens")
    if not tokens:
        raise TokenizerError(f"{PREFIX}tokens must not be empty")
    bos, eos = keys.token_id("bos_token_id", len(tokens)), keys.token_id("eos_token_id", len(tokens))
    kinds = keys.kinds(len(tokens))
    for token_id in (bos, eos):
        if token_id is not None:
            kinds[token_id] = TokenKind.CONTROL  # also in files that do not say what is what
    _check_distinct(tokens, kinds)
    return _Vocabulary(tokens, kinds, bos, eos)


def _check_distinct(tokens: list[str], kinds: list[TokenKind]) -> None:
    if len(set(tokens)) == len(tokens) and "" not in tokens:
        return  # so it is in every sound file, and a start waits for this
    seen: dict[str, int] = {}
    for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind == TokenKind.UNUSED:
            continue
        if not token:
            raise TokenizerError(f"{PREFIX}tokens[{i}] is empty")
        if (first := seen.setdefault(token, i)) != i:
            raise TokenizerError(f"{PREFIX}tokens has {token!r} twice, as {first} and {i}")


def _byte_level(keys: GgufKeys, vocabulary: _Vocabulary) -> Definition:
    pre = pre_tokenizer_named(keys.text("pre", "default"))
    ids = vocabulary.ids
    merges = _merges(keys.texts("merges"), ids)
    return Definition(
        json={
            "added_tokens": vocabulary.added(),
            "normalizer": None,
            "pre_tokenizer": pre.to_json(),
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
            "model": _bpe(ids, merges) | {"ignore_merges": pre.ignore_merges},
        },
        bos_token_id=vocabulary.bos,
        eos_token_id=vocabulary.eos,
        adds_bos=keys.flag("add_bos_token", default=pre.adds_bos),
        adds_eos=keys.flag("add_eos_token", default=False),
        vocab_size=len(vocabulary.tokens),
    )


def _sentencepiece(keys: GgufKeys, vocabulary: _Vocabulary) -> Definition:
    ids = vocabulary.ids
    spaced = keys.flag("add_space_prefix", default=True)
    prepend: list[Json] = [{"type": "Prepend", "prepend": _SPACE}] if spaced else []
    strip: list[Json] = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if spaced else []
    to_mark: Json = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    from_mark: Json = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    return Definition(
        json={
            "added_tokens": vocabulary.added(),
            "normalizer": {"type": "Sequence", "normalizers": [*prepend, to_mark]},
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": {
                "type": "Sequence",
                "decoders": [from_mark, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
            },
            "model": _bpe(ids, _merges_by_score(keys.scores(len(vocabulary.tokens)), vocabulary))
            | {"unk_token": vocabulary.first(TokenKind.UNKNOWN), "fuse_unk": True, "byte_fallback": True},
        },
        bos_token_id=vocabulary.bos,
        eos_token_id=vocabulary.eos,
        adds_bos=keys.flag("add_bos_token", default=True),
        adds_eos=keys.flag("add_eos_token", default=False),
        vocab_size=len(vocabulary.tokens),
    )


def _bpe(ids: dict[str, int], merges: list[Json]) -> dict[str, Json]:
    return {"type": "BPE", "vocab": dict[str, Json](ids), "merges": merges}


def _merges(texts: list[str], ids: dict[str, int]) -> list[Json]:
    parts = [text.partition(" ") for text in texts]
    for i, (left, separator, right) in enumerate(parts):
        if left in ids and right in ids and left + right in ids:
            continue
        if not separator:
            raise TokenizerError(f"{PREFIX}merges[{i}] must be two tokens with a space between, got {left!r}")
        missing = next(token for token in (left, right, left + right) if token not in ids)
        raise TokenizerError(f"{PREFIX}merges[{i}] needs the token {missing!r}, which is not in {PREFIX}tokens")
    return [[left, right] for left, _, right in parts]


def _merges_by_score(scores: list[float], vocabulary: _Vocabulary) -> list[Json]:
    """The merges that SentencePiece would try, best first.

    SentencePiece joins the neighbours whose union scores highest, the leftmost of equals (Kudo & Richardson 2018).
    Every way to cut a token in two tokens is a merge with that token's score; control tokens are never the outcome.
    """
    ids = {
        token: i
        for token, i in vocabulary.ids.items()
        if vocabulary.kinds[i] in (TokenKind.NORMAL, TokenKind.USER_DEFINED)
    }
    merges = [
        (-scores[i], -cut, i, (token[:cut], token[cut:]))
        for token, i in ids.items()
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    return [list(merge) for *_, merge in sorted(merges)]
