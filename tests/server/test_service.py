"""The service over a real engine and its thread. Each test ends with a check that nothing is in flight or leaked."""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
from tests.server.service_bench import EOS, Answer, ServiceBench, read, serving

from segue_server.errors import (
    ContextExceeded,
    Draining,
    EngineError,
    EtagMismatch,
    FieldInvalid,
    KvBudgetImpossible,
    PositionMismatch,
    QueueFull,
    QueueTimeout,
    RequestIdReused,
    SegueError,
    SessionBusy,
    SessionExists,
    SessionExpired,
    SessionLimit,
    SessionNotFound,
)
from segue_server.events import Finished, Prefill, Queued, Started, Tokens
from segue_server.requests import (
    AppendRequest,
    BusyPolicy,
    ChatMessage,
    ChatTurn,
    CommitPolicy,
    CreateSessionRequest,
    FinishReason,
    ListSessionsRequest,
    OutputOptions,
    SessionSettings,
    StopConditions,
    TextInput,
    TokenInput,
)
from segue_server.views import SessionState

Serve = Callable[..., AbstractAsyncContextManager[ServiceBench]]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    return partial(serving, tmp_path)


def spawn(work: Coroutine[object, object, Answer]) -> "asyncio.Task[Answer]":
    return asyncio.ensure_future(work)


# A conversation


