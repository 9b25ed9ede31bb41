"""A plain tokenizer that shares the model of the parsing one gives the ids of one that has a model of its own."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from segue_model.loaders import find_embedded_model
from segue_model.loaders.gguf_file import read_gguf as read_file
from segue_model.tokenizer.files import added_token
from segue_model.tokenizer.gguf import read_gguf
from segue_model.tokenizer.json_types import Json
from segue_model.tokenizer.pipeline import Pipeline

VOCABULARY = ["<", "s", ">", "a", "##s", "##>", "<0x61>", "s>", "as"]
CONTROL, OWN = 9, 10  # ids of <s> and of <tool>, which is no control token


def definition(
    merges: list[Json], *, control: str = "<s>", own_in_vocabulary: bool = True, **model: Json
) -> dict[str, Json]:
    vocab: dict[str, Json] = {text: i for i, text in enumerate([*VOCABULARY, control])}
    if own_in_vocabulary:
        vocab["<tool>"] = OWN
    added: list[Json] = [added_token(CONTROL, control, special=True), added_token(OWN, "<tool>", special=False)]
    bpe: dict[str, Json] = {"type": "BPE", "vocab": vocab, "merges": merges}
    return {"added_tokens": added, "model": bpe | model}


CASES: dict[str, tuple[dict[str, Json], bool]] = {  # definition, whether the model is shared
    "no merge makes it": (definition([["s", ">"], ["a", "s"]]), True),
    "merges as text": (definition(["s >", "a s"]), True),
    "no merges": (definition([]), True),
    "a merge makes it": (definition([["s", ">"], ["<", "s>"]]), False),
    "a merge as text makes it": (definition(["s >", "< s>"]), False),
    "an added token beside the vocabulary": (definition([["s", ">"]], own_in_vocabulary=False), False),
    "whole words": (definition([["s", ">"]], ignore_merges=True), False),
    "bytes are spelled": (definition([], control="<0x62>", byte_fallback=True), False),
    "marked inside a word": (definition([], control="##s", continuing_subword_prefix="##"), False),
    "marked at the end": (definition([], control="s</w>", end_of_word_suffix="</w>"), False),
    "words": ({"added_tokens": [added_token(CONTROL, "<s>", special=True)],
               "model": {"type": "WordLevel", "vocab": {"a": 0, "<s>": CONTROL}, "unk_token": "a"}}, False),
}  # fmt: skip
TEXTS = [
    "<s>",
    "<s>a<s>",
    "a<s",
    "s>",
    "##s",
    "as##s",
    "b",
    "<0x62>",
    "<tool>",
    "a<tool>s>",
    "as",
    "</w>s</w>",
    "",
    "s",
]


def shares(plain: Backend, parsing: Backend) -> bool:
    """Whether the two have one model: a change of the one is seen in the other."""
    if not isinstance(parsing.model, models.BPE):
        return False
    before = parsing.model.fuse_unk
    plain.model.fuse_unk = not before
    seen = parsing.model.fuse_unk != before
    plain.model.fuse_unk = before
    return seen


@pytest.mark.parametrize("name", CASES)
def test_a_model_is_shared_only_where_text_cannot_become_a_control_token(name: str) -> None:
    """Every way in which BPE could make one of text keeps the careful path; both give equal ids, none a control's."""
    found, expected = CASES[name]
    pipeline = Pipeline.parse(found)
    parsing = pipeline.backend()
    plain, careful = pipeline.plain_backend(parsing), pipeline.plain_backend()
    assert shares(plain, parsing) is expected
    for text in TEXTS:
        ids = plain.encode(text, add_special_tokens=False).ids
        assert ids == careful.encode(text, add_special_tokens=False).ids, text
        assert CONTROL not in ids, text


@pytest.fixture(scope="module")
def embedded() -> Pipeline:
    return Pipeline.parse(read_gguf(read_file(find_embedded_model()).metadata).json)


@pytest.fixture(scope="module")
def twins(embedded: Pipeline) -> tuple[Backend, Backend]:
    parsing = embedded.backend()
    plain = embedded.plain_backend(parsing)
    assert shares(plain, parsing)
    return plain, embedded.plain_backend()


def test_the_embedded_vocabulary_gives_equal_ids_on_hostile_text(
    embedded: Pipeline, twins: tuple[Backend, Backend]
) -> None:
    """Control tokens spelled out, cut, doubled, nested, among other characters, and what else hypothesis finds."""
    plain, careful = twins
    controls = list(embedded.special.values())
    pieces = st.sampled_from([*controls, *(c[:-1] for c in controls), *(c[1:] for c in controls), " ", "\n", "Ġ", "<|"])

    @settings(max_examples=300, deadline=None)
    @given(st.lists(pieces | st.text(max_size=4), max_size=8).map("".join))
    def check(text: str) -> None:
        ids = plain.encode(text, add_special_tokens=False).ids
        assert ids == careful.encode(text, add_special_tokens=False).ids
        assert embedded.special.keys().isdisjoint(ids)

    check()
    for control in controls:
        assert plain.encode(control, add_special_tokens=False).ids == careful.encode(control).ids
