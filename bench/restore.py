"""What a tier below the pool saves: time to the first token of a turn whose history lies there, beside recomputing it.

One session a length. Before each turn its KV is moved to where the column says ("pool": it stays); the turn appends
one random token, and is rewound afterwards, so that every run finds the same history. The time is the client's, over
the socket; "restore ms" is the server's own figure for bringing the KV back. Files are read from the page cache unless
the machine is short of memory: what is measured of the disk is reading, checking and copying, not the device.
"""

import argparse
import statistics
import sys
import time
import uuid
from collections.abc import Sequence
from typing import Literal

from _server import parser, print_served, print_table, random_tokens, running_server, spread

from segue_client import Client, Session, Tokens

Place = Literal["device", "host", "disk", "none"]
PLACES: Sequence[tuple[Place, str]] = (
    ("device", "pool"),
    ("host", "host"),
    ("disk", "disk"),
    ("none", "recomputed"),
)


def main() -> int:
    options, server_words = parse()
    tiers = ("--kv-host-bytes", "2GiB", "--kv-disk-bytes", "4GiB")
    with running_server(*tiers, *server_words) as addresses, Client(addresses.grpc) as client:
        print_served(addresses.grpc)
        turn(client.create_session(), [1, 2, 3])  # warm-up
        rows = [row(client, history, options.runs) for history in options.history]
    columns = [f"{name} ms" for _, name in PLACES]
    print_table(("history", *columns, "restore ms host / disk", "recomputed / host", "/ disk"), rows)
    print(f"median (smallest..largest) of {options.runs} runs")
    return 0


def row(client: Client, history: int, runs: int) -> list[str]:
    vocabulary = client.model_info().vocab_size
    session = client.create_session(cache_salt=str(uuid.uuid4()))
    session.append_context(tokens=random_tokens(vocabulary, history))
    times: dict[Place, list[float]] = {place: [] for place, _ in PLACES}
    restores: dict[Place, list[float]] = {place: [] for place, _ in PLACES}
    for _ in range(runs):
        for place, _name in PLACES:
            session.move(place)
            first, restore = turn(session, random_tokens(vocabulary, 1))
            times[place].append(first * 1e3)
            restores[place].append(restore * 1e3)
            session.rewind(position=history)
    session.delete()
    middle = {place: statistics.median(times[place]) for place, _ in PLACES}
    return [
        f"{history:,}",
        *(spread(times[place], 0) for place, _ in PLACES),
        f"{statistics.median(restores['host']):.0f} / {statistics.median(restores['disk']):.0f}",
        *(f"{middle['none'] / middle[place]:.1f}" for place in ("host", "disk")),
    ]


def turn(session: Session, tokens: list[int]) -> tuple[float, float]:
    """Seconds to the first token, and of them those in which KV came back."""
    began, first = time.perf_counter(), 0.0
    with session.stream(tokens=tokens, max_tokens=1, temperature=0.0, ignore_eos=True) as running:
        for event in running.events():
            if isinstance(event, Tokens):
                first = time.perf_counter() - began
        timings = running.timings
    return first, (timings.restore or 0.0) if timings else 0.0


def parse() -> tuple[argparse.Namespace, list[str]]:
    """The benchmark's own options, and the words for the server."""
    words = parser(__doc__)
    words.add_argument("--history", type=int, nargs="+", default=[1024, 4096, 8000], help="tokens")
    words.add_argument("--runs", type=int, default=5)
    return words.parse_known_args()


if __name__ == "__main__":
    sys.exit(main())
