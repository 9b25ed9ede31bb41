"""The engine over a fake runner that checks every page table, a fake clock, and a slow twin without any cache."""

import math
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.fakes import EngineBench, ListSink, greedy, next_logits

from segue_model.sampling import Sampling, token_logprobs
from segue_server.cache.segments import Tier
from segue_server.errors import EngineError, QueueTimeout, SessionNotFound
from segue_server.events import Failed, Finished, Prefill, Queued, Started, Tokens
from segue_server.plan import Plan
from segue_server.requests import CancelCause, CommitPolicy, FinishReason
from segue_server.text import OutputText

VOCAB = 50
Bench = EngineBench


def plain(tokens: Sequence[int], count: int, stop: frozenset[int] = frozenset()) -> list[int]:
    return greedy(tokens, count, VOCAB, stop)


def finish(bench: Bench, sink: ListSink) -> Finished:
    bench.run(sink)
    return sink.one(Finished)


class Letters:
    """Token n is the n-th of these pieces; enough of a detokenizer for OutputText."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = pieces

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def flush(self) -> str:
        return ""


@pytest.fixture(scope="module", autouse=True)
def short_reserve() -> Iterator[None]:
    """Open-ended turns are promised one token of what they may take: in a small pool they have to give way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("segue_server.jobs.OPEN_ENDED_RESERVE", 1)
        yield


# Reuse and scheduling change nothing


def test_a_turn_equals_the_loop_without_a_cache_and_is_told_in_order() -> None:
    bench = Bench()
    bench.open()
    sink = bench.submit(range(10), max_tokens=5)
    end = finish(bench, sink)
    assert sink.tokens == plain(range(10), 5)
    assert [type(e) for e in sink.events] == [Started, *[Tokens] * 5, Finished]
    assert [e.position for e in sink.all(Tokens)] == [10, 11, 12, 13, 14]
    assert end.finish_reason is FinishReason.MAX_TOKENS
    assert end.position == 15
    assert end.cache.cached_tokens == 14, "the last sampled token was not run"


def test_second_turn_computes_only_what_is_new_and_the_token_that_was_not_run() -> None:
    bench = Bench()
    bench.open()
    finish(bench, bench.submit(range(40), max_tokens=5))
    bench.runner.steps.clear()
    sink = bench.submit([7, 8, 9], max_tokens=4)
    end = finish(bench, sink)
    started = sink.one(Started)
    assert (started.position, started.prompt_tokens, started.to_compute_tokens) == (45, 3, 4)
    assert started.restored_from is Tier.DEVICE
    assert bench.runner.steps[0] == [(44, 4)]
    assert sum(count for step in bench.runner.steps for _, count in step) == 4 + 3
    assert end.usage.session_reused_tokens == 44
    assert sink.tokens == plain(bench.ledger()[:48], 4)


def test_a_turn_without_input_goes_on_from_the_last_token() -> None:
    bench = Bench()
    bench.open()
    first = bench.submit(range(20), max_tokens=6)
    bench.run(first)
    second = bench.submit([], max_tokens=6)
    bench.run(second)
    assert first.tokens + second.tokens == plain(range(20), 12)
    assert second.one(Started).to_compute_tokens == 1


turns_of_a_session = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    sessions=st.lists(turns_of_a_session, min_size=1, max_size=6),
    pages=st.integers(22, 40),
    running=st.integers(1, 6),
    budget=st.integers(16, 80),
    open_ended=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_scheduling_gives_the_tokens_of_the_loop_without_a_cache(
    sessions: list[list[tuple[int, int]]], pages: int, running: int, budget: int, open_ended: bool, seed: int
) -> None:
    """Chunks, preemption, eviction, pauses and neighbours: greedy answers, usage and events stay what they are."""
    bench = Bench(pages, max_running=running, step_tokens=budget)
    rng = random.Random(seed)
    ledgers: dict[str, list[int]] = {}
    flying: dict[str, tuple[ListSink, list[int]]] = {}
    opening = [rng.randrange(VOCAB) for _ in range(200)]  # what many of the prompts begin with
    left = {}
    for n, turns in enumerate(sessions):
        salt = rng.choice([None, "a", "a"])
        left[bench.open(f"s{n}", priority=rng.randint(-1, 1), salt=salt)] = list(turns)
    for _ in range(5000):
        for name, (sink, expected) in list(flying.items()):
            sink.full = rng.random() < 0.1
            if sink.done:
                assert sink.tokens == expected
                check_events(sink)
                del flying[name]
        for name, turns in left.items():
            if turns and name not in flying and rng.random() < 0.5:
                prompt, new = turns.pop(0)
                before = ledgers.setdefault(name, [])
                known = rng.randrange(prompt + 1)
                tokens = opening[:known] + [rng.randrange(VOCAB) for _ in range((prompt or not before) - known)]
                expected = plain(before + tokens, new)
                before += tokens + expected
                options: dict[str, object] = {"max_tokens": new, "priority": rng.randint(-1, 1)}
                options["open_ended"] = open_ended
                flying[name] = bench.submit(tokens, name, **options), expected
        if not flying and not any(left.values()):
            break
        bench.step()
    assert not flying
    assert all(bench.ledger(name) == tokens for name, tokens in ledgers.items())
    assert bench.engine.figures.kv_bytes().active == 0
    bench.holdings.prefixes.flush()
    held = {page for s in bench.holdings.sequences.values() for page in s.cache.pages}
    assert bench.holdings.pool.held == len(held)


