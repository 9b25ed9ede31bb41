"""Turns that do not end by themselves: however the caller leaves, the work stops, and the session goes on at once.

One place in the batch and small steps, so that a turn can be caught in the queue, in its prompt and while it decodes.
"""

import asyncio
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from segue.v1 import generation_pb2, generation_pb2_grpc, types_pb2
from segue_client import AsyncClient, FinishReason, PositionMismatch, SessionBusy, SessionNotFound
from segue_model.paging import PAGE_TOKENS
from segue_server.cache.session import pages_for

PROMPT = list(range(97, 123))
LONG_PROMPT = (PROMPT * 240)[:6000]  # 375 steps of 16 tokens
DEADLINE = 0.4  # seconds
PHASES = ("queue", "prefill", "decode")
WAYS = ("rpc", "stream", "channel", "deadline")


@pytest.fixture
def live(serve):
    return serve(max_running=1, prefill_chunk_tokens=16)


@dataclass
class Caught:
    """A turn that has been brought into a phase."""

    call: Any
    events: Any
    channel: grpc.Channel
    request_id: str

    def leave(self, way, client):
        if way == "rpc":
            assert client.cancel(request_id=self.request_id).was_running
        elif way == "stream":
            self.call.cancel()
        elif way == "channel":
            self.channel.close()
        else:
            time.sleep(max(0.0, self.call.time_remaining() or 0.0) + 0.02)


@contextmanager
def caught(live, session, phase, way, policy=None):
    """A stream of `session`, opened with a plain stub, when it has reached `phase`."""
    with ExitStack() as stack:
        if phase == "queue":
            blocker = stack.enter_context(live.client().stream(tokens=PROMPT, temperature=0, ignore_eos=True))
            blocking = blocker.events()
            next(blocking)
            stack.callback(blocking.close)
        channel = stack.enter_context(grpc.insecure_channel(live.target))
        message = generation_pb2.GenerateRequest(
            session_id=session.id,
            request_id=f"turn-{phase}-{way}",
            token_ids=types_pb2.TokenIds(ids=LONG_PROMPT if phase == "prefill" else PROMPT),
            sampling=types_pb2.SamplingParams(temperature=0),
            stop=types_pb2.StopConditions(ignore_eos=True),
            commit_policy=policy,
        )
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.GenerateStream(message, timeout=DEADLINE if way == "deadline" else 60)
        wanted = {"queue": "queued", "prefill": "prefill", "decode": "tokens"}[phase]
        while next(call).WhichOneof("event") != wanted:
            pass
        yield Caught(call, call, channel, message.request_id)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("phase", PHASES)
def test_leaving_stops_the_work_and_frees_the_session(live, phase, way):
    """No step is run for a turn that was left; its session takes the next turn at once and knows where it stands."""
    client = live.client()
    session = client.create_session()
    session.append_context(tokens=PROMPT)
    with caught(live, session, phase, way) as turn:
        turn.leave(way, client)
        blockers = 1 if phase == "queue" else 0
        wait_for(lambda: live.in_flight() == blockers)
        if not blockers:
            steps = live.steps
            time.sleep(0.1)
            assert live.steps == steps, "the engine went on"
    live.wait_idle()
    session.refresh()
    appended = len(LONG_PROMPT) if phase == "prefill" else len(PROMPT)
    base = len(PROMPT) + appended
    assert session.position >= base if phase == "decode" else session.position == base
    assert session.info.active_request_id == ""
    if phase == "prefill":
        assert session.info.cache.cached_tokens < base, "the prompt was computed to its end"
    again = session.generate(temperature=0, max_tokens=2, ignore_eos=True)
    assert again.usage.generated_tokens == 2
    counted = live.running.engine.stats.cancellations.values
    cause = {"rpc": "rpc", "deadline": "deadline"}.get(way, "disconnect")
    label = "queued" if phase == "queue" else phase
    assert counted[label, cause] == 1, {key: n for key, n in counted.items() if n}


