"""What a session saves: time to the first token of the next turn, by the length of the history before it.

"warm" is a turn of a session whose KV cache is there; "recomputed" is the same ledger sent at once to a session that
has nothing. Both append the same new prompt of random tokens; the time is the client's, over the socket.
"""

import argparse
import statistics
import sys
import time
import uuid

from _server import print_table, random_tokens, running_server, spread

from segue_client import Client, Session, Tokens


def main() -> int:
    options = parse()
    with (
        running_server("--threads", str(options.threads), "--dtype", options.dtype) as addresses,
        Client(addresses.grpc) as client,
    ):
        client.wait_ready()
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


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--history", type=int, nargs="+", default=[0, 1024, 4096])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=0, help="of the server; 0 = one per core")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
