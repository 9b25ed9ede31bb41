"""Random sessions, cancels, disconnects and deadlines against a pool that is too small for them.

Every turn that nobody disturbed must answer as an unlimited pool does, although its pages were evicted, its prefix was
shared and its turn was preempted meanwhile; and at the end no page may be without an owner.
"""

import random
import resource
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from segue.v1 import generation_pb2, generation_pb2_grpc, types_pb2
from segue_client import Client, DeadlineExceeded

PAGE_BYTES = 8192  # of the tiny model: 16 tokens
POOL_PAGES = 96
MAX_CONTEXT = 640
WORKERS = 8
CLOSE_CALL = 1e-3
PATIENCE = 60.0  # seconds for what has to happen, where a busy machine is slow


@dataclass
class Answer:
    """A greedy turn that ran undisturbed: everything before it, and what came."""

    context: list[int]
    tokens: list[int]


@dataclass
class Tally:
    """What all workers did."""

    answers: list[Answer] = field(default_factory=list)
    done: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, what: str) -> None:
        with self.lock:
            self.done[what] = self.done.get(what, 0) + 1


class Worker(threading.Thread):
    """One user: opens sessions, talks in them, leaves in every way, and knows each ledger from what it was sent."""

    def __init__(self, number: int, target: str, over: threading.Event, tally: Tally) -> None:
        super().__init__(name=f"user-{number}")
        self.random = random.Random(number)
        self.target = target
        self.over = over
        self.tally = tally
        self.ledgers: dict[str, list[int]] = {}

    def run(self) -> None:
        try:
            with Client(self.target, channel_options=[("grpc.use_local_subchannel_pool", 1)]) as self.client:
                while not self.over.is_set():
                    self.act()
                for session_id in list(self.ledgers):
                    self.client.delete_session(session_id, force=True, allow_missing=True)
        except Exception as error:  # noqa: BLE001 - shown by the test
            self.tally.errors.append(f"{self.name}: {error!r}")

    def act(self) -> None:
        if len(self.ledgers) < 2 or (len(self.ledgers) < 6 and self.random.random() < 0.1):
            session = self.client.create_session(max_context_tokens=MAX_CONTEXT)
            self.ledgers[session.id] = []
            return
        session_id = self.random.choice(list(self.ledgers))
        if len(self.ledgers[session_id]) > MAX_CONTEXT - 120:
            self.forget(session_id)
            return
        (act,) = self.random.choices(
            (self.talk, self.talk_on, self.cancel, self.disconnect, self.expire), (8, 2, 2, 2, 1)
        )
        act(session_id)
        self.tally.count(act.__name__)

    def prompt(self) -> list[int]:
        """Half of them begin alike, so that prefixes are shared."""
        own = [self.random.randrange(256) for _ in range(self.random.randrange(1, 40))]
        return [*range(48), *own] if self.random.random() < 0.5 else own

    def talk(self, session_id: str) -> None:
        """A turn to its end."""
        self.keep(session_id, self.prompt(), max_tokens=self.random.randrange(1, 40))

    def talk_on(self, session_id: str) -> None:
        """A turn without max_tokens: admission promises less than it takes, so turns have to give way."""
        self.keep(session_id, self.prompt(), max_tokens=None)

    def keep(self, session_id: str, prompt: list[int], max_tokens: int | None) -> None:
        ledger = self.ledgers[session_id]
        turn = self.client.generate(
            session_id, tokens=prompt, temperature=0, max_tokens=max_tokens, ignore_eos=True, return_text=False
        )
        context = [*ledger, *prompt]
        assert turn.usage.context_tokens == len(ledger), "the ledger is not what it was"
        self.tally.answers.append(Answer(context, list(turn.token_ids)))
        self.ledgers[session_id] = [*context, *turn.token_ids]
        assert turn.position == len(self.ledgers[session_id])

    def cancel(self, session_id: str) -> None:
        """Leave a stream after a few events; the ledger keeps what was streamed, or nothing of the turn."""
        policy = self.random.choice(("keep_partial", "rollback"))
        prompt = self.prompt()
        options = {"tokens": prompt, "temperature": 0, "max_tokens": 60, "ignore_eos": True, "commit_policy": policy}
        with self.client.stream(session_id, **options) as turn:
            for _, event in zip(range(self.random.randrange(1, 20)), turn.events(), strict=False):
                del event
        if policy == "rollback" and turn.finished and turn.finished.position == len(self.ledgers[session_id]):
            return
        if turn.finished and turn.usage.generated_tokens == len(turn.token_ids):
            self.ledgers[session_id] = [*self.ledgers[session_id], *prompt, *turn.token_ids]
            assert turn.finished.position == len(self.ledgers[session_id])
        else:
            self.forget(session_id)  # tokens were on their way when it left

    def disconnect(self, session_id: str) -> None:
        """Close the connection in the middle of a stream; the turn is rolled back."""
        message = generation_pb2.GenerateRequest(
            session_id=session_id,
            token_ids=types_pb2.TokenIds(ids=self.prompt()),
            stop=types_pb2.StopConditions(max_tokens=80, ignore_eos=True),
            commit_policy=types_pb2.COMMIT_POLICY_ROLLBACK,
        )
        with grpc.insecure_channel(self.target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            call = generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(message, timeout=30)
            for _ in range(self.random.randrange(3)):
                next(call)
        self.settle(session_id)

    def expire(self, session_id: str) -> None:
        """A deadline that passes while the turn runs or waits."""
        timeout = self.random.uniform(0.005, 0.05)
        options = {"tokens": self.prompt(), "max_tokens": 200, "ignore_eos": True, "commit_policy": "rollback"}
        try:
            self.client.generate(session_id, timeout=timeout, **options)
        except DeadlineExceeded:
            self.settle(session_id)
        else:
            self.forget(session_id)

    def settle(self, session_id: str) -> None:
        """Wait until a turn that was left has left; a session that it did not leave as it was is given up."""
        end = time.monotonic() + 20
        while self.client.get_session(session_id).info.active_request_id:
            assert time.monotonic() < end, "a turn that was left still runs"
            time.sleep(0.002)
        if self.client.get_session(session_id).position != len(self.ledgers[session_id]):
            self.forget(session_id)

    def forget(self, session_id: str) -> None:
        del self.ledgers[session_id]
        self.client.delete_session(session_id, force=True, allow_missing=True)


def resident() -> float:
    """MiB of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def run_users(live, seconds, seen):
    """All users for so long, and until `seen(tally)`; what they did and the resident memory (MiB) at each quarter."""
    tally, over = Tally(), threading.Event()
    began = time.monotonic()
    users = [Worker(number, live.target, over, tally) for number in range(WORKERS)]
    for user in users:
        user.start()
    memory = []
    for quarter in range(1, 5):
        time.sleep(max(0.0, began + quarter * seconds / 4 - time.monotonic()))
        memory.append(resident())
    while not seen(tally) and time.monotonic() < began + seconds + PATIENCE:
        time.sleep(0.1)
    over.set()
    for user in users:
        user.join(60)
        assert not user.is_alive(), f"{user.name} hangs"
    assert tally.errors == []
    return tally, memory


def differences(answers, client):
    """Undisturbed answers that an unlimited pool would not have given; close calls are only counted.

    Each answer is read once, behind its context: where the likeliest token after every prefix is the one that came,
    greedy decoding would have chosen the same tokens.
    """
    clear, close = [], 0
    for answer in answers:
        whole = [*answer.context, *answer.tokens]
        seen = client.generate(tokens=whole, max_tokens=1, prompt_logprobs=True, top_logprobs=2, return_text=False)
        rows = seen.prompt_logprobs[len(answer.context) - 1 :]
        for position, (token, row) in enumerate(zip(answer.tokens, rows, strict=True)):
            best, second = row.top
            if token != best.token_id:
                close += best.logprob - second.logprob <= CLOSE_CALL
                clear += [(len(answer.context), position)] if best.logprob - second.logprob > CLOSE_CALL else []
    return clear, close


def check_mixed_run(serve, seconds, sample):
    live = serve(kv_bytes=POOL_PAGES * PAGE_BYTES, max_running=6, prefill_chunk_tokens=64)
    scheduler, stats = live.running.engine.scheduler, live.running.engine.stats
    tally, memory = run_users(live, seconds, lambda tally: stats.preemptions and len(tally.answers) > 20)
    live.leave_nothing()
    evictions, preemptions = scheduler.evictor.cost.count, stats.preemptions
    cancelled = {"/".join(key): int(count) for key, count in stats.cancellations.values.items() if count}
    print(f"\n{tally.done}; {evictions} evictions, {preemptions} preemptions, cancelled {cancelled}")
    print(f"resident MiB at each quarter: {', '.join(f'{mib:.0f}' for mib in memory)}")
    assert evictions > 0
    assert preemptions > 0
    assert len(tally.answers) > 20
    chosen = random.Random(1).sample(tally.answers, min(sample, len(tally.answers)))
    clear, close = differences(chosen, serve(kv_bytes=256 << 20, prefill_chunk_tokens=64).client())
    print(
        f"{len(chosen)} undisturbed answers compared with an unlimited pool: {len(clear)} differ, {close} close calls"
    )
    assert clear == []
    return memory


def test_a_short_mixed_run_over_a_small_pool(serve):
    """6 seconds: eviction and preemption happen, no undisturbed answer changes, no page is lost."""
    check_mixed_run(serve, seconds=6, sample=150)


@pytest.mark.soak
def test_five_minutes_of_the_same_with_flat_memory(serve):
    """5 minutes: as above, and the resident memory of the last three quarters stays within 32 MiB."""
    memory = check_mixed_run(serve, seconds=300, sample=1500)
    assert max(memory[1:]) - memory[0] < 32, memory


def test_the_comparison_sees_a_wrong_token(serve):
    """The oracle has teeth: one token of an answer changed is a difference."""
    client = serve().client()
    turn = client.generate(tokens=[1, 2, 3], temperature=0, max_tokens=8, ignore_eos=True)
    good = Answer([1, 2, 3], list(turn.token_ids))
    assert differences([good], client)[0] == []
    bad = Answer([1, 2, 3], [*good.tokens[:-1], (good.tokens[-1] + 1) % 256])
    assert differences([bad], client)[0] == [(3, 7)]


def test_a_users_failure_is_shown():
    """A worker that cannot reach its server reports it instead of ending in silence."""
    tally = Tally()
    worker = Worker(0, "127.0.0.1:1", threading.Event(), tally)
    worker.start()
    worker.join(60)
    assert "user-0: Unavailable" in tally.errors[0]
