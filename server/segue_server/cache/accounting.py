"""What the pool is used for: every held page in exactly one class, shared pages once. Integers only."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from segue_model.paging import PAGE_TOKENS
from segue_server.cache.pages import PageId
from segue_server.cache.session import SessionCache


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Positions that hold KV by class, and positions that are taken and hold none."""

    active: int = 0  # of turns in the batch
    pinned: int = 0
    idle: int = 0
    prefix: int = 0  # held by the prefix index alone
    slack: int = 0

    @property
    def tokens(self) -> int:
        return self.active + self.pinned + self.idle + self.prefix

    @property
    def held(self) -> int:
        return self.tokens + self.slack


def pool_use(
    active: Iterable[SessionCache], pinned: Iterable[SessionCache], idle: Iterable[SessionCache], held_pages: int
) -> PoolUse:
    """Classify the `held_pages` of a pool. A page of several sessions counts with the busiest of them.

    May run beside the engine thread: page tables are copied before they are walked, so at worst it is a step late.
    """
    filled: dict[PageId, int] = {}
    so_far = [0]
    for caches in (active, pinned, idle):
        for cache in caches:
            _fill(filled, list(cache.pages), cache.computed)
        so_far.append(sum(filled.values()))
    classes = [after - before for before, after in pairwise(so_far)]
    prefix_pages = max(0, held_pages - len(filled))
    slack = len(filled) * PAGE_TOKENS - sum(filled.values())
    in_use = PoolUse(*classes)
    return replace(in_use, prefix=prefix_pages * PAGE_TOKENS, slack=slack)


def _fill(filled: dict[PageId, int], pages: list[PageId], computed: int) -> None:
    """Note how many positions of each page hold KV; of a shared page, the most that any owner filled."""
    for number, page in enumerate(pages):
        tokens = min(PAGE_TOKENS, max(0, computed - number * PAGE_TOKENS))
        filled[page] = max(tokens, filled.get(page, 0))
