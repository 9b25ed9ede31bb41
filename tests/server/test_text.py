"""The shown text against a slow twin that decodes and searches everything from the start after each token."""

import codecs
import time
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue_server.text import OutputText, TextStep


class BytesDetokenizer:
    """Tokens are byte strings in a list; UTF-8 is decoded incrementally."""

    def __init__(self, vocabulary: Sequence[bytes]) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._vocabulary[token_id])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


@dataclass
class Run:
    """All that a turn showed."""

    steps: list[TextStep]
    rest: str  # what finish() gave; "" after a stop

    @property
    def text(self) -> str:
        return "".join(step.text for step in self.steps) + self.rest


def run(tokens: Sequence[bytes], stops: Sequence[str], *, include_stop: bool = False) -> Run:
    output = OutputText(BytesDetokenizer(tokens), stops, include_stop=include_stop)
    steps: list[TextStep] = []
    for token_id in range(len(tokens)):
        steps.append(output.push(token_id))
        if steps[-1].stop is not None:
            return Run(steps, "")
    return Run(steps, output.finish())


def decode(tokens: Sequence[bytes]) -> str:
    """The twin's decoding: everything from the start, an unfinished last character left out."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(tokens))


def find_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """The twin's search: the end of the stop sequence that is completed first, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return end, stop
    return None


def showable(text: str, stops: Sequence[str]) -> str:
    """The twin's holding back: all but the longest suffix that some stop sequence begins with."""
    for start in range(len(text) + 1):
        if any(stop.startswith(text[start:]) for stop in stops) or start == len(text):
            return text[:start]
    return text


def overhang(tokens: Sequence[bytes], shown: str) -> int:
    """The twin's count: tokens to drop from the end until all the text of the rest, and no loose byte, is shown."""
    for kept in range(len(tokens), -1, -1):
        if len(b"".join(tokens[:kept])) <= len(shown.encode()):
            return len(tokens) - kept
    raise AssertionError


# A small alphabet makes partial, overlapping and nested matches common; "é" and "€" have two and three bytes.
letters = st.sampled_from("abé€")
stop_lists = st.lists(st.text(letters, min_size=1, max_size=5), max_size=4)


@st.composite
def token_lists(draw: st.DrawFn) -> list[bytes]:
    """A text cut into tokens at any bytes, inside characters too, as byte-level BPE may do, with a few empty tokens."""
    data = draw(st.text(letters, max_size=30)).encode()
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=20)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@settings(max_examples=1000, deadline=None)
@given(token_lists(), stop_lists, st.booleans())
def test_shown_text_equals_the_slow_twin_after_every_token(
    tokens: list[bytes], stops: list[str], include_stop: bool
) -> None:
    """Each step shows all that may be shown and nothing more; the stop ends it; what was held comes with finish()."""
    result = run(tokens, stops, include_stop=include_stop)
    shown = ""
    for count, step in enumerate(result.steps, start=1):
        shown += step.text
        text = decode(tokens[:count])
        match = find_stop(text, stops)
        if match is None:
            assert (shown, step.stop, step.overhang_tokens) == (showable(text, stops), None, 0)
        else:
            end, stop = match
            assert (shown, step.stop) == (text[: end if include_stop else end - len(stop)], stop)
            assert count == len(result.steps)
    if result.steps[-1].stop is None:
        assert result.text == b"".join(tokens).decode()


@settings(max_examples=500, deadline=None)
@given(token_lists(), st.lists(st.text(letters, min_size=1, max_size=5), min_size=1, max_size=4))
def test_nothing_shown_belongs_to_a_stop_sequence(tokens: list[bytes], stops: list[str]) -> None:
    """Whatever the tokens, the text shown up to a stop, and up to the end without one, contains no stop sequence."""
    result = run(tokens, stops)
    assert find_stop(result.text, stops) is None
    full = b"".join(tokens).decode()
    assert full.startswith(result.text + (result.steps[-1].stop or ""))


@settings(max_examples=500, deadline=None)
@given(token_lists(), token_lists(), stop_lists, st.booleans())
def test_the_cut_into_tokens_does_not_matter(
    tokens: list[bytes], borders: list[bytes], stops: list[str], include_stop: bool
) -> None:
    """The same text in other tokens ends at the same place with the same stop sequence."""
    data = b"".join(tokens)
    lengths = [len(piece) for piece in borders]
    others, start = [], 0
    for length in lengths:
        others.append(data[start : start + length])
        start += length
    others.append(data[start:])
    one, other = run(tokens, stops, include_stop=include_stop), run(others, stops, include_stop=include_stop)
    assert (one.text, one.steps[-1].stop) == (other.text, other.steps[-1].stop)


