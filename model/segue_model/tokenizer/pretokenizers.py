"""How text is cut before byte-level BPE, by the name in `tokenizer.ggml.pre`.

The names and what they stand for follow llama.cpp (src/llama-vocab.cpp); the patterns are those of the models' own
tokenizer.json files, which llama.cpp rewrites for its regex engine.
"""

from dataclasses import dataclass

from segue_model.tokenizer.errors import TokenizerError
from segue_model.tokenizer.json_types import Json

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _BLANKS
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _BLANKS
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_CAPITAL_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_TEKKEN = rf"{_CASED_WORD}|{_CAPITAL_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
_GPT4O = (
    rf"{_CASED_WORD}{_CONTRACTION}?|{_CAPITAL_WORD}{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
)
_CJK = "[一-龥\u3040-ゟ\u30a0-ヿ]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _BLANKS
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")
# What llama.cpp falls back to for a file that names no pre-tokenizer.
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Patterns applied in turn, each to what the one before left; matches and gaps both become pieces."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is a token as it stands is not merged up from bytes
    adds_bos: bool = False  # where the file does not say

    def to_json(self) -> Json:
        """The `pre_tokenizer` entry of a tokenizer.json."""
        splits: list[Json] = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in self.patterns
        ]
        byte_level: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        return {"type": "Sequence", "pretokenizers": [*splits, byte_level]}


def _table() -> dict[str, PreTokenizer]:
    llama3 = PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True)
    single_digits = PreTokenizer((r"\p{N}", _GPT2))
    families: list[tuple[PreTokenizer, str]] = [
        (PreTokenizer(_DEFAULT), "default"),
        (PreTokenizer((_GPT2,)), "gpt-2 gpt2 phi-2 mpt olmo jais trillion exaone4"),
        (llama3, "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2"),
        (PreTokenizer((_LLAMA3,)), "dbrx smaug-bpe glm4 chatglm-bpe"),
        (PreTokenizer((_QWEN2,)), "qwen2 stablelm2 deepseek-r1-qwen hunyuan megrez kormo"),
        (single_digits, "smollm starcoder refact command-r codeshell exaone minerva-7b"),
        (PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True), "tekken"),
        (PreTokenizer((_GPT4O,)), "gpt-4o llama4"),
        (PreTokenizer((r"\p{N}{1,3}", _CJK, _DEEPSEEK3)), "deepseek-v3 hunyuan-dense"),
        (PreTokenizer(_DEEPSEEK_CODER), "deepseek-coder"),
    ]
    return {name: pre_tokenizer for pre_tokenizer, names in families for name in names.split()}


def pre_tokenizer_named(name: str) -> PreTokenizer:
    """The pre-tokenizer called `name`; TokenizerError, with the list of known names, for any other."""
    table = _table()
    if name not in table:
        raise TokenizerError(f"tokenizer.ggml.pre {name!r} is not supported; supported: {', '.join(sorted(table))}")
    return table[name]
