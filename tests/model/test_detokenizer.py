"""Streaming detokenisation: the pieces join to the whole, and no character is ever cut."""

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from segue_model.tokenizer import Tokenizer
from segue_model.tokenizer.alphabet import byte_alphabet

WORDS = ["ab", "héé", "漢", "😀", " a", "  ", "\n"]


def bytelevel() -> Tokenizer:
    """Every byte is a token, so that any broken UTF-8 can be spelled."""
    spelling = {byte: char for char, byte in byte_alphabet().items()}
    words = ["".join(spelling[byte] for byte in word.encode()) for word in WORDS if len(word.encode()) > 1]
    tokens = ["<|im_start|>", "<|im_end|>", "<think>", *(spelling[byte] for byte in range(256)), *words]
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3, 3, 4, *[1] * (len(tokens) - 3)],
            "tokenizer.ggml.merges": [],
        }
    )


def sentencepiece(*, space_prefix: bool = True) -> Tokenizer:
    words = ["▁", "▁a", "▁▁", "a", "é", "漢", "😀", "▁b▁"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(words)],
            "tokenizer.ggml.scores": [0.0] * len(tokens),
            "tokenizer.ggml.add_space_prefix": space_prefix,
        }
    )


TOKENIZERS = {
    "bytelevel": bytelevel(),
    "sentencepiece": sentencepiece(),
    "sentencepiece without prefix": sentencepiece(space_prefix=False),
}
# Ids near the ends are the control tokens and the whole words; the middle is single bytes.
IDS = st.lists(st.one_of(st.integers(0, 262), st.integers(0, 3), st.integers(256, 262)), max_size=40)


def stream(tokenizer: Tokenizer, ids: list[int], *, skip_special: bool) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special=skip_special)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
@settings(max_examples=200, deadline=None)
@given(ids=IDS, skip_special=st.booleans())
def test_pieces_join_to_the_whole(tokenizer: Tokenizer, ids: list[int], skip_special: bool) -> None:
    """Over random ids, broken UTF-8 included; and U+FFFD is only where the whole has it."""
    pieces = stream(tokenizer, ids, skip_special=skip_special)
    written = b"".join(tokenizer._table.of[i] for i in ids if not (skip_special and i in tokenizer.special_ids))
    if tokenizer is TOKENIZERS["sentencepiece"]:
        written = written.removeprefix(b" ")
    assert "".join(pieces) == tokenizer.decode(ids, skip_special=skip_special) == written.decode(errors="replace")


@given(text=st.text(max_size=60))
def test_text_goes_through_and_back(text: str) -> None:
    """Any text, as ids and streamed back, is itself: no U+FFFD, no lost or added space."""
    for name, tokenizer in TOKENIZERS.items():
        expected = text if name == "bytelevel" else text.replace("▁", " ")  # SentencePiece spells a space so
        assert "".join(stream(tokenizer, tokenizer.encode(text), skip_special=False)) == expected


@settings(deadline=None)
@given(ids=IDS)
def test_bytelevel_decodes_as_the_tokenizers_library(ids: list[int]) -> None:
    """Also where the bytes are no UTF-8."""
    tokenizer = TOKENIZERS["bytelevel"]
    spelled = [tokenizer._parsing.id_to_token(i) for i in ids]
    assert tokenizer.decode(ids) == decoders.ByteLevel().decode(spelled)


@pytest.mark.parametrize("character", ["é", "漢", "😀"])
@pytest.mark.parametrize("name", ["bytelevel", "sentencepiece"])
def test_a_character_of_several_tokens_comes_out_whole_with_its_last(name: str, character: str) -> None:
    detokenizer = TOKENIZERS[name].detokenizer()
    ids = [3 + byte for byte in character.encode()]
    assert [detokenizer.push(i) for i in ids] == [""] * (len(ids) - 1) + [character]
    assert detokenizer.flush() == ""


def test_an_unfinished_character_comes_out_as_one_replacement_at_the_end() -> None:
    detokenizer = TOKENIZERS["bytelevel"].detokenizer()
    assert [detokenizer.push(3 + byte) for byte in "😀".encode()[:3]] == ["", "", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_a_stream_that_continues_keeps_its_first_space() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = tokenizer.encode("a")
    assert tokenizer.detokenizer().push(ids[0]) == "a"
    assert tokenizer.detokenizer(continues=True).push(ids[0]) == " a"


def test_skipped_control_tokens_do_not_use_up_the_first_space() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    assert tokenizer.decode([1, *tokenizer.encode("a")], skip_special=True) == "a"
    assert tokenizer.decode([1, *tokenizer.encode("a")]) == "<s> a"


def test_an_id_of_a_padding_row_writes_nothing() -> None:
    detokenizer = TOKENIZERS["bytelevel"].detokenizer()
    assert detokenizer.push(1_000_000) == ""
    assert detokenizer.push(-1) == ""


def test_pieces_of_tokenize_name_each_token() -> None:
    tokenizer = TOKENIZERS["bytelevel"]
    assert [tokenizer.piece(i) for i in tokenizer.encode("<|im_end|>a", allow_special=True)] == ["<|im_end|>", "a"]
    assert tokenizer.piece(3 + 0xE6) == "\ufffd"


def test_a_push_costs_the_same_at_any_length() -> None:
    """Amortised O(1): a push after 100k tokens costs what a push after 1k did. Prints the figure."""
    detokenizer = TOKENIZERS["bytelevel"].detokenizer()
    ids = TOKENIZERS["bytelevel"].encode("plain text, 漢字 and 😀 ") * 40

    def microseconds() -> float:
        begin = time.perf_counter()
        for token_id in ids:
            detokenizer.push(token_id)
        return (time.perf_counter() - begin) / len(ids) * 1e6

    early = min(microseconds() for _ in range(5))
    for _ in range(100_000 // len(ids)):
        microseconds()
    late = min(microseconds() for _ in range(5))
    print(f"\n{early:.2f} us per token at the start, {late:.2f} us after 100k tokens")
    assert late < 5 * early + 1


def test_one_tokenizer_serves_many_threads() -> None:
    """Plain and special encodings at the same time on one object give what they give alone."""
    tokenizer, text = TOKENIZERS["bytelevel"], "a<|im_end|>é " * 50
    expected = {flag: tokenizer.encode(text, allow_special=flag) for flag in (False, True)}
    wrong: list[bool] = []

    def work(flag: bool) -> None:
        wrong.extend(flag for _ in range(50) if tokenizer.encode(text, allow_special=flag) != expected[flag])

    threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert expected[False] != expected[True]
