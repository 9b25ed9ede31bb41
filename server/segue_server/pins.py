"""How much of the pool pinned sessions may take: each counts with all that its context can come to hold.

So a pinned session never has to be refused a turn, and the others keep what the limit leaves them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from segue_model.paging import PAGE_TOKENS
from segue_server.cache.session import pages_for
from segue_server.errors import KvBudget, Quota
from segue_server.requests import SessionSettings


@dataclass(frozen=True, slots=True)
class PinBudget:
    """In bytes of KV."""

    limit: int
    per_token: int

    def check(self, wanted: SessionSettings, pinned: Iterable[SessionSettings], *, count: int = 1) -> None:
        """May `count` more sessions with the settings `wanted` be, beside those `pinned`? Raises KvBudget."""
        if not wanted.pinned:
            return
        needed, taken = count * self._claim(wanted), sum(map(self._claim, pinned))
        if taken + needed > self.limit:
            message = (
                f"pinning takes room for max_context_tokens, {needed} bytes of KV here; {taken} of the "
                f"{self.limit} bytes that may be pinned are taken"
            )
            raise KvBudget(message, quota=Quota("pinned_kv_bytes", self.limit), neededBytes=str(needed))

    def _claim(self, settings: SessionSettings) -> int:
        return pages_for(settings.max_context_tokens or 0) * PAGE_TOKENS * self.per_token
