"""Turns that are safe to repeat: a request id is one turn, however often it is asked for."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from tests.server.service_bench import Answer, ServiceBench, read, serving

from segue_server.errors import EngineError, PositionBeyondEnd, RequestIdReused, RequestNotFound
from segue_server.events import Event, Finished, Heartbeat, Tokens
from segue_server.requests import (
    AppendRequest,
    BusyPolicy,
    CommitPolicy,
    FinishReason,
    GenerateRequest,
    OutputOptions,
    SamplingParams,
    TextInput,
    TokenInput,
)
from segue_server.turns import content_of

Serve = Callable[..., AbstractAsyncContextManager[ServiceBench]]
Numbered = list[tuple[int, Event]]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    return partial(serving, tmp_path)


async def take(turn: object, tokens: int) -> Numbered:
    """The events up to and including that many tokens."""
    taken: Numbered = []
    async for item in turn:  # type: ignore[attr-defined]
        taken.append(item)
        if sum(isinstance(event, Tokens) for _, event in taken) >= tokens:
            break
    return taken


async def all_of(turn: object) -> Numbered:
    return [item async for item in turn]  # type: ignore[attr-defined]


def attach(
    bench: ServiceBench, request_id: str, after: int = 0, *, caller: str = "me", left: float | None = None
) -> AbstractAsyncContextManager[object]:
    return bench.service.attach(request_id, after, caller=caller, time_remaining=lambda: left)


async def attached(bench: ServiceBench, request_id: str, after: int = 0, **options: object) -> Numbered:
    async with attach(bench, request_id, after, **options) as turn:  # type: ignore[arg-type]
        return await all_of(turn)


def tokens_of(events: Sequence[tuple[int, Event]]) -> list[int]:
    return [token for _, event in events if isinstance(event, Tokens) for token in event.token_ids]


def cancellations(bench: ServiceBench) -> dict[tuple[str, ...], float]:
    return {labels: count for labels, count in bench.engine.stats.cancellations.values.items() if count}


def only(answers: Sequence[Answer]) -> list[Event]:
    """The events of answers that are all the same."""
    assert all(answer.events == answers[0].events for answer in answers)
    return answers[0].events


# The same request again


async def test_repeated_while_it_runs_a_request_is_read_by_both_from_its_first_event(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        ask = partial(bench.turn, range(20), max_tokens=200, request_id="r-1")
        async with ask() as first:
            begun = await take(first, 5)
            async with ask() as second:
                both = await asyncio.gather(all_of(first), all_of(second))
        assert begun + both[0] == both[1]
        assert [number for number, _ in both[1]] == list(range(1, len(both[1]) + 1))
        assert tokens_of(both[1]) == bench.plain(range(20), 200)
        assert len(bench.ledger()) == 220, "one turn, not two"


async def test_repeated_after_its_end_a_request_is_replayed_and_nothing_runs(serve: Serve) -> None:
    """Also when the session has moved on, so that `expected_position` would not hold any more."""
    async with serve() as bench:
        await bench.create()
        ask = partial(bench.ask, range(20), max_tokens=6, request_id="r-1", expected_position=0)
        first = await ask()
        await bench.ask([7], max_tokens=2)
        steps, ledger = len(bench.runner.steps), bench.ledger()
        assert (await ask()).events == first.events
        assert len(bench.runner.steps) == steps
        assert bench.ledger() == ledger


async def test_an_ephemeral_turn_is_replayed_too(serve: Serve) -> None:
    async with serve() as bench:
        ask = partial(bench.ask, range(20), "", max_tokens=6, request_id="r-1")
        assert only([await ask(), await ask()])
        assert bench.service.load().sessions == 0


async def test_an_append_is_replayed(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        request = AppendRequest(session_id="chat-1", request_id="a-1", input=TokenInput(tuple(range(20))))
        answers = []
        for _ in range(2):
            async with bench.service.append(request, caller="me", time_remaining=lambda: None) as turn:
                answers.append(await read(turn))
        assert only(answers)
        assert bench.ledger() == list(range(20))


@pytest.mark.parametrize("running", [True, False], ids=["running", "finished"])
async def test_a_request_id_with_other_content_is_refused(serve: Serve, running: bool) -> None:
    async with serve() as bench:
        await bench.create()
        await bench.create("chat-2")
        async with bench.turn(max_tokens=300, request_id="r-1") as turn:
            if not running:
                await all_of(turn)
            for other in ({"prompt": [9]}, {"session_id": "chat-2"}, {"max_tokens": 9}, {"expected_position": 0}):
                with pytest.raises(RequestIdReused, match="'r-1' came before with other content"):
                    await bench.ask(**({"request_id": "r-1", "max_tokens": 300} | other))  # type: ignore[arg-type]
            request = GenerateRequest(session_id="chat-1", request_id="r-1", input=TokenInput((1, 2, 3)))
            with pytest.raises(RequestIdReused):
                async with bench.service.generate(request, caller="someone else", time_remaining=lambda: None):
                    pytest.fail("was let in")
        await bench.idle()
        assert bench.ledger("chat-2") == []


def test_equal_requests_have_one_digest_and_any_difference_another() -> None:
    def request(**fields: object) -> GenerateRequest:
        return GenerateRequest(**{"session_id": "s", "request_id": "r", **fields})  # type: ignore[arg-type]

    bias = {3: 1.5, 4: -2.0}
    same = [request(sampling=SamplingParams(logit_bias=bias)), request(sampling=SamplingParams(logit_bias=dict(bias)))]
    others = [
        request(),
        request(sampling=SamplingParams(logit_bias={3: 1.5})),
        request(input=TextInput("a")),
        request(input=TokenInput((1, 2))),
        request(input=TokenInput((12,))),
        request(detach_grace=1.0),
        request(busy_policy=BusyPolicy.QUEUE),
    ]
    assert len({content_of(r) for r in same}) == 1
    assert len({content_of(r) for r in [same[0], *others]}) == 1 + len(others)


@pytest.mark.parametrize("policy", [BusyPolicy.QUEUE, BusyPolicy.REPLACE])
async def test_twins_that_wait_behind_another_turn_become_one_turn(serve: Serve, policy: BusyPolicy) -> None:
    """A retry that arrives before the server knows that the first try's connection is dead; neither ends the other."""
    async with serve() as bench:
        await bench.create()
        async with bench.turn(max_tokens=400) as turn:
            await take(turn, 1)
            ask = partial(bench.ask, [7], request_id="twin", busy_policy=policy, max_tokens=50)
            twins = [asyncio.ensure_future(ask()) for _ in range(3)]
            await all_of(turn)
        events = only(await asyncio.gather(*twins))
        assert tokens_of(list(enumerate(events))) == bench.plain(bench.ledger()[:-50], 50)
        assert (await bench.service.get_session("chat-1")).turn_count == 2


