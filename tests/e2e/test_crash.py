"""The durable ledger under kill -9, a clean stop, and everything that can be wrong with its file."""

import random
import time

import pytest
from tests.e2e.crashing import Crowd, Host

from segue_client import Client

ANSWER = 12  # tokens of the turn that is compared


@pytest.fixture
def host(tiny_model, tmp_path):
    host = Host(tiny_model, tmp_path / "ledger.db")
    yield host
    host.kill()


def compare_next_turn(client: Client, name: str, same_choices) -> int:
    """The next greedy turn answers as the same tokens do in a session that knows no crash, and no KV of this one."""
    session = client.get_session(name)
    tokens = session.read_tokens().token_ids
    if not tokens:
        return 0
    greedy = {"max_tokens": ANSWER, "temperature": 0.0, "ignore_eos": True}
    fork = session.fork()  # the session itself stays as its user knows it
    got = fork.generate(**greedy)
    expected = client.generate(tokens=tokens, top_logprobs=2, bypass_prefix_cache=True, **greedy)
    same_choices(got, expected)
    fork.delete()
    return 1


def survive(host: Host, kills: int, same_choices) -> None:
    """Kill the server `kills` times at random moments, every fifth time once more while it recovers."""
    crowd, compared, starts = Crowd(host), 0, []
    began = time.monotonic()
    host.start()
    for kill in range(kills):
        users = crowd.live_and_die(random.uniform(0.05, 0.4))
        if kill % 5 == 4:
            host.start()
            time.sleep(random.uniform(0.0, 0.4))
            host.kill()
        at = time.monotonic()
        host.start()
        with host.client() as client:
            starts.append(time.monotonic() - at)
            cut = crowd.check(client, users)
            names = [name for user in users for name in user.sessions]
            for name in [*cut[:2], random.choice(names)] if names else cut[:2]:
                compared += compare_next_turn(client, name, same_choices)
    took = time.monotonic() - began
    print(
        f"{kills} kills, {crowd.operations} operations acknowledged, {crowd.turns_cut} turns cut short, "
        f"{crowd.tokens_unseen} tokens kept that no reader had, {compared} answers compared; "
        f"a start takes {sorted(starts)[len(starts) // 2]:.2f} s, all {took:.0f} s"
    )
    assert crowd.turns_cut, "no kill came in the middle of a turn"
    assert crowd.operations > kills


def test_nothing_that_was_acknowledged_is_lost_in_twenty_kills(host, same_choices):
    """SIGKILL at random moments under four users who open, talk, append, fork, rewind and delete."""
    survive(host, 20, same_choices)


@pytest.mark.soak
def test_nothing_that_was_acknowledged_is_lost_in_two_hundred_kills(host, same_choices):
    """The same on one file that goes through two hundred recoveries."""
    survive(host, 200, same_choices)
