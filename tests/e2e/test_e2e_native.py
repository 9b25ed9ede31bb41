"""The native runner behind the server: the same bits for a session, whatever else happens around it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.e2e.conftest import LiveServer, live_server

from segue_client import Client, Completion
from segue_server.config import ServerConfig

STREAMS = 32
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def native() -> Iterator[LiveServer]:
    """SmolLM2 on the C++ kernels, with a pool too small for all of its sessions at once."""
    threads = torch.get_num_threads()
    ports = {"port": 0, "admin_port": 0, "metrics_port": 0}
    with live_server(
        ServerConfig(runner="native", threads=1, kv_bytes=48 << 20, prefill_chunk_tokens=64, **ports)
    ) as live:
        yield live
    torch.set_num_threads(threads)


def prompts(client: Client) -> list[list[int]]:
    text = "The harbour was quiet that morning, and the boats lay in the fog as if somebody had forgotten them. " * 8
    tokens = client.tokenize(text=text).token_ids
    return [list(tokens[n : n + 10 + 7 * n]) for n in range(STREAMS)]


def answer(client: Client, prompt: list[int]) -> Completion:
    return client.generate(tokens=prompt, temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)


def test_the_runner_is_native(native: LiveServer) -> None:
    """The server says what computes, so that a fallback to torch does not go unnoticed."""
    assert native.client().server_info().build.startswith("native-")


def test_streams_together_answer_as_each_alone(native: LiveServer) -> None:
    """32 turns at once, in chunks, with preemption and eviction: token for token the answers of each alone.

    No rule for near ties is needed: the logits are the same bits.
    """
    client = native.client()
    with ThreadPoolExecutor(STREAMS) as pool:
        together = list(pool.map(lambda prompt: answer(client, prompt), prompts(client)))
    for prompt, found in zip(prompts(client), together, strict=True):
        assert list(found.token_ids) == list(answer(client, prompt).token_ids)


def test_a_second_turn_answers_as_the_whole_conversation_at_once(native: LiveServer) -> None:
    """KV that a session kept, a fork shared, or a rewind cut gives the bits of a fresh computation."""
    client = native.client()
    session = client.create_session(text="Once upon a time, in a small village by the sea, ")
    session.generate(text="there lived a fisherman who", temperature=0.0, max_tokens=40, ignore_eos=True)
    branch = session.fork()
    answers = [s.generate(text=" One day", temperature=0.0, max_tokens=20, ignore_eos=True) for s in (session, branch)]
    reused = answers[0].usage.session_reused_tokens
    ledger = native.ledger(session)[: session.position - 20]
    session.rewind(turn=-1)
    answers.append(session.generate(text=" One day", temperature=0.0, max_tokens=20, ignore_eos=True))
    answers.append(client.generate(tokens=ledger, temperature=0.0, max_tokens=20, ignore_eos=True))
    assert reused > 40
    assert len({tuple(found.token_ids) for found in answers}) == 1
