"""llama.cpp in process, through llama-cpp-python; `generate` keeps the KV of a prefix shared with the last call."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from llama_cpp import Llama

from peers.workers.loop import serve


class LlamaCpp:
    def __init__(self, options: argparse.Namespace) -> None:
        threads = options.threads
        self._llama = Llama(
            options.model, n_ctx=options.context, n_threads=threads, n_threads_batch=threads, verbose=False
        )

    def run(self, prompts: Sequence[Sequence[int]], new: int) -> Iterator[Mapping[int, int]]:
        [prompt] = prompts  # the Python class has one sequence; many are the server's matter
        for token in islice(self._llama.generate(list(prompt), top_k=1, temp=0.0), new):
            yield {0: token}


if __name__ == "__main__":
    serve(LlamaCpp)
