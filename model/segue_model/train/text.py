"""A text file to tokens: a byte-level BPE of its own, and windows to learn from."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"  # where it stands in the text it becomes the end token; otherwise the text is one document
BYTES = 256
HELD_OUT = 0.1  # of the text, its end


class TextError(ValueError):
    """The text does not suffice for what is asked; says by how much."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token ids, int64, of what is learned from and of what is only measured on."""

    tokenizer: Tokenizer
    train: torch.Tensor  # (N,)
    validation: torch.Tensor  # (M,)

    @classmethod
    def of(cls, text: str, *, vocab_size: int, context: int) -> "Corpus":
        """Raises TextError when a part is shorter than one window of context + 1 tokens."""
        cut = round(len(text) * (1 - HELD_OUT))
        tokenizer = train_tokenizer(text[:cut], vocab_size)  # the vocabulary must not know the held-out part either
        train, validation = (torch.tensor(tokenizer.encode(part).ids) for part in (text[:cut], text[cut:]))
        for name, part in (("training", train), ("validation", validation)):
            if len(part) <= context:
                raise TextError(f"the {name} part has {len(part)} tokens, at least {context + 1} are needed")
        return cls(tokenizer, train, validation)

    def batches(self, context: int, batch: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
        """Random windows of the training part without end: (batch, context + 1)."""
        while True:
            starts = torch.randint(len(self.train) - context, (batch,), generator=generator)
            yield self.train[starts[:, None] + torch.arange(context + 1)]

    def validation_windows(self, context: int, at_most: int) -> torch.Tensor:
        """The same windows at each call, side by side, evenly spread: (at most `at_most`, context + 1)."""
        windows = self.validation.unfold(0, context + 1, context)
        return windows[:: -(-len(windows) // at_most)]


def train_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    """Byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2), which can spell any text; may end below vocab_size.

    Raises TextError for a vocab_size without room for the bytes and the end token.
    """
    if vocab_size <= BYTES:
        raise TextError(f"the vocabulary needs at least {BYTES + 1} tokens for the bytes and {END}, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.split(END), trainer)
    return tokenizer
