"""The KV cache of one session, as integers: a page table and how far it is filled."""

from collections.abc import Sequence

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

    Any page may have other owners: a fork, or the prefix index. Only the page that the next position falls into is
    ever written, and `reserve` makes sure that nobody else owns it.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.pages: list[PageId] = []
        self.computed = 0

    @property
    def slack_tokens(self) -> int:
        """Positions that are taken and hold no KV."""
        return len(self.pages) * PAGE_TOKENS - self.computed

    @property
    def needs_copy(self) -> bool:
        """The page that the next position falls into is partly filled and has other owners."""
        at = self.computed // PAGE_TOKENS
        return at < len(self.pages) and self._pool.references(self.pages[at]) > 1

    def missing_pages(self, tokens: int) -> int:
        """Pages still to be taken before `tokens` positions fit and the next one can be written."""
        return max(0, pages_for(tokens) - len(self.pages)) + self.needs_copy

    def reserve(self, tokens: int) -> tuple[PageId, PageId] | None:
        """Grow the table until `tokens` positions fit. Raises OutOfPages and takes nothing when the pool is short.

        Copy-on-write: a partly filled page with other owners is replaced by a new one. Returns (its source, the new
        page), whose contents the runner must copy before it writes.
        """
        copies = self.needs_copy
        fresh = self._pool.take(self.missing_pages(tokens))
        copied = self._replace(self.computed // PAGE_TOKENS, fresh.pop()) if copies else None
        self.pages += fresh
        return copied

    def _replace(self, at: int, page: PageId) -> tuple[PageId, PageId]:
        source = self.pages[at]
        self.pages[at] = page
        self._pool.release([source])
        return source, page

    def adopt(self, pages: Sequence[PageId]) -> None:
        """Go on from whole pages that hold this session's tokens from position 0 on, and are owned by somebody.

        Own whole pages stay; from the first one that is missing or only partly filled, the others take their place.
        """
        keep = self.computed // PAGE_TOKENS
        self._pool.share(pages[keep:])
        self._pool.release(self.pages[keep:])
        self.pages[keep:] = pages[keep:]
        self.computed = len(pages) * PAGE_TOKENS

    def share_from(self, other: "SessionCache", tokens: int) -> None:
        """Become an owner of the pages that hold the first `tokens` positions of `other`. This cache is empty."""
        self.computed = min(tokens, other.computed)
        self.pages = other.pages[: pages_for(self.computed)]
        self._pool.share(self.pages)

    def glance(self, tokens: int) -> "SessionCache":
        """What `rewind(tokens)` would leave, for looking ahead: it owns no pages and is not to be changed."""
        likeness = SessionCache(self._pool)
        likeness.computed = min(self.computed, tokens)
        likeness.pages = self.pages[: pages_for(likeness.computed)]
        return likeness

    def advance(self, tokens: int) -> None:
        """Note that the next `tokens` positions have been computed: the one place where the position moves on."""
        if pages_for(self.computed + tokens) > len(self.pages):
            raise ValueError(f"{self.computed + tokens} positions do not fit into {len(self.pages)} pages")
        self.computed += tokens

    def rewind(self, position: int) -> None:
        """Forget KV from `position` on, and give back the pages that held only that."""
        self.computed = min(self.computed, position)
        self.trim()

    def rewind_to_page(self) -> None:
        """Give up a partly filled last page, KV included."""
        self.rewind(self.computed // PAGE_TOKENS * PAGE_TOKENS)

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

    def check_integrity(self, *, idle: bool) -> None:
        """Raises AssertionError: a page is in the table twice, one is missing, or, when idle, one is too many."""
        if len(set(self.pages)) != len(self.pages):
            raise AssertionError(f"a page is twice in {self.pages}")
        needed = pages_for(self.computed)
        if len(self.pages) < needed or (idle and len(self.pages) > needed):
            raise AssertionError(f"{len(self.pages)} pages for {self.computed} positions")
