"""/metrics against what clients did and received, however their turns ended, over a real socket."""

import contextlib
import statistics
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import grpc
import pytest
from tests.e2e.conftest import live_server

from segue.v1 import generation_pb2, generation_pb2_grpc, types_pb2
from segue_client import AdminClient, DeadlineExceeded, SegueError, Tokens
from segue_server.config import ServerConfig
from segue_server.errors import EngineError

CLASSES = ("active", "pinned", "idle", "prefix", "slack")
PAGE_BYTES = 8192  # of the tiny model: 16 tokens
GREEDY = {"temperature": 0, "ignore_eos": True, "return_text": False}
TURNS = 12  # of each user


@dataclass
class Seen:
    """What clients know of their turns."""

    tokens: int = 0  # received
    undisturbed: int = 0  # tokens of turns that were read to their end, whatever ended them
    ends: Counter[str] = field(default_factory=Counter)
    generated: int = 0  # as the last event of each such turn says
    errors: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ended(self, turn) -> None:
        """A turn that was read to its end."""
        with self.lock:
            self.tokens += len(turn.token_ids)
            self.undisturbed += len(turn.token_ids)
            self.generated += turn.usage.generated_tokens
            self.ends[turn.finish_reason.name.lower()] += 1

    def left(self, how: str, tokens: int) -> None:
        with self.lock:
            self.tokens += tokens
            self.ends[how] += 1


def user(live, number: int, seen: Seen, acts) -> None:
    try:
        client = live.client()
        session = client.create_session()
        for turn in range(TURNS):
            if session.refresh().position > 300:
                session.rewind(position=0)
            prompt = [(number * 31 + turn * 7 + n) % 250 for n in range(5 + 13 * (turn % 5))]
            acts[(number + turn) % len(acts)](live, client, session, prompt, seen)
            settle(session)
    except Exception as error:  # noqa: BLE001 - shown by the test
        seen.errors.append(f"user {number}: {error!r}")


def settle(session) -> None:
    end = time.monotonic() + 30
    while session.refresh().info.active_request_id:
        assert time.monotonic() < end, "a turn that was left still runs"
        time.sleep(0.002)


def finish(_live, _client, session, prompt, seen) -> None:
    seen.ended(session.generate(tokens=prompt, max_tokens=3 + len(prompt) % 17, **GREEDY))


def one_off(_live, client, _session, prompt, seen) -> None:
    seen.ended(client.generate(tokens=prompt, max_tokens=6, **GREEDY))


def cancel(_live, client, session, prompt, seen) -> None:
    """By another RPC, and the stream is read to its end."""
    with session.stream(tokens=prompt, max_tokens=150, **GREEDY) as turn:
        for number, event in enumerate(turn.events()):
            del event
            if number == 3:
                client.cancel(request_id=turn.request_id)
        seen.ended(turn)


