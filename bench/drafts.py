"""What guessing tokens ahead brings: two servers, one with drafts and one without, answer the same prompts by turns.

One stream at a time, over the socket. Prints tokens/s of both from the first token on, the share of the drafts that
came true, and how many answers differ, which must be none. A draft comes true where an answer repeats what the
conversation holds: lists, code, quotations. Greedy answers of a small model repeat themselves a lot, sampled prose
hardly does.
"""

import argparse
import re
import statistics
import sys
import time
from dataclasses import dataclass, field

from _server import Addresses, parser, print_served, print_table, read, running_server, spread

from segue_client import Client, Tokens

PROMPTS = (
    "Write a short story about a dragon.",
    "List ten countries and their capitals.",
    "Explain how photosynthesis works.",
    "Write a Python function that computes the Fibonacci numbers, and explain it line by line.",
    "Write a JSON document that describes three books with title, author and year.",
    "Give me a recipe for pancakes.",
)


@dataclass(slots=True)
class Answers:
    """What one server said."""

    tokens: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0  # from the first token of each answer to its last

    @property
    def tokens_per_second(self) -> float:
        return sum(len(answer) - 1 for answer in self.tokens) / self.seconds


def main() -> int:
    options, words = parse()
    with running_server(*words, "--draft-tokens", "0") as plain, running_server(*words) as drafting:
        print_served(drafting.grpc)
        measured = [measure(plain, drafting, options, temperature) for temperature in options.temperature]
    differ = sum(count for _, count in measured)
    print_table(("temperature", "tokens/s without", "with drafts", "ratio", "came true"), [row for row, _ in measured])
    print(f"median (smallest..largest) of {options.runs} runs of {len(PROMPTS)} answers; {differ} answers differ")
    return 1 if differ else 0


def measure(
    plain: Addresses, drafting: Addresses, options: argparse.Namespace, temperature: float
) -> tuple[list[str], int]:
    """A row of the table, and how many answers differ."""
    before = drafts_of(drafting)
    runs = [
        [answer_all(server.grpc, options.new_tokens, temperature, seed) for server in (plain, drafting)]
        for seed in range(options.runs)
    ]
    accepted, rejected = (now - then for now, then in zip(drafts_of(drafting), before, strict=True))
    without, with_drafts = ([run[index].tokens_per_second for run in runs] for index in (0, 1))
    ratio = statistics.median(with_drafts) / statistics.median(without)
    came_true = accepted / max(accepted + rejected, 1)
    row = [f"{temperature:g}", spread(without), spread(with_drafts), f"{ratio:.2f}", f"{came_true:.2f}"]
    return row, sum(a != b for one, other in runs for a, b in zip(one.tokens, other.tokens, strict=True))


def answer_all(target: str, new_tokens: int, temperature: float, seed: int) -> Answers:
    answers = Answers()
    with Client(target) as client:
        for prompt in PROMPTS:
            session = client.create_session()
            with session.chat(prompt, temperature=temperature, seed=seed, max_tokens=new_tokens) as turn:
                events = [(time.perf_counter(), event) for event in turn.events() if isinstance(event, Tokens)]
            session.delete()
            answers.tokens.append([token for _, event in events for token in event.token_ids])
            answers.seconds += events[-1][0] - events[0][0]
    return answers


def drafts_of(server: Addresses) -> tuple[float, float]:
    """Drafts of the server so far: accepted, rejected."""
    page = read(server.metrics)
    found = dict(re.findall(r'^segue_draft_tokens_total{.*outcome="(\w+)".*} (\S+)$', page, re.MULTILINE))
    return float(found["accepted"]), float(found["rejected"])


def parse() -> tuple[argparse.Namespace, list[str]]:
    """The benchmark's own options, and the words for the servers."""
    options = parser(__doc__)
    options.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.7])
    options.add_argument("--new-tokens", type=int, default=200)
    options.add_argument("--runs", type=int, default=3)
    return options.parse_known_args()


if __name__ == "__main__":
    sys.exit(main())
