"""The same bits however a token came to be computed, through the whole server: logprobs compare with ==.

An answer's bits are its tokens, the float of each one's logprob, and the tokens and floats of the best beside it. The
reference is one prompt in one chunk, alone, on one thread. Each way says from the usage that it went where it claims.
"""

import io
import random
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypedDict

import pytest
import torch
from tests.e2e.conftest import LiveServer, live_server

from segue_client import AdminClient, Client, Completion, Session, TurnOptions
from segue_client.options import CacheTierName
from segue_model.runner.native import build as native_build
from segue_server.config import ServerConfig

MIB = 1 << 20
LENGTHS = (
    50,
    64,
    253,
    256,
    257,
    400,
)  # tokens; around pages of 16 and segments of 256, which 253 crosses in its answer
QUESTION = 3  # the last tokens of a history, which come in the turn itself
COMPANY = 8
WORDS = 40_000  # of SmolLM2's vocabulary: no special tokens

Bits = list[tuple[int, float, tuple[tuple[int, float], ...]]]


def bits(answer: Completion) -> Bits:
    """Of each token its id, its logprob, and the best beside it."""
    found = [(e.token_id, e.logprob, tuple((top.token_id, top.logprob) for top in e.top)) for e in answer.logprobs]
    assert [token for token, _, _ in found] == list(answer.token_ids)
    assert all(len(top) == 5 for _, _, top in found)
    return found


@dataclass(frozen=True)
class Case:
    """A history and how it is answered."""

    tokens: tuple[int, ...]
    seed: int | None  # None: greedy

    @property
    def context(self) -> tuple[int, ...]:
        return self.tokens[:-QUESTION]

    @property
    def name(self) -> str:
        return f"{len(self.tokens)}-{'greedy' if self.seed is None else 'seeded'}"

    def turn(self, tokens: Sequence[int], *, bypass: bool = False) -> TurnOptions:
        return {
            "tokens": tokens,
            "temperature": 0.0 if self.seed is None else 1.0,
            "seed": self.seed,
            "max_tokens": 6,
            "ignore_eos": True,
            "top_logprobs": 5,
            "bypass_prefix_cache": bypass,
        }

    def at_once(self, client: Client) -> Completion:
        """In a session of its own, with nothing to reuse."""
        answer = client.generate(**self.turn(self.tokens, bypass=True))
        assert answer.usage.computed_tokens == len(self.tokens)
        return answer

    def open(self, client: Client, more: tuple[int, ...] = (), session_id: str = "") -> Session:
        """A session that has computed the context, and `more`, and shares with no other."""
        return client.create_session(
            tokens=self.context + more, cache_salt=uuid.uuid4().hex, session_id=session_id or None
        )

    def ask(self, session: Session) -> Completion:
        answer = session.generate(**self.turn(self.tokens[-QUESTION:]))
        assert answer.usage.context_tokens == len(self.context)
        return answer


def make_cases(words: int, lengths: tuple[int, ...]) -> list[Case]:
    """Random tokens; one history is answered greedily, the next by chance."""
    chance = random.Random(5)
    histories = [tuple(chance.choices(range(words), k=length)) for length in lengths]
    return [Case(tokens, seed=len(tokens) if n % 2 else None) for n, tokens in enumerate(histories)]


CASES = make_cases(WORDS, LENGTHS)


def admin_of(server: LiveServer) -> AdminClient:
    return AdminClient(f"127.0.0.1:{server.running.ports.admin}")


@dataclass(frozen=True)
class House:
    """The server that everything is compared with, and another that computes otherwise."""

    home: LiveServer  # one thread, chunks of 512, no drafts
    other: (
        LiveServer  # two threads, chunks of 16, drafts; started on what home's ledger held of the sessions in `CASES`
    )

    @cached_property
    def client(self) -> Client:
        return Client(self.home.target)

    @cached_property
    def truth(self) -> dict[Case, Bits]:
        return {case: bits(case.at_once(self.client)) for case in CASES}


class Tiers(TypedDict):
    """Below the pool."""

    kv_host_bytes: int
    kv_disk_bytes: int
    kv_disk_dir: Path


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """Two servers of SmolLM2."""
    folder, threads = tmp_path_factory.mktemp("bits"), torch.get_num_threads()
    tiers = Tiers(kv_host_bytes=64 * MIB, kv_disk_bytes=64 * MIB, kv_disk_dir=folder / "kv")
    base = ServerConfig(runner="native", port=0, admin_port=0, metrics_port=0, kv_bytes=640 * MIB)
    here = replace(base, ledger=str(folder / "here.db"), threads=1, prefill_chunk_tokens=512, draft_tokens=0, **tiers)
    there = replace(base, ledger=str(folder / "there.db"), threads=2, prefill_chunk_tokens=16)
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        home = stack.enter_context(live_server(here))
        with Client(home.target) as client:
            for case in CASES:
                client.create_session(session_id=case.name, cache_salt=case.name).append_context(
                    tokens=case.context, defer_compute=True
                )
        _copy_ledger(folder / "here.db", folder / "there.db")
        other = stack.enter_context(live_server(there))
        house = House(home, other)
        stack.callback(house.client.close)
        yield house


