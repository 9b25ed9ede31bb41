"""The same loop around every engine that is measured in process: one JSON object a line, in and out.

    in    {"prompts": [[token id, ...], ...], "new": 64}
    out   {"ready": true}, once, when the model is loaded
          {"began": seconds, "ids": [[token id, ...], ...], "times": [[seconds, ...], ...]} for every line

It runs with the peer's own Python, so it needs nothing but the standard library.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TextIO


class Engine(Protocol):
    """What is measured."""

    def run(self, prompts: Sequence[Sequence[int]], new: int) -> Iterator[Mapping[int, int]]:
        """Greedy decoding of `new` tokens for each prompt, end-of-sequence tokens ignored.

        Yields after each step: the number of a prompt -> its next token. A lone prompt may reuse what it shares with
        the beginning of the one before it.
        """
        ...


def serve(make: Callable[[argparse.Namespace], Engine]) -> None:
    """Load the engine, then answer until standard input ends."""
    options = _options()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    engine = make(options)
    _send(answers, {"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        _send(answers, measure(engine, order["prompts"], order["new"]))


def measure(engine: Engine, prompts: Sequence[Sequence[int]], new: int) -> dict[str, object]:
    ids: list[list[int]] = [[] for _ in prompts]
    times: list[list[float]] = [[] for _ in prompts]
    began = time.perf_counter()
    for step in engine.run(prompts, new):
        now = time.perf_counter()
        for stream, token in step.items():
            ids[stream].append(token)
            times[stream].append(now)
    return {"began": began, "ids": ids, "times": times}


def shared_prefix(held: Sequence[int], prompt: Sequence[int]) -> int:
    """Tokens of `prompt` that need not be computed again; never the last, whose logits are needed."""
    pairs = enumerate(zip(held, prompt, strict=False))
    differs = next((i for i, (old, new) in pairs if old != new), min(len(held), len(prompt)))
    return min(differs, len(prompt) - 1)


def _send(answers: TextIO, message: Mapping[str, object]) -> None:
    print(json.dumps(message), file=answers, flush=True)


def _options() -> argparse.Namespace:
    words = argparse.ArgumentParser()
    words.add_argument("--model", required=True)
    words.add_argument("--threads", type=int, required=True)
    words.add_argument("--context", type=int, required=True, help="longest context, in tokens")
    words.add_argument("--variant", default="", help="what the engine understands, such as a dtype")
    return words.parse_args()
