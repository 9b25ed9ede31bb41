"""What each token of a tokenizer.json writes, read from its `decoder` entry."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from segue_model.tokenizer.alphabet import byte_alphabet
from segue_model.tokenizer.detokenizer import Lead, TokenBytes
from segue_model.tokenizer.errors import TokenizerError
from segue_model.tokenizer.json_types import Json, as_list, as_object, as_text
from segue_model.tokenizer.pipeline import Pipeline

_SUPPORTED = "ByteLevel, Replace of a string, ByteFallback, Fuse, Strip of one leading space after Fuse, Metaspace"
# Ids of a vocabulary lie close together; one id of 2**60 must not allocate a table of that size.
_MAX_VOCAB = 1 << 24


@dataclass(frozen=True, slots=True)
class _Writer:
    """A decoder chain reduced to a function of one token, plus what happens at the very start of the text."""

    byte_level: bool = False
    byte_fallback: bool = False
    fused: bool = False
    separator: str = ""
    replacements: tuple[tuple[str, str], ...] = ()
    lead: Lead = "keep"

    def write(self, token: str) -> bytes:
        """The bytes of a token spelled in the vocabulary's own way."""
        if self.byte_fallback and (byte := _fallback_byte(token)) is not None:
            return byte
        for old, new in self.replacements:
            token = token.replace(old, new)
        return (self.separator + token).encode()


def token_bytes(pipeline: Pipeline, *, at_least: int = 0) -> TokenBytes:
    """The table for `Detokenizer`, of `at_least` so many ids.

    Raises TokenizerError for a decoder that cannot work one token at a time.
    """
    texts = pipeline.token_texts()
    size = max(max(texts, default=-1) + 1, at_least)
    if not 0 < size <= _MAX_VOCAB:
        raise TokenizerError(f"model.vocab: ids must lie between 0 and {_MAX_VOCAB - 1}, the largest is {size - 1}")
    writer = _writer(pipeline.definition.get("decoder"))
    # Added tokens are spelled as they read, also where the others use the byte alphabet.
    raw = {token.id for token in pipeline.added} if writer.byte_level else set()
    alphabet = _to_latin_1(byte_alphabet())
    table = [b""] * size
    for token_id, text in texts.items():
        spelled = writer.byte_level and token_id not in raw
        table[token_id] = (_spelled(text, alphabet) if spelled else None) or writer.write(text)
    return TokenBytes(table, frozenset(pipeline.special), writer.lead)


def _to_latin_1(alphabet: Mapping[str, int]) -> dict[int, int]:
    """For `str.translate`: the byte alphabet's characters become the bytes' own in Latin-1, and no other does."""
    foreign = {code: 0x100 for code in range(256) if chr(code) not in alphabet}
    return foreign | {ord(character): byte for character, byte in alphabet.items()}


def _spelled(text: str, alphabet: Mapping[int, int]) -> bytes | None:
    """What characters of the byte alphabet stand for; None when there are others among them."""
    try:
        return text.translate(alphabet).encode("latin-1")
    except UnicodeEncodeError:
        return None


def _fallback_byte(token: str) -> bytes | None:
    """The byte that a token like <0x0A> stands for."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return None
    return None


def _writer(decoder: Json) -> _Writer:
    if decoder is None:
        return _Writer(separator=" ", lead="one space")
    writer = _Writer()
    for step in _flat(as_object(decoder, "decoder")):
        writer = _with_step(writer, step)
    return writer


def _flat(decoder: dict[str, Json]) -> list[dict[str, Json]]:
    if decoder.get("type") != "Sequence":
        return [decoder]
    steps = as_list(decoder.get("decoders"), "decoder.decoders")
    return [leaf for step in steps for leaf in _flat(as_object(step, "decoder.decoders"))]


def _with_step(writer: _Writer, step: dict[str, Json]) -> _Writer:
    match step:
        case {"type": "ByteLevel"}:
            return replace(writer, byte_level=True)
        case {"type": "ByteFallback"}:
            return replace(writer, byte_fallback=True)
        case {"type": "Fuse"}:
            return replace(writer, fused=True)
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return replace(writer, replacements=(*writer.replacements, (old, new)))
        case {"type": "Strip", "start": 0, "stop": 0}:
            return writer
        case {"type": "Strip", "content": " ", "start": 1, "stop": 0} if writer.fused:
            return replace(writer, lead="one space")
        case {"type": "Metaspace"}:
            mark = as_text(step.get("replacement", "▁"), "decoder.replacement")
            lead: Lead = "keep" if step.get("prepend_scheme") == "never" else "first token"
            return replace(writer, replacements=(*writer.replacements, (mark, " ")), lead=lead)
    raise TokenizerError(f"decoder {step.get('type')!r} is not supported as it stands; supported: {_SUPPORTED}")
