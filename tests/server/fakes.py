"""Stand-ins for what the server's core talks to: a runner that checks its page tables, a clock, sinks, a tokenizer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from segue_model.arrays import Floats, Logits
from segue_model.config import DecoderConfig
from segue_model.paging import PAGE_TOKENS
from segue_model.runner.base import Slice, Want
from segue_model.sampling import Outcome, SampleRequest, Sampling, sample
from segue_model.tokenizer import Tokenizer
from segue_server.engine import Engine
from segue_server.events import Event, Failed, Finished, Tokens
from segue_server.jobs import TurnSpec
from segue_server.mover import Offload

E = TypeVar("E")
GREEDY = Sampling(temperature=0.0)
_MASK = 2**64 - 1


def next_logits(tokens: Sequence[int], vocab: int) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """The fake model: logits (vocab,) that depend on every token before and on its position."""
    return _logits(_state(0, tokens), vocab)


def _state(state: int, tokens: Sequence[int]) -> int:
    for token in tokens:
        state = ((state ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK
        state ^= state >> 29
    return state


def _logits(state: int, vocab: int) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    x = np.arange(1, vocab + 1, dtype=np.uint64) * np.uint64(0xBF58476D1CE4E5B9) + np.uint64(state)
    x = (x ^ (x >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
    return ((x >> np.uint64(40)).astype(np.float64) / 2**24 * 6).astype(np.float32)


def greedy(tokens: Sequence[int], count: int, vocab: int, stop: frozenset[int] = frozenset()) -> list[int]:
    """The slow twin: no cache, no batch, no pages. Ends after `count` tokens or with one of `stop`, which it keeps."""
    ledger = list(tokens)
    for _ in range(count):
        ledger.append(int(next_logits(ledger, vocab).argmax()))
        if ledger[-1] in stop:
            break
    return ledger[len(tokens) :]


class FakeRunner:
    """Keeps (token, position) where a runner keeps K and V, and answers from what it reads back through the pages.

    What it finds wrong goes to `faults`, since the engine survives a step that raises. `failures` are raised, one a
    step; a token of `poison` at the end of a slice gives a row of NaN.
    """

    name = "fake"
    batch_invariant = True

    def __init__(self, num_pages: int, *, vocab: int = 50) -> None:
        self.num_pages = num_pages
        self.page_bytes = PAGE_TOKENS * 8
        self.vocab = vocab
        self.config = DecoderConfig(
            vocab_size=vocab,
            dim=8,
            layers=1,
            heads=1,
            kv_heads=1,
            head_dim=8,
            ffn_dim=8,
            max_context_tokens=4096,
        )
        self.faults: list[str] = []
        self.copied = 0  # pages, for copy-on-write
        self.failures: list[BaseException] = []
        self.copy_failures: list[BaseException] = []
        self.poison: frozenset[int] = frozenset()
        self.steps: list[list[tuple[int, int]]] = []  # (start, count) of each slice
        self.before_step: Callable[[], None] = lambda: None
        self.ledgers: Callable[[Sequence[int]], Sequence[int] | None] = lambda _: None
        self._tokens = np.full((num_pages, PAGE_TOKENS), -1)
        self._positions = np.full((num_pages, PAGE_TOKENS), -1)

    def forward(self, batch: Sequence[Slice]) -> list[Logits | None]:
        self.before_step()
        self.steps.append([(s.start, len(s.token_ids)) for s in batch])
        for piece in batch:
            written = set(piece.pages[piece.start // PAGE_TOKENS :])
            others = {page for other in batch if other is not piece for page in other.pages}
            self._expect(not written & others, f"pages {written & others} are written and in another table")
        if self.failures:
            raise self.failures.pop(0)
        return [self._run(piece) for piece in batch]

    def _run(self, piece: Slice) -> Logits | None:
        before = self._read(piece)
        ledger = self.ledgers(piece.pages)
        end = piece.start + len(piece.token_ids)
        self._expect(len(piece.token_ids) >= 1, "an empty slice")
        self._expect(end <= len(piece.pages) * PAGE_TOKENS, f"{end} positions in {len(piece.pages)} pages")
        if ledger is not None:
            known = (before + list(piece.token_ids))[: len(ledger)]  # behind the ledger come drafts
            self._expect(list(ledger[:end]) == known, f"not the ledger's tokens up to {end}")
        rows = []
        state = _state(0, before)
        for position, token in enumerate(piece.token_ids, start=piece.start):
            page, slot = piece.pages[position // PAGE_TOKENS], position % PAGE_TOKENS
            self._tokens[page, slot], self._positions[page, slot] = token, position
            state = _state(state, [token])
            row = _logits(state, self.vocab)
            rows.append(np.full_like(row, np.nan) if token in self.poison else row)
        if piece.want is Want.NOTHING:
            return None
        return np.stack(rows if piece.want is Want.ALL else rows[-1:])

    def _read(self, piece: Slice) -> list[int]:
        """Tokens of positions 0 .. start - 1, through the page table."""
        tokens = []
        for position in range(piece.start):
            page, slot = piece.pages[position // PAGE_TOKENS], position % PAGE_TOKENS
            self._expect(self._positions[page, slot] == position, f"page {page} holds nothing for {position}")
            tokens.append(int(self._tokens[page, slot]))
        return tokens

    def _expect(self, fine: bool, fault: str) -> None:
        if not fine:
            self.faults.append(fault)

    def sample(self, rows: Sequence[Logits], requests: Sequence[SampleRequest]) -> list[Outcome]:
        return sample(rows, requests)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        if self.copy_failures:
            raise self.copy_failures.pop(0)
        sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
        self._tokens[targets] = self._tokens[sources]
        self._positions[targets] = self._positions[sources]
        self.copied += len(pairs)

    def export_pages(self, pages: Sequence[int], tokens: int) -> Floats:
        """Tokens where K would be and positions where V would; `forward` reads both back and checks them."""
        kv = np.zeros((2, 1, 1, tokens, 8), np.float32)
        table = list(pages)
        kv[0, 0, 0, :, 0] = self._tokens[table].reshape(-1)[:tokens]
        kv[1, 0, 0, :, 0] = self._positions[table].reshape(-1)[:tokens]
        self._expect(bool((kv[1] >= 0).all()), f"exported {tokens} positions of {table}, some were never computed")
        return kv

    def import_pages(self, pages: Sequence[int], kv: Floats) -> None:
        if not np.isfinite(kv).all():
            raise ValueError("kv holds values that are not finite")
        tokens = kv.shape[3]
        table = list(pages[: -(-tokens // PAGE_TOKENS)])
        for name, source in (("_tokens", kv[0]), ("_positions", kv[1])):
            values = np.full(len(table) * PAGE_TOKENS, -1)
            values[:tokens] = source[0, 0, :, 0]
            getattr(self, name)[table] = values.reshape(-1, PAGE_TOKENS)


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class ListSink:
    """Keeps the events of a turn."""

    full: bool = False
    events: list[Event] = field(default_factory=list)

    def deliver(self, event: Event) -> None:
        self.events.append(event)

    def all(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def one(self, kind: type[E]) -> E:
        found = self.all(kind)
        assert len(found) == 1, self.events
        return found[0]

    @property
    def done(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1], Finished | Failed)

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.all(Tokens) for token in event.token_ids]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.all(Tokens))


class EngineBench:
    """An engine over a fake runner and a fake clock, stepped by hand."""

    def __init__(
        self,
        pages: int = 64,
        *,
        max_running: int = 8,
        step_tokens: int = 64,
        vocab: int = 50,
        draft_tokens: int = 0,
        offload: Offload | None = None,
    ) -> None:
        self.runner = FakeRunner(pages, vocab=vocab)
        self.clock = Clock()
        self.engine = Engine(
            self.runner,
            max_running=max_running,
            step_tokens=step_tokens,
            draft_tokens=draft_tokens,
            slow_reader_limit=30.0,
            offload=offload,
            clock=self.clock,
        )
        self.scheduler, self.holdings = self.engine.scheduler, self.engine.holdings
        self.runner.ledgers = self._ledger_of
        self._count = 0

    def _ledger_of(self, pages: Sequence[int]) -> Sequence[int] | None:
        return next((s.tokens for s in self.holdings.sequences.values() if s.cache.pages is pages), None)

    def open(self, session_id: str = "s", *, priority: int = 0, salt: str | None = None) -> str:
        self.engine.open(session_id, priority=priority, pinned=False, salt=salt)
        return session_id

    def ledger(self, session_id: str = "s") -> list[int]:
        return list(self.engine.tokens(session_id))

    def submit(self, prompt: Sequence[int], session_id: str = "s", **options: object) -> ListSink:
        """Order a turn; options are those of TurnSpec. The sink's turn is called r1, r2, ..."""
        self._count += 1
        sink = ListSink()
        values: dict[str, object] = {
            "request_id": f"r{self._count}",
            "session_id": session_id,
            "prompt": list(prompt),
            "arrival": self.clock(),
            "sink": sink,
            "max_tokens": 8,
            "max_context_tokens": 4096,
            "sampling": GREEDY,
        }
        self.engine.jobs.submit(TurnSpec(**(values | options)))  # type: ignore[arg-type]
        self.deliver()
        return sink

    @property
    def last_id(self) -> str:
        return f"r{self._count}"

    def step(self, seconds: float = 0.01) -> bool:
        self.clock.now += seconds
        busy = self.engine.step()
        self.deliver()
        self.check()
        return busy

    def run(self, *sinks: ListSink, limit: int = 3000) -> None:
        """Step until these turns have ended."""
        for _ in range(limit):
            if all(sink.done for sink in sinks):
                return
            self.step()
        raise AssertionError(f"not over after {limit} steps: {[sink.events[-1:] for sink in sinks]}")

    def deliver(self) -> None:
        for sink, event in self.engine.jobs.take_outbox():
            sink.deliver(event)

    def check(self) -> None:
        assert not self.runner.faults, self.runner.faults
        self.scheduler.check_integrity()
        kv = self.engine.figures.kv_bytes()
        assert kv.held == self.holdings.pool.held * self.runner.page_bytes


SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
SPECIAL = {text: 256 + number for number, text in enumerate(SPECIALS)}
BYTE_VOCAB = 256 + len(SPECIALS)


def byte_tokenizer(folder: Path) -> Tokenizer:
    """One token per byte, in an order of its own, and the control tokens of three families."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIALS])
    (folder / "tokenizer.json").write_text(backend.to_str())
    return Tokenizer.from_file(folder / "tokenizer.json")
