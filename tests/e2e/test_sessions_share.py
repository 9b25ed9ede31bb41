"""Sessions of SmolLM2 that share KV, over a real socket: forks, rewinds, equal prefixes, scores, estimates, watches."""

import time

import pytest

from segue_client import EventHistoryLost, KvBudget, SessionExpired, SessionNotFound

GREEDY = {"temperature": 0.0, "ignore_eos": True}
SYSTEM = "You are a librarian of a small town. Answer in one short sentence, and name a book. " * 120


def assert_adds_up(usage):
    """context + prompt = computed + reused from the session, a shared prefix or a lower tier."""
    reused = usage.session_reused_tokens + usage.prefix_reused_tokens + usage.restored_tokens
    assert usage.context_tokens + usage.prompt_tokens == usage.computed_tokens + reused


@pytest.fixture
def copied(server):
    """Counts the pages that the runner copies for copy-on-write."""
    runner, counts = server.running.engine.runner, []
    copy_pages = runner.copy_pages
    runner.copy_pages = lambda pairs: (counts.append(len(pairs)), copy_pages(pairs))[1]
    yield lambda: sum(counts)
    del runner.copy_pages


@pytest.fixture
def engine_seconds(server):
    """Times what the engine's thread spends in each fork."""
    engine, seconds = server.running.engine, []
    fork = engine.fork

    def timed(*args, **kwargs):
        began = time.perf_counter()
        result = fork(*args, **kwargs)
        seconds.append(time.perf_counter() - began)
        return result

    engine.fork = timed
    yield seconds
    del engine.fork


# Forks


def test_eight_forks_share_all_but_one_page_each(server, client, same_choices, copied, engine_seconds):
    """Forking takes no page and no time to speak of; each child copies at most one page, and answers as if alone."""
    parent = client.create_session(text=SYSTEM[:2000])
    parent.generate(text="What shall I read?", **GREEDY, max_tokens=5)
    pool = server.running.engine.holdings.pool
    held = pool.held
    children = parent.fork(count=8)
    assert pool.held == held, "a fork takes no page"
    assert len({child.id for child in children}) == 8
    assert all(child.position == parent.position for child in children)
    assert children[0].info.cache.shared_bytes > 0
    assert children[0].info.forked_from.session_id == parent.id
    before = copied()
    answers = [child.generate(text=f" Reader {n} asks:", **GREEDY, max_tokens=6) for n, child in enumerate(children)]
    assert copied() - before <= 8
    for answer in answers:
        assert_adds_up(answer.usage)
        assert answer.usage.session_reused_tokens == parent.position - 1
    ledger = server.ledger(parent)
    for child, answer in zip(children[:2], answers[:2], strict=True):
        prompt = server.ledger(child)[: -len(answer.token_ids)]
        assert prompt[: len(ledger)] == ledger
        alone = client.generate(tokens=prompt, bypass_prefix_cache=True, **GREEDY, max_tokens=6, top_logprobs=2)
        assert alone.usage.computed_tokens == len(prompt)
        same_choices(answer, alone)
    parent.delete()
    assert children[2].generate(**GREEDY, max_tokens=3).usage.computed_tokens == 1, "the child is whole without it"
    each = sum(engine_seconds) / 8 * 1e6
    print(f"\n8 forks of {len(ledger)} tokens: {each:.0f} µs each in the engine, {copied() - before} pages copied")
    assert sum(engine_seconds) < 0.25


def test_a_fork_at_an_earlier_position_goes_its_own_way(server, client, same_choices):
    parent = client.create_session()
    first = parent.generate(text="Once upon a time, in a village by the sea,", **GREEDY, max_tokens=20)
    child = parent.fork(position=15)
    assert child.position == 15
    other = child.generate(text=" nobody", **GREEDY, max_tokens=8)
    tokens = server.ledger(parent)
    alone = client.generate(
        tokens=server.ledger(child)[:-8], bypass_prefix_cache=True, **GREEDY, max_tokens=8, top_logprobs=2
    )
    same_choices(other, alone)
    assert tokens[-20:] == list(first.token_ids), "the parent's ledger is its own"
    more = parent.generate(**GREEDY, max_tokens=4)
    assert more.usage.computed_tokens == 1


