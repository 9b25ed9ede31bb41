"""The ledger's file against a model in plain Python: what is committed is there after a restart, and nothing else."""

import shutil
import tempfile
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from segue_server.ledger.codec import pack_ids, settings_from_json, settings_to_json, unpack_ids
from segue_server.ledger.mirror import load
from segue_server.ledger.records import (
    Record,
    SessionCreated,
    SessionDeleted,
    SessionExpired,
    SessionForked,
    SessionUpdated,
    Slid,
    TokensAppended,
    TombstonesForgotten,
    Truncated,
    TurnBegan,
    TurnEnded,
    TurnRevoked,
)
from segue_server.ledger.schema import LedgerError
from segue_server.ledger.store import LedgerStore, RecoveredSession, open_ledger
from segue_server.requests import (
    CommitPolicy,
    ContextPolicy,
    FinishReason,
    SamplingParams,
    SessionSettings,
    StopConditions,
)
from segue_server.sessions import TurnRecord, turns_slid, turns_until

EVERYTHING = SessionSettings(
    ttl=12.5,
    max_context_tokens=2048,
    kv_dtype="bfloat16",
    context_policy=ContextPolicy.SLIDE,
    keep_tokens=3,
    commit_policy=CommitPolicy.ROLLBACK,
    priority=-2,
    pinned=True,
    cache_salt="caller ü",
    default_sampling=SamplingParams(
        temperature=0.1 + 0.2,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.1,
        frequency_penalty=-0.5,
        presence_penalty=0.25,
        penalty_last_tokens=64,
        seed=2**63,
        logit_bias={7: -100.0, 50256: 1.5},
    ),
    default_stop=StopConditions(
        max_tokens=100,
        min_tokens=2,
        stop_sequences=("\n\n", "</s>"),
        stop_token_ids=(0, 2),
        ignore_eos=True,
        include_stop=False,
        time_limit=3.0,
    ),
)


def created(session_id: str, **options: object) -> SessionCreated:
    values: dict[str, object] = {"settings": SessionSettings(), "create_time": 1.0, "last_used_time": 1.0}
    return SessionCreated(session_id=session_id, **(values | options))  # type: ignore[arg-type]


def tokens_of(store: LedgerStore) -> dict[str, list[int]]:
    return {session.session_id: list(session.tokens) for session in store.recover()}


# Against a model


@dataclass
class Model:
    """A session as it should be."""

    created: SessionCreated
    version: int = 0
    last_used: float = 1.0
    tokens: list[int] = field(default_factory=list)
    turns: list[TurnRecord] = field(default_factory=list)
    began: TurnBegan | None = None
    parent: tuple[str | None, int | None] = (None, None)

    def end(self, end: int, reason: FinishReason, time: float) -> None:
        began, self.began = self.began, None
        assert began
        del self.tokens[end:]
        self.last_used = time
        if end > began.start:
            generated = min(began.start + len(began.prompt), end)
            self.turns.append(TurnRecord(began.request_id, began.start, generated, end, reason))
            self.version += 1

    def cut(self, position: int) -> None:
        del self.tokens[position:]
        self.turns = turns_until(self.turns, position)

    def history(self) -> list[TurnRecord]:
        """The turns, the open one included as far as it has come: what a fork takes along."""
        if not (began := self.began):
            return list(self.turns)
        generated, end = began.start + len(began.prompt), len(self.tokens)
        return [*self.turns, TurnRecord(began.request_id, began.start, generated, end, FinishReason.CANCELLED)]

    def slide(self, keep: int, drop: int) -> None:
        drop = max(0, min(drop, len(self.tokens) - keep))
        del self.tokens[keep : keep + drop]
        self.turns = turns_slid(self.turns, keep, drop)
        if began := self.began:
            end = began.start + len(began.prompt)
            start, end = (p if p <= keep else max(keep, p - drop) for p in (began.start, end))
            self.began = replace(began, start=start, prompt=self.tokens[start:end])


def same(model: Model, found: RecoveredSession) -> None:
    base = model.created
    assert list(found.tokens) == model.tokens
    assert list(found.turns) == model.turns
    assert (found.version, found.settings, dict(found.labels)) == (model.version, base.settings, dict(base.labels))
    assert (found.display_name, found.create_time) == (base.display_name, base.create_time)
    assert (found.parent_id, found.fork_position) == model.parent
    assert found.model_fingerprint == base.model_fingerprint


IDS = st.sampled_from(["a", "b", "c", "d"])
NUMBERS = st.integers(0, 3)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=5)
SETTINGS = st.sampled_from([SessionSettings(), EVERYTHING])