def check_events(sink: ListSink) -> None:
    """The grammar of a turn: Queued? Started Prefill* Tokens* Finished; numbers that rise and add up."""
    kinds = [type(event) for event in sink.events if not isinstance(event, Queued)]
    order = [Started, Prefill, Tokens, Finished]
    assert [order.index(kind) for kind in kinds] == sorted(order.index(kind) for kind in kinds)
    assert (kinds[0], kinds[-1]) == (Started, Finished)
    assert kinds.count(Started) == kinds.count(Finished) == 1
    done = [event.processed_tokens for event in sink.all(Prefill)]
    assert done == sorted(set(done))
    assert all(0 < event.processed_tokens <= event.total_tokens for event in sink.all(Prefill))
    usage, started = sink.one(Finished).usage, sink.one(Started)
    reused = usage.session_reused_tokens, usage.prefix_reused_tokens
    assert usage.context_tokens + usage.prompt_tokens == usage.computed_tokens + sum(reused)
    assert min(reused) >= 0
    assert usage.computed_tokens == started.to_compute_tokens
    assert usage.generated_tokens == len(sink.tokens)


def test_preemption_happens_is_counted_and_repeats_no_event() -> None:
    """Two open-ended turns are promised less than they take: one has to give way in the middle of its answer."""
    bench = Bench(pages=40, step_tokens=32)
    for name in "ab":
        bench.open(name)
    options: dict[str, object] = {"open_ended": True, "max_tokens": 400}
    old = bench.submit([1, 2, 3], "a", **options)
    young = bench.submit(range(40), "b", **options)
    bench.run(old, young)
    assert bench.engine.stats.preemptions >= 1
    assert old.tokens == plain([1, 2, 3], 400)
    assert young.tokens == plain(range(40), 400)
    check_events(old)
    check_events(young)


def test_a_turn_that_gives_way_in_its_prompt_reports_and_scores_each_position_once() -> None:
    """It loses pages in the middle of a chunk's work, so that chunks are computed again across the old borders."""
    bench = Bench(step_tokens=32)
    bench.open()
    sink = bench.submit(tokens := [n % VOCAB for n in range(150)], prompt_logprobs=True, max_tokens=5)
    sequence = bench.holdings.sequences["s"]
    for lost in (1, 3):
        for _ in range(2):
            bench.step()
        bench.scheduler._preempt(sequence, Plan())
        bench.holdings.drop(sequence, lost)
    bench.run(sink)
    check_events(sink)
    got = [(p.token_id, p.logprob) for event in sink.all(Prefill) for p in event.prompt_logprobs]
    assert got == expected_logprobs(tokens, 0)
    assert sink.tokens == plain(tokens, 5)


def test_a_turn_that_gives_way_in_its_answer_does_not_report_its_prompt_again() -> None:
    bench = Bench(step_tokens=32)
    bench.open()
    sink = bench.submit(range(VOCAB), max_tokens=20)
    while len(sink.tokens) < 9:
        bench.step()
    sequence = bench.holdings.sequences["s"]
    bench.scheduler._preempt(sequence, Plan())
    bench.holdings.drop(sequence)
    bench.run(sink)
    check_events(sink)
    assert sink.tokens == plain(range(VOCAB), 20)


