"""A tokenizer.json as data: checked, and rewritten so that plain text cannot reach a control token."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from tokenizers import Tokenizer as Backend

from segue_model.tokenizer.backends import added_token, build
from segue_model.tokenizer.errors import TokenizerError
from segue_model.tokenizer.json_types import Json, as_id, as_list, as_object, as_text

_MODELS = ("BPE", "WordLevel")


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is matched in the text before any other step. A special one controls the model."""

    id: int
    text: str
    special: bool
    entry: dict[str, Json]  # as the file has it


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One tokenizer.json, and the parts of it that Segue needs to know; the `tokenizers` library runs it."""

    definition: dict[str, Json]
    model: dict[str, Json]
    vocab: dict[str, int]
    added: tuple[AddedToken, ...]

    @classmethod
    def parse(cls, definition: dict[str, Json]) -> "Pipeline":
        """Raises TokenizerError, naming the entry, for what is missing, malformed or not supported."""
        model = as_object(definition.get("model"), "model")
        kind = model.get("type", "BPE")
        if kind not in _MODELS:
            raise TokenizerError(f"model.type {kind!r} is not supported; supported: {', '.join(_MODELS)}")
        if kind == "BPE":
            model = model | {"type": kind, "dropout": None}  # dropout is for training
        vocab = as_object(model.get("vocab"), "model.vocab")
        added = as_list(definition.get("added_tokens") or [], "added_tokens")
        return cls(
            # Truncation and padding would change ids behind the caller's back.
            definition | {"truncation": None, "padding": None},
            model,
            _ids(vocab),
            tuple(_added_token(i, entry) for i, entry in enumerate(added)),
        )

    @property
    def special(self) -> dict[int, str]:
        """Control tokens, as they are written out, by id."""
        return {token.id: token.text for token in self.added if token.special}

    def token_texts(self) -> dict[int, str]:
        """Every token by id."""
        return {token_id: text for text, token_id in self.vocab.items()} | {t.id: t.text for t in self.added}

    def backend(self) -> Backend:
        """Reads a control token wherever the text spells one out."""
        # Matched in the raw text only, so that no normaliser can turn other text into a control token.
        added = [t.entry | {"normalized": False} if t.special else t.entry for t in self.added]
        backend = build(self.definition, self.model, added)
        for token in self.added:
            if (found := backend.token_to_id(token.text)) != token.id:
                raise TokenizerError(f"added_tokens: {token.text!r} claims id {token.id} but would get {found}")
        return backend

    def plain_backend(self, parsing: Backend | None = None, *, continues: bool = False) -> Backend:
        """Knows no control token: text cannot become one, neither as an added token nor as the outcome of a merge.

        With `continues` the text is taken as the middle of a longer one, so it gets no first-word space.
        parsing: what `backend` made, to share its model where that is safe: the same ids in a tenth of the time.
        """
        if parsing is not None and not continues and self._plain_as_it_is():
            return self._sharing(parsing)
        return self._without_hidden(continues)

    def _plain_as_it_is(self) -> bool:
        """Whether the model, as the file has it, never makes a control token out of text.

        BPE begins with single characters, and what is longer is the outcome of a merge: unless it takes whole words,
        spells out bytes, or marks where in a word a character stands.
        """
        model, hidden = self.model, self._hidden()
        whole = ("ignore_merges", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")
        if model.get("type") != "BPE" or any(model.get(key) for key in whole):
            return False
        if any(self.vocab.get(token.text) != token.id for token in self._kept()):
            return False
        return hidden.isdisjoint(_outcomes(as_list(model.get("merges", []), "model.merges")))

    def _sharing(self, parsing: Backend) -> Backend:
        """The same model under a table of added tokens without the control tokens."""
        backend = Backend(parsing.model)
        for step in ("normalizer", "pre_tokenizer", "decoder"):
            if (found := getattr(parsing, step)) is not None:
                setattr(backend, step, found)
        backend.add_tokens([added_token(token.entry) for token in self._kept()])
        return backend

    def _without_hidden(self, continues: bool) -> Backend:
        """A model of its own, less the control tokens and every merge that has to do with them."""
        hidden, kept = self._hidden(), self._kept()
        vocab: dict[str, Json] = {text: token_id for text, token_id in self.vocab.items() if text not in hidden}
        # The library counts ids of added tokens on from the last one, unless the vocabulary holds them: so it must.
        vocab |= {token.text: token.id for token in kept}
        model = self.model | {"vocab": vocab}
        if "merges" in model:
            merges = as_list(model["merges"], "model.merges")
            model["merges"] = [merge for merge in merges if hidden.isdisjoint(_merge_texts(merge))]
        definition = self.definition | {"post_processor": None}
        if continues:
            definition["pre_tokenizer"] = _mid_text(definition.get("pre_tokenizer"))
        return build(definition, model, [token.entry for token in kept])

    @property
    def marks_start(self) -> bool:
        """Whether the first word of a text is treated unlike the others."""
        before = self.definition.get("pre_tokenizer")
        return _mid_text(before) != before

    def _kept(self) -> list[AddedToken]:
        return [token for token in self.added if not token.special]

    def _hidden(self) -> set[str]:
        """Control tokens, less the one for unknown text, and less single characters: those must stay writable."""
        unknown = self.model.get("unk_token")
        return {text for text in self.special.values() if len(text) > 1 and text != unknown}


def _ids(vocab: dict[str, Json]) -> dict[str, int]:
    """Raises TokenizerError for what is no token id; its name is spelled out only then, a start waits for this."""
    ids = {text: token_id for text, token_id in vocab.items() if type(token_id) is int and token_id >= 0}
    if len(ids) < len(vocab):
        text = next(text for text in vocab if text not in ids)
        as_id(vocab[text], f"model.vocab[{text!r}]")
    return ids


def _added_token(index: int, value: Json) -> AddedToken:
    key = f"added_tokens[{index}]"
    entry = as_object(value, key)
    text = as_text(entry.get("content"), f"{key}.content")
    if not text:
        raise TokenizerError(f"{key}.content must not be empty")
    return AddedToken(as_id(entry.get("id"), f"{key}.id"), text, entry.get("special") is True, entry)


def _merge_texts(merge: Json) -> list[str]:
    """The two tokens of a merge and what they become."""
    parts = merge.split(" ") if isinstance(merge, str) else as_list(merge, "model.merges")
    texts = [as_text(part, "model.merges") for part in parts]
    return [*texts, "".join(texts)]


def _outcomes(merges: list[Json]) -> Iterator[str]:
    """What merges make, in the forms that the library has taken."""
    taken = cast("list[str | list[str]]", merges)
    return (merge.replace(" ", "") if isinstance(merge, str) else "".join(merge) for merge in taken)


def _mid_text(step: Json) -> Json:
    """A pre-tokenizer for text that does not begin here."""
    if not isinstance(step, dict):
        return step
    if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first":
        return step | {"prepend_scheme": "never"}
    if isinstance(steps := step.get("pretokenizers"), list):
        return step | {"pretokenizers": [_mid_text(inner) for inner in steps]}
    return step