class LedgerMachine(RuleBasedStateMachine):
    """Records gather in a batch; a batch is committed, or lost whole; between two, the process may die."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))  # noqa: S108
        self.generation = 0
        self.batch: list[Record] = []
        self.sessions: dict[str, Model] = {}
        self.tombstones: dict[str, float] = {}
        self.now = 10.0

    @initialize()
    def open(self) -> None:
        self.store = LedgerStore(self.folder / "0.db")
        for session_id in ("a", "b", "c"):
            self.sessions[session_id] = Model(created(session_id))
        self.store.apply([model.created for model in self.sessions.values()])
        self.saved = deepcopy((self.sessions, self.tombstones))

    def add(self, record: Record) -> None:
        self.now += 1
        self.batch.append(record)
        if len(self.batch) >= 3:
            self.commit()

    def pick(self, number: int, *, in_turn: bool | None = None) -> tuple[str, Model] | None:
        """One of the sessions in that state, if there is one, so that few rules do nothing."""
        fitting = [
            (session_id, model)
            for session_id, model in sorted(self.sessions.items())
            if in_turn is None or (model.began is not None) == in_turn
        ]
        return fitting[number % len(fitting)] if fitting else None

    @rule(session_id=IDS, settings=SETTINGS, name=st.text(max_size=3))
    def create(self, session_id: str, settings: SessionSettings, name: str) -> None:
        if session_id not in self.sessions:
            record = created(
                session_id,
                settings=settings,
                display_name=name.replace("\x00", ""),
                labels={name: name},
                create_time=self.now + 0.1,
                model_fingerprint="m",
            )
            self.sessions[session_id] = Model(record)
            self.tombstones.pop(session_id, None)
            self.add(record)

    @rule(number=NUMBERS, settings=SETTINGS)
    def update(self, number: int, settings: SessionSettings) -> None:
        if picked := self.pick(number):
            session_id, model = picked
            model.created = replace(model.created, settings=settings, labels={"k": "v"}, display_name="new")
            model.version, model.last_used = model.version + 1, self.now
            self.add(
                SessionUpdated(
                    session_id=session_id,
                    settings=settings,
                    labels={"k": "v"},
                    display_name="new",
                    last_used_time=self.now,
                )
            )

    @rule(number=NUMBERS, prompt=TOKENS)
    def begin(self, number: int, prompt: list[int]) -> None:
        if picked := self.pick(number, in_turn=False):
            session_id, model = picked
            model.began = TurnBegan(session_id, f"r{self.now}", len(model.tokens), prompt)
            model.tokens += prompt
            self.add(model.began)

    @rule(number=NUMBERS, ids=TOKENS, in_turn=st.sampled_from([True, True, None]))
    def append(self, number: int, ids: list[int], in_turn: bool | None) -> None:
        if picked := self.pick(number, in_turn=in_turn):
            session_id, model = picked
            record = TokensAppended(session_id, len(model.tokens), ids)
            model.tokens += ids
            self.add(record)

    @rule(number=NUMBERS, back=st.integers(0, 8), reason=st.sampled_from(FinishReason))
    def end(self, number: int, back: int, reason: FinishReason) -> None:
        picked = self.pick(number, in_turn=True)
        if picked and (began := picked[1].began):
            session_id, model = picked
            end = max(began.start, len(model.tokens) - back)
            model.end(end, reason, self.now)
            self.add(TurnEnded(session_id, end, reason, self.now))

    @rule(number=NUMBERS)
    def revoke(self, number: int) -> None:
        if picked := self.pick(number):
            session_id, model = picked
            if model.began:
                del model.tokens[model.began.start :]
                model.began = None
            self.add(TurnRevoked(session_id))

    @rule(number=NUMBERS, back=st.integers(0, 8))
    def rewind(self, number: int, back: int) -> None:
        if picked := self.pick(number, in_turn=False):
            session_id, model = picked
            position = max(0, len(model.tokens) - back)
            model.cut(position)
            self.add(Truncated(session_id, position))

    @rule(number=NUMBERS, keep=st.integers(0, 8), drop=st.integers(0, 8))
    def slide(self, number: int, keep: int, drop: int) -> None:
        if picked := self.pick(number):
            session_id, model = picked
            model.slide(keep, drop)
            self.add(Slid(session_id, keep, drop))

    @rule(number=NUMBERS, child_id=IDS, back=st.integers(0, 8))
    def fork(self, number: int, child_id: str, back: int) -> None:
        picked = self.pick(number)
        if picked and child_id not in self.sessions:
            parent_id, parent = picked
            position = max(0, len(parent.tokens) - back)
            record = created(child_id, create_time=self.now)
            child = Model(record, tokens=list(parent.tokens), turns=parent.history(), parent=(parent_id, position))
            child.cut(position)
            self.sessions[child_id] = child
            self.tombstones.pop(child_id, None)
            self.add(SessionForked(record, parent_id, position))

    @rule(number=NUMBERS, expires=st.booleans())
    def leave(self, number: int, expires: bool) -> None:
        if picked := self.pick(number):
            session_id, _ = picked
            del self.sessions[session_id]
            if expires:
                self.tombstones[session_id] = self.now
                self.add(SessionExpired(session_id, self.now))
            else:
                self.add(SessionDeleted(session_id))

    @rule(age=st.integers(0, 30))
    def forget(self, age: int) -> None:
        before = self.now - age
        self.tombstones = {name: at for name, at in self.tombstones.items() if at >= before}
        self.add(TombstonesForgotten(before))

    @rule()
    def commit(self) -> None:
        self.store.apply(self.batch)
        self.batch = []
        self.saved = deepcopy((self.sessions, self.tombstones))
        found = load(self.store._db)
        assert self.store._mirror
        assert found.sessions == self.store._mirror.sessions
        assert found.open == self.store._mirror.open

    @precondition(lambda self: self.sessions)
    @rule()
    def lose(self) -> None:
        """The last record of the batch cannot be written: none of it is."""
        session_id, model = next(iter(self.sessions.items()))
        gap = TokensAppended(session_id, len(model.tokens) + 1, [1])
        with pytest.raises(LedgerError, match="do not continue it"):
            self.store.apply([*self.batch, gap])
        self.restore()

    @rule(killed=st.booleans())
    def restart(self, killed: bool) -> None:
        """A copy of the files of an open store is what a killed process leaves."""
        self.generation += 1
        old, new = self.store.path, self.folder / f"{self.generation}.db"
        if not killed:
            self.store.close()
        for suffix in ("", "-wal"):
            if (part := Path(f"{old}{suffix}")).exists():
                shutil.copy(part, f"{new}{suffix}")
        if killed:
            self.store.close()
        self.store = LedgerStore(new)
        self.restore()
        for model in self.sessions.values():
            if model.began:
                model.end(len(model.tokens), FinishReason.ERROR, self.now)
        self.saved = deepcopy((self.sessions, self.tombstones))
        found = {session.session_id: session for session in self.store.recover()}
        assert found.keys() == self.sessions.keys()
        for session_id, model in self.sessions.items():
            same(model, found[session_id])
        assert self.store.tombstones() == self.tombstones

    def restore(self) -> None:
        self.batch = []
        self.sessions, self.tombstones = deepcopy(self.saved)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.restart(killed=True)
            self.store.close()
        shutil.rmtree(self.folder)


LedgerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_the_file_is_what_the_model_says = LedgerMachine.TestCase


# One thing at a time


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def test_a_turn_in_flight_ends_as_an_error_with_all_its_tokens(path: Path) -> None:
    """kill -9 between two steps: prompt and sampled tokens stay, and the etag's version moves on as for any turn."""
    store = LedgerStore(path)
    store.apply([created("s"), TurnBegan("s", "r1", 0, [1, 2, 3]), TokensAppended("s", 3, [4])])
    store.apply([TokensAppended("s", 4, [5, 6])])
    store.close()
    for _ in range(2):  # the second start finds nothing left to end
        store = LedgerStore(path)
        (session,) = store.recover()
        assert list(session.tokens) == [1, 2, 3, 4, 5, 6]
        assert session.turns == (TurnRecord("r1", 0, 3, 6, FinishReason.ERROR),)
        assert session.version == 1
        store.close()


