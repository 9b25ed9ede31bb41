"""What the weights say when nothing is rounded: the check that every system runs the same model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from segue_model.checkpoint import Checkpoint
from segue_model.runner.base import PAGE_TOKENS, Slice
from segue_model.runner.torch_runner import TorchRunner

TEXT: Final = "The three most important inventions of the nineteenth century were"
TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class Reference:
    """Greedy tokens after a prompt of natural text, where the first choice is seldom a close one."""

    prompt: Sequence[int]
    expected: Sequence[int]

    @classmethod
    def compute(cls, checkpoint: Checkpoint) -> "Reference":
        """In float32 with plain torch. Raises ValueError for a checkpoint without a tokenizer."""
        if checkpoint.tokenizer is None:
            raise ValueError(f"{checkpoint.model_id} has no tokenizer")
        prompt = list(checkpoint.tokenizer.encode(TEXT))
        return cls(prompt, greedy_float32(checkpoint, prompt, TOKENS))

    def agreeing(self, ids: Sequence[int]) -> int:
        """Tokens before the first that differs."""
        pairs = enumerate(zip(ids, self.expected, strict=True))
        return next((i for i, (got, expected) in pairs if got != expected), len(ids))


def greedy_float32(checkpoint: Checkpoint, prompt: Sequence[int], new: int) -> list[int]:
    pages = range(-(-(len(prompt) + new) // PAGE_TOKENS))
    runner = TorchRunner(checkpoint.config, checkpoint.weights, num_pages=len(pages))
    ledger, computed = list(prompt), 0
    for _ in range(new):
        [logits] = runner.forward([Slice(ledger[computed:], computed, pages)])
        computed = len(ledger)
        if logits is not None:
            ledger.append(int(logits.argmax()))
    return ledger[len(prompt) :]
