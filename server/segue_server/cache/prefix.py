"""The prefix index: whole pages of KV by the tokens they hold, so that equal prompts are computed once. Integers only.

    salt "a"  ──▶ [t0..t15] ──▶ [t16..t31] ──▶ [t32..t47]
                      │
                      └──▶ [u16..u31]            one node a page; a path from the root spells the tokens

A hash may find, only equality decides: children are found by their tokens themselves. Sessions with different salts
never meet. Each node is an owner of its page, so a page outlives the session that computed it until it is evicted.

Invariant: a page that a session holds and the index knows has at least two references; a node whose page has one is
held by the index alone. Those without children are what `evict_one` may drop, least recently used first.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heapify, heappop, heappush

from segue_model.paging import PAGE_TOKENS
from segue_server.cache.pages import PageId, PagePool

PageTokens = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Node:
    """One page of a prefix."""

    page: PageId
    tokens: PageTokens  # PAGE_TOKENS of them
    parent: "Node | None"  # None: the first page
    salt: str
    last_used: float
    children: dict[PageTokens, "Node"] = field(default_factory=dict)
    alive: bool = True
    hash: int = 0  # of all tokens up to its end, and the salt; for those outside, who cannot compare tokens

    def __post_init__(self) -> None:
        before = struct.pack("<q", self.parent.hash if self.parent else 0)
        salt = b"" if self.parent else self.salt.encode(errors="surrogatepass")
        text = before + struct.pack(f"<{len(self.tokens)}i", *self.tokens) + salt
        (self.hash,) = struct.unpack("<q", blake2b(text, digest_size=8).digest())


@dataclass(frozen=True, slots=True)
class Stored:
    """A page can be hit from now on."""

    hash: int
    parent: int  # 0 = the start of a ledger
    tokens: PageTokens
    salt: str


@dataclass(frozen=True, slots=True)
class Removed:
    """A page can no longer be hit."""

    hash: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """No page can be hit any more."""


Change = Stored | Removed | Cleared


def stored(node: Node) -> Stored:
    return Stored(node.hash, node.parent.hash if node.parent else 0, node.tokens, node.salt)


class PrefixIndex:
    """Finds and keeps pages by tokens. The engine thread owns it."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._roots: dict[str, dict[PageTokens, Node]] = {}
        self._idle: list[tuple[float, int, Node]] = []  # a heap of nodes that may be evictable; looked at again on use
        self._ticket = 0  # breaks ties in the heap
        self._by_page: dict[PageId, Node] = {}
        self._changes: list[Change] = []

    def take_changes(self) -> list[Change]:
        """What has come and gone since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def __contains__(self, page: PageId) -> bool:
        """Is the index one of the owners of `page`?"""
        return page in self._by_page

    def match(self, salt: str, tokens: Sequence[int], now: float | None) -> list[PageId]:
        """Pages that hold the longest known prefix of `tokens`, whole pages only. Share them before anything else.

        `now` counts as a use of them; None only looks.
        """
        found: list[PageId] = []
        siblings = self._roots.get(salt, {})
        for key in _pages_of(tokens):
            node = siblings.get(key)
            if node is None:
                break
            node.last_used = node.last_used if now is None else now
            found.append(node.page)
            siblings = node.children
        return found

    def insert(self, salt: str, tokens: Sequence[int], pages: Sequence[PageId], now: float) -> None:
        """Make known that `pages` hold `tokens` (whole pages from position 0 on).

        A page that is known already stays: the session keeps its own copy, so that page tables are append-only.
        """
        siblings = self._roots.setdefault(salt, {})
        parent: Node | None = None
        for key, page in zip(_pages_of(tokens), pages, strict=False):
            node = siblings.get(key)
            if node is None:
                if page in self._by_page:
                    break  # of a fork with a salt of its own: known under its parent's
                node = siblings[key] = Node(page, key, parent, salt, now)
                self._pool.share([page])
                self._by_page[page] = node
                self._changes.append(stored(node))
            node.last_used = now
            parent, siblings = node, node.children

    def evict_subtree(self) -> bool:
        """Drop a page that only the index holds though others follow it, and what is known of those. False: none."""
        node = next((n for n in self._nodes() if self._pool.references(n.page) == 1), None)
        if node is None:
            return False
        for member in reversed(list(_subtree(node))):
            self._drop(member)
        if node.parent is not None:
            self._consider(node.parent)
        return True

    def oldest(self) -> float | None:
        """When the first node to be evicted was last used; None: the index holds nothing that nobody else does."""
        node = self._peek()
        return None if node is None else node.last_used

    def evict_one(self) -> bool:
        """Drop the least recently used page that only the index holds and that ends its path. False: there is none."""
        node = self._peek()
        if node is None:
            return False
        heappop(self._idle)
        self._drop(node)
        if node.parent is not None:
            self._consider(node.parent)
        return True

    def forget(self, salt: str, tokens: Sequence[int], keep: int) -> int:
        """Drop what only the index holds of this path, from its end back to the first `keep` pages; returns how many.

        A page that others hold, or that others follow, stays, and with it those before it.
        """
        path: list[Node] = []
        siblings = self._roots.get(salt, {})
        for key in _pages_of(tokens):
            node = siblings.get(key)
            if node is None:
                break
            path.append(node)
            siblings = node.children
        dropped = 0
        while len(path) > keep and not path[-1].children and self._pool.references(path[-1].page) == 1:
            self._drop(path.pop())
            dropped += 1
        if dropped and path:
            self._consider(path[-1])
        return dropped

    def flush(self, salt: str | None = None) -> int:
        """Forget every prefix, of one salt or of all; returns the pages that became free."""
        before = self._pool.free
        for root in [salt] if salt is not None else list(self._roots):
            for node in list(self._roots.get(root, {}).values()):
                for member in reversed(list(_subtree(node))):
                    self._drop(member)
        if not self._by_page:
            self._changes.append(Cleared())
        return self._pool.free - before

    def flush_unheld(self, salt: str | None = None) -> int:
        """Drop what only the index holds, of one salt or of all, unless others follow it; returns the pages freed."""
        before = self._pool.free
        for node in reversed(list(self._nodes())):
            if salt in (None, node.salt) and not node.children and self._pool.references(node.page) == 1:
                self._drop(node)
        return self._pool.free - before

    def check_integrity(self) -> None:
        """Raises AssertionError: a page that could be evicted has been forgotten, and would be kept for ever."""
        looked_at = self._pool.singled | {node.page for *_, node in self._idle if node.alive}
        for node in self._nodes():
            if not node.children and self._pool.references(node.page) == 1 and node.page not in looked_at:
                raise AssertionError(f"page {node.page} is held by the index alone, and will not be looked at")

    def owned(self) -> list[PageId]:
        """Every page the index is an owner of, for the integrity check."""
        pages = [node.page for node in self._nodes()]
        if set(pages) != self._by_page.keys() or len(pages) != len(self._by_page):
            raise AssertionError("the tree of prefixes and the set of their pages disagree")
        return pages

    def entries(self) -> list[Node]:
        """Every node, parents before children."""
        return list(self._nodes())

    def _drop(self, node: Node) -> None:
        siblings = node.parent.children if node.parent else self._roots[node.salt]
        del siblings[node.tokens]
        if not node.parent and not siblings:
            del self._roots[node.salt]
        node.alive = False
        self._changes.append(Removed(node.hash))
        del self._by_page[node.page]
        self._pool.release([node.page])

    def _consider(self, node: Node) -> None:
        """Put a node where `_peek` will look at it."""
        self._ticket += 1
        heappush(self._idle, (node.last_used, self._ticket, node))
        if len(self._idle) > 64 + 4 * len(self._by_page):
            self._compact()

    def _compact(self) -> None:
        """Leave out entries that were overtaken."""
        alive = {id(node): node for *_, node in self._idle if node.alive}
        self._idle = [(node.last_used, ticket, node) for ticket, node in enumerate(alive.values())]
        self._ticket = len(self._idle)
        heapify(self._idle)

    def _peek(self) -> Node | None:
        """The evictable node that was used longest ago; entries that no longer are what they were are put right."""
        for page in self._pool.take_singled():
            if (node := self._by_page.get(page)) and not node.children:
                self._consider(node)
        while self._idle:
            used, _, node = self._idle[0]
            if not node.alive or node.children or self._pool.references(node.page) != 1:
                heappop(self._idle)  # comes back when its last child or its last other owner goes
            elif node.last_used != used:
                heappop(self._idle)
                self._consider(node)
            else:
                return node
        return None

    def _nodes(self) -> Iterator[Node]:
        for root in self._roots.values():
            for node in root.values():
                yield from _subtree(node)


def _subtree(node: Node) -> Iterator[Node]:
    """A node and all below it, parents first."""
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def _pages_of(tokens: Sequence[int]) -> Iterator[PageTokens]:
    """The tokens of each whole page."""
    for start in range(0, len(tokens) - PAGE_TOKENS + 1, PAGE_TOKENS):
        yield tuple(tokens[start : start + PAGE_TOKENS])