def test_a_turn_becomes_one_row_and_leaves_no_tail(path: Path) -> None:
    """However many steps a turn took, what stays in the file is its prompt, its answer and its record."""
    store = LedgerStore(path)
    store.apply([created("s"), TurnBegan("s", "r1", 0, [1])])
    for position in range(1, 101):
        store.apply([TokensAppended("s", position, [position])])
    store.apply([TurnEnded("s", 101, FinishReason.MAX_TOKENS, 5.0)])
    assert store._db.execute("SELECT count(*) FROM tokens").fetchone() == (2,)
    assert store._db.execute("SELECT count(*) FROM tail").fetchone() == (0,)
    assert tokens_of(store) == {"s": [1, *range(1, 101)]}


def test_what_an_ended_turn_left_in_the_tail_is_not_taken_for_the_next_one(path: Path) -> None:
    """A long turn of another session holds the front of the tail back, and a new session takes a deleted one's key."""
    store = LedgerStore(path)
    store.apply([created("long"), TurnBegan("long", "r", 0, []), TokensAppended("long", 0, [1])])
    store.apply([created("s"), TurnBegan("s", "r", 0, []), TokensAppended("s", 0, [2])])
    store.apply([TurnEnded("s", 0, FinishReason.CANCELLED, 1.0), TurnBegan("s", "r", 0, [])])
    store.apply([TokensAppended("s", 0, [3])])
    store.apply([created("t"), TurnBegan("t", "r", 0, []), TokensAppended("t", 0, [4]), SessionDeleted("t")])
    store.apply([created("u"), TurnBegan("u", "r", 0, [])])
    store.close()
    assert tokens_of(LedgerStore(path)) == {"long": [1], "s": [3], "u": []}


