"""CONTEXT_POLICY_SLIDE: an answer from a context that slid equals one from the tokens that were left."""

import itertools

import pytest
from tests.server.fakes import Clock, FakeRunner, ListSink, greedy

from segue_model.sampling import Sampling
from segue_server.engine import Engine
from segue_server.events import Finished, Tokens
from segue_server.jobs import TurnSpec, excess
from segue_server.requests import FinishReason
from segue_server.sessions import TurnRecord, turns_slid


def spec(prompt: list[int], *, keep: int | None, limit: int, max_tokens: int, samples: bool = True) -> TurnSpec:
    return TurnSpec(
        request_id="r",
        session_id="s",
        prompt=prompt,
        arrival=0.0,
        sink=ListSink(),
        samples=samples,
        max_tokens=max_tokens,
        max_context_tokens=limit,
        keep_tokens=keep,
        sampling=Sampling(temperature=0.0),
    )


@pytest.mark.parametrize(("keep", "length", "incoming"), list(itertools.product([0, 3, 40], [40, 63, 64], [1, 5, 24])))
def test_what_is_dropped_makes_room_and_never_touches_the_head(keep: int, length: int, incoming: int) -> None:
    """After the drop the incoming tokens fit, the head is whole, and nothing is dropped without need."""
    dropped = excess(spec([1], keep=keep, limit=64, max_tokens=1), length, incoming)
    assert length - dropped + incoming <= 64
    assert length - dropped >= min(keep, length)
    assert bool(dropped) == (length + incoming > 64)
    assert excess(spec([1], keep=None, limit=64, max_tokens=1), length, incoming) == 0


@pytest.mark.parametrize("keep", [0, 5, 16, 33])
def test_a_sliding_answer_is_that_of_the_tokens_left(keep: int) -> None:
    """Every token drawn after a slide is the one a fresh session with the remaining ledger would draw."""
    runner = FakeRunner(64)
    engine = Engine(runner, max_running=2, step_tokens=32, clock=Clock())
    engine.open("s", priority=0, pinned=False)
    order = spec(list(range(30)), keep=keep, limit=64, max_tokens=200)
    engine.jobs.submit(order)
    while engine.step():
        pass
    sink = order.sink
    assert isinstance(sink, ListSink)
    for target, event in engine.jobs.take_outbox():
        target.deliver(event)
    events = sink.events
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.finish_reason is FinishReason.MAX_TOKENS
    tokens = [t for event in events if isinstance(event, Tokens) for t in event.token_ids]
    assert len(tokens) == 200
    assert tokens == slid_twin(runner, list(range(30)), keep=keep, limit=64, count=200, order=order)
    ledger = engine.tokens("s")
    assert len(ledger) == finished.position <= 64
    assert 230 - finished.dropped_tokens == finished.position
    assert list(ledger[:keep]) == (list(range(30)) + tokens)[:keep]
    assert runner.faults == []
    engine.scheduler.check_integrity()
    assert engine.stats.recomputed_tokens.values[("slid",)] > 0


def slid_twin(
    runner: FakeRunner, tokens: list[int], *, keep: int, limit: int, count: int, order: TurnSpec
) -> list[int]:
    """The same without a cache: from the whole ledger at every token, cut where the policy says."""
    ledger, answer = list(tokens), []
    for _ in range(count):
        token = greedy(ledger, 1, runner.vocab)[0]
        ledger.append(token)
        answer.append(token)
        if len(ledger) >= limit:
            dropped = excess(order, len(ledger), 1)
            del ledger[keep : keep + dropped]
    return answer


def test_turns_move_with_the_ledger() -> None:
    """Spans before the kept head stay, spans that were dropped vanish, one that was cut keeps its rest."""
    turns = [TurnRecord(str(n), start, start + 2, end, FinishReason.EOS) for n, (start, end) in enumerate(SPANS)]
    slid = turns_slid(turns, keep=10, dropped=25)
    assert [(t.start, t.generated_start, t.end) for t in slid] == [(0, 2, 10), (10, 10, 15), (15, 17, 25)]


SPANS = [(0, 10), (10, 30), (30, 40), (40, 50)]