def _copy_ledger(here: Path, there: Path) -> None:
    """The files as a crash at this moment would leave them: all that was acknowledged is in them."""
    for suffix in ("", "-wal"):
        shutil.copy(f"{here}{suffix}", f"{there}{suffix}")


# ------------------------------------------------------------------------------------------- ways to compute an answer


def kept(house: House, case: Case) -> Completion:
    """The session's own KV, of a turn before."""
    answer = case.ask(case.open(house.client))
    assert answer.usage.computed_tokens == QUESTION
    return answer


def in_pieces(house: House, case: Case) -> Completion:
    """Appended bit by bit, each bit computed before the next comes."""
    chance, session = random.Random(len(case.tokens)), house.client.create_session(cache_salt=uuid.uuid4().hex)
    while left := case.context[session.position :]:
        piece = left[: chance.choice((1, 7, 15, 16, 17, 33, 120))]
        assert session.append_context(tokens=piece).usage.computed_tokens == len(piece)
    return case.ask(session)


def forked(house: House, case: Case) -> Completion:
    """From a session that has gone on, in the middle of a page or not, while it goes on further."""
    parent = case.open(house.client, more=(11, 12, 13))
    child = parent.fork(position=len(case.context))
    parent.append_context(tokens=[14, 15])
    answer = case.ask(child)
    assert answer.usage.session_reused_tokens >= len(case.context) - 1
    return answer


def regenerated(house: House, case: Case) -> Completion:
    """The turn taken back and asked again, after another answer lay in its place."""
    session = case.open(house.client)
    session.generate(tokens=[17] * 20, temperature=1.0, seed=1, max_tokens=6, ignore_eos=True)
    session.rewind(turn=-1)
    first = case.ask(session)
    session.rewind(turn=-1)
    answer = case.ask(session)
    assert bits(first) == bits(answer)
    assert answer.usage.computed_tokens <= QUESTION + 1
    return answer


def flushed(house: House, case: Case) -> Completion:
    """All KV evicted and computed again."""
    session = case.open(house.client)
    with admin_of(house.home) as admin:
        admin.flush(idle_sessions=True, prefixes=True)
    answer = case.ask(session)
    assert answer.usage.computed_tokens == len(case.tokens)
    return answer


