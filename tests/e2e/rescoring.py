"""Every greedy answer of a ledger proved by one prefill: the best token after each position is the one that came.

The native runner computes the same bits however a ledger came about, so this needs no rule for near ties.
"""

import uuid
from collections.abc import Iterable, Sequence

from segue_client import Client


def check_greedy(client: Client, ledger: Sequence[int], answered: Iterable[int], what: str) -> int:
    """Compute `ledger` afresh, by itself; the tokens at the positions `answered`, 1 or later, are the best there.

    Returns how many there were. Raises AssertionError naming the first that is not.
    """
    positions = list(answered)
    if not positions:
        return 0
    session = client.create_session(tokens=ledger[:1], cache_salt=uuid.uuid4().hex)
    scores = session.score(ledger[1:], top_logprobs=1).logprobs
    session.delete()
    assert len(scores) == len(ledger) - 1
    for position in positions:
        best = scores[position - 1].top[0].token_id
        assert best == ledger[position], f"{what}: {ledger[position]} at {position} of {len(ledger)}, afresh {best}"
    return len(positions)
