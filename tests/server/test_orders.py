"""From a request and its session to a turn: which default wins, how much room there is, and what is refused."""

from pathlib import Path

import pytest
from tests.server.fakes import ListSink
from tests.server.service_bench import EOS, ServiceBench

from segue_server.errors import ContextExceeded, FieldInvalid, KvBudgetImpossible
from segue_server.jobs import TurnSpec, new_turn
from segue_server.orders import Orders, Pool
from segue_server.requests import (
    CommitPolicy,
    GenerateRequest,
    OutputOptions,
    SamplingParams,
    SessionSettings,
    StopConditions,
)
from segue_server.sessions import Session


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> ServiceBench:
    return ServiceBench(tmp_path_factory.mktemp("orders"))


def session(position: int = 0, **settings: object) -> Session:
    given = SessionSettings(**({"max_context_tokens": 100} | settings))  # type: ignore[arg-type]
    return Session("chat-1", given, position=position)


def order(bench: ServiceBench, where: Session, prompt: int = 5, *, pages: int = 128, **fields: object) -> TurnSpec:
    request = GenerateRequest(request_id="r", **fields)  # type: ignore[arg-type]
    orders = Orders(bench.model, Pool(pages, 1024))
    return orders.generate(where, request, list(range(prompt)), arrival=3.0, patience=9.0, sink=ListSink())


def test_a_request_wins_over_its_session_and_the_session_over_the_model(bench: ServiceBench) -> None:
    where = session(
        default_sampling=SamplingParams(top_k=7, top_p=0.5, seed=1),
        default_stop=StopConditions(max_tokens=9, ignore_eos=True),
        commit_policy=CommitPolicy.ROLLBACK,
        priority=4,
    )
    spec = order(bench, where)
    assert (spec.sampling.temperature, spec.sampling.top_k, spec.sampling.seed) == (0.0, 7, 1)
    assert (spec.max_tokens, spec.eos_token_ids) == (9, frozenset())
    assert (spec.commit_policy, spec.priority) == (CommitPolicy.ROLLBACK, 4)
    spec = order(
        bench,
        where,
        sampling=SamplingParams(temperature=0.5, top_k=1),
        stop=StopConditions(ignore_eos=False, stop_token_ids=(3,)),
        commit_policy=CommitPolicy.KEEP_PROMPT,
        priority=0,
    )
    assert (spec.sampling.temperature, spec.sampling.top_k, spec.sampling.top_p) == (0.5, 1, 0.5)
    assert (spec.max_tokens, spec.eos_token_ids, spec.stop_token_ids) == (9, frozenset({EOS}), frozenset({3}))
    assert (spec.commit_policy, spec.priority) == (CommitPolicy.KEEP_PROMPT, 0)


def test_an_unset_seed_is_drawn_anew_and_zero_is_a_seed(bench: ServiceBench) -> None:
    drawn = {order(bench, session()).sampling.seed for _ in range(5)}
    assert len(drawn) == 5
    assert all(0 <= seed < 2**63 for seed in drawn)
    assert order(bench, session(), sampling=SamplingParams(seed=0)).sampling.seed == 0


def test_without_max_tokens_a_turn_may_take_what_context_and_pool_have_left(bench: ServiceBench) -> None:
    spec = order(bench, session(position=20))
    assert (spec.open_ended, spec.max_tokens) == (True, 100 - 25)
    spec = order(bench, session(position=20, max_context_tokens=9999), pages=4)
    assert (spec.open_ended, spec.max_tokens) == (True, 64 - 25)
    turn = new_turn(spec, 20)
    assert (turn.start, turn.prompt_end, turn.limit, turn.promise) == (20, 25, 64, 64)


def test_admission_reserves_all_of_max_tokens_and_a_part_of_an_open_end(bench: ServiceBench) -> None:
    where = session(max_context_tokens=1600)
    fixed = new_turn(order(bench, where, stop=StopConditions(max_tokens=1000)), 0)
    assert (fixed.limit, fixed.promise) == (1005, 1005)
    open_end = new_turn(order(bench, where), 0)
    assert (open_end.limit, open_end.promise) == (1600, 5 + 256)


@pytest.mark.parametrize(("position", "prompt", "fits"), [(90, 9, True), (90, 10, False), (100, 0, False)])
def test_there_must_be_room_for_one_token(bench: ServiceBench, position: int, prompt: int, fits: bool) -> None:
    if fits:
        assert order(bench, session(position), prompt).max_tokens == 1
        return
    with pytest.raises(ContextExceeded) as error:
        order(bench, session(position), prompt)
    assert error.value.metadata == {"maxContextTokens": "100", "neededTokens": str(position + prompt + 1)}


def test_what_an_empty_pool_could_not_hold_is_impossible(bench: ServiceBench) -> None:
    where = session(max_context_tokens=9999)
    assert order(bench, where, stop=StopConditions(max_tokens=59), pages=4).max_tokens == 59
    with pytest.raises(KvBudgetImpossible) as error:
        order(bench, where, stop=StopConditions(max_tokens=60), pages=4)
    assert error.value.quota
    assert error.value.quota.value == 4 * 1024
    assert order(bench, session(max_context_tokens=64), stop=StopConditions(max_tokens=10**18), pages=4).max_tokens


def test_an_empty_ledger_needs_an_input(bench: ServiceBench) -> None:
    with pytest.raises(FieldInvalid, match="input: must be given"):
        order(bench, session(), 0)
    assert order(bench, session(position=1), 0).prompt == []


def test_text_is_made_only_for_those_who_look_at_it(bench: ServiceBench) -> None:
    silent = OutputOptions(return_text=False)
    assert order(bench, session()).text
    assert order(bench, session(), output=silent).text is None
    assert order(bench, session(), output=silent, stop=StopConditions(stop_sequences=("x",))).text


def test_stop_sequences_need_a_tokenizer(tmp_path: Path) -> None:
    bench = ServiceBench(tmp_path)
    bench.model.prompts.tokenizer = None
    assert order(bench, session()).text is None
    with pytest.raises(FieldInvalid, match=r"stop.stop_sequences: .*use stop_token_ids"):
        order(bench, session(), stop=StopConditions(stop_sequences=("x",)))


def test_appending_needs_tokens_and_room(bench: ServiceBench) -> None:
    orders = Orders(bench.model, Pool(4, 1024))

    def append(where: Session, prompt: int) -> TurnSpec:
        tokens = list(range(prompt))
        return orders.append(
            where, "r", tokens, OutputOptions(), defer_compute=False, arrival=0, patience=1, sink=ListSink()
        )

    assert not append(session(position=40), 24).samples
    with pytest.raises(FieldInvalid, match="at least one token"):
        append(session(), 0)
    with pytest.raises(KvBudgetImpossible):
        append(session(position=40), 25)
    with pytest.raises(ContextExceeded):
        append(session(position=90), 11)