# Rewind


def test_rewinding_and_asking_again_is_asking_for_the_first_time(client, same_choices):
    """Regenerate: the same question after a rewind gets the same answer, and only the question is computed."""
    session = client.create_session(text=SYSTEM[:800])
    first = session.generate(text="Who wrote Moby Dick?", **GREEDY, max_tokens=10, top_logprobs=2)
    session.generate(text="And when?", **GREEDY, max_tokens=5)
    session.rewind(turn=1)
    assert session.position == first.usage.context_tokens
    again = session.generate(text="Who wrote Moby Dick?", **GREEDY, max_tokens=10)
    same_choices(again, first)
    assert_adds_up(again.usage)
    assert again.usage.computed_tokens <= again.usage.prompt_tokens + 1
    spans = session.read_tokens().turns
    assert [(span.turn, span.start_position, span.end_position) for span in spans] == [
        (0, 0, first.usage.context_tokens),
        (1, first.usage.context_tokens, session.position),
    ]


# Equal prefixes


def test_a_second_session_with_the_same_system_prompt_computes_what_differs(client, same_choices):
    """2,000 tokens are computed once for everybody of one cache_salt, and again for whoever has another or asks so."""
    prompt = SYSTEM[: SYSTEM.index("librarian", 8900)]
    warm, cold, other, asked = (client.create_session(cache_salt=salt) for salt in ("one", "one", "two", "one"))
    first = warm.generate(text=prompt + "First question.", **GREEDY, max_tokens=4)
    total = first.usage.prompt_tokens
    assert total > 1900
    assert first.usage.computed_tokens == total
    second = cold.generate(text=prompt + "Another question!", **GREEDY, max_tokens=4)
    assert second.usage.prefix_reused_tokens > 0.95 * total
    assert second.usage.computed_tokens < 40
    strange = other.generate(text=prompt + "Another question!", **GREEDY, max_tokens=4, top_logprobs=2)
    assert strange.usage.prefix_reused_tokens == 0, "another salt shares nothing"
    same_choices(second, strange)
    bypassed = asked.generate(text=prompt[:1500], **GREEDY, max_tokens=4, bypass_prefix_cache=True)
    assert (bypassed.usage.prefix_reused_tokens, bypassed.usage.computed_tokens) == (0, bypassed.usage.prompt_tokens)
    for turn in (first, second, strange, bypassed):
        assert_adds_up(turn.usage)
    gain = first.timings.time_to_first_token / second.timings.time_to_first_token
    print(
        f"\n{total} tokens of prompt: {second.usage.computed_tokens} computed the second time, "
        f"TTFT {first.timings.time_to_first_token:.2f} s -> {second.timings.time_to_first_token:.3f} s ({gain:.0f} x)"
    )
    assert gain > 3


# Scores and estimates


def test_scores_are_the_logprobs_that_generate_gives(server, client):
    """Of its own greedy answer, token by token, and nothing of the session changes."""
    session = client.create_session(text="The first books of the library were")
    before = session.refresh().etag
    ledger = server.ledger(session)
    answer = session.fork().generate(**GREEDY, max_tokens=12, top_logprobs=3)
    scored = session.score(answer.token_ids, top_logprobs=3)
    assert scored.position == session.position
    differences = [
        abs(one.logprob - other.logprob) for one, other in zip(scored.logprobs, answer.logprobs, strict=True)
    ]
    assert [entry.token_id for entry in scored.logprobs] == list(answer.token_ids)
    print(f"\nlargest difference of {len(differences)} logprobs: {max(differences):.1e}")
    assert max(differences) < 1e-3
    assert all(len(entry.top) == 3 for entry in scored.logprobs)
    assert session.refresh().etag == before
    assert server.ledger(session) == ledger