def test_evicted_kv_is_recomputed_told_and_counted() -> None:
    bench = Bench(pages=8)
    bench.open("a")
    bench.open("b")
    first = bench.submit(range(50), "a", max_tokens=4)
    bench.run(first)
    bench.run(bench.submit(range(45), "b", max_tokens=40))
    assert bench.engine.figures.cache_usage("a").cached_tokens < 50
    bench.engine.close("b")
    kept = bench.engine.figures.cache_usage("a").cached_tokens
    again = bench.submit([1, 2], "a", max_tokens=4)
    bench.run(again)
    started = again.one(Started)
    assert started.restored_from is Tier.NONE
    assert started.to_compute_tokens == 56 - kept
    assert bench.engine.stats.recomputed_tokens.values["evicted",] == 53 - kept
    assert again.tokens == plain([*range(50), *first.tokens, 1, 2], 4)
    assert bench.engine.stats.time_to_first_token["recomputed"].counts != [0] * 22


def test_a_seeded_answer_is_the_same_alone_and_under_load() -> None:
    sampling = Sampling(temperature=0.9, top_p=0.95, seed=77)

    def run(others: int, budget: int) -> list[int]:
        bench = Bench(max_running=8, step_tokens=budget)
        bench.open()
        noise = []
        for n in range(others):
            bench.open(f"n{n}")
            noise.append(bench.submit(range(n, 30 + n), f"n{n}", sampling=Sampling(seed=n), max_tokens=30))
            bench.step()
        sink = bench.submit(range(40), max_tokens=30, sampling=sampling)
        bench.run(sink, *noise)
        return sink.tokens

    alone = run(0, 256)
    assert len(set(alone)) > 5
    assert run(5, 64) == run(3, 16) == alone


# How a turn ends


def test_eos_goes_into_the_ledger_and_ends_the_turn() -> None:
    expected = plain(range(9), 50)
    eos = expected[6]
    bench = Bench()
    bench.open()
    sink = bench.submit(range(9), max_tokens=50, eos_token_ids=frozenset({eos}))
    end = finish(bench, sink)
    until = expected.index(eos) + 1
    assert sink.tokens == expected[:until]
    assert bench.ledger()[-1] == eos
    assert (end.finish_reason, end.matched_token_id) == (FinishReason.EOS, eos)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_kept_only_when_asked_for(include: bool) -> None:
    expected = plain(range(9), 50)
    stop = expected[6]
    until = expected.index(stop) + include
    bench = Bench()
    bench.open()
    sink = bench.submit(range(9), max_tokens=50, stop_token_ids=frozenset({stop}), include_stop=include)
    end = finish(bench, sink)
    assert sink.tokens == expected[:until]
    assert bench.ledger() == [*range(9), *expected[:until]]
    assert (end.finish_reason, end.matched_token_id) == (FinishReason.STOP_TOKEN, stop)
    assert end.usage.generated_tokens == expected.index(stop) + 1, "it was sampled"


def test_min_tokens_masks_eos_and_stop_tokens_until_then() -> None:
    expected = plain(range(9), 3)
    ends = frozenset(expected[:1])
    bench = Bench()
    bench.open()
    sink = bench.submit(range(9), max_tokens=40, min_tokens=12, eos_token_ids=ends, stop_token_ids=frozenset({3}))
    end = finish(bench, sink)
    assert end.usage.generated_tokens >= 12
    assert not (ends | {3}) & set(sink.tokens[:12])


def test_without_eos_ids_a_turn_goes_on_past_them() -> None:
    """ignore_eos reaches the engine as an empty set."""
    bench = Bench()
    bench.open()
    bench.run(sink := bench.submit(range(9), max_tokens=200))
    assert sink.tokens == plain(range(9), 200)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_sequence_across_tokens_cuts_the_text_and_keeps_whole_tokens(include: bool) -> None:
    expected = plain(range(9), 30)
    pieces = [f"<{n}>" for n in range(VOCAB)]
    text = "".join(pieces[t] for t in expected)
    stop = f"{expected[4]}><{expected[5]}"  # begins inside token 4, ends inside token 5
    bench = Bench()
    bench.open()
    output = OutputText(Letters(pieces), [stop], include_stop=include)
    sink = bench.submit(range(9), max_tokens=30, text=output)
    end = finish(bench, sink)
    assert (end.finish_reason, end.matched_text) == (FinishReason.STOP_SEQUENCE, stop)
    assert sink.text == text[: text.index(stop) + len(stop) * include]
    assert bench.ledger()[9:] == sink.tokens == expected[:6]
    assert end.ledger_overhang_tokens == (1 if include else 2)