@settings(max_examples=1000, deadline=None)
@given(st.text(letters, max_size=30), st.lists(st.integers(1, 3), min_size=30, max_size=30), stop_lists, st.booleans())
def test_overhang_counts_the_tokens_that_the_cut_leaves_unseen(
    text: str, lengths: list[int], stops: list[str], include_stop: bool
) -> None:
    """Tokens of one to three characters: without the overhang, the ledger's text is within what was shown."""
    tokens, start = [], 0
    for length in lengths:
        tokens.append(text[start : start + length].encode())
        start += length
    tokens = [token for token in tokens if token]
    result = run(tokens, stops, include_stop=include_stop)
    if result.steps and result.steps[-1].stop is not None:
        assert result.steps[-1].overhang_tokens == overhang(tokens[: len(result.steps)], result.text)


@pytest.mark.parametrize(
    ("tokens", "stops", "include_stop", "shown", "overhang_tokens"),
    [
        (["Hello", "\n\nUser", ":"], ["\n\nUser:"], False, "Hello", 2),
        (["Hello", "\n\nUser", ":"], ["\n\nUser:"], True, "Hello\n\nUser:", 0),
        (["Hello\n", "\nUser:", "x"], ["\n\n"], False, "Hello", 2),
        (["Hello\n", "\nUser:", "x"], ["\n\n"], True, "Hello\n\n", 1),
        (["one stop two"], ["stop"], False, "one ", 1),
        (["one ", "st", "op"], ["stop"], False, "one ", 2),
        (["aab"], ["b", "ab", "aab"], False, "", 1),
        (["xa", "b"], ["ab", "a"], False, "x", 1),
        (["ab", "cx"], ["abcd", "bc"], False, "a", 2),
    ],
)
def test_examples(tokens: list[str], stops: list[str], include_stop: bool, shown: str, overhang_tokens: int) -> None:
    """Cuts at and inside tokens; the match that is complete first wins, then the longest."""
    result = run([token.encode() for token in tokens], stops, include_stop=include_stop)
    assert result.text == shown
    assert result.steps[-1].stop in stops
    assert result.steps[-1].overhang_tokens == overhang_tokens


def test_bytes_of_a_hidden_character_are_overhang() -> None:
    """A token that holds only the first bytes of the stop's first character is not shown, so it counts."""
    result = run([b"ok", b"\xe2\x82", b"\xac"], ["€"])
    assert result.text == "ok"
    assert result.steps[-1] == TextStep("", "€", overhang_tokens=2)


def test_text_is_shown_at_once_when_it_cannot_be_a_stop() -> None:
    """Holding ends with the character that rules a match out, not at a token count or at the end."""
    result = run([b"a <", b"b", b"x", b"<"], ["<br>"])
    assert [step.text for step in result.steps] == ["a ", "", "<bx", ""]
    assert result.rest == "<"


def test_without_stop_sequences_nothing_is_held() -> None:
    """All text of a token is shown with it; an unfinished character comes out as U+FFFD at the end."""
    result = run([b"a", "€".encode(), b"\xe2\x82"], [])
    assert [step.text for step in result.steps] == ["a", "€", ""]
    assert result.rest == "�"


def test_an_empty_stop_sequence_is_refused() -> None:
    """It would match before the first token; the error names which one it is."""
    with pytest.raises(ValueError, match=r"stop_sequences\[1\] must not be empty"):
        OutputText(BytesDetokenizer([]), ["a", ""], include_stop=False)


def test_cost_with_ten_long_stop_sequences() -> None:
    """Prints the cost per token of 5 characters in a text that nearly matches ten stop sequences of 100."""
    stops = ["a" * 99 + chr(ord("b") + i) for i in range(10)]
    tokens = [b"aaaaa"] * 2000
    start = time.perf_counter()
    output = OutputText(BytesDetokenizer(tokens), stops, include_stop=False)
    built = time.perf_counter()
    for token_id in range(len(tokens)):
        output.push(token_id)
    token_us = (time.perf_counter() - built) / len(tokens) * 1e6
    print(f"building {1e6 * (built - start):.0f} us, {token_us:.1f} us a token")
    assert token_us < 200