def test_an_estimate_comes_true(client):
    session = client.create_session(text=SYSTEM[:3000])
    told = session.estimate(text="Which one?", **GREEDY, max_tokens=6)
    began = time.monotonic()
    turn = session.generate(text="Which one?", **GREEDY, max_tokens=6)
    wall = time.monotonic() - began
    assert told.admissible
    assert told.to_compute_tokens == turn.usage.computed_tokens
    assert told.needed_bytes >= turn.finished.cache.used_bytes
    seconds = told.estimated_time_to_first_token.ToTimedelta().total_seconds()
    first = turn.timings.time_to_first_token
    print(f"\nestimated TTFT {seconds * 1e3:.0f} ms, was {first * 1e3:.0f} ms of {wall * 1e3:.0f} ms")
    assert first / 20 < seconds < first * 20
    assert client.estimate("nobody-here", text="x").refusal_reason == "SESSION_NOT_FOUND"


# Updates, pins, watches, expiry


def test_a_life_is_watched_to_its_expiry(serve):
    """Created, a turn, a fork, expiring and expired; the tombstone is another error than an unknown id."""
    live = serve(default_ttl=1.5, expiry_notice=1.0)
    client = live.client()
    with client.watch() as events:
        session = client.create_session(session_id="short-lived")
        session.generate(text="hello", max_tokens=3, ignore_eos=True)
        session.fork(new_session_id="child-1")
        seen = []
        for event in events:
            seen.append((event.session.session_id, event.reason))
            if seen[-1] == ("short-lived", "TTL") and event.session.state == 5:
                break
    assert seen[:4] == [
        ("short-lived", "CALLER"),
        ("short-lived", "CALLER"),
        ("short-lived", "MAX_TOKENS"),
        ("child-1", "FORK"),
    ]
    assert seen.count(("short-lived", "TTL")) == 2, "EXPIRING, then EXPIRED"
    with pytest.raises(SessionExpired):
        client.get_session("short-lived")
    with pytest.raises(SessionNotFound):
        client.get_session("never-there")
    with pytest.raises(SessionExpired), client.watch("short-lived") as late:
        list(late)
    again = client.watch("short-lived", after_sequence=0)
    assert len(list(again)) == 5
    with pytest.raises(EventHistoryLost):
        list(client.watch(after_sequence=10_000))


def test_pins_and_updates(serve):
    """A quarter of the pool may be pinned; a longer time to live lets a session stay."""
    live = serve(kv_bytes=4 << 20, default_ttl=1.0, expiry_notice=0.0)
    client = live.client(channel_options=[("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)])
    limit = client.server_info().limits.max_pinned_bytes
    assert limit == client.server_info().limits.kv_budget_bytes // 4
    per_token = client.model_info().kv_bytes_per_token
    kept = client.create_session(pinned=True, max_context_tokens=limit // per_token)
    kept.update(ttl=600)
    gone = client.create_session()
    with pytest.raises(KvBudget) as caught:
        client.create_session(pinned=True, max_context_tokens=16)
    assert caught.value.needed_bytes == 16 * per_token
    time.sleep(2.0)
    assert kept.refresh().info.settings.pinned
    with pytest.raises(SessionExpired):
        gone.refresh()
    kept.update(pinned=False)
    client.create_session(pinned=True, max_context_tokens=16)


def test_the_ledger_is_read_back(serve):
    live = serve()
    client = live.client()
    session = client.create_session(text="And 漢字 🎈? " * 200)
    session.generate(**GREEDY, max_tokens=5)
    part = session.read_tokens(text=True)
    assert list(part.token_ids) == live.ledger(session)
    assert len(part.token_ids) > 2048, "more than one message"
    assert part.text == client.detokenize(part.token_ids)
    assert [span.end_position for span in part.turns][-1] == session.position
