"""The page pool: which pages are free, and how often each other page is held. Integers only.

    ┌──────────────┐  take   ┌──────────────────────────────┐
    │ free: a list │ ──────▶ │ held: references[page] >= 1  │ ◀─┐ share: +1
    └──────────────┘ ◀────── └──────────────────────────────┘ ──┘
                     release: -1, back to the list at 0

The pool may be told to hand out fewer pages than it has (`resize`); the others stay in the free list.

Invariant: a page is in the free list exactly when its count is 0, and its count is the number of page tables (or
other owners) that name it. `check_integrity` runs it against the owners themselves.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import NewType

PageId = NewType("PageId", int)


class OutOfPages(Exception):
    """Fewer pages are free than were asked for; nothing was taken."""


class PagePool:
    """Hands out pages 0 .. num_pages - 1. Not thread-safe: the engine thread owns it; others may read the counts."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"a pool needs at least 1 page, got {num_pages}")
        self.num_pages = num_pages
        self._references = [0] * num_pages
        self._withheld = 0
        self._singled: set[PageId] = set()
        self._free = [PageId(p) for p in range(num_pages - 1, -1, -1)]  # a stack: the last released is the first reused

    @property
    def capacity(self) -> int:
        """Pages that may be held at once."""
        return self.num_pages - self._withheld

    def resize(self, capacity: int) -> None:
        """Hand out at most so many pages. Raises ValueError for less than are held, or more than there are."""
        if not max(1, self.held) <= capacity <= self.num_pages:
            raise ValueError(f"capacity must be in {max(1, self.held)} .. {self.num_pages}, got {capacity}")
        self._withheld = self.num_pages - capacity

    @property
    def free(self) -> int:
        """Pages that can be taken."""
        return len(self._free) - self._withheld

    @property
    def held(self) -> int:
        """Pages somebody holds, each counted once however often it is shared."""
        return self.num_pages - len(self._free)

    def references(self, page: PageId) -> int:
        """How many owners a page has."""
        return self._references[page]

    def take(self, count: int) -> list[PageId]:
        """Take `count` pages, each with one owner. All or nothing: raises OutOfPages."""
        if count > self.free:
            raise OutOfPages(f"asked for {count} pages, {self.free} of {self.capacity} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Sequence[PageId]) -> None:
        """Add an owner to pages that are held already."""
        for page in pages:
            if not self._references[page]:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._references[page] += 1

    def release(self, pages: Sequence[PageId]) -> int:
        """Take an owner away from each page; returns how many became free."""
        freed = 0
        for page in pages:
            if not self._references[page]:
                raise ValueError(f"page {page} is free already")
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)
                freed += 1
            elif self._references[page] == 1:
                self._singled.add(page)
        return freed

    @property
    def singled(self) -> AbstractSet[PageId]:
        """Pages that came down to one owner since `take_singled`; some may have been shared or taken again."""
        return self._singled

    def take_singled(self) -> set[PageId]:
        singled, self._singled = self._singled, set()
        return singled

    def check_integrity(self, owners: Iterable[Sequence[PageId]]) -> None:
        """Compare the counts with the page tables of all owners. Raises AssertionError naming the first page off."""
        counted = Counter(page for table in owners for page in table)
        for page, references in enumerate(self._references):
            if counted[PageId(page)] != references:
                raise AssertionError(f"page {page}: {references} references, {counted[PageId(page)]} owners")
        if sorted(self._free) != [page for page, n in enumerate(self._references) if not n]:
            raise AssertionError("the free list and the reference counts disagree")
        if self.held > self.capacity:
            raise AssertionError(f"{self.held} pages are held, and {self.capacity} may be")
