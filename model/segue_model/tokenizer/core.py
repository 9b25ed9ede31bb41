"""The tokenizer that the rest of Segue sees."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from segue_model.tokenizer.controls import ControlTexts
from segue_model.tokenizer.detokenizer import Detokenizer
from segue_model.tokenizer.errors import TokenizerError
from segue_model.tokenizer.files import Definition, read_files
from segue_model.tokenizer.gguf import read_gguf
from segue_model.tokenizer.pipeline import Pipeline
from segue_model.tokenizer.token_bytes import token_bytes


class Tokenizer:
    """Text to ids and back. Immutable after construction and safe to share between threads.

    Two machines over one vocabulary: one reads control tokens wherever the text spells them, the other knows none,
    so text that a user wrote cannot become one.
    """

    __slots__ = (
        "_continuing",
        "_control_texts",
        "_controls",
        "_parsing",
        "_plain",
        "_prefix",
        "_suffix",
        "_table",
        "bos_token_id",
        "eos_token_id",
        "special_ids",
        "vocab_size",
    )

    def __init__(self, definition: Definition) -> None:
        pipeline = Pipeline.parse(definition.json)
        self._table = token_bytes(pipeline, at_least=definition.vocab_size)
        self._parsing = pipeline.backend()
        self._plain = pipeline.plain_backend(self._parsing)
        self._continuing = pipeline.plain_backend(continues=True) if pipeline.marks_start else self._plain
        self._controls = pipeline.special
        self.vocab_size = len(self._table.of)
        self.special_ids = self._table.special_ids
        self._control_texts = ControlTexts(self._controls.values())
        self.bos_token_id = definition.bos_token_id
        self.eos_token_id = definition.eos_token_id
        self._prefix, self._suffix = _affixes(definition, self._parsing)

    @classmethod
    def from_file(cls, path: Path) -> "Tokenizer":
        """tokenizer.json, with the tokenizer_config.json beside it when present (bos, eos, whether they are added).

        Raises TokenizerError, naming the file and the entry, for what is damaged or not supported.
        """
        return cls(read_files(path))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> "Tokenizer":
        """From the `tokenizer.ggml.*` keys of a GGUF file, as plain Python values; other keys are not looked at.

        Raises TokenizerError, naming the key, for what is damaged or not supported.
        """
        return cls(read_gguf(metadata))

    @property
    def adds_bos(self) -> bool:
        """Whether `encode(..., add_special_tokens=True)` begins with the BOS token."""
        return self.bos_token_id is not None and self.bos_token_id in self._prefix

    def encode(self, text: str, *, allow_special: bool = False, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`.

        Text becomes a control token only with `allow_special`. `add_special_tokens` puts BOS and EOS around, where the
        model was trained that way.
        """
        ids = _encode(self._parsing if allow_special else self._plain, text).ids
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def guarded(self, text: str, guard: str) -> str:
        """`text` for `encode_guarded`: the character `guard` breaks whatever is, or could become, a control token."""
        return self._control_texts.guarded(text, guard)

    def encode_guarded(self, text: str, guard: str) -> list[int]:
        """Like `encode(text, allow_special=True)` of `text` without `guard`, one character that it is taken out of.

        A control token spelled with the guard inside it stays text.
        """
        ids: list[int] = []
        done = 0
        found = _encode(self._parsing, text)
        for token_id, (start, end) in zip(found.ids, found.offsets, strict=True):
            # The unknown token also stands for text that spells something else, hence the comparison.
            if token_id in self._controls and text[start:end].strip() == self._controls[token_id].strip():
                ids += self._encode_between(text, done, start, guard)
                ids.append(token_id)
                done = end
        return ids + self._encode_between(text, done, len(text), guard)

    def _encode_between(self, text: str, start: int, end: int, guard: str) -> list[int]:
        segment = text[start:end].replace(guard, "")
        return _encode(self._continuing if start else self._plain, segment).ids if segment else []

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. TokenizerError for an id outside the vocabulary."""
        for token_id in ids:
            self._check(token_id)
        stream = self.detokenizer(skip_special=skip_special)
        return "".join(map(stream.push, ids)) + stream.flush()

    def piece(self, token_id: int) -> str:
        """What one token writes, on its own; U+FFFD where it holds only a part of a character."""
        self._check(token_id)
        return self._table.of[token_id].decode("utf-8", "replace")

    def detokenizer(self, *, skip_special: bool = True, continues: bool = False) -> Detokenizer:
        """A fresh streaming detokeniser.

        With `continues` the stream goes on after other text, so a SentencePiece space before its first word is kept.
        """
        return Detokenizer(self._table, skip_special=skip_special, continues=continues)

    def _check(self, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise TokenizerError(f"token id {token_id} is outside the vocabulary, which has {self.vocab_size} tokens")


def _encode(backend: Backend, text: str) -> Encoding:
    try:
        return backend.encode(text, add_special_tokens=False)
    except TypeError as error:
        raise TokenizerError("text holds a lone surrogate, which is not valid Unicode") from error


def _affixes(definition: Definition, backend: Backend) -> tuple[list[int], list[int]]:
    """What goes before and after a text: as the definition says, else as the file's post-processor does."""
    if definition.adds_bos is not None:
        bos, eos = definition.bos_token_id, definition.eos_token_id
        before = [bos] if bos is not None and definition.adds_bos else []
        return before, [eos] if eos is not None and definition.adds_eos else []
    body = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    start = next((i for i in range(len(whole)) if whole[i : i + len(body)] == body), len(whole))
    return whole[:start], whole[start + len(body) :]
