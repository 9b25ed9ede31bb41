"""The events of real streams, read with plain stubs: their order, their numbers, and the probabilities they carry."""

import re
import time

import pytest
import torch
from google.protobuf.duration_pb2 import Duration
from tests.e2e.conftest import smollm2

from segue.v1 import generation_pb2, generation_pb2_grpc, types_pb2
from segue_client import Queued, Started
from segue_model.decoder import Decoder
from segue_model.loaders import find_embedded_model, load_checkpoint
from segue_model.torch_arrays import state_of

LETTERS = {"queued": "Q", "started": "S", "prefill": "P", "tokens": "T", "heartbeat": "H", "finished": "F"}
TOLERANCE = 1e-3  # of log probability
GREEDY = {"temperature": 0.0}


@pytest.fixture(scope="module")
def server():
    """SmolLM2 in float32, whose probabilities are compared with those of the reference decoder."""
    with smollm2("torch") as live:
        yield live


def spelled(messages):
    """One letter for each event; on the way, their sequence numbers are checked."""
    assert [message.sequence for message in messages] == list(range(1, len(messages) + 1))
    return "".join(LETTERS[message.WhichOneof("event")] for message in messages)


def request(prompt, *, heartbeat=None, max_tokens=4):
    return generation_pb2.GenerateRequest(
        text=prompt,
        sampling=types_pb2.SamplingParams(temperature=0),
        stop=types_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True),
        output=types_pb2.OutputOptions(heartbeat_interval=heartbeat),
    )


def read(channel, message):
    return list(generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(message))


def test_a_short_turn_is_started_tokens_finished(channel):
    """One event a token, and positions that go on from the prompt."""
    messages = read(channel, request("Hello, my name is"))
    assert spelled(messages) == "STTTTF"
    started, finished = messages[0].started, messages[-1].finished
    first = started.position + started.prompt_tokens
    assert [message.tokens.position for message in messages[1:-1]] == [first, first + 1, first + 2, first + 3]
    assert finished.position == first + 4
    assert started.to_compute_tokens == finished.usage.computed_tokens == started.prompt_tokens


def test_a_long_prompt_tells_how_far_it_is_and_that_it_is_alive(server, channel):
    """PrefillProgress after each chunk but the last, heartbeats in between, in the order of the grammar."""
    words = "one two three four five six seven eight nine ten " * 60
    messages = read(channel, request(words, heartbeat=Duration(nanos=60_000_000), max_tokens=2))
    letters = spelled(messages)
    assert re.fullmatch(r"S[PH]*T[TH]*F", letters), letters
    total = messages[0].started.to_compute_tokens
    chunk = server.config.prefill_chunk_tokens
    progress = [message.prefill for message in messages if message.HasField("prefill")]
    assert [event.processed_tokens for event in progress] == list(range(chunk, total, chunk))
    assert all(event.total_tokens == total for event in progress)
    assert "H" in letters
    elapsed = [m.heartbeat.elapsed.ToNanoseconds() for m in messages if m.HasField("heartbeat")]
    assert elapsed == sorted(elapsed)


def test_waiting_turns_say_so_first_and_no_heartbeat_comes_before_started(serve):
    """One place in the batch: the second and the third turn are told their place, then wait in silence."""
    live = serve(max_running=1)
    client = live.client()
    blocker = client.stream(text="a", **GREEDY, ignore_eos=True)
    running = blocker.events()
    assert isinstance(next(running), Started)
    waiting = [client.stream(text="b", **GREEDY, max_tokens=3, ignore_eos=True, heartbeat_interval=0.05) for _ in "12"]
    events = [turn.events() for turn in waiting]
    assert next(events[0]) == Queued(queue_position=0)
    assert next(events[1]) == Queued(queue_position=1)
    time.sleep(0.3)
    assert live.in_flight() == 3
    running.close()
    for turn, rest in zip(waiting, events, strict=True):
        kinds = [type(event).__name__ for event in rest]
        assert kinds[0] == "Started"
        assert kinds[-1] == "Finished"
        assert set(kinds[1:-1]) <= {"Tokens", "Heartbeat"}
        assert len(turn.token_ids) == 3
        assert turn.timings.queue >= 0.3


# ---------------------------------------------------------------------------------------------------- probabilities


@pytest.fixture(scope="module")
def reference():
    """log softmax of the reference decoder's logits (T, vocab), in float32, without a cache."""
    checkpoint = load_checkpoint(find_embedded_model())
    decoder = Decoder(checkpoint.config)
    decoder.load_state_dict(state_of(checkpoint.weights), strict=True)

    @torch.no_grad()
    def logprobs(tokens):
        return decoder(torch.tensor([tokens]))[0].log_softmax(-1)

    return logprobs


def worst(entries, rows):
    """Largest distance of the logprobs in `entries` from the reference's row for the same position."""
    pairs = [(entry.logprob, row[entry.token_id]) for entry, row in zip(entries, rows, strict=True)]
    pairs += [(top.logprob, row[top.token_id]) for entry, row in zip(entries, rows, strict=True) for top in entry.top]
    return max(abs(float(ours) - float(theirs)) for ours, theirs in pairs)


def test_logprobs_of_tokens_and_prompt_are_those_of_the_reference_decoder(server, client, reference):
    """Every probability of a turn, in a session that had context before it, to 1e-3; and the best come first."""
    session = client.create_session()
    session.append_context(text="It was the best of times,")
    start = session.position
    turn = session.generate(
        text=" it was the worst of", **GREEDY, max_tokens=6, ignore_eos=True, top_logprobs=3, prompt_logprobs=True
    )
    rows = reference(server.ledger(session))
    end = start + turn.usage.prompt_tokens
    assert [entry.token_id for entry in turn.prompt_logprobs] == server.ledger(session)[start:end]
    prompt = worst(turn.prompt_logprobs, rows[start - 1 : end - 1])
    assert [entry.token_id for entry in turn.logprobs] == list(turn.token_ids)
    generated = worst(turn.logprobs, rows[end - 1 : -1])
    print(f"logprobs: prompt off by at most {prompt:.1e}, generated by {generated:.1e}")
    assert max(prompt, generated) < TOLERANCE
    for entry in turn.logprobs:
        best = [top.logprob for top in entry.top]
        assert len(best) == 3
        assert best == sorted(best, reverse=True)


def test_the_comparison_sees_a_wrong_probability(client, reference):
    """The oracle has teeth: the rows of the neighbouring position are far away."""
    turn = client.generate(text="It was the best of times", **GREEDY, max_tokens=4, ignore_eos=True, top_logprobs=0)
    prompt = client.tokenize("It was the best of times").token_ids
    rows = reference([*prompt, *turn.token_ids])
    assert worst(turn.logprobs, rows[len(prompt) - 1 : -1]) < TOLERANCE
    assert worst(turn.logprobs, rows[len(prompt) - 2 : -2]) > 0.1


def test_the_first_token_of_a_session_has_no_logprob(client):
    """Nothing comes before it, so prompt_logprobs are one fewer than the prompt."""
    turn = client.create_session(cache_salt="own").generate(text="Hello there", max_tokens=1, prompt_logprobs=True)
    assert len(turn.prompt_logprobs) == turn.usage.prompt_tokens - 1
