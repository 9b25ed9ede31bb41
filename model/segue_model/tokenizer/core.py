"""The tokenizer that the rest of Segue sees."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from segue_model.tokenizer.detokenizer import Detokenizer


class Tokenizer:
    """Immutable after construction and safe to share between threads."""

    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int | None
    special_ids: frozenset[int]
    adds_bos: bool

    @classmethod
    def from_file(cls, path: Path) -> "Tokenizer":
        """tokenizer.json, with the tokenizer_config.json beside it when present."""
        raise NotImplementedError

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> "Tokenizer":
        """From the `tokenizer.ggml.*` keys of a GGUF file, as plain Python values."""
        raise NotImplementedError

    def encode(self, text: str, *, allow_special: bool = False, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`. Text becomes a control token only with `allow_special`."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        raise NotImplementedError

    def piece(self, token_id: int) -> str:
        """The text of one token on its own."""
        raise NotImplementedError

    def detokenizer(self, *, skip_special: bool = True) -> Detokenizer:
        """A fresh streaming detokeniser."""
        raise NotImplementedError
