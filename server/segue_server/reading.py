"""A ledger, piece by piece."""

from collections.abc import Iterator, Sequence

from segue_server.text import Detokenizer
from segue_server.views import TokenChunk, TurnSpan

CHUNK_TOKENS = 1024


def chunks(
    ids: Sequence[int], start: int, turns: tuple[TurnSpan, ...], detokenizer: Detokenizer | None
) -> Iterator[TokenChunk]:
    """The tokens `ids` from position `start` on, at least one chunk. Their texts together are the text of them all."""
    for first in range(0, max(len(ids), 1), CHUNK_TOKENS):
        piece = tuple(ids[first : first + CHUNK_TOKENS])
        is_last = first + CHUNK_TOKENS >= len(ids)
        text = _text(piece, detokenizer, is_last=is_last) if detokenizer else ""
        yield TokenChunk(start + first, piece, text, turns if is_last else ())


def _text(ids: Sequence[int], detokenizer: Detokenizer, *, is_last: bool) -> str:
    return "".join(map(detokenizer.push, ids)) + (detokenizer.flush() if is_last else "")