def test_held_text_comes_out_when_the_turn_ends_otherwise() -> None:
    expected = plain(range(9), 4)
    pieces = [f"<{n}>" for n in range(VOCAB)]
    whole = "".join(pieces[t] for t in expected)
    bench = Bench()
    bench.open()
    text = OutputText(Letters(pieces), [f"{pieces[expected[-1]]}and more"], include_stop=False)
    sink = bench.submit(range(9), max_tokens=4, text=text)
    bench.run(sink)
    assert sink.text == whole
    assert sink.all(Tokens)[-1].token_ids == ()


def test_a_full_context_ends_the_turn() -> None:
    bench = Bench()
    bench.open()
    end = finish(bench, sink := bench.submit(range(9), max_tokens=100, max_context_tokens=20))
    assert (end.finish_reason, end.position, len(sink.tokens)) == (FinishReason.CONTEXT_FULL, 20, 11)
    open_ended = bench.open("o")
    end = finish(bench, bench.submit(range(9), open_ended, max_tokens=11, max_context_tokens=20, open_ended=True))
    assert (end.finish_reason, end.position) == (FinishReason.CONTEXT_FULL, 20)


def test_time_limit_runs_from_admission_and_keeps_what_came() -> None:
    bench = Bench(max_running=1)
    bench.open("a")
    bench.open("b")
    first = bench.submit(range(9), "a", max_tokens=30)
    second = bench.submit(range(9), "b", max_tokens=400, time_limit=2.0)
    while not first.done:
        bench.step(1.0)
    while not second.done:
        bench.step(0.5)
    end = second.one(Finished)
    assert end.finish_reason is FinishReason.TIME_LIMIT
    assert len(second.tokens) == 4
    assert end.position == 9 + 4
    assert end.timings.queue == pytest.approx(30.0, abs=1.0)


def test_queue_timeout_leaves_no_trace_and_zero_still_takes_a_free_place() -> None:
    bench = Bench(max_running=1)
    bench.open("a")
    bench.open("b")
    first = bench.submit(range(9), "a", max_tokens=100, queue_timeout=0.0)
    bench.step()
    assert first.all(Started), "there was a place, so nobody had to wait"
    late = bench.submit(range(9), "b", max_tokens=4, queue_timeout=5.0)
    assert late.one(Queued).queue_position == 0
    assert bench.engine.jobs.next_deadline() == bench.clock() + 5.0
    while not late.done:
        bench.step(1.0)
    failed = late.one(Failed)
    assert isinstance(failed.error, QueueTimeout)
    assert failed.position == 0
    assert bench.ledger("b") == []
    assert not first.done


def test_a_turn_without_patience_is_refused_when_the_places_are_taken() -> None:
    bench = Bench(max_running=1)
    bench.open("a")
    bench.open("b")
    bench.submit(range(9), "a", max_tokens=100)
    bench.step()
    late = bench.submit(range(9), "b", queue_timeout=0.0)
    bench.step()
    assert isinstance(late.one(Failed).error, QueueTimeout)


# Cancel


PHASES = ("queued", "prefill", "decode")


@pytest.mark.parametrize("policy", list(CommitPolicy))
@pytest.mark.parametrize("phase", PHASES)
def test_cancel_in_each_phase_leaves_what_the_commit_policy_says(phase: str, policy: CommitPolicy) -> None:
    bench = Bench(max_running=1, step_tokens=16)
    bench.open()
    bench.open("other")
    finish(bench, bench.submit(range(20), max_tokens=3))
    before = bench.ledger()
    if phase == "queued":
        bench.submit(range(5), "other", max_tokens=300)
        bench.step()
    prompt = list(range(40))
    sink = bench.submit(prompt, max_tokens=300, commit_policy=policy)
    if phase == "prefill":
        bench.step()
    while phase == "decode" and len(sink.tokens) < 5:
        bench.step()
    assert bench.engine.jobs.cancel(bench.last_id, CancelCause.RPC)
    bench.deliver()
    bench.check()
    end = sink.one(Finished)
    kept = {
        CommitPolicy.ROLLBACK: before,
        CommitPolicy.KEEP_PROMPT: before + prompt,
        CommitPolicy.KEEP_PARTIAL: before + prompt + sink.tokens,
    }[policy]
    assert end.finish_reason is FinishReason.CANCELLED
    assert sink.events[-1] is end
    assert bench.ledger() == kept
    assert end.position == len(kept)
    assert bench.engine.stats.cancellations.values[phase, "rpc"] == 1
    assert not bench.engine.jobs.cancel(bench.last_id, CancelCause.RPC), "idempotent"
    while bench.scheduler.waiting or bench.scheduler.running:
        bench.step()
    again = bench.submit([3], max_tokens=5)
    bench.run(again)
    assert again.tokens == plain([*kept, 3], 5), "what is left is as good as new"


