"""Random histories of sessions that share prefixes: answers are those of the loop without a cache, Usage adds up.

The pool is small, so that sessions lose KV to each other on the way.
"""

from collections.abc import Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from tests.server.fakes import EngineBench, ListSink, greedy

from segue_server.events import Finished, Started

VOCAB = 50
PAGES = 24
CONTEXT = 200
SYSTEM = ([1] * 40, [2] * 16 + [3] * 20, [1] * 32 + [4] * 7)  # of different salts and sessions, equal in part
SALTS = ("a", "b", None)


def assert_adds_up(sink: ListSink) -> None:
    """Each position of context and prompt was computed, or taken from one place.

    The one exception to "what is there is not computed": the last token is run although its KV is there, because KV
    says nothing about the next token.
    """
    usage, started = sink.one(Finished).usage, sink.one(Started)
    reused = usage.session_reused_tokens + usage.prefix_reused_tokens + usage.restored_tokens
    assert usage.context_tokens + usage.prompt_tokens == usage.computed_tokens + reused
    assert min(usage.session_reused_tokens, usage.prefix_reused_tokens, usage.restored_tokens) >= 0
    assert usage.computed_tokens == started.to_compute_tokens


class Histories(RuleBasedStateMachine):
    sessions = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        self.bench = EngineBench(PAGES, vocab=VOCAB, step_tokens=48)
        self.ledgers: dict[str, list[int]] = {}
        self.salts: dict[str, str | None] = {}
        self.known: dict[str | None, list[list[int]]] = {}
        self.count = 0

    def new(self, salt: str | None, ledger: Sequence[int]) -> str:
        self.count += 1
        name = f"s{self.count}"
        self.ledgers[name], self.salts[name] = list(ledger), salt
        return name

    @rule(target=sessions, salt=st.sampled_from(SALTS), prefix=st.sampled_from(SYSTEM))
    def open(self, salt: str | None, prefix: list[int]) -> str:
        name = self.new(salt, [])
        self.bench.open(name, salt=salt)
        self.append(name, prefix)
        return name

    @rule(name=sessions, prompt=st.lists(st.integers(0, 5), max_size=20), most=st.integers(1, 24), bypass=st.booleans())
    def generate(self, name: str, prompt: list[int], most: int, bypass: bool) -> None:
        ledger = self.ledgers[name]
        if len(ledger) + len(prompt) + most > CONTEXT or not ledger:
            return
        sink = self.bench.submit(prompt, name, max_tokens=most, reads_prefixes=not bypass, max_context_tokens=CONTEXT)
        self.bench.run(sink)
        assert sink.tokens == greedy([*ledger, *prompt], most, VOCAB)
        ledger += [*prompt, *sink.tokens]
        assert_adds_up(sink)
        usage = sink.one(Finished).usage
        assert usage.computed_tokens >= 1, "the last token is always run"
        if bypass or self.salts[name] is None:
            assert usage.prefix_reused_tokens == 0

    @rule(name=sessions, prompt=st.lists(st.integers(0, 5), min_size=1, max_size=30))
    def append(self, name: str, prompt: list[int]) -> None:
        if len(self.ledgers[name]) + len(prompt) > CONTEXT:
            return
        sink = self.bench.submit(prompt, name, samples=False, max_tokens=0)
        self.bench.run(sink)
        self.ledgers[name] += prompt
        assert_adds_up(sink)

    @rule(name=sessions, prompt=st.lists(st.integers(0, 5), min_size=1, max_size=30))
    def append_later(self, name: str, prompt: list[int]) -> None:
        """Only the ledger grows; the next turn computes."""
        if len(self.ledgers[name]) + len(prompt) > CONTEXT:
            return
        self.bench.run(self.bench.submit(prompt, name, samples=False, max_tokens=0, defer_compute=True))
        self.ledgers[name] += prompt

    @rule(target=sessions, name=sessions, share=st.floats(0.0, 1.0), count=st.integers(1, 3), data=st.data())
    def fork(self, name: str, share: float, count: int, data: st.DataObject) -> object:
        position = round(share * len(self.ledgers[name]))
        salt = data.draw(st.sampled_from((self.salts[name], self.salts[name], *SALTS)), "salt")
        children = [self.new(salt, self.ledgers[name][:position]) for _ in range(count)]
        held = self.bench.holdings.pool.held
        assert self.bench.engine.fork(name, children, position, salt=salt) == position
        assert self.bench.holdings.pool.held == held, "a fork takes no page"
        return multiple(*children)

    @rule(name=sessions, share=st.floats(0.0, 1.0))
    def rewind(self, name: str, share: float) -> None:
        position = round(share * len(self.ledgers[name]))
        self.bench.engine.rewind(name, position)
        del self.ledgers[name][position:]

    @rule(name=consumes(sessions))
    def delete(self, name: str) -> None:
        self.bench.engine.close(name)
        del self.ledgers[name], self.salts[name]

    @invariant()
    def ledgers_are_what_was_said(self) -> None:
        self.bench.check()
        for name, ledger in self.ledgers.items():
            assert self.bench.ledger(name) == ledger

    def teardown(self) -> None:
        """What is left answers as without a cache, and nothing leaks."""
        for name in list(self.ledgers):
            self.generate(name, [5], 3, bypass=False)
            self.delete(name)
        self.bench.holdings.prefixes.flush()
        assert self.bench.holdings.pool.held == 0


def test_histories() -> None:
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_equal_prompts_of_two_salts_share_nothing() -> None:
    bench = EngineBench(64, vocab=VOCAB)
    for name, salt in (("one", "a"), ("two", "a"), ("three", "b")):
        bench.open(name, salt=salt)
        sink = bench.submit(SYSTEM[0], name, max_tokens=2)
        bench.run(sink)
        assert_adds_up(sink)
        assert sink.one(Finished).usage.prefix_reused_tokens == (32 if name == "two" else 0)
