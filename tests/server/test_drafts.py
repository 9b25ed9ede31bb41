"""Drafts: what is guessed, how often, and that an answer is the same tokens with and without them."""

import random
from array import array
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.fakes import EngineBench, FakeRunner, ListSink, greedy

from segue_model.sampling import Sampling
from segue_server.drafter import Drafter
from segue_server.drafts import GRAM, LONGEST, LONGEST_REST, Pace, lookup
from segue_server.events import Finished, Tokens
from segue_server.requests import FinishReason

VOCAB = 50


# What is guessed


@settings(max_examples=500, deadline=None)
@given(tokens=st.lists(st.sampled_from([0, 1, 2, 256, 65536, 2**24, 2**31 - 1]), max_size=60), count=st.integers(1, 8))
def test_a_guess_is_what_followed_the_last_earlier_occurrence(tokens: list[int], count: int) -> None:
    """The slow twin compares tokens; the bytes of some of these look alike across their borders."""
    expected: list[int] = []
    for at in range(len(tokens) - GRAM):
        if tokens[at : at + GRAM] == tokens[-GRAM:]:
            expected = tokens[at + GRAM : at + GRAM + count]
    assert list(lookup(array("i", tokens), count)) == expected


def test_guesses_grow_while_they_come_true_and_rest_ever_longer_while_they_do_not() -> None:
    pace = Pace()
    widths = []
    for _ in range(4):
        widths.append(pace.ask())
        pace.learn(widths[-1], widths[-1])
    assert widths == [2, 4, 7, 7]
    pauses = []
    for _ in range(7):
        pace.learn(pace.ask(), 0)
        pauses.append(pace.rest)
        assert [pace.ask() for _ in range(pace.rest)] == [0] * pauses[-1]
    assert pauses == [1, 3, 7, 15, LONGEST_REST, LONGEST_REST, LONGEST_REST]
    pace.learn(pace.ask(), 1)
    assert (pace.ask(), pace.rest) == (2, 0), "one that came true ends the pauses"


# What becomes of it


class Oracle:
    """Knows the answers, and spoils each of them with probability `wrong`."""

    def __init__(self, wrong: float, seed: int = 0) -> None:
        self._wrong, self._random = wrong, random.Random(seed)
        self.asked: list[int] = []

    def __call__(self, tokens: "array[int]", count: int) -> Sequence[int]:
        self.asked.append(count)
        answer = greedy(list(tokens), count, VOCAB)
        return [(token + 1) % VOCAB if self._random.random() < self._wrong else token for token in answer]


def drafting(
    guess: "Callable[[array[int], int], Sequence[int]]", pages: int = 64, *, max_running: int = 8, step_tokens: int = 64
) -> EngineBench:
    bench = EngineBench(pages, max_running=max_running, step_tokens=step_tokens, vocab=VOCAB)
    bench.engine.drafter = Drafter(bench.engine.jobs, bench.engine.stats, LONGEST, guess=guess)
    return bench


def finished(sink: ListSink) -> Finished:
    (end,) = sink.all(Finished)
    return end


def test_drafts_that_come_true_save_passes_and_are_told_token_by_token() -> None:
    bench = drafting(Oracle(wrong=0))
    bench.open()
    sink = bench.submit(range(10), max_tokens=33)
    bench.run(sink)
    assert sink.tokens == greedy(range(10), 33, VOCAB)
    assert [event.position for event in sink.all(Tokens)] == list(range(10, 43))
    assert all(len(event.token_ids) == 1 for event in sink.all(Tokens))
    drafts = bench.engine.stats.draft_tokens.values
    assert drafts["rejected",] == 0
    assert len(bench.runner.steps) == 33 - drafts["accepted",] < 12
    assert bench.runner.faults == []
    bench.engine.scheduler.check_integrity()


def test_wrong_drafts_leave_nothing() -> None:
    """Neither in the answer nor in the KV, which the next turn reads back."""
    bench = drafting(Oracle(wrong=1))
    bench.open()
    first = bench.submit(range(10), max_tokens=40)
    bench.run(first)
    second = bench.submit([1, 2], max_tokens=40)
    bench.run(second)
    assert first.tokens == greedy(range(10), 40, VOCAB)
    assert second.tokens == greedy([*range(10), *first.tokens, 1, 2], 40, VOCAB)
    assert bench.engine.stats.draft_tokens.values["accepted",] == 0
    assert bench.engine.stats.draft_tokens.values["rejected",] > 0
    assert finished(second).usage.session_reused_tokens == 49
    assert bench.runner.faults == []


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=5),
    pages=st.integers(8, 30),
    wrong=st.sampled_from([0.0, 0.2, 0.5]),
    seed=st.integers(0, 1000),
)
def test_company_a_small_pool_and_forks_change_no_token(
    lengths: list[tuple[int, int]], pages: int, wrong: float, seed: int
) -> None:
    rng = random.Random(seed)
    bench = drafting(Oracle(wrong, seed), pages, max_running=4, step_tokens=32)
    prompts = {bench.open(f"s{n}"): [rng.randrange(VOCAB) for _ in range(size)] for n, (size, _) in enumerate(lengths)}
    sinks = {
        name: bench.submit(prompt, name, max_tokens=count)
        for (name, prompt), (_, count) in zip(prompts.items(), lengths, strict=True)
    }
    while not all(sink.done for sink in sinks.values()):
        bench.engine.step()
        bench.deliver()
        bench.engine.scheduler.check_integrity()
        if rng.random() < 0.2:
            bench.engine.fork("s0", [f"child{bench.clock()}{rng.random()}"], None)
    for (name, prompt), (_, count) in zip(prompts.items(), lengths, strict=True):
        assert sinks[name].tokens == greedy(prompt, count, VOCAB)
    assert bench.runner.faults == []