def wait_for(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the turn did not leave"
        time.sleep(0.002)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("policy", ["keep_partial", "keep_prompt", "rollback"])
def test_the_commit_policy_says_what_the_ledger_keeps(live, phase, policy):
    """After a cancel: prompt and tokens, the prompt, or nothing of the turn; never a token that was not streamed."""
    client = live.client()
    session = client.create_session()
    session.append_context(tokens=PROMPT)
    before = session.position
    wire = types_pb2.CommitPolicy.Value(f"COMMIT_POLICY_{policy.upper()}")
    with caught(live, session, phase, "rpc", policy=wire) as turn:
        answer = client.cancel(request_id=turn.request_id)
        rest = list(turn.events)
    tokens = [token for message in rest for token in message.tokens.token_ids]
    assert rest[-1].finished == answer.finished
    assert answer.finished.finish_reason == types_pb2.FINISH_REASON_CANCELLED
    prompt_end = before + (len(LONG_PROMPT) if phase == "prefill" else len(PROMPT))
    streamed = prompt_end + (1 + len(tokens) if phase == "decode" else 0)
    kept = {"keep_partial": streamed, "keep_prompt": prompt_end, "rollback": before}[policy]
    assert answer.finished.position == kept == len(live.ledger(session)) == session.refresh().position
    assert session.info.cache.cached_tokens <= kept


def test_cancel_is_idempotent_and_can_name_the_session(live):
    """A second cancel finds nothing; a cancel by session ends whatever is in flight; an unknown session is an error."""
    client = live.client()
    session = client.create_session()
    with session.stream(tokens=PROMPT, temperature=0, ignore_eos=True) as turn:
        events = turn.events()
        next(events)
        assert session.cancel().was_running
        assert [type(event).__name__ for event in events][-1] == "Finished"
        assert turn.finish_reason is FinishReason.CANCELLED
    assert not client.cancel(request_id=turn.request_id).was_running
    assert not session.cancel().was_running
    with pytest.raises(SessionNotFound):
        client.cancel(session_id="never-was")


def test_a_closed_client_leaves_its_turns_without_an_error(live):
    """Closing the client while a turn is read ends the turn on the server, and the turn's own close says nothing."""
    client = live.client()
    turn = client.stream(tokens=PROMPT, temperature=0, ignore_eos=True)
    events = turn.events()
    next(events)
    client.close()
    live.wait_idle()
    events.close()
    turn.close()


# ---------------------------------------------------------------------------------------------- one turn at a time


def test_a_second_turn_is_refused_queued_or_takes_over(live):
    """busy_policy: SESSION_BUSY names the turn in flight, QUEUE waits for its end, REPLACE cancels it."""
    client = live.client()
    session = client.create_session()
    options = {"tokens": PROMPT, "temperature": 0, "ignore_eos": True, "expected_position": None}
    with session.stream(**options) as turn:
        events = turn.events()
        next(events)
        with pytest.raises(SessionBusy) as busy:
            session.generate(**options, max_tokens=2)
        assert busy.value.active_request_id == turn.request_id
        with pytest.raises(SessionBusy):
            client.delete_session(session.id)
        after = session.generate(**options, max_tokens=2, busy_policy="replace")
        rest = list(events)
        assert turn.finish_reason is FinishReason.CANCELLED
        assert after.usage.context_tokens == rest[-1].position
    with session.stream(**options, max_tokens=200) as turn:
        events = turn.events()
        next(events)
        behind = session.generate(**options, max_tokens=2, busy_policy="queue")
        rest = list(events)
        assert turn.finish_reason is FinishReason.MAX_TOKENS
        assert behind.usage.context_tokens == rest[-1].position


def test_two_writers_find_out_about_each_other(live):
    """expected_position: the writer that did not see the other's turn is told where the ledger stands."""
    client = live.client()
    session = client.create_session()
    other = client.get_session(session.id)
    session.generate(tokens=PROMPT, temperature=0, max_tokens=3, ignore_eos=True)
    with pytest.raises(PositionMismatch) as mismatch:
        other.generate(tokens=PROMPT, temperature=0, max_tokens=3)
    assert mismatch.value.actual_position == session.position == len(PROMPT) + 3
    assert other.refresh().generate(temperature=0, max_tokens=1).usage.context_tokens == session.position


def test_deleting_a_session_by_force_ends_its_turn(live):
    """The stream ends with Finished{CANCELLED} and every page is free, but whole ones, which stay known as a prefix."""
    client = live.client()
    session = client.create_session()
    with session.stream(tokens=PROMPT, temperature=0, ignore_eos=True) as turn:
        events = turn.events()
        for _ in range(20):
            next(events)
        freed = session.delete(force=True)
        list(events)
    assert turn.finish_reason is FinishReason.CANCELLED
    live.settle()
    computed = turn.completion.position - 1
    whole = computed // PAGE_TOKENS
    assert live.running.engine.holdings.pool.held == whole
    assert freed >= live.page_bytes * (pages_for(computed) - whole)
    with pytest.raises(SessionNotFound):
        session.refresh()


# ------------------------------------------------------------------------------------------------- the real model


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_cancelling_smollm2_ends_before_its_next_step(server, client, phase):
    """A real chunk takes a third of a second: after the cancel at most the one in progress is finished."""
    prompt = "one two three four five six seven eight nine ten " * (120 if phase == "prefill" else 1)
    with client.stream(text=prompt, temperature=0, ignore_eos=True) as turn:
        events = turn.events()
        wanted = "PrefillProgress" if phase == "prefill" else "Tokens"
        while type(next(events)).__name__ != wanted:
            pass
        before = server.steps
        answer = client.cancel(request_id=turn.request_id)
        ended = server.steps
        assert answer.was_running
        assert ended - before <= 2
        time.sleep(0.5)
        assert server.steps == ended
        list(events)


async def test_cancelling_the_task_cancels_the_turn(server):
    """asyncio: a reader that is cancelled leaves, and the server stops."""
    async with AsyncClient(server.target) as client:
        session = await client.create_session()
        seen = asyncio.Event()

        async def read():
            async with session.stream(text="One, two,", temperature=0, ignore_eos=True) as turn:
                async for _ in turn:
                    seen.set()

        task = asyncio.create_task(read())
        await asyncio.wait_for(seen.wait(), 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert server.in_flight() == 0
        turn = await session.generate(temperature=0, max_tokens=1)
        assert turn.usage.generated_tokens == 1
        await session.delete()