def test_a_cancelled_turn_costs_no_further_work_and_leaves_its_neighbours_alone() -> None:
    """A queued client's disconnect must not cancel another client's decode."""
    bench = Bench(max_running=1)
    bench.open("a")
    bench.open("b")
    runs = bench.submit(range(9), "a", max_tokens=30)
    bench.step()
    bench.submit(range(200), "b", max_tokens=30)
    bench.step()
    bench.engine.jobs.cancel(bench.last_id, CancelCause.DISCONNECT)
    bench.runner.steps.clear()
    bench.run(runs)
    assert runs.tokens == plain(range(9), 30)
    assert all(len(step) == 1 for step in bench.runner.steps)


def test_cancel_with_another_policy_overrides_that_of_the_turn() -> None:
    bench = Bench()
    bench.open()
    sink = bench.submit(range(9), max_tokens=100)
    for _ in range(5):
        bench.step()
    bench.engine.jobs.cancel(bench.last_id, CancelCause.RPC, policy=CommitPolicy.ROLLBACK)
    bench.deliver()
    assert sink.one(Finished).position == 0
    assert bench.holdings.pool.held == 0


# Prefill, logprobs, append


def test_a_long_prompt_is_computed_in_chunks_and_tells_how_far_it_is() -> None:
    bench = Bench(step_tokens=32)
    bench.open()
    sink = bench.submit([1] * 100, max_tokens=2)
    bench.run(sink)
    assert [(e.processed_tokens, e.total_tokens) for e in sink.all(Prefill)] == [(32, 100), (64, 100)]
    check_events(sink)


def expected_logprobs(ledger: Sequence[int], start: int) -> list[tuple[int, float]]:
    out = []
    for position in range(max(start, 1), len(ledger)):
        row = next_logits(ledger[:position], VOCAB)[None]
        out.append((ledger[position], token_logprobs(row, [ledger[position]], 0)[0].logprob))
    return out


@settings(max_examples=25, deadline=None)
@given(
    context=st.integers(0, 50), prompt=st.integers(1, 90), budget=st.integers(16, 64), samples=st.booleans(),
    crowd=st.booleans(),
)  # fmt: skip
def test_prompt_logprobs_are_complete_and_come_once(
    context: int, prompt: int, budget: int, samples: bool, crowd: bool
) -> None:
    """In chunks, behind a reused context, and with a neighbour that makes the turn give way."""
    bench = Bench(pages=24, step_tokens=budget)
    bench.open()
    bench.open("old", priority=9)
    if context:
        finish(bench, bench.submit(range(context), max_tokens=2))
    before = bench.ledger()
    if crowd:
        bench.submit(range(30), "old", max_tokens=300, open_ended=True, priority=9)
        bench.step()
    tokens = [n * 7 % VOCAB for n in range(prompt)]
    sink = bench.submit(tokens, prompt_logprobs=True, samples=samples, max_tokens=30 if samples else 0, top_logprobs=2)
    bench.run(sink)
    got = [p for event in sink.all(Prefill) for p in event.prompt_logprobs]
    assert [(p.token_id, p.logprob) for p in got] == expected_logprobs(before + tokens, len(before))
    assert all(len(p.top) == 2 for p in got)
    assert all(p.logprob <= 0 and math.isfinite(p.logprob) for p in got)
    if samples:
        assert sink.tokens == plain(before + tokens, 30)


