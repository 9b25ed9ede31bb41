"""The KV cache of one session, as integers: a page table and how far it is filled."""

from segue_model.paging import PAGE_TOKENS
from segue_server.cache.pages import PageId, PagePool


def pages_for(tokens: int) -> int:
    """Pages that `tokens` positions take."""
    return -(-tokens // PAGE_TOKENS)


class SessionCache:
    """Positions 0 .. computed - 1 have KV in the pages of the table; the engine thread owns it.

    pages     [ 7 ][ 3 ][ 9 ]          len(pages) >= pages_for(computed)
    positions 0..15 16..31 32..47
    computed  ──────────────▶ 37       11 positions of page 9 are slack
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.pages: list[PageId] = []
        self.computed = 0

    @property
    def slack_tokens(self) -> int:
        """Positions that are taken and hold no KV."""
        return len(self.pages) * PAGE_TOKENS - self.computed

    def missing_pages(self, tokens: int) -> int:
        """Pages still to be taken before `tokens` positions fit."""
        return max(0, pages_for(tokens) - len(self.pages))

    def reserve(self, tokens: int) -> None:
        """Grow the table until `tokens` positions fit. Raises OutOfPages and takes nothing when the pool is short."""
        self.pages += self._pool.take(self.missing_pages(tokens))

    def advance(self, tokens: int) -> None:
        """Note that the next `tokens` positions have been computed: the one place where the position moves on."""
        if pages_for(self.computed + tokens) > len(self.pages):
            raise ValueError(f"{self.computed + tokens} positions do not fit into {len(self.pages)} pages")
        self.computed += tokens

    def rewind(self, position: int) -> None:
        """Forget KV from `position` on, and give back the pages that held only that."""
        self.computed = min(self.computed, position)
        self.trim()

    def trim(self) -> int:
        """Give back pages beyond the computed positions; returns how many became free."""
        keep = pages_for(self.computed)
        tail = self.pages[keep:]
        del self.pages[keep:]
        return self._pool.release(tail)

    def evict(self, pages: int) -> int:
        """Drop up to `pages` pages from the tail, the part that is cheapest to lose; returns how many became free."""
        keep = max(0, len(self.pages) - pages)
        self.computed = min(self.computed, keep * PAGE_TOKENS)
        return self.trim()
