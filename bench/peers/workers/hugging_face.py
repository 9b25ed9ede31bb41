"""Transformers in process: the loop that `generate` runs, with the cache of the last prompt cropped to what is shared.

Many prompts are a static batch, so they must have one length.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from peers.workers.loop import serve, shared_prefix


class Transformers:
    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(options.threads)
        self._model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.variant))
        self._cache, self._held = DynamicCache(), list[int]()

    def run(self, prompts: Sequence[Sequence[int]], new: int) -> Iterator[Mapping[int, int]]:
        start = self._take_up(prompts)
        tokens = torch.tensor(prompts)[:, start:]
        for _ in range(new):
            tokens = self._step(tokens)
            yield dict(enumerate(tokens[:, 0].tolist()))
        if len(prompts) > 1:
            self._cache, self._held = DynamicCache(), []

    @torch.inference_mode()
    def _step(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, T) to the next tokens (B, 1)."""
        logits = self._model(input_ids=tokens, cache=self._cache, use_cache=True, logits_to_keep=1).logits
        next_tokens: torch.Tensor = logits[:, -1].argmax(-1, keepdim=True)
        return next_tokens

    def _take_up(self, prompts: Sequence[Sequence[int]]) -> int:
        """Positions that are computed already."""
        if len(prompts) > 1 or not (start := shared_prefix(self._held, prompts[0])):
            self._cache, start = DynamicCache(), 0
        else:
            self._cache.crop(start - self._cache.get_seq_length())  # by so many tokens from the end
        self._held = list(prompts[0])
        return start


if __name__ == "__main__":
    serve(Transformers)
