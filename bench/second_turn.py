"""What a session saves: time to the first token of the next turn, by the length of the history before it.

"warm" is a turn of a session whose KV cache is there; "recomputed" is the same ledger sent at once to a session that
has nothing. Both append the same new prompt of random tokens; the time is the client's, over the socket.
"""

import argparse
import statistics
import sys
import time
import uuid

from _server import parser, print_served, print_table, random_tokens, running_server, spread

from segue_client import Client, Session, Tokens


def main() -> int:
    options, server_words = parse()
    with running_server(*server_words) as addresses, Client(addresses.grpc) as client:
        print_served(addresses.grpc)
        first_token(client.create_session(), [1, 2, 3])  # warm-up
        rows = [row(client, history, options) for history in options.history]
    print_table(("history", "warm ms", "recomputed ms", "ratio"), rows)
    print(f"median (smallest..largest) of {options.runs} runs, {options.prompt_tokens} new tokens")
    return 0


def row(client: Client, history: int, options: argparse.Namespace) -> list[str]:
    runs = [measure(client, history, options.prompt_tokens) for _ in range(options.runs)]
    warm, cold = ([one[index] * 1e3 for one in runs] for index in (0, 1))
    ratio = statistics.median(cold) / statistics.median(warm)
    return [f"{history:,}", spread(warm, 0), spread(cold, 0), f"{ratio:.1f}"]


def measure(client: Client, history: int, prompt_tokens: int) -> tuple[float, float]:
    """Seconds to the first token: (warm, recomputed)."""
    vocabulary = client.model_info().vocab_size
    past, prompt = (random_tokens(vocabulary, count) for count in (history, prompt_tokens))
    warm, cold = (client.create_session(cache_salt=str(uuid.uuid4())) for _ in range(2))  # they share nothing
    if past:
        warm.append_context(tokens=past)
    times = first_token(warm, prompt), first_token(cold, [*past, *prompt])
    for session in (warm, cold):
        session.delete()
    return times


def first_token(session: Session, tokens: list[int]) -> float:
    """Seconds from the call to the first token."""
    began = time.perf_counter()
    with session.stream(tokens=tokens, max_tokens=1, temperature=0.0, ignore_eos=True) as turn:
        for event in turn.events():
            if isinstance(event, Tokens):
                return time.perf_counter() - began
    raise RuntimeError("the turn ended without a token")


def parse() -> tuple[argparse.Namespace, list[str]]:
    """The benchmark's own options, and the words for the server."""
    options = parser(__doc__)
    options.add_argument("--history", type=int, nargs="+", default=[0, 1024, 4096])
    options.add_argument("--prompt-tokens", type=int, default=32)
    options.add_argument("--runs", type=int, default=3)
    return options.parse_known_args()


if __name__ == "__main__":
    sys.exit(main())