def test_appending_computes_without_sampling_and_deferring_computes_nothing() -> None:
    bench = Bench()
    bench.open()
    end = finish(bench, sink := bench.submit(range(30), samples=False, max_tokens=0))
    assert sink.tokens == []
    assert (end.position, end.cache.cached_tokens, end.finish_reason) == (30, 30, FinishReason.MAX_TOKENS)
    bench.run(first := bench.submit([], max_tokens=1))
    assert first.one(Started).to_compute_tokens == 1, "KV says nothing about the next token"
    assert first.tokens == plain(range(30), 1)
    bench.holdings.rewind(bench.holdings.sequences["s"], 30)
    steps = len(bench.runner.steps)
    deferred = bench.submit(range(20), samples=False, max_tokens=0, defer_compute=True)
    assert deferred.one(Finished).position == 50
    assert deferred.one(Started).to_compute_tokens == 0
    assert len(bench.runner.steps) == steps
    sink = bench.submit([1], max_tokens=3)
    bench.run(sink)
    assert sink.one(Started).to_compute_tokens == 21
    assert sink.one(Started).restored_from is Tier.DEVICE
    assert sink.tokens == plain([*range(30), *range(20), 1], 3)


def test_sampled_logprobs_are_those_of_the_model() -> None:
    bench = Bench()
    bench.open()
    sink = bench.submit(range(9), max_tokens=5, top_logprobs=3)
    bench.run(sink)
    got = [(p.token_id, p.logprob) for e in sink.all(Tokens) for p in e.logprobs]
    assert got == expected_logprobs([*range(9), *sink.tokens], 9)


def test_penalties_look_at_this_turn_or_at_the_window_that_was_asked_for() -> None:
    bench = Bench()
    for name in "ab":
        bench.open(name)
        finish(bench, bench.submit(range(9), name, max_tokens=20))
    hard = Sampling(temperature=0.0, repetition_penalty=50.0)
    seen = set(bench.ledger("a"))
    finish(bench, mine := bench.submit([1], "a", sampling=hard, max_tokens=10))
    finish(bench, wide := bench.submit([1], "b", sampling=hard, max_tokens=10, penalty_window=1000))
    assert len(set(mine.tokens)) == 10
    assert seen & set(mine.tokens), "tokens of earlier turns are free"
    assert not seen & set(wide.tokens), "here they are not"


# Faults


def test_a_step_that_raises_fails_only_its_turns_and_the_sessions_go_on() -> None:
    bench = Bench(max_running=2)
    for name in "abc":
        bench.open(name)
    doomed = [bench.submit(range(9), name, max_tokens=50) for name in "ab"]
    waits = bench.submit(range(9), "c", max_tokens=5)
    for _ in range(4):
        bench.step()
    came = [list(sink.tokens) for sink in doomed]
    bench.runner.failures.append(RuntimeError("no memory"))
    bench.step()
    for sink, tokens, name in zip(doomed, came, "ab", strict=True):
        failed = sink.one(Failed)
        assert isinstance(failed.error, EngineError)
        assert sink.events[-1] is failed
        assert bench.ledger(name) == [*range(9), *tokens]
        assert failed.position == len(bench.ledger(name))
    bench.run(waits)
    assert waits.tokens == plain(range(9), 5)
    again = bench.submit([5], "a", max_tokens=5)
    bench.run(again)
    assert again.tokens == plain([*range(9), *came[0], 5], 5)


@pytest.mark.parametrize("fault", ["copy", "forward"])
def test_a_failure_around_a_copy_on_write_leaves_no_page_that_was_not_copied(fault: str) -> None:
    bench = Bench()
    bench.open("parent")
    bench.run(bench.submit(range(24), "parent", max_tokens=3))
    ledger = bench.ledger("parent")
    bench.holdings.fork(bench.holdings.sequences["parent"], "child", 20, bench.clock())
    (bench.runner.copy_failures if fault == "copy" else bench.runner.failures).append(RuntimeError("no memory"))
    bench.run(bad := bench.submit([1, 2], "child", max_tokens=5))
    assert bad.all(Failed)
    bench.run(again := bench.submit([3], "child", max_tokens=5))
    assert again.tokens == plain([*ledger[:20], 1, 2, 3], 5)
    assert bench.runner.copied == (fault == "forward")
    bench.run(old := bench.submit([4], "parent", max_tokens=5))
    assert old.tokens == plain([*ledger, 4], 5), "the parent is as it was"


def test_a_failed_step_rolls_back_a_turn_that_asked_for_it() -> None:
    bench = Bench()
    bench.open()
    sink = bench.submit(range(40), commit_policy=CommitPolicy.ROLLBACK)
    bench.runner.failures.append(RuntimeError("no memory"))
    bench.step()
    assert sink.one(Failed).position == 0
    assert bench.holdings.pool.held == 0