def test_a_session_deleted_in_its_turn_holds_nothing_back(path: Path) -> None:
    store = LedgerStore(path)
    store.apply([created("s"), TurnBegan("s", "r", 0, []), TokensAppended("s", 0, [2])])
    store.apply([SessionDeleted("s")])
    assert store._db.execute("SELECT count(*) FROM tail").fetchone() == (0,)
    assert store._db.execute("SELECT count(*) FROM turns").fetchone() == (0,)


def test_records_of_an_unknown_session_are_ignored(path: Path) -> None:
    """Ephemeral sessions are never created here, and a turn may outlive its session by a step."""
    store = LedgerStore(path)
    store.apply([created("s"), TurnBegan("s", "r", 0, [1]), SessionDeleted("s"), TokensAppended("s", 1, [2])])
    store.apply([TurnEnded("s", 2, FinishReason.CANCELLED, 1.0), TokensAppended("nobody", 7, [1])])
    assert tokens_of(store) == {}
    store.apply([created("s")])
    assert tokens_of(store) == {"s": []}, "the name is free, and nothing of the old session comes back"


@pytest.mark.parametrize(
    "record",
    [
        created("s"),
        TokensAppended("s", 2, [1]),
        TokensAppended("s", 0, [1]),
        TokensAppended("s", 1, [2**31]),
        TurnBegan("s", "r2", 1, [1]),
        TurnEnded("s", 2, FinishReason.EOS, 1.0),
        Truncated("s", 0),
        SessionForked(created("child"), "nobody", 0),
        SessionForked(created("child"), "s", 2),
    ],
    ids=lambda record: type(record).__name__,
)
def test_a_record_that_contradicts_the_file_is_refused_with_its_whole_batch(path: Path, record: Record) -> None:
    store = LedgerStore(path)
    store.apply([created("s"), TurnBegan("s", "r", 0, [9])])
    with pytest.raises(LedgerError, match=r"ledger\.db"):
        store.apply([created("other"), record])
    store.apply([TokensAppended("s", 1, [1])])
    store.close()
    assert tokens_of(LedgerStore(path)) == {"s": [9, 1]}


def test_in_memory_means_no_ledger_and_a_path_means_a_file(path: Path) -> None:
    assert open_ledger(":memory:") is None
    store = open_ledger(str(path))
    assert store is not None
    assert path.is_file()
    store.close()


# Settings and tokens as they lie in the file


def test_every_field_of_the_settings_survives() -> None:
    """The example sets every field there is; a field added later must be added here, and then survives or fails."""
    for part in (EVERYTHING, EVERYTHING.default_sampling, EVERYTHING.default_stop):
        for item in fields(part):
            assert getattr(part, item.name) is not None, f"{item.name} is not in the example"
    found = settings_from_json(settings_to_json(EVERYTHING))
    for item in fields(EVERYTHING):
        assert getattr(found, item.name) == getattr(EVERYTHING, item.name), item.name
    assert found == EVERYTHING
    assert settings_from_json(settings_to_json(SessionSettings())) == SessionSettings()


@pytest.mark.parametrize("item", fields(SessionSettings), ids=lambda item: item.name)
def test_each_field_survives_alone(item: object) -> None:
    """Unset stays unset beside it: None and a value are told apart, also 0 and False."""
    name = item.name  # type: ignore[attr-defined]
    alone = SessionSettings(**{name: getattr(EVERYTHING, name)})
    assert settings_from_json(settings_to_json(alone)) == alone


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[]", "settings"),
        ('{"ttl": "5"}', "settings.ttl"),
        ('{"ttl": true}', "settings.ttl"),
        ('{"priority": 1.0}', "settings.priority"),
        ('{"nonsense": 1}', "nonsense"),
        ('{"commit_policy": "SOMETIMES"}', "settings.commit_policy"),
        ('{"default_sampling": {"logit_bias": [[1]]}}', "settings.default_sampling.logit_bias"),
        ('{"default_stop": {"stop_token_ids": [1, null]}}', "settings.default_stop.stop_token_ids"),
        ("{", "property name"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(text: str, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        settings_from_json(text)


def test_a_flipped_bit_in_the_tokens_is_noticed() -> None:
    blob = pack_ids([0, 1, 2**31 - 1])
    assert list(unpack_ids(blob)) == [0, 1, 2**31 - 1]
    for bit in range(len(blob) * 8):
        damaged = bytearray(blob)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="checksum"):
            unpack_ids(bytes(damaged))
    with pytest.raises(ValueError, match="checksum"):
        unpack_ids(blob[:-3])