async def test_a_retry_survives_the_first_call_that_dies_while_its_text_is_encoded(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("segue_server.service.turn_calls.LONG_TEXT", 10)  # longer texts are encoded on a thread
    async with serve() as bench:
        await bench.create()
        ask = partial(bench.ask, input=TextInput("x" * 100), max_tokens=5, request_id="r-1", detach_grace=5.0)
        first = asyncio.ensure_future(ask())
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert bench.ledger() == []
        answer = await ask()
        assert answer.started.prompt_tokens == 100
        assert answer.tokens == bench.plain(bench.ledger()[:100], 5)
        assert (await bench.service.get_session("chat-1")).turn_count == 1


# Coming back


async def test_coming_back_gives_what_has_not_been_read_and_each_token_once(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        async with bench.turn(range(20), max_tokens=300, request_id="r-1", detach_grace=30.0) as turn:
            seen = await take(turn, 5)
        for _ in range(3):
            async with attach(bench, "r-1", seen[-1][0]) as turn:
                seen += await take(turn, 20)
        seen += await attached(bench, "r-1", seen[-1][0])
        assert [number for number, _ in seen] == list(range(1, len(seen) + 1))
        assert tokens_of(seen) == bench.plain(range(20), 300)
        assert await attached(bench, "r-1", seen[-1][0]) == [], "after Finished there is nothing"
        assert await attached(bench, "r-1") == seen, "from the start, all of it"
        assert cancellations(bench) == {}


async def test_attaching_to_nothing_is_refused(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        events = (await bench.ask(max_tokens=3, request_id="r-1")).events
        with pytest.raises(RequestNotFound, match="'r-2'"):
            await attached(bench, "r-2")
        with pytest.raises(RequestNotFound):
            await attached(bench, "r-1", caller="someone else")
        with pytest.raises(PositionBeyondEnd) as error:
            await attached(bench, "r-1", len(events) + 1)
        assert error.value.metadata == {"lastSequence": str(len(events))}


async def test_a_deleted_session_is_not_repeated(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        await bench.ask(max_tokens=3, request_id="r-1")
        async with bench.turn(max_tokens=300, request_id="r-2"):
            await bench.service.delete_session("chat-1", force=True)
            await asyncio.sleep(0.05)
            for name in ("r-1", "r-2"):
                with pytest.raises(RequestNotFound):
                    await attached(bench, name)


# Leaving


async def test_within_its_grace_a_turn_goes_on_without_a_reader(serve: Serve) -> None:
    """More tokens than a reader may be behind: nobody is there to wait for."""
    async with serve() as bench:
        await bench.create()
        async with bench.turn(range(20), max_tokens=600, request_id="r-1", detach_grace=30.0):
            pass
        await bench.idle()
        assert tokens_of(await attached(bench, "r-1")) == bench.plain(range(20), 600)


async def test_left_by_one_reader_a_turn_goes_on_for_the_other(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        async with bench.turn(range(20), max_tokens=300, request_id="r-1") as turn:
            async with attach(bench, "r-1") as other:
                await take(other, 5)
            assert tokens_of(await all_of(turn)) == bench.plain(range(20), 300)


@asynccontextmanager
async def slow_steps(bench: ServiceBench, seconds: float):  # type: ignore[no-untyped-def]
    """A turn of a thousand tokens would be over within any grace; this one is not."""
    bench.runner.before_step = lambda: time.sleep(seconds)
    yield
    bench.runner.before_step = bench.gate


@pytest.mark.parametrize(
    ("grace", "left", "cause", "at_least"),
    [(0.0, None, "disconnect", 0.0), (0.3, None, "disconnect", 0.3), (30.0, 0.3, "deadline", 0.3)],
    ids=["no grace", "grace", "deadline within the grace"],
)
async def test_a_turn_that_nobody_comes_back_for_is_cancelled(
    serve: Serve, grace: float, left: float | None, cause: str, at_least: float
) -> None:
    async with serve() as bench, slow_steps(bench, 0.005):
        await bench.create()
        options: dict[str, object] = {"max_tokens": 1000, "request_id": "r-1", "detach_grace": grace}
        async with bench.turn(**options, time_remaining=lambda: left) as turn:  # type: ignore[arg-type]
            await take(turn, 2)
        began = asyncio.get_running_loop().time()
        await bench.idle()
        elapsed = asyncio.get_running_loop().time() - began
        assert elapsed >= at_least
        assert cancellations(bench) == {("decode", cause): 1}
        answer = await bench.ask(**options)  # type: ignore[arg-type]
        assert answer.finished.finish_reason is FinishReason.CANCELLED, "what the ledger keeps is replayed as it is"
        assert len(bench.ledger()) == 3 + len(answer.tokens)


async def test_coming_back_stops_the_clock_and_leaving_again_starts_it_anew(serve: Serve) -> None:
    async with serve() as bench, slow_steps(bench, 0.005):
        await bench.create()
        async with bench.turn(max_tokens=1000, request_id="r-1", detach_grace=0.3) as turn:
            await take(turn, 1)
        async with attach(bench, "r-1"):
            await asyncio.sleep(0.5)
            assert bench.service.load().running_requests == 1
        assert bench.service.load().running_requests == 1
        await asyncio.sleep(0.1)
        assert bench.service.load().running_requests == 1
        await bench.idle()


POLICIES = {
    CommitPolicy.KEEP_PARTIAL: "prompt and tokens",
    CommitPolicy.KEEP_PROMPT: "prompt",
    CommitPolicy.ROLLBACK: "",
}


@pytest.mark.parametrize("policy", list(CommitPolicy))
@pytest.mark.parametrize("end", ["cancel", "disconnect", "grace over", "deadline", "engine error", "replaced"])
async def test_what_the_ledger_keeps_of_a_turn_cut_short(serve: Serve, end: str, policy: CommitPolicy) -> None:
    """Six ends, three policies; the session's next turn is that of a session which was given the kept ledger."""
    async with serve() as bench:
        await bench.create()
        before = [*range(20), *(await bench.ask(range(20), max_tokens=3)).tokens]
        grace = 0.05 if end == "grace over" else 0.0
        left = -0.1 if end == "deadline" else None
        ask = partial(bench.turn, range(40), max_tokens=1200, request_id="r-1", commit_policy=policy)
        async with slow_steps(bench, 0.002), ask(detach_grace=grace, time_remaining=lambda: left) as turn:
            await take(turn, 4)
            if end == "cancel":
                assert (await bench.service.cancel(request_id="r-1"))[0]
            elif end == "engine error":
                bench.runner.failures.append(RuntimeError("the arithmetic"))
                with pytest.raises(EngineError):
                    await all_of(turn)
            elif end == "replaced":
                await bench.ask([5], max_tokens=1, busy_policy=BusyPolicy.REPLACE, commit_policy=policy)
        await bench.idle()
        ledger = bench.ledger()
        assert ledger[: len(before)] == before
        kept = ledger[len(before) :]
        if end == "replaced":
            kept = kept[: len(kept) - 2]
        if policy is CommitPolicy.ROLLBACK:
            assert kept == []
        elif policy is CommitPolicy.KEEP_PROMPT:
            assert kept == list(range(40))
        else:
            assert len(kept) >= 44
            assert kept == [*range(40), *bench.plain(before + list(range(40)), len(kept) - 40)]
        assert (await bench.service.get_session("chat-1")).position == len(ledger)
        assert (await bench.ask([4], max_tokens=3)).tokens == bench.plain([*ledger, 4], 3)


# What is remembered


@pytest.mark.parametrize("end", ["disconnect", "engine error"])
async def test_a_turn_that_came_to_nothing_runs_again(serve: Serve, end: str) -> None:
    async with serve() as bench:
        await bench.create()
        ask = partial(bench.turn, max_tokens=900, request_id="r-1", commit_policy=CommitPolicy.ROLLBACK)
        if end == "engine error":
            bench.runner.failures.append(RuntimeError("the arithmetic"))
        async with ask() as turn:
            if end == "engine error":
                with pytest.raises(EngineError):
                    await all_of(turn)
        await bench.idle()
        assert bench.ledger() == []
        async with ask() as turn:
            assert len(tokens_of(await all_of(turn))) == 900


async def test_a_failed_turn_that_the_ledger_keeps_fails_again_in_the_same_way(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        async with slow_steps(bench, 0.002), bench.turn(max_tokens=900, request_id="r-1") as turn:
            seen = await take(turn, 4)
            bench.runner.failures.append(RuntimeError("the arithmetic"))
            with pytest.raises(EngineError):
                await all_of(turn)
        ledger = bench.ledger()
        async with bench.turn(max_tokens=900, request_id="r-1") as turn:
            assert await take(turn, 4) == seen
            with pytest.raises(EngineError):
                await all_of(turn)
        assert bench.ledger() == ledger


async def test_a_turn_that_was_cancelled_on_purpose_does_not_run_again(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        ask = partial(bench.turn, max_tokens=900, request_id="r-1", commit_policy=CommitPolicy.ROLLBACK)
        async with ask() as turn:
            await take(turn, 1)
            was_running, finished = await bench.service.cancel(request_id="r-1")
        assert was_running
        async with ask() as turn:
            assert (await all_of(turn))[-1][1] == finished
        assert bench.ledger() == []
        assert await bench.service.cancel(request_id="r-1") == (False, finished), "and how it ended is still told"


async def test_cancelling_a_turn_that_has_ended_tells_how(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        answer = await bench.ask(max_tokens=3, request_id="r-1")
        assert await bench.service.cancel(request_id="r-1") == (False, answer.finished)
        assert await bench.service.cancel(request_id="r-2") == (False, None)


async def test_any_number_of_readers_coming_and_going_see_the_same_events(serve: Serve) -> None:
    """Forty readers of one turn with heartbeats and joined tokens, from random places, leaving at random moments."""
    dice = random.Random(7)
    output = OutputOptions(heartbeat_interval=0.004, max_tokens_per_event=3, max_event_delay=0.01)
    async with serve() as bench, slow_steps(bench, 0.003):
        await bench.create()
        known: dict[int, Event] = {}

        async def visit(turn: object, events: int) -> None:
            async for number, event in turn:  # type: ignore[attr-defined]
                assert known.setdefault(number, event) is event
                events -= 1
                if not events:
                    return

        async def visitor() -> None:
            for _ in range(5):
                await asyncio.sleep(dice.random() * 0.1)
                async with attach(bench, "r-1", dice.randrange(len(known) + 1)) as turn:
                    await visit(turn, dice.randrange(1, 60))

        async with bench.turn(max_tokens=150, request_id="r-1", output=output) as turn:
            await asyncio.gather(visit(turn, 10**6), *(visitor() for _ in range(40)))
        assert sorted(known) == list(range(1, len(known) + 1))
        assert tokens_of(sorted(known.items())) == bench.plain((1, 2, 3), 150)
        assert any(isinstance(event, Heartbeat) for event in known.values())
        assert isinstance(known[len(known)], Finished)
