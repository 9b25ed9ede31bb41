"""The demonstration's task: write a sequence backwards. Nothing but attention between positions can solve it."""

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from segue_model.config import ConfigError
from segue_model.seq2seq.config import EOS, PAD, SPECIAL_TOKENS
from segue_model.seq2seq.decoding import beam_search
from segue_model.seq2seq.training import Pairs, pad
from segue_model.seq2seq.transformer import Transformer

_ONE_IN = 16  # sequences are held out of training


@dataclass(frozen=True, slots=True)
class Reversal:
    """Sequences over `symbols` symbols, of min_length .. max_length in training."""

    symbols: int = 16
    min_length: int = 4
    max_length: int = 10

    def __post_init__(self) -> None:
        if not 2 <= self.symbols <= 256 - SPECIAL_TOKENS:
            raise ConfigError(f"symbols must lie in 2 .. {256 - SPECIAL_TOKENS}, got {self.symbols}")
        if not 1 <= self.min_length <= self.max_length:
            raise ConfigError(f"lengths must satisfy 1 <= min <= max, got {self.min_length} and {self.max_length}")

    @property
    def vocab(self) -> int:
        return SPECIAL_TOKENS + self.symbols

    def batches(self, seed: int, size: int) -> Iterator[Pairs]:
        """Training data without end, none of it held out."""
        chance = random.Random(seed)  # noqa: S311 - repeatable on purpose
        while True:
            lengths = [chance.randint(self.min_length, self.max_length) for _ in range(size)]
            sources = [self._draw(chance, length, held_out=False) for length in lengths]
            yield Pairs.of(sources, [source[::-1] for source in sources])

    def held_out(self, seed: int, length: int, count: int) -> list[list[int]]:
        """Sequences that no training batch of any seed contains."""
        chance = random.Random(f"held out {seed} {length}")  # noqa: S311 - repeatable on purpose
        return [self._draw(chance, length, held_out=True) for _ in range(count)]

    def _draw(self, chance: random.Random, length: int, *, held_out: bool) -> list[int]:
        while True:
            sequence = [SPECIAL_TOKENS + chance.randrange(self.symbols) for _ in range(length)]
            if is_held_out(sequence) == held_out:
                return sequence


def is_held_out(sequence: list[int]) -> bool:
    """A property of the sequence alone, so that training and check cannot meet, whatever the seeds."""
    return zlib.crc32(bytes(sequence)) % _ONE_IN == 0


def exact_matches(model: Transformer, sources: list[list[int]], *, beams: int) -> float:
    """The share of sources whose decoded target, EOS included, is right in every token."""
    longest = max(map(len, sources))
    found = beam_search(model, pad(sources), max_tokens=longest + 4, beams=beams).tokens
    return sum(_content(row) == [*source[::-1], EOS] for row, source in zip(found, sources, strict=True)) / len(sources)


def _content(row: torch.Tensor) -> list[int]:
    return [token for token in row.tolist() if token != PAD]