def disconnect(live, _client, session, prompt, seen) -> None:
    message = generation_pb2.GenerateRequest(
        session_id=session.id,
        token_ids=types_pb2.TokenIds(ids=prompt),
        stop=types_pb2.StopConditions(max_tokens=120, ignore_eos=True),
    )
    tokens = 0
    with grpc.insecure_channel(live.target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(message, timeout=60)
        while tokens < 4:
            tokens += len(next(call).tokens.token_ids)
    seen.left("disconnected", tokens)


def deadline(_live, _client, session, prompt, seen) -> None:
    tokens = 0
    try:
        with session.stream(tokens=prompt, max_tokens=150, timeout=0.05, **GREEDY) as turn:
            for event in turn.events():
                tokens += len(event.token_ids) if isinstance(event, Tokens) else 0
            seen.ended(turn)
    except DeadlineExceeded:
        seen.left("deadline", tokens)


def run_users(live, count: int, acts) -> Seen:
    seen = Seen()
    users = [threading.Thread(target=user, args=(live, number, seen, acts)) for number in range(count)]
    for one in users:
        one.start()
    for one in users:
        one.join(120)
        assert not one.is_alive()
    assert seen.errors == []
    live.wait_idle()
    live.settle()
    print(f"\n{dict(seen.ends)}: {seen.tokens} tokens received")
    return seen


def family(samples, name: str) -> float:
    """The sum over all label values."""
    return sum(value for key, value in samples.items() if key[0] == name)


def check_idle(live) -> dict:
    """Everything that must hold of an idle server, whatever has happened to it; returns the scrape."""
    now = live.metrics()
    pool, page_bytes = live.running.engine.holdings.pool, live.page_bytes
    ours = {name: now["segue_kv_bytes", name, "device"] for name in CLASSES}
    assert sum(ours.values()) == pool.held * page_bytes, "bytes by class are what the allocator has given out"
    with AdminClient(f"127.0.0.1:{live.running.ports.admin}") as admin:
        stats = admin.stats()
    told = {name: getattr(stats.tiers[0], f"{name}_bytes") for name in CLASSES}
    assert told == ours, "GetCacheStats says the same"
    assert ours["active"] == now["segue_kv_usage_ratio", "device"] == 0
    assert now["segue_turns_running",] == family(now, "segue_turns_queued") == 0
    turns = family(now, "segue_turns_total")
    for histogram in ("turn_duration_seconds", "turn_prompt_tokens", "turn_generated_tokens", "session_context_tokens"):
        assert now[f"segue_{histogram}_count",] == turns, histogram
    assert now["segue_turn_generated_tokens_sum",] == now["segue_generated_tokens_total",]
    answered = family(now, "segue_time_to_first_token_seconds_count")
    assert now["segue_prefill_seconds_count",] == answered
    assert now["segue_inter_token_seconds_count",] == now["segue_generated_tokens_total",] - answered
    alive = family(now, "segue_sessions_opened_total") - family(now, "segue_sessions_ended_total")
    assert alive == family(now, "segue_sessions") == len(live.running.engine.holdings.sequences)
    return now


def test_counters_equal_what_clients_received_when_turns_end_by_themselves_or_are_cancelled(serve) -> None:
    """In a pool that is too small: tokens, turns and reasons on both sides of the socket, after evictions."""
    aliases = ("vllm", "otel")
    live = serve(kv_bytes=40 * PAGE_BYTES, max_running=3, prefill_chunk_tokens=32, metrics_aliases=aliases)
    seen = run_users(live, 5, (finish, cancel, finish, one_off))
    now = check_idle(live)
    assert now["segue_generated_tokens_total",] == seen.generated == seen.undisturbed == seen.tokens
    assert family(now, "vllm:generation_tokens_total") == seen.tokens
    assert family(now, "gen_ai_server_request_duration_seconds_count") == family(now, "segue_turns_total")
    for reason in ("max_tokens", "cancelled", "context_full"):
        assert now["segue_turns_total", reason] == seen.ends[reason]
    assert family(now, "segue_turns_total") == seen.ends.total() == 5 * TURNS
    assert family(now, "segue_cancellations_total") == seen.ends["cancelled"]
    assert family(now, "segue_wasted_tokens_total") == 0, "all was delivered, and kept"
    evicted = now["segue_kv_evictions_total", "pressure", "device"]
    print(f"{evicted:g} evictions, {family(now, 'segue_recomputed_tokens_total'):g} positions computed again")
    assert evicted > 0


def test_every_figure_is_true_after_disconnects_deadlines_and_failed_steps(serve) -> None:
    """A step in forty fails. What clients did not receive is in their ledgers or was waste, and nothing still runs."""
    live = serve(kv_bytes=64 * PAGE_BYTES, max_running=4, prefill_chunk_tokens=32)
    runner = live.running.engine.runner
    forward, steps = runner.forward, iter(range(1, 1 << 30))

    def failing(batch):
        if next(steps) % 40 == 0:
            raise RuntimeError("a fault that was put there")
        return forward(batch)

    def or_fail(act):
        def tried(live, client, session, prompt, seen) -> None:
            try:
                act(live, client, session, prompt, seen)
            except (SegueError, grpc.RpcError):
                seen.left("failed", 0)

        return tried

    runner.forward = failing
    try:
        seen = run_users(live, 5, [or_fail(act) for act in (finish, disconnect, deadline, cancel, one_off)])
        now = check_idle(live)
    finally:
        runner.forward = forward
    assert seen.ends["failed"] > 0
    assert now["segue_turns_total", "error"] > 0
    assert now["segue_turns_total", "max_tokens"] >= seen.ends["max_tokens"]
    assert family(now, "segue_turns_total") <= seen.ends.total() == 5 * TURNS
    received, wasted = seen.tokens, now["segue_wasted_tokens_total", "cancelled"]
    print(f"{now['segue_generated_tokens_total',]:g} generated, {received} received, {wasted:g} left lying")
    assert received + wasted <= now["segue_generated_tokens_total",], "the rest was on its way"
    causes = Counter()
    for (name, *labels), value in now.items():
        if name == "segue_cancellations_total":
            causes[labels[0]] += value
    assert causes["disconnect"] + causes["deadline"] + causes["rpc"] == now["segue_turns_total", "cancelled"]


def test_no_turn_runs_in_the_figures_of_an_engine_that_has_failed(tiny_model) -> None:
    """Not a step but the engine: its turns end with an error on both sides, and the gauges do not freeze."""
    config = ServerConfig(
        model=tiny_model, port=0, admin_port=0, metrics_port=0, runner="torch", threads=1, max_running=1
    )
    with contextlib.suppress(EngineError), live_server(config) as live:  # which would ask the engine to count its pages
        client = live.client()
        sessions = [client.create_session() for _ in range(2)]
        turns = [session.stream(tokens=[1, 2, 3], **GREEDY) for session in sessions]
        running, queued = (turn.events() for turn in turns)
        next(running)
        next(queued)
        live.running.engine.scheduler.schedule = None  # "'NoneType' object is not callable", outside of any step
        for events in (running, queued):
            with pytest.raises(SegueError):
                list(events)
        now = live.metrics()
        assert now["segue_turns_running",] == family(now, "segue_turns_queued") == 0
        assert now["segue_turns_total", "error"] == now["segue_turn_duration_seconds_count",] == 2
        assert now["segue_kv_bytes", "active", "device"] == 0
        assert live.running.crashed.is_set()


def test_client_and_server_agree_on_latencies_but_for_the_transport(serve) -> None:
    """TTFT and gaps of 40 turns. What the client sees is what the server measured, and the way there on top."""
    live = serve()
    client = live.client()
    client.generate(tokens=[1], max_tokens=2, **GREEDY)  # the connection is there
    before = live.metrics()
    firsts, decodes, timings = [], [], []
    for number in range(40):
        began = time.monotonic()
        with client.stream(tokens=[number, 2, 3], max_tokens=12, **GREEDY) as turn:
            arrivals = [time.monotonic() for event in turn.events() if isinstance(event, Tokens) and event.token_ids]
        firsts.append(arrivals[0] - began)
        decodes.append(arrivals[-1] - arrivals[0])
        timings.append(turn.timings)
    after = live.metrics()
    server_firsts = [timing.time_to_first_token for timing in timings]
    gaps, server_gaps = [decode / 11 for decode in decodes], [timing.decode / 11 for timing in timings]
    for name, ours, theirs in (("TTFT", firsts, server_firsts), ("inter-token", gaps, server_gaps)):
        medians = statistics.median(ours) * 1e3, statistics.median(theirs) * 1e3
        print(f"\n{name}: client {medians[0]:.2f} ms, server {medians[1]:.2f} ms (medians)", end="")
    for first, decode, timing in zip(firsts, decodes, timings, strict=True):
        assert first >= timing.time_to_first_token
        assert first + decode >= timing.time_to_first_token + timing.decode
    measured = family(after, "segue_time_to_first_token_seconds_sum") - family(
        before, "segue_time_to_first_token_seconds_sum"
    )
    assert measured == pytest.approx(sum(server_firsts), abs=1e-4)
    total = after["segue_inter_token_seconds_sum",] - before["segue_inter_token_seconds_sum",]
    assert total == pytest.approx(sum(timing.decode for timing in timings), abs=1e-4)
    assert sum(firsts) - sum(server_firsts) < 10 * sum(server_firsts) + 40 * 1.0
