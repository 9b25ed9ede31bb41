"""From sampled tokens to the text that may be shown: nothing of a stop sequence, no half characters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Detokenizer(Protocol):
    """Incremental decoding that never cuts a character."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


@dataclass(frozen=True, slots=True)
class TextStep:
    text: str
    stop: str | None = None
    overhang_tokens: int = 0


class OutputText:
    def __init__(self, detokenizer: Detokenizer, stop_sequences: Sequence[str], *, include_stop: bool) -> None:
        raise NotImplementedError

    def push(self, token_id: int) -> TextStep:
        raise NotImplementedError

    def finish(self) -> str:
        raise NotImplementedError
