"""Turns of SmolLM2 over a real socket: what is reused, how they end, and what the stream says."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest

from segue_client import AsyncClient, FinishReason, Started

QUESTION = "What is the capital of France?"
GREEDY = {"temperature": 0.0}


def user(content):
    return {"messages": [{"role": "user", "content": content}]}


def assert_adds_up(usage):
    """context + prompt = computed + reused from the session, a shared prefix or a lower tier."""
    reused = usage.session_reused_tokens + usage.prefix_reused_tokens + usage.restored_tokens
    assert usage.context_tokens + usage.prompt_tokens == usage.computed_tokens + reused


# ----------------------------------------------------------------------------------------------------------- reuse


def test_a_second_turn_runs_the_last_token_and_the_new_ones_and_nothing_else(server, client, same_choices):
    """Usage of two turns, to the token; and the second answer equals that of a fresh session given the whole ledger."""
    session = client.create_session(system="You are a helpful assistant.")
    prefix = session.position
    first = session.generate(**user(QUESTION), **GREEDY, max_tokens=24)
    assert (first.usage.context_tokens, first.usage.session_reused_tokens) == (prefix, prefix)
    assert first.usage.computed_tokens == first.usage.prompt_tokens
    assert first.position == prefix + first.usage.prompt_tokens + first.usage.generated_tokens

    second = session.generate(**user("And of Italy?"), **GREEDY, max_tokens=24)
    assert second.usage.context_tokens == first.position
    assert second.usage.session_reused_tokens == first.position - 1, "all but the last sampled token had been run"
    assert second.usage.computed_tokens == second.usage.prompt_tokens + 1
    for turn in (first, second):
        assert_adds_up(turn.usage)
        assert turn.usage.generated_tokens == len(turn.token_ids)

    ledger = server.ledger(session)
    assert ledger[-len(second.token_ids) :] == list(second.token_ids)
    fresh = client.create_session(cache_salt="fresh")
    whole = fresh.generate(tokens=ledger[: -len(second.token_ids)], **GREEDY, max_tokens=24, top_logprobs=2)
    assert whole.usage.computed_tokens == whole.usage.prompt_tokens == len(ledger) - len(second.token_ids)
    same_choices(second, whole)
    print(f"second turn: {second.usage.computed_tokens} computed, {second.usage.session_reused_tokens} reused")


def test_a_turn_without_input_goes_on_where_the_last_one_stopped(client, same_choices):
    """Two turns of 6 tokens are one turn of 12, and the second computes one position."""
    session = client.create_session()
    half = session.generate(text="Once upon a time", **GREEDY, max_tokens=6)
    rest = session.generate(**GREEDY, max_tokens=6)
    assert (rest.usage.prompt_tokens, rest.usage.computed_tokens) == (0, 1)
    whole = client.create_session(cache_salt="whole").generate(
        text="Once upon a time", **GREEDY, max_tokens=12, top_logprobs=2
    )
    same_choices(replace(rest, token_ids=(*half.token_ids, *rest.token_ids)), whole)


def test_appended_context_is_computed_at_once_and_reused_by_the_turn_after_it(client):
    """append_context leaves nothing but its last token to be run by the next turn."""
    session = client.create_session()
    appended = session.append_context(text="The first law of robotics says that")
    assert appended.usage.computed_tokens == appended.usage.prompt_tokens == session.position
    turn = session.generate(**GREEDY, max_tokens=2)
    assert (turn.usage.session_reused_tokens, turn.usage.computed_tokens) == (appended.position - 1, 1)


# --------------------------------------------------------------------------------------------------------- sampling


def test_a_seed_gives_the_same_tokens_alone_and_under_load(server, client):
    """The draw depends on seed and position, never on what else is in the batch."""
    options = {"text": "My favourite colour is", "temperature": 0.9, "top_p": 0.95, "seed": 7, "max_tokens": 16}
    alone = client.generate(**options)
    with ExitStack() as load:
        busy = {"temperature": 1.0, "max_tokens": 400, "ignore_eos": True}
        streams = [load.enter_context(client.stream(text=f"Number {n}:", seed=n, **busy)).events() for n in range(5)]
        for events in streams:
            next(events)
        assert server.in_flight() == 5
        beside = client.generate(**options)
    assert list(beside.token_ids) == list(alone.token_ids)
    assert list(client.generate(**{**options, "seed": 8}).token_ids) != list(alone.token_ids)


def test_an_unset_seed_is_told_and_gives_the_same_tokens_again(client):
    """Started.seed, sent back, repeats a sampled answer."""
    options = {"text": "Roses are", "temperature": 1.0, "max_tokens": 12}
    turn = client.stream(**options)
    started, *_ = turn.events()
    assert isinstance(started, Started)
    again = client.generate(**options, seed=started.seed)
    assert list(again.token_ids) == list(turn.token_ids)


# ------------------------------------------------------------------------------------------------------ many at once


def test_32_sessions_at_once_answer_like_each_one_alone(server, same_choices):
    """Continuous batching changes no greedy answer: 32 turns in one batch against the same 32, one at a time."""
    count, new_tokens = 32, 8
    client = server.client()
    prompts = [f"{number + 3} things that everybody knows about the number {number * 7}:" for number in range(count)]
    options = {**GREEDY, "max_tokens": new_tokens, "ignore_eos": True, "top_logprobs": 2}
    before = server.full_steps
    with ThreadPoolExecutor(count) as pool:
        together = list(pool.map(lambda prompt: client.create_session().generate(text=prompt, **options), prompts))
    full = server.full_steps - before
    sessions = [client.create_session(cache_salt="alone") for _ in prompts]
    alone = [session.generate(text=prompt, **options) for session, prompt in zip(sessions, prompts, strict=True)]
    for one, other in zip(together, alone, strict=True):
        same_choices(one, other)
    equal = sum(list(one.token_ids) == list(other.token_ids) for one, other in zip(together, alone, strict=True))
    print(f"{equal} of {count} answers equal in all {new_tokens} tokens; {full} steps with more than 24 sequences")
    assert full > 0, "the turns did not run together"


# -------------------------------------------------------------------------------------------------- stop conditions


def test_the_models_own_end_token_ends_a_turn_and_stays_in_the_ledger(server, client):
    """Chat templates need EOS in the ledger; the text does not show it."""
    session = client.create_session()
    turn = session.generate(**user(QUESTION), **GREEDY, max_tokens=64)
    assert turn.finish_reason is FinishReason.EOS
    ends = client.model_info().eos_token_ids
    assert turn.finished.matched_stop.token_id == turn.token_ids[-1] == server.ledger(session)[-1]
    assert turn.token_ids[-1] in ends
    assert turn.text == "The capital of France is Paris."


def test_ignore_eos_and_min_tokens_go_past_the_end_token(client):
    """ignore_eos treats it as any token; min_tokens keeps it from being drawn too early."""
    ignored = client.generate(**user(QUESTION), **GREEDY, max_tokens=20, ignore_eos=True)
    assert (ignored.finish_reason, len(ignored.token_ids)) == (FinishReason.MAX_TOKENS, 20)
    ends = set(client.model_info().eos_token_ids)
    assert ends & set(ignored.token_ids)
    late = client.generate(**user(QUESTION), **GREEDY, max_tokens=20, min_tokens=15)
    assert not ends & set(late.token_ids[:15])


def test_a_stop_text_cuts_the_output_and_tells_what_the_ledger_holds_beyond_it(client):
    """Matched across token borders; the ledger keeps whole tokens, and the overhang says how many are not shown."""
    options = {**user(QUESTION), **GREEDY, "max_tokens": 64}
    cut = client.generate(**options, stop=["of Fr", "never said"])
    assert (cut.finish_reason, cut.text) == (FinishReason.STOP_SEQUENCE, "The capital ")
    assert cut.finished.matched_stop.text == "of Fr"
    shown = client.detokenize(cut.token_ids[: len(cut.token_ids) - cut.finished.ledger_overhang_tokens])
    assert cut.text.startswith(shown)
    assert client.detokenize(cut.token_ids).startswith("The capital of Fr")
    kept = client.generate(**options, stop=["of Fr"], include_stop=True)
    assert kept.text == "The capital of Fr"


def test_a_stop_token_is_neither_in_the_output_nor_in_the_ledger_unless_asked_for(server, client):
    """stop_token_ids with and without include_stop."""
    options = {**user(QUESTION), **GREEDY, "max_tokens": 64}
    token = client.generate(**options).token_ids[3]
    session = client.create_session()
    cut = session.generate(**options, stop_token_ids=[token])
    assert (cut.finish_reason, cut.finished.matched_stop.token_id) == (FinishReason.STOP_TOKEN, token)
    assert token not in cut.token_ids
    assert server.ledger(session)[-1] != token
    kept = client.generate(**options, stop_token_ids=[token], include_stop=True)
    assert kept.token_ids[-1] == token


def test_max_tokens_time_limit_and_a_full_context_end_a_turn(client):
    """Each with its own reason, and the session goes on after a time limit."""
    assert client.generate(text="One, two,", **GREEDY, max_tokens=3).finish_reason is FinishReason.MAX_TOKENS
    session = client.create_session()
    limited = session.generate(text="One, two,", **GREEDY, ignore_eos=True, time_limit=0.4)
    assert limited.finish_reason is FinishReason.TIME_LIMIT
    assert 1 <= limited.usage.generated_tokens < 400
    assert session.generate(**GREEDY, max_tokens=1).usage.context_tokens == limited.position
    small = client.create_session(max_context_tokens=16)
    full = small.generate(text="One, two,", **GREEDY, ignore_eos=True)
    assert (full.finish_reason, full.position) == (FinishReason.CONTEXT_FULL, 16)


# ------------------------------------------------------------------------------------------------------------ text


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_streamed_text_is_the_text_of_the_streamed_ids(client, seed):
    """However hot the sampling: no character is cut in two, none is lost, and each piece comes with its tokens."""
    prompt = "Emoji 🦊🐻‍❄️, 漢字, العربية, Ελληνικά:"
    with client.stream(text=prompt, temperature=2.0, top_p=1.0, seed=seed, max_tokens=24, ignore_eos=True) as turn:
        pieces = list(turn)
    assert "".join(pieces) == turn.text == client.detokenize(turn.token_ids, skip_special_tokens=True)
    assert len(turn.token_ids) == 24


async def test_blocking_asyncio_streamed_and_unary_turns_say_the_same(server, client):
    """Four ways to one greedy answer."""
    options = {**user(QUESTION), **GREEDY, "max_tokens": 24}
    unary = client.generate(**options)
    with client.stream(**options) as turn:
        streamed = "".join(turn)
    async with AsyncClient(server.target) as aclient:
        await aclient.wait_ready(5)
        async_unary = await aclient.generate(**options)
        session = await aclient.create_session()
        async with session.stream(**options) as aturn:
            async_streamed = "".join([piece async for piece in aturn])
        await session.delete()
    assert streamed == unary.text == async_unary.text == async_streamed
    assert list(turn.token_ids) == list(unary.token_ids) == list(aturn.token_ids)
    assert turn.usage.prompt_tokens == aturn.usage.prompt_tokens == unary.usage.prompt_tokens


def test_coalescing_changes_the_events_and_not_the_answer(client):
    """max_tokens_per_event=8 with a delay: fewer events, same tokens."""
    options = {"text": "The three primary colours are", **GREEDY, "max_tokens": 24, "ignore_eos": True}
    plain = client.stream(**options)
    single = [event for event in plain.events() if hasattr(event, "token_ids")]
    together = client.stream(**options, max_tokens_per_event=8, max_event_delay=10)
    joined = [event for event in together.events() if hasattr(event, "token_ids")]
    assert len(single) == 24
    assert [len(event.token_ids) for event in joined] == [8, 8, 8]
    assert (together.text, together.token_ids) == (plain.text, plain.token_ids)