def test_a_row_without_a_token_fails_its_own_turn_only() -> None:
    """NaN, or penalties that overflow, are one request's matter: its neighbours in the batch go on."""
    bench = Bench()
    for name in "abc":
        bench.open(name)
    fine = [bench.submit(range(9), name, max_tokens=10) for name in "ab"]
    bench.runner.poison = frozenset({49})
    bad = bench.submit([1, 49], "c", max_tokens=10)
    bench.run(bad, *fine)
    assert isinstance(bad.one(Failed).error, EngineError)
    assert "no token can be drawn" in str(bad.one(Failed).error)
    assert all(sink.tokens == plain(range(9), 10) for sink in fine)


def test_a_turn_for_a_session_that_is_gone_ends_instead_of_hanging() -> None:
    bench = Bench()
    sink = bench.submit(range(9), "nobody")
    assert isinstance(sink.one(Failed).error, SessionNotFound)
    assert bench.engine.close("nobody") == 0


# Slow readers


def test_a_slow_reader_pauses_its_turn_only_and_is_ended_after_the_limit() -> None:
    bench = Bench()
    bench.open("a")
    bench.open("b")
    slow = bench.submit(range(9), "a", max_tokens=300)
    fine = bench.submit(range(9), "b", max_tokens=20)
    for _ in range(5):
        bench.step()
    slow.full = True
    came = len(slow.tokens)
    bench.run(fine)
    assert len(slow.tokens) == came
    assert not bench.step(), "nothing to compute"
    assert bench.clock() < bench.engine.jobs.next_deadline() <= bench.clock() + 30.0
    slow.full = False
    bench.step()
    assert len(slow.tokens) == came + 1
    blocked = bench.engine.stats.stream_blocked_seconds
    assert blocked > 0
    slow.full = True
    for _ in range(32):
        bench.step(1.0)
    assert slow.one(Finished).finish_reason is FinishReason.CANCELLED
    assert bench.engine.stats.cancellations.values["decode", "slow_client"] == 1
    assert bench.engine.stats.stream_blocked_seconds == pytest.approx(blocked + 30.0, abs=1.1)
    assert bench.ledger("a") == [*range(9), *slow.tokens]


# Accounts


def test_the_counters_tell_what_readers_received() -> None:
    bench = Bench()
    sinks = []
    for n in range(4):
        bench.open(f"s{n}")
        sinks.append(bench.submit(range(10 * n + 1), f"s{n}", max_tokens=n + 2))
    bench.run(*sinks)
    stats = bench.engine.stats
    assert stats.generated_tokens == sum(len(sink.tokens) for sink in sinks) == 14
    assert stats.turns.values["max_tokens",] == stats.turns.sum == 4
    assert stats.prompt_tokens.values["computed",] == 64
    assert sum(stats.time_to_first_token["new"].counts) == 4
    assert sum(stats.inter_token.counts) == 14 - 4
    assert sum(stats.turn_duration.counts) == 4
    kv = bench.engine.figures.kv_bytes()
    assert (kv.active, kv.pinned) == (0, 0)
    assert kv.idle == kv.tokens * bench.runner.page_bytes // 16
    assert [bench.engine.close(f"s{n}") > 0 for n in range(4)] == [True] * 4
    assert bench.holdings.pool.held == 0


def test_timings_come_from_the_clock() -> None:
    bench = Bench(step_tokens=16)
    bench.open()
    sink = bench.submit(range(32), max_tokens=4)
    while not sink.done:
        bench.step(1.0)
    timings = sink.one(Finished).timings
    assert timings.queue == 1.0
    assert timings.prefill == 1.0
    assert timings.time_to_first_token == 2.0
    assert timings.decode == 3.0
    assert timings.max_inter_token == 1.0


def test_only_tokens_that_had_kv_count_as_wasted() -> None:
    bench = Bench(max_running=1)
    bench.open("a")
    bench.open("b")
    bench.submit(range(9), "a", max_tokens=100, commit_policy=CommitPolicy.ROLLBACK)
    first = bench.last_id
    bench.step()
    bench.submit(range(500), "b", commit_policy=CommitPolicy.ROLLBACK)
    bench.engine.jobs.cancel(bench.last_id, CancelCause.RPC)
    assert bench.engine.stats.wasted_tokens.sum == 0, "it was never computed"
    bench.engine.jobs.cancel(first, CancelCause.RPC)
    assert bench.engine.stats.wasted_tokens.values["rolled_back",] == 9