@pytest.mark.parametrize("count", [1, 2, 3, 17, 18])
def test_a_turn_ends_where_it_would_have_ended(count: int) -> None:
    """At its last token, in the middle of drafts that would all have come true."""
    answer = greedy(range(10), count, VOCAB)
    bench = drafting(Oracle(wrong=0))
    bench.open()
    limited = bench.submit(range(10), max_tokens=count)
    bench.run(limited)
    assert (limited.tokens, finished(limited).finish_reason) == (answer, FinishReason.MAX_TOKENS)
    assert finished(limited).position == 10 + count
    bench.open("t")
    stopped = bench.submit(range(10), "t", max_tokens=200, stop_token_ids=frozenset(answer[-1:]), include_stop=True)
    bench.run(stopped)
    assert stopped.tokens == answer[: answer.index(answer[-1]) + 1]
    assert finished(stopped).finish_reason is FinishReason.STOP_TOKEN


def test_penalties_minimum_and_seeds_see_each_token_as_without_drafts() -> None:
    """What a draw depends on moves on with every token, drafted or not."""
    sampling = Sampling(temperature=0.9, top_k=5, seed=7, frequency_penalty=0.7, repetition_penalty=1.3)
    answers: list[list[tuple[int, tuple[int, ...], object]]] = []
    for bench in (EngineBench(vocab=VOCAB), drafting(Replay(answers))):
        bench.open()
        sink = bench.submit(
            range(10), max_tokens=60, sampling=sampling, min_tokens=30, stop_token_ids=frozenset({3}), top_logprobs=2
        )
        bench.run(sink)
        answers.append([(event.position, event.token_ids, event.logprobs) for event in sink.all(Tokens)])
    assert answers[0] == answers[1]
    assert bench.engine.stats.draft_tokens.values["accepted",] > 20


@pytest.mark.parametrize("wrong", [0.0, 0.4])
def test_a_sliding_context_drops_and_says_the_same(wrong: float) -> None:
    """It slides in the middle of drafts: what was guessed of the longer ledger is not believed of the shorter one."""
    told = []
    for bench in (EngineBench(vocab=VOCAB), drafting(Oracle(wrong))):
        bench.open()
        sink = bench.submit(range(20), max_tokens=150, max_context_tokens=48, keep_tokens=8)
        bench.run(sink)
        told.append((sink.tokens, bench.ledger(), finished(sink).dropped_tokens))
    assert told[0] == told[1]
    assert told[0][2] > 48
    assert bench.engine.stats.draft_tokens.values["accepted",] > 10


class Replay:
    """Guesses what an earlier run has said."""

    def __init__(self, answers: "list[list[tuple[int, tuple[int, ...], object]]]") -> None:
        self._answers = answers

    def __call__(self, tokens: "array[int]", count: int) -> Sequence[int]:
        said = {position: ids[0] for position, ids, _ in self._answers[0]}
        return [said[at] for at in range(len(tokens), len(tokens) + count) if at in said]


def test_many_streams_and_prompts_run_without_drafts() -> None:
    oracle = Oracle(wrong=0)
    bench = drafting(oracle)
    sinks = [bench.submit(range(5), bench.open(f"s{n}"), max_tokens=20) for n in range(5)]
    bench.run(*sinks)
    assert oracle.asked == [], "five streams already fill a pass"
    sinks = [bench.submit(range(5), bench.open(f"t{n}"), max_tokens=20) for n in range(4)]
    bench.run(*sinks)
    assert set(oracle.asked) == {1}


def test_a_draw_that_fails_in_a_draft_fails_its_turn_there() -> None:
    answer = greedy(range(10), 30, VOCAB)
    poison = next(token for token in answer[8:] if token not in answer[:8] and token not in range(10))
    bench = drafting(Oracle(wrong=0))
    bench.runner.poison = frozenset({poison})
    bench.open()
    sink = bench.submit(range(10), max_tokens=30)
    bench.run(sink)
    assert sink.tokens == answer[: answer.index(poison) + 1]
    assert not sink.all(Finished)
    bench.engine.scheduler.check_integrity()


@pytest.mark.parametrize("invariant", [True, False])
def test_only_a_batch_invariant_runner_gets_drafts(invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked up for real: of two tokens, three have soon been said before."""
    monkeypatch.setattr(FakeRunner, "batch_invariant", invariant)
    bench = EngineBench(vocab=2, draft_tokens=LONGEST)
    bench.open()
    sink = bench.submit([0, 1], max_tokens=60)
    bench.run(sink)
    assert sink.tokens == greedy([0, 1], 60, 2)
    assert (bench.engine.stats.draft_tokens.sum > 0) == invariant
