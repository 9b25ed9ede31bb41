"""The page pool against a plain dict, and the page table of one session on top of it. Integers only."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from segue_model.paging import PAGE_TOKENS
from segue_server.cache.pages import OutOfPages, PageId, PagePool
from segue_server.cache.session import SessionCache, pages_for


class PoolAgainstDict(RuleBasedStateMachine):
    """Owners take, share and release pages; a dict of counts says what must be true."""

    @initialize(pages=st.integers(1, 40))
    def begin(self, pages: int) -> None:
        self.pool = PagePool(pages)
        self.counts = dict.fromkeys(map(PageId, range(pages)), 0)
        self.owners: list[list[PageId]] = []

    @rule(count=st.integers(0, 12))
    def take(self, count: int) -> None:
        free = sum(not n for n in self.counts.values())
        if count > free:
            with pytest.raises(OutOfPages, match=f"asked for {count} pages, {free} of"):
                self.pool.take(count)
            return
        pages = self.pool.take(count)
        assert len(set(pages)) == count
        assert all(self.counts[page] == 0 for page in pages)
        self.counts |= dict.fromkeys(pages, 1)
        self.owners.append(pages)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.owners))
        part = table[: data.draw(st.integers(0, len(table)))]
        self.pool.share(part)
        for page in part:
            self.counts[page] += 1
        self.owners.append(list(part))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        for page in table:
            self.counts[page] -= 1
        assert self.pool.release(table) == sum(not self.counts[page] for page in table)

    @rule(data=st.data())
    def refuse_what_is_free(self, data: st.DataObject) -> None:
        free = [page for page, n in self.counts.items() if not n]
        if free:
            page = data.draw(st.sampled_from(free))
            with pytest.raises(ValueError, match="free"):
                self.pool.release([page])
            with pytest.raises(ValueError, match="free"):
                self.pool.share([page])

    @invariant()
    def agrees(self) -> None:
        assert self.pool.free == sum(not n for n in self.counts.values())
        assert self.pool.free + self.pool.held == self.pool.num_pages
        assert all(self.pool.references(page) == n for page, n in self.counts.items())
        self.pool.check_integrity(self.owners)


TestPoolAgainstDict = PoolAgainstDict.TestCase
TestPoolAgainstDict.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_integrity_check_finds_a_page_that_nobody_names_and_one_that_two_name() -> None:
    pool = PagePool(4)
    pages = pool.take(2)
    with pytest.raises(AssertionError, match="1 references, 0 owners"):
        pool.check_integrity([pages[:1]])
    with pytest.raises(AssertionError, match="1 references, 2 owners"):
        pool.check_integrity([pages, pages])


def test_a_pool_without_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 page, got 0"):
        PagePool(0)


class TableAgainstNumbers(RuleBasedStateMachine):
    """One session grows, rewinds and loses its tail; the pool gets back all that is not covered."""

    @initialize(pages=st.integers(1, 12))
    def begin(self, pages: int) -> None:
        self.pool = PagePool(pages)
        self.cache = SessionCache(self.pool)

    @rule(tokens=st.integers(1, 60))
    def grow(self, tokens: int) -> None:
        before = list(self.cache.pages), self.cache.computed
        wanted = self.cache.computed + tokens
        if pages_for(wanted) > self.pool.num_pages:
            with pytest.raises(OutOfPages):
                self.cache.reserve(wanted)
            assert (self.cache.pages, self.cache.computed) == before
            return
        self.cache.reserve(wanted)
        self.cache.advance(tokens)
        assert self.cache.computed == wanted
        assert self.cache.pages[: len(before[0])] == before[0], "a page table only grows at its end"

    @rule(position=st.integers(0, 200))
    def rewind(self, position: int) -> None:
        expected = min(self.cache.computed, position)
        self.cache.rewind(position)
        assert self.cache.computed == expected
        assert len(self.cache.pages) == pages_for(expected)

    @rule(pages=st.integers(0, 14))
    def evict(self, pages: int) -> None:
        held = len(self.cache.pages)
        freed = self.cache.evict(pages)
        assert min(pages, held) <= freed <= held
        assert len(self.cache.pages) == held - freed

    @rule(ahead=st.integers(0, 40))
    def trim(self, ahead: int) -> None:
        wanted = self.cache.computed + ahead
        if pages_for(wanted) <= self.pool.num_pages:
            self.cache.reserve(wanted)
        self.cache.trim()
        assert self.cache.slack_tokens < PAGE_TOKENS

    @invariant()
    def covered(self) -> None:
        assert self.cache.computed + self.cache.slack_tokens == len(self.cache.pages) * PAGE_TOKENS
        self.pool.check_integrity([self.cache.pages])


TestTableAgainstNumbers = TableAgainstNumbers.TestCase
TestTableAgainstNumbers.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


def test_advancing_beyond_the_pages_is_refused() -> None:
    cache = SessionCache(PagePool(2))
    cache.reserve(16)
    with pytest.raises(ValueError, match="17 positions do not fit into 1 pages"):
        cache.advance(17)