def tail_dropped(house: House, case: Case) -> Completion:
    """Half of the KV evicted and computed again after the half that stayed."""
    session = case.open(house.client)
    session.move("none", from_position=len(case.context) // 2)
    answer = case.ask(session)
    assert 0 < answer.usage.session_reused_tokens < len(case.context) * 3 // 4
    return answer


def restored(*tiers: CacheTierName) -> Callable[[House, Case], Completion]:
    def way(house: House, case: Case) -> Completion:
        session = case.open(house.client)
        for tier in tiers:
            session.move(tier)
        answer = case.ask(session)
        assert answer.usage.restored_tokens >= len(case.context) - 1
        return answer

    return way


def imported(house: House, case: Case) -> Completion:
    """Exported, and imported by the other server."""
    snapshot = io.BytesIO()
    case.open(house.client).export(snapshot)
    snapshot.seek(0)
    with Client(house.other.target) as client:
        answer = case.ask(client.import_session(snapshot, session_id=uuid.uuid4().hex))
    assert answer.usage.computed_tokens == QUESTION
    return answer


def elsewhere(house: House, case: Case) -> Completion:
    """Computed afresh on two threads, 16 tokens at a time."""
    with Client(house.other.target) as client:
        return case.at_once(client)


def restarted(house: House, case: Case) -> Completion:
    """Read back from the ledger by a new server."""
    with Client(house.other.target) as client:
        answer = case.ask(client.get_session(case.name))
    assert answer.usage.computed_tokens == len(case.tokens)
    return answer


WAYS: dict[str, Callable[[House, Case], Completion]] = {
    "kept": kept,
    "in pieces": in_pieces,
    "forked": forked,
    "regenerated": regenerated,
    "flushed": flushed,
    "tail dropped": tail_dropped,
    "from host memory": restored("host"),
    "from disk": restored("disk"),
    "through all tiers": restored("host", "disk", "host", "device", "disk"),
    "imported": imported,
    "other threads and chunks": elsewhere,
    "restarted": restarted,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_an_answer_gives_its_bits(house: House, way: str) -> None:
    for case in CASES:
        assert bits(WAYS[way](house, case)) == house.truth[case], case.name


def endless(prompt: Sequence[int]) -> TurnOptions:
    """More tokens than the test lets come, in few events, so that a stream that nobody reads does not pause."""
    return {
        "tokens": prompt,
        "max_tokens": 3000,
        "ignore_eos": True,
        "max_tokens_per_event": 16,
        "max_event_delay": 10.0,
        "detach_grace": 0.0,
    }


def test_company_changes_no_bit(house: House) -> None:
    """Each beside 8 streams, which are there before it begins and after it has ended."""
    with ExitStack() as stack:
        chance, others = random.Random(8), []
        for _ in range(COMPANY):
            prompt = chance.choices(range(WORDS), k=chance.randint(1, 90))
            turn = stack.enter_context(house.client.stream(**endless(prompt)))
            others.append(turn.events())
        for events in others:
            next(events)  # it has started
        for events in others:
            next(events)  # it has tokens
        for case in CASES:
            assert bits(case.at_once(house.client)) == house.truth[case], case.name
        assert house.home.in_flight() == COMPANY


def test_a_pool_for_one_session_changes_no_bit(house: House) -> None:
    """Sessions whose KV is pushed out by the others' and computed again."""
    size = house.other.page_bytes
    evicted = evictions(house.other)
    with Client(house.other.target) as client, admin_of(house.other) as admin:
        sessions = [case.open(client) for case in CASES]
        admin.set_budget("device", 28 * size)
        answers = [case.ask(session) for case, session in zip(CASES, sessions, strict=True)]
        admin.set_budget("device", 640 * MIB)
    assert evictions(house.other) > evicted
    assert sum(answer.usage.computed_tokens for answer in answers) > sum(len(case.context) for case in CASES) / 2
    for case, answer in zip(CASES, answers, strict=True):
        assert bits(answer) == house.truth[case], case.name


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.5, "seed": 3, "frequency_penalty": 0.1}])
def test_drafts_change_no_bit(house: House, sampling: TurnOptions) -> None:
    """Of answers that repeat themselves: some drafts come true, some do not."""
    asked: TurnOptions = {
        "tokens": CASES[0].tokens[:20] * 4,
        "max_tokens": 80,
        "ignore_eos": True,
        "top_logprobs": 5,
        "bypass_prefix_cache": True,
        **sampling,
    }
    before = drafts(house.other)
    with Client(house.other.target) as client:
        answer = client.generate(**asked)
    accepted, rejected = (now - then for now, then in zip(drafts(house.other), before, strict=True))
    assert bits(answer) == bits(house.client.generate(**asked))
    assert accepted > 0
    assert rejected > 0
    assert drafts(house.home) == (0, 0)


def drafts(server: LiveServer) -> tuple[float, float]:
    """Accepted and rejected so far."""
    metrics = server.metrics()
    return metrics["segue_draft_tokens_total", "accepted"], metrics["segue_draft_tokens_total", "rejected"]


def evictions(server: LiveServer) -> float:
    return sum(value for key, value in server.metrics().items() if key[0] == "segue_kv_evictions_total")


def test_scores_of_all_positions_are_the_same_bits(house: House) -> None:
    """Every token of a history, in chunks of 512 on one thread and of 16 on two."""
    tokens = CASES[-1].tokens
    with Client(house.other.target) as there:
        one, other = (
            client.create_session(tokens=tokens[:1]).score(tokens[1:], top_logprobs=2).logprobs
            for client in (house.client, there)
        )
    assert len(one) == len(tokens) - 1
    assert list(one) == list(other)


# ------------------------------------------------------------------------------- formats of KV, and instruction sets


@pytest.fixture
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As if this CPU had nothing better."""
    name: str = request.param
    if name != "best":
        features = native_build.cpu_features() & native_build.ISAS[name].features
        monkeypatch.setattr(native_build, "cpu_features", lambda: features)
    return name


@pytest.mark.parametrize("isa", ["best", "avx2"], indirect=True)
@pytest.mark.parametrize("kv", ["bfloat16", "float32", "int8"])
def test_kv_of_every_format_survives_every_way(
    serve: Callable[..., LiveServer], tmp_path: Path, isa: str, kv: str
) -> None:
    """The tiny model: host memory, disk, another server with other chunks, and eviction, on old processors too."""
    tiers = Tiers(kv_host_bytes=8 * MIB, kv_disk_bytes=8 * MIB, kv_disk_dir=tmp_path)
    home = serve(runner="native", kv_dtype=kv, prefill_chunk_tokens=512, **tiers)
    other = serve(runner="native", kv_dtype=kv, prefill_chunk_tokens=16)
    if isa != "best" and f"native-{isa}" not in home.client().server_info().build:
        pytest.skip(f"this CPU has no {isa}")
    here = House(home, other)
    ways = [kept, forked, flushed, tail_dropped, restored("host"), restored("disk"), imported, elsewhere]
    try:
        for case in make_cases(256, (31, 64, 255, 300)):
            expected = bits(case.at_once(here.client))
            for way in ways:
                assert bits(way(here, case)) == expected, f"{way.__name__}, {case.name}"
    finally:
        here.client.close()
