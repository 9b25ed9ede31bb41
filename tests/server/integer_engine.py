"""The real engine over a runner and a store that hold integers where others hold tensors: thousands of steps a second.

A position's KV is a number that depends on every token up to it, so a page of another prefix, at another place, or
written by somebody else gives another answer.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import cast

import numpy as np

from segue_model.arrays import Floats, Logits
from segue_model.config import DecoderConfig
from segue_model.paging import PAGE_TOKENS
from segue_model.runner.base import Slice, Want
from segue_model.runner.kv_store import KvStore, News
from segue_model.sampling import Outcome, Sampled, SampleRequest
from segue_server.cache.tiers import Tiers
from segue_server.drafter import Drafter
from segue_server.drafts import LONGEST
from segue_server.engine import Engine
from segue_server.ledger.journal import Journal
from segue_server.mover import Offload

VOCAB = 40
POSITION_BYTES = 8  # in the pool and below it
_NOTHING = -7  # where no KV has been written; no position's KV is this one's in practice


def kv_of(tokens: Iterable[int], before: int = 0) -> list[int]:
    """The KV of each position, in the order of the tokens."""
    return list(accumulate(tokens, lambda kv, token: hash((kv, token)), initial=before))[1:]


def token_after(kv: Sequence[int]) -> int:
    """What the model answers: it reads the KV of every position."""
    return hash(tuple(kv)) % VOCAB


def answer_to(tokens: Sequence[int]) -> int:
    """The slow twin: the next token, without a cache."""
    return token_after(kv_of(tokens))


class IntegerRunner:
    """Computes next tokens from what it reads back through the page tables."""

    name = "integers"
    batch_invariant = True
    config = DecoderConfig(
        vocab_size=VOCAB, dim=8, layers=1, heads=1, kv_heads=1, head_dim=8, ffn_dim=8, max_context_tokens=4096
    )

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.page_bytes = PAGE_TOKENS * POSITION_BYTES
        self.fails_next = False
        self._pages = [[_NOTHING] * PAGE_TOKENS for _ in range(num_pages)]

    def forward(self, batch: Sequence[Slice]) -> list[Logits | None]:
        """Rows of one integer, the next token, where others give logits."""
        if self.fails_next:
            self.fails_next = False
            raise RuntimeError("this step fails")
        return cast("list[Logits | None]", [self._run(piece) for piece in batch])

    def _run(self, piece: Slice) -> list[int] | None:
        kv = self._read(piece.pages, piece.start)
        new = kv_of(piece.token_ids, kv[-1] if kv else 0)
        for position, value in enumerate(new, piece.start):
            self._pages[piece.pages[position // PAGE_TOKENS]][position % PAGE_TOKENS] = value
        rows = {Want.NOTHING: 0, Want.LAST: 1, Want.ALL: len(new)}[piece.want]
        return [token_after(kv + new[: len(new) - row]) for row in reversed(range(rows))] or None

    def _read(self, pages: Sequence[int], positions: int) -> list[int]:
        table = pages[: -(-positions // PAGE_TOKENS)]
        return list(chain.from_iterable(map(self._pages.__getitem__, table)))[:positions]

    def sample(self, rows: Sequence[Logits], requests: Sequence[SampleRequest]) -> list[Outcome]:  # noqa: ARG002
        """A row is its next token already."""
        return [Sampled(int(row), None) for row in rows]

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self._pages[target] = self._pages[source].copy()

    def export_pages(self, pages: Sequence[int], tokens: int) -> Floats:
        kv = np.array(self._read(pages, tokens), dtype=np.int64).reshape(1, 1, 1, tokens, 1)
        return cast("Floats", kv)

    def import_pages(self, pages: Sequence[int], kv: Floats) -> None:
        values = kv.reshape(-1).tolist()
        for number, start in enumerate(range(0, len(values), PAGE_TOKENS)):
            part = values[start : start + PAGE_TOKENS]
            self._pages[pages[number]][: len(part)] = part


class MemoryStore(KvStore):
    """Two dictionaries: what is written to disk is there at once, what is read from it comes with the next news."""

    def __init__(self) -> None:
        self.host: dict[int, Floats] = {}
        self.disk: dict[int, Floats] = {}
        self.damaged: set[int] = set()
        self.slow = False  # reads do not arrive for as long as this holds
        self._asked: set[int] = set()
        self._arrived: set[int] = set()

    @property
    def has_directory(self) -> bool:
        return True

    def put(self, key: int, kv: Floats) -> None:
        self.host[key] = kv

    def to_disk(self, key: int) -> None:
        self.disk[key] = self.host.pop(key)

    def read_ahead(self, key: int) -> None:
        self._asked.add(key)

    def to_host(self, key: int) -> None:
        self._arrived.remove(key)
        self.host[key] = self.disk.pop(key)

    def unread(self, key: int) -> None:
        self._asked.discard(key)
        self._arrived.discard(key)

    def get(self, key: int) -> Floats | None:
        return self.disk[key] if key in self._arrived else self.host.get(key)

    def load(self, key: int) -> Floats | None:
        return None if key in self.damaged else self.disk.get(key, self.host.get(key))

    def drop(self, key: int) -> None:
        self.unread(key)
        self.damaged.discard(key)
        if (self.host.pop(key, None) is None) == (self.disk.pop(key, None) is None):
            raise AssertionError(f"segment {key} is dropped and was nowhere, or in both tiers")

    def take_news(self) -> News:
        read: set[int] = set() if self.slow else self._asked
        failed = read & self.damaged
        self._arrived |= read - failed
        self._asked = self._asked - read
        return News(arrived=sorted(read - failed), failed=sorted(failed))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOffload(Offload):
    """Tiers over a `MemoryStore`."""

    memory: MemoryStore = field(default_factory=MemoryStore)

    def tiers(self, runner: object) -> Tiers:  # noqa: ARG002 - integers have no layout to ask for
        return Tiers(
            segment_tokens=self.segment_tokens,
            token_bytes=POSITION_BYTES,
            host_bytes=self.host_bytes,
            disk_bytes=self.disk_bytes,
        )

    def store(self) -> KvStore:
        return self.memory


class IntegerEngine(Engine):
    """Its runner says which token comes next."""

    def __init__(
        self,
        runner: IntegerRunner,
        *,
        max_running: int,
        step_tokens: int,
        slow_reader_limit: float,
        offload: MemoryOffload,
        journal: Journal,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(
            runner,
            max_running=max_running,
            step_tokens=step_tokens,
            slow_reader_limit=slow_reader_limit,
            offload=offload,
            journal=journal,
            clock=clock,
        )
        self.integers = runner
        self.memory = offload.memory
        self.drafter = Drafter(self.jobs, self.stats, LONGEST, guess=half_right)


def half_right(tokens: "array[int]", count: int) -> list[int]:
    """Drafts of which the first come true and the others do not; how many depends on the tokens."""
    ledger = list(tokens)
    for _ in range(count):
        ledger.append(answer_to(ledger))
    drafts = ledger[len(tokens) :]
    right = hash(tuple(tokens)) % (count + 1)
    return drafts[:right] + [VOCAB - 1 - draft for draft in drafts[right:]]


def ids(tokens: Iterable[int]) -> "array[int]":
    return array("i", tokens)