async def test_two_turns_and_what_the_session_says_of_itself(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create(labels={"team": "a"})
        first = await bench.ask(range(20), max_tokens=5)
        assert first.tokens == bench.plain(range(20), 5)
        view = await bench.service.get_session("chat-1")
        assert (view.position, view.turn_count, view.state) == (25, 1, SessionState.IDLE)
        assert view.cache.cached_tokens == 24
        assert view.etag == first.finished.etag
        second = await bench.ask([9], max_tokens=4, expected_position=25)
        assert second.tokens == bench.plain([*range(20), *first.tokens, 9], 4)
        assert second.finished.usage.session_reused_tokens == 24
        assert second.finished.position == 30
        assert second.finished.etag != first.finished.etag


async def test_text_and_chat_turns_are_encoded_and_their_text_comes_back(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        chat = ChatTurn((ChatMessage("user", "hi"),))
        answer = await bench.ask(input=chat, max_tokens=6)
        prompt = bench.ledger()[: answer.started.prompt_tokens]
        tokenizer = bench.model.prompts.need_tokenizer("x")
        assert tokenizer.decode(prompt) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        text = "".join(event.text for event in answer.events if isinstance(event, Tokens))
        assert text == tokenizer.decode(answer.tokens, skip_special=True)
        more = await bench.ask(input=TextInput("abc"), max_tokens=2)
        assert more.started.prompt_tokens == 3


async def test_an_ephemeral_session_vanishes_with_its_turn(serve: Serve) -> None:
    async with serve() as bench:
        answer = await bench.ask(range(20), session_id="", max_tokens=5)
        assert answer.tokens == bench.plain(range(20), 5)
        with pytest.raises(SessionNotFound):
            await bench.service.get_session(answer.started.session_id)
        assert (await bench.service.list_sessions(ListSessionsRequest())).sessions == ()
        async with bench.turn(range(40), session_id="", max_tokens=500) as turn:
            seen = [event async for _, event in first_events(turn, Tokens)]
            name = next(event.session_id for event in seen if isinstance(event, Started))
            assert (await bench.service.list_sessions(ListSessionsRequest())).sessions == ()
        await bench.check()
        with pytest.raises(SessionNotFound):
            await bench.service.get_session(name)
        with pytest.raises(ContextExceeded):
            await bench.ask(range(250), session_id="", input=TokenInput((1,) * 2000))
        assert bench.session_pages == 0


async def test_append_computes_and_counts_as_a_turn(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        request = AppendRequest(session_id="chat-1", input=TokenInput(tuple(range(30))))
        async with bench.service.append(request, caller="me", time_remaining=lambda: None) as turn:
            appended = await read(turn)
        assert appended.finished.position == 30
        assert appended.finished.cache.cached_tokens == 30
        answer = await bench.ask(None, max_tokens=5)
        assert answer.tokens == bench.plain(range(30), 5)
        deferred = AppendRequest(session_id="chat-1", input=TokenInput((1, 2)), defer_compute=True)
        async with bench.service.append(deferred, caller="me", time_remaining=lambda: None) as turn:
            assert (await read(turn)).finished.position == 37
        assert bench.ledger()[35:] == [1, 2]


async def first_events(turn: object, kind: type):  # type: ignore[no-untyped-def]
    """Events up to and including the first of a kind; leaves the rest unread."""
    async for number, event in turn:  # type: ignore[attr-defined]
        yield number, event
        if isinstance(event, kind):
            return


# One turn in flight


async def test_a_second_turn_is_refused_and_told_of_the_first(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        async with bench.turn(max_tokens=500, request_id="first") as turn:
            async for _ in first_events(turn, Tokens):
                pass
            with pytest.raises(SessionBusy) as error:
                await bench.ask()
            assert error.value.metadata == {"activeRequestId": "first"}
            view = await bench.service.get_session("chat-1")
            assert (view.state, view.active_request_id) == (SessionState.RUNNING, "first")
            with pytest.raises(RequestIdReused):
                await bench.ask(session_id="", request_id="first")
        # Leaving the block is enough: the next turn waits for the end of one that is leaving.
        answer = await bench.ask([5], max_tokens=3)
        assert answer.tokens == bench.plain(bench.ledger()[:-3], 3)


async def test_queued_turns_of_one_session_run_one_after_the_other(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        tasks = [spawn(bench.ask([n], max_tokens=10, busy_policy=BusyPolicy.QUEUE)) for n in range(4)]
        await asyncio.sleep(0)
        assert bench.service.waiting_behind == 3
        answers = await asyncio.gather(*tasks)
        ledger: list[int] = []
        for n, answer in enumerate(answers):
            ledger += [n]
            assert answer.tokens == bench.plain(ledger, 10)
            ledger += answer.tokens
        assert bench.ledger() == ledger
        assert bench.service.waiting_behind == 0


async def test_a_turn_that_waits_behind_another_has_a_limit(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        async with bench.turn(max_tokens=1000) as turn:
            bench.gate.shut()
            with pytest.raises(QueueTimeout, match="ran for longer than"):
                await bench.ask(busy_policy=BusyPolicy.QUEUE, queue_timeout=0.05)
            bench.gate.open()
            del turn
        assert bench.service.stats.rejections.values["queue_timeout",] == 1


async def test_two_waiting_turns_of_one_request_id_do_not_become_two(serve: Serve) -> None:
    """Both are let in while they wait; only one may get the id."""
    async with serve() as bench:
        names = ["chat-1", "chat-2"]
        running = []
        for name in names:
            await bench.create(name)
            running.append(spawn(bench.ask([1], name, max_tokens=900)))
        await bench.until(lambda: bench.service.load().running_requests == 2)
        ask = partial(bench.ask, busy_policy=BusyPolicy.REPLACE, request_id="same", max_tokens=300)
        results = await asyncio.gather(*(ask([n], name) for n, name in enumerate(names)), return_exceptions=True)
        assert sorted(type(result).__name__ for result in results) == ["Answer", "RequestIdReused"]
        await asyncio.gather(*running)


async def test_barging_in_ends_the_turn_in_flight_and_keeps_what_was_said(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        first = spawn(bench.ask(range(5), max_tokens=1000))
        await bench.until(lambda: bench.ledger()[8:])
        second = await bench.ask([7], max_tokens=3, busy_policy=BusyPolicy.REPLACE)
        cut = await first
        assert cut.finished.finish_reason is FinishReason.CANCELLED
        assert cut.tokens == bench.plain(range(5), len(cut.tokens))
        assert second.started.position == cut.finished.position == 5 + len(cut.tokens)
        assert second.tokens == bench.plain([*range(5), *cut.tokens, 7], 3)
        assert bench.engine.stats.cancellations.values["decode", "replaced"] == 1


async def test_a_wrong_expected_position_is_refused_and_changes_nothing(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        await bench.ask(max_tokens=4)
        before = await bench.service.get_session("chat-1")
        with pytest.raises(PositionMismatch) as error:
            await bench.ask(expected_position=0)
        assert error.value.metadata == {"actualPosition": "7"}
        after = await bench.service.get_session("chat-1")
        assert (after.position, after.etag, after.turn_count, after.state) == (
            7,
            before.etag,
            before.turn_count,
            SessionState.IDLE,
        )


# Leaving


LONG = TextInput("x" * 9000)


@pytest.mark.parametrize("policy", list(CommitPolicy))
@pytest.mark.parametrize("moment", ["claimed", "queued", "prefill", "decode"])
async def test_leaving_early_frees_session_and_pages_at_every_moment(
    serve: Serve, moment: str, policy: CommitPolicy
) -> None:
    """A disconnect is `async with` left early. What is kept is what the policy says; nothing else remains."""
    async with serve(max_running=1, step_tokens=16) as bench:
        await bench.create("other-1")
        await bench.create()
        await bench.ask(range(20), max_tokens=3)
        before = bench.ledger()
        prompt = list(range(100))
        if moment == "queued":
            busy = spawn(bench.ask(range(5), "other-1", max_tokens=1500))
            await bench.until(lambda: bench.ledger("other-1"))
        seen = Answer()
        async with bench.turn(prompt, max_tokens=1400, commit_policy=policy) as turn:
            kind = {"queued": Queued, "prefill": Prefill, "decode": Tokens}.get(moment)
            if kind:
                seen.events = [event async for _, event in first_events(turn, kind)]
        await bench.idle()
        if moment == "queued":
            assert (await bench.service.cancel(session_id="other-1"))[0]
            assert (await busy).finished.finish_reason is FinishReason.CANCELLED
        ledger = bench.ledger()
        if policy is CommitPolicy.ROLLBACK:
            assert ledger == before
        elif policy is CommitPolicy.KEEP_PROMPT or moment in ("claimed", "queued", "prefill"):
            assert ledger[: len(before) + 100] == before + prompt
        view = await bench.service.get_session("chat-1")
        assert view.position == len(ledger)
        assert ledger[len(before) + 100 :] == bench.plain(before + prompt, max(0, len(ledger) - len(before) - 100))
        await bench.check()
        answer = await bench.ask([4], max_tokens=3)
        assert answer.tokens == bench.plain([*ledger, 4], 3)


async def test_a_turn_cancelled_while_its_text_is_encoded_never_reaches_the_engine(serve: Serve) -> None:
    async with serve(max_context_tokens=12_000, pages=800) as bench:  # it would fit, and run
        await bench.create()
        task = spawn(bench.ask(input=LONG, request_id="late"))
        await asyncio.sleep(0)
        was_running, finished = await bench.service.cancel(request_id="late")
        assert was_running
        assert finished
        assert (finished.finish_reason, finished.position) == (FinishReason.CANCELLED, 0)
        answer = await task
        assert answer.finished.finish_reason is FinishReason.CANCELLED
        assert bench.ledger() == []
        assert (await bench.ask(max_tokens=2)).finished.position == 5


async def test_a_cancelled_task_while_its_text_is_encoded_frees_the_session(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        task = spawn(bench.ask(input=LONG))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await bench.service.get_session("chat-1")).state is SessionState.IDLE


async def test_an_input_that_is_refused_frees_the_session(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        with pytest.raises(FieldInvalid, match="the session's ledger is empty"):
            await bench.ask(None)
        with pytest.raises(ContextExceeded) as error:
            await bench.ask([1] * 1600)
        assert error.value.metadata == {"maxContextTokens": "1600", "neededTokens": "1601"}
        assert (await bench.service.get_session("chat-1")).state is SessionState.IDLE


async def test_a_passed_deadline_is_told_from_a_disconnect(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        for left in (-0.1, 5.0):
            async with bench.turn(max_tokens=600, time_remaining=lambda left=left: left) as turn:
                async for _ in first_events(turn, Tokens):
                    pass
            await bench.idle()
        cancellations = bench.engine.stats.cancellations.values
        assert cancellations["decode", "deadline"] == 1
        assert cancellations["decode", "disconnect"] == 1


async def test_cancel_by_request_and_by_session_answers_when_the_turn_has_left(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        for request_id, target in [("r-7", {"request_id": "r-7"}), ("r-8", {"session_id": "chat-1"})]:
            task = spawn(bench.ask(max_tokens=700, request_id=request_id, commit_policy=CommitPolicy.ROLLBACK))
            await bench.until(lambda: bench.engine.scheduler.running)
            before = (await bench.service.get_session("chat-1")).turn_count
            cancel = partial(bench.service.cancel, commit_policy=CommitPolicy.KEEP_PROMPT)
            was_running, finished = await cancel(**target)  # type: ignore[arg-type]
            assert was_running
            assert finished == (await task).finished
            assert finished
            assert finished.finish_reason is FinishReason.CANCELLED
            assert (await bench.service.get_session("chat-1")).turn_count == before + 1
            assert not (await cancel(**target))[0], "idempotent"  # type: ignore[arg-type]
        with pytest.raises(SessionNotFound):
            await bench.service.cancel(session_id="nobody")


async def test_a_cut_queued_turn_is_recorded_as_prompt_only(serve: Serve) -> None:
    """Its Started never came; still the ledger's spans must be right, or the next chat turn would close a reply."""
    async with serve(max_running=1) as bench:
        await bench.create()
        await bench.create("other-1")
        busy = spawn(bench.ask(range(5), "other-1", max_tokens=1500))
        await bench.until(lambda: bench.ledger("other-1"))
        async with bench.turn([1, 2, 3]) as turn:
            async for _ in first_events(turn, Queued):
                pass
        await bench.idle()
        await bench.service.cancel(session_id="other-1")
        await busy
        assert bench.ledger() == [1, 2, 3]
        record = bench.service._sessions.get("chat-1").turns[-1]
        assert (record.start, record.generated_start, record.end, record.sampled) == (0, 3, 3, False)


async def test_chaos_whoever_leaves_whenever_nothing_is_left_behind(serve: Serve) -> None:
    """Tasks are killed at random moments under every busy policy, in a pool that is too small, beside deletions."""
    rng = random.Random(5)
    async with serve(pages=24, max_running=3, step_tokens=32, max_context_tokens=300) as bench:
        names = [f"chat-{n}" for n in range(6)]
        for name in names:
            await bench.create(name)

        async def one() -> None:
            name = rng.choice([*names, ""])
            if name and rng.random() < 0.08:
                await bench.service.delete_session(name, force=True, allow_missing=True)
                await bench.create(name)
                return
            fields: dict[str, object] = {
                "busy_policy": rng.choice(list(BusyPolicy)),
                "commit_policy": rng.choice(list(CommitPolicy)),
                "max_tokens": rng.choice([1, 10, 60]),
                "queue_timeout": rng.choice([0.01, 5.0]),
            }
            if rng.random() < 0.1:
                fields["input"] = LONG  # too long, refused after it was encoded on a thread
            await bench.ask([rng.randrange(256) for _ in range(rng.randint(1, 40))], name, **fields)

        async def killed() -> None:
            task = asyncio.ensure_future(one())
            await asyncio.wait([task], timeout=rng.choice([0, 0.001, 0.01, 0.05, 5.0]))
            task.cancel()
            with suppress(SegueError, asyncio.CancelledError):
                await task

        for _ in range(12):
            await asyncio.gather(*(killed() for _ in range(12)))
        for name in names:
            await bench.service.delete_session(name, allow_missing=True, force=True)
        await bench.check()
        assert bench.session_pages == 0
        assert len(bench.engine.holdings.sequences) == 0


# Limits


async def test_the_queue_has_a_bound_and_free_places_do_not_count(serve: Serve) -> None:
    async with serve(max_running=2, max_queued=1) as bench:
        bench.gate.shut()
        tasks = [spawn(bench.ask(session_id="", max_tokens=3)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull) as error:
            await bench.ask(session_id="")
        assert error.value.quota
        assert error.value.quota.value == 1
        bench.gate.open()
        answers = await asyncio.gather(*tasks)
        assert all(answer.finished for answer in answers)
        assert bench.service.stats.rejections.values["queue_full",] == 1
        assert (await bench.ask(session_id="")).finished


async def test_turns_that_wait_behind_their_own_session_count_for_the_bound(serve: Serve) -> None:
    async with serve(max_running=1, max_queued=2) as bench:
        await bench.create()
        first = spawn(bench.ask(max_tokens=300))
        await bench.until(lambda: bench.service.load().running_requests)
        ask = partial(bench.ask, max_tokens=2, busy_policy=BusyPolicy.QUEUE)
        results = await asyncio.gather(*(ask([n]) for n in range(5)), return_exceptions=True)
        assert [type(result) for result in results] == [Answer, Answer, QueueFull, QueueFull, QueueFull]
        assert (await first).finished


async def test_no_queue_at_all_still_runs_turns(serve: Serve) -> None:
    async with serve(max_running=2, max_queued=0) as bench:
        assert (await bench.ask(session_id="", max_tokens=3)).finished


async def test_what_never_fits_is_refused_for_good(serve: Serve) -> None:
    async with serve(pages=4, max_context_tokens=1600) as bench:
        with pytest.raises(KvBudgetImpossible) as error:
            await bench.ask(range(60), session_id="", max_tokens=10)
        assert error.value.retry_after == -1
        assert error.value.metadata["neededBytes"] == str(5 * bench.runner.page_bytes)
        open_ended = StopConditions(ignore_eos=True)
        answer = await bench.ask(range(60), session_id="", stop=open_ended)
        assert answer.finished.finish_reason is FinishReason.CONTEXT_FULL
        assert answer.finished.position == 64


async def test_the_number_of_sessions_has_a_bound(serve: Serve) -> None:
    async with serve(max_sessions=2) as bench:
        await bench.create("aaa")
        await bench.create("bbb")
        for refused in (bench.create("ccc"), bench.ask(session_id="")):
            with pytest.raises(SessionLimit):
                await refused
        assert bench.service.stats.rejections.values["session_limit",] == 2
        await bench.service.delete_session("aaa")
        await bench.create("ccc")


async def test_every_violation_is_told_at_once(serve: Serve) -> None:
    async with serve() as bench:
        with pytest.raises(FieldInvalid) as error:
            await bench.ask([1, 99999], session_id="No!", max_tokens=0, priority=101)
        assert [v.field for v in error.value.violations] == [
            "session_id",
            "input.token_ids[1]",
            "stop.max_tokens",
            "priority",
        ]


# Sessions


async def test_create_with_a_prefix_computes_it_as_turn_zero(serve: Serve) -> None:
    async with serve() as bench:
        chat = ChatTurn((ChatMessage("system", "be brief"),))
        await bench.create(prefix=chat)
        view = await bench.service.get_session("chat-1")
        text = bench.service.detokenize(bench.ledger(), skip_special_tokens=False)
        assert text == "<|im_start|>system\nbe brief<|im_end|>\n", "no reply is opened yet"
        assert (view.position, view.cache.cached_tokens, view.turn_count) == (len(bench.ledger()), view.position, 1)


async def test_a_prefix_that_is_refused_leaves_no_session(serve: Serve) -> None:
    async with serve() as bench:
        with pytest.raises(ContextExceeded):
            await bench.create(request_id="c", prefix=TokenInput((1,) * 1601))
        with pytest.raises(SessionNotFound):
            await bench.service.get_session("chat-1")
        await bench.create(request_id="c", prefix=TokenInput((1,) * 5))


async def test_create_is_idempotent_by_request_id_even_while_it_runs(serve: Serve) -> None:
    async with serve(step_tokens=16) as bench:
        request = CreateSessionRequest(request_id="c-1", prefix=TokenInput(tuple(range(200))))
        create = partial(bench.service.create_session, caller="me")
        views = await asyncio.gather(create(request), create(request), create(request))
        assert len({view.session_id for view in views}) == 1
        assert [view.position for view in views] == [200] * 3
        assert (await create(request)).session_id == views[0].session_id
        with pytest.raises(RequestIdReused):
            await create(CreateSessionRequest(request_id="c-1", display_name="other"))
        assert bench.service.load().sessions == 1


async def test_a_taken_id_is_refused(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        with pytest.raises(SessionExists) as error:
            await bench.create()
        assert error.value.resource == ("segue.v1.Session", "chat-1")


async def test_lists_are_paged_ordered_and_filtered(serve: Serve) -> None:
    async with serve() as bench:
        for n in range(7):
            await bench.create(f"chat-{n}", labels={"kind": "odd" if n % 2 else "even", "n": str(n)})
            await bench.ask(range(16 * (n + 1)), f"chat-{n}", max_tokens=2)

        async def pages(**fields: object) -> list[list[str]]:
            found, token = [], ""
            while True:
                page = await bench.service.list_sessions(ListSessionsRequest(page_token=token, **fields))  # type: ignore[arg-type]
                found.append([view.session_id for view in page.sessions])
                if not (token := page.next_page_token):
                    return found

        names = [f"chat-{n}" for n in range(7)]
        assert await pages() == [names]
        assert await pages(page_size=3) == [names[:3], names[3:6], names[6:]]
        assert list(chain(*await pages(page_size=2, order_by="create_time desc"))) == names[::-1]
        assert list(chain(*await pages(page_size=4, order_by="cache.used_bytes desc"))) == names[::-1]
        assert await pages(labels={"kind": "odd"}) == [names[1::2]]
        assert await pages(labels={"kind": "odd", "n": "2"}) == [[]]
        assert await pages(states=("RUNNING",)) == [[]]
        async with bench.turn(session_id="chat-3", max_tokens=600) as turn:
            async for _ in first_events(turn, Tokens):
                pass
            assert await pages(states=("RUNNING", "QUEUED")) == [["chat-3"]]
        wrong = (
            ListSessionsRequest(page_size=-1),
            ListSessionsRequest(page_token="?"),  # noqa: S106 - no password
            ListSessionsRequest(order_by="colour"),
        )
        for request in wrong:
            with pytest.raises(FieldInvalid):
                await bench.service.list_sessions(request)


async def test_delete_obeys_etag_force_and_allow_missing(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        etag = (await bench.ask(range(30), max_tokens=2)).finished.etag
        with pytest.raises(EtagMismatch):
            await bench.service.delete_session("chat-1", etag="old")
        assert await bench.service.delete_session("chat-1", etag=etag) == bench.runner.page_bytes, (
            "the other is a known prefix"
        )
        with pytest.raises(SessionNotFound):
            await bench.service.delete_session("chat-1")
        assert await bench.service.delete_session("chat-1", allow_missing=True) == 0
        await bench.create()
        async with bench.turn(max_tokens=900) as turn:
            reader = first_events(turn, Tokens)
            async for _ in reader:
                pass
            with pytest.raises(SessionBusy):
                await bench.service.delete_session("chat-1")
            assert await bench.service.delete_session("chat-1", force=True) > 0
            rest = await read(turn)
            assert rest.finished.finish_reason is FinishReason.CANCELLED
        assert bench.session_pages == 0


async def test_a_turn_that_waits_for_a_session_that_is_deleted_is_told(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        running = spawn(bench.ask(max_tokens=1500))
        await bench.until(bench.ledger)
        waiting = [spawn(bench.ask(busy_policy=policy)) for policy in (BusyPolicy.QUEUE, BusyPolicy.QUEUE)]
        await asyncio.sleep(0)
        await bench.service.delete_session("chat-1", force=True)
        assert (await running).finished.finish_reason is FinishReason.CANCELLED
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, SessionNotFound)
        await bench.create()
        assert (await bench.ask()).started.position == 0


async def test_a_delete_whose_caller_leaves_still_frees_everything(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        running = spawn(bench.ask(max_tokens=1500))
        await bench.until(bench.ledger)
        task = asyncio.ensure_future(bench.service.delete_session("chat-1", force=True))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, running, return_exceptions=True)
        await bench.check()
        assert bench.session_pages == 0


async def test_an_idle_session_expires_and_leaves_a_tombstone_for_a_while(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("segue_server.service.service.REAP_INTERVAL", 0.01)
    async with serve() as bench:
        reaper = asyncio.ensure_future(bench.service.reap())
        await bench.create("soon", settings=SessionSettings(ttl=0.15))
        await bench.create("later")
        await bench.ask(range(20), "soon", max_tokens=2)
        async with bench.turn(session_id="soon", max_tokens=1500) as turn:
            bench.gate.shut()
            await asyncio.sleep(0.3)
            assert (await bench.service.get_session("soon")).active_request_id, "a turn in flight is use"
            bench.gate.open()
            del turn
        await bench.idle("soon")
        await bench.until(lambda: bench.service.load().sessions == 1)
        with pytest.raises(SessionExpired) as error:
            await bench.service.get_session("soon")
        assert "expireTime" in error.value.metadata
        await bench.thread.call(lambda: None)
        assert bench.session_pages == 0
        assert bench.service.stats.sessions_ended.values["expired",] == 1
        bench.service._sessions.forget_tombstones(time.time() + 61)
        with pytest.raises(SessionNotFound):
            await bench.service.get_session("soon")
        assert (await bench.service.get_session("later")).state is SessionState.IDLE
        reaper.cancel()


# The end, and faults


async def test_drain_refuses_new_work_waits_and_then_ends_what_runs(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        short = spawn(bench.ask(max_tokens=20))
        long = spawn(bench.ask(session_id="", max_tokens=1500))
        behind = spawn(bench.ask([4], busy_policy=BusyPolicy.QUEUE, max_tokens=1500))
        await asyncio.sleep(0)
        bench.runner.before_step = lambda: time.sleep(0.002)
        draining = asyncio.ensure_future(bench.service.drain(0.3))
        await asyncio.sleep(0)
        for refused in (bench.ask(session_id=""), bench.create("new")):
            with pytest.raises(Draining):
                await refused
        await draining
        assert (await short).finished.finish_reason is FinishReason.MAX_TOKENS
        assert (await long).finished.finish_reason is FinishReason.DRAINING
        assert (await behind).finished.finish_reason is FinishReason.DRAINING
        assert bench.service.load().draining
        assert bench.service.stats.rejections.values["draining",] == 2


async def test_an_engine_error_ends_the_turn_with_an_error_and_keeps_the_session(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        async with bench.turn(range(5), max_tokens=1500) as turn:
            async for _ in first_events(turn, Tokens):
                pass
            bench.runner.failures = [RuntimeError("no memory")]
            with pytest.raises(EngineError):
                await read(turn)
        view = await bench.service.get_session("chat-1")
        assert view.state is SessionState.IDLE
        assert view.position == len(bench.ledger())
        assert view.turn_count == 1, "what it left in the ledger has its place"
        ledger = bench.ledger()
        assert (await bench.ask([1], max_tokens=4)).tokens == bench.plain([*ledger, 1], 4)


async def test_a_crash_of_the_engine_ends_every_turn_and_lets_the_server_stop(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        bench.gate.shut()
        turns = [spawn(bench.ask(max_tokens=500)), spawn(bench.ask(session_id="", max_tokens=500))]
        await bench.gate.wait_reached()

        def crash() -> bool:
            raise MemoryError("gone")

        bench.engine.step = crash  # type: ignore[method-assign]
        bench.gate.open()
        async with asyncio.timeout(5):
            results = await asyncio.gather(*turns, return_exceptions=True)
            assert [type(result) for result in results] == [EngineError, EngineError]
            assert len(bench.crashes) == 1
            with pytest.raises(EngineError):
                await bench.ask()
            await bench.service.drain(5.0)


async def test_a_reader_that_stops_reading_is_ended_and_its_neighbour_is_not(serve: Serve) -> None:
    async with serve(slow_reader_limit=0.1) as bench:
        await bench.create()
        async with bench.turn(max_tokens=1500) as turn:
            neighbour = await bench.ask(session_id="", max_tokens=400)
            assert len(neighbour.tokens) == 400
            await bench.idle()
            slow = await read(turn)
            assert slow.finished.finish_reason is FinishReason.CANCELLED
            assert 200 <= len(slow.tokens) <= 300
        assert bench.engine.stats.cancellations.values["decode", "slow_client"] == 1


async def test_a_slow_but_living_reader_gets_everything(serve: Serve) -> None:
    async with serve() as bench:
        await bench.create()
        async with bench.turn(max_tokens=600) as turn:
            await asyncio.sleep(0.1)
            assert len(bench.ledger()) < 300, "paused"
            answer = await read(turn)
        assert answer.tokens == bench.plain([1, 2, 3], 600)


async def test_descriptions_are_true(serve: Serve) -> None:
    async with serve() as bench:
        assert bench.service.tokenize(TextInput("ab"), add_special_tokens=False)[1] == ["a", "b"]
        ids, _ = bench.service.tokenize(ChatTurn((ChatMessage("user", "x"),)), add_special_tokens=False)
        assert bench.service.detokenize(ids, skip_special_tokens=True) == "user\nx\nassistant\n"
        with pytest.raises(FieldInvalid, match=r"token_ids\[1\]"):
            bench.service.detokenize([0, 263], skip_special_tokens=True)
        info = bench.service.server_info()
        assert info.limits == bench.limits
        assert bench.service.model_info().eos_token_ids == (EOS,)
        await bench.create()
        async with bench.turn(range(20), max_tokens=1000) as turn:
            async for _ in first_events(turn, Tokens):
                pass
            bench.gate.shut()
            await bench.gate.wait_reached()
            load = bench.service.load()
            assert (load.running_requests, load.queued_requests, load.sessions) == (1, 0, 1)
            assert load.kv_used_bytes > 0
            bench.gate.open()
            assert bench.service.session_states()["running"] == 1


async def test_coalesced_output_loses_nothing(serve: Serve) -> None:
    async with serve() as bench:
        output = OutputOptions(max_tokens_per_event=16, max_event_delay=1.0, top_logprobs=0)
        answer = await bench.ask(session_id="", max_tokens=50, output=output)
        assert answer.tokens == bench.plain([1, 2, 3], 50)
        sizes = [len(event.token_ids) for event in answer.events if isinstance(event, Tokens)]
        assert sizes[:3] == [16, 16, 16]
        assert isinstance(answer.events[-1], Finished)
