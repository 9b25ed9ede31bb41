"""What a step does: the batch, and what of the pages is to be done before it is run. Integers only."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from segue_server.cache.pages import PageId
from segue_server.cache.segments import SegmentKey
from segue_server.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Work:
    """Compute `count` tokens of a sequence, from position `start` on, and the drafts as if they came after them."""

    sequence: Sequence
    start: int
    count: int
    drafts: Seq[int] = ()  # see drafts.py; only behind the last token

    @property
    def reaches_end(self) -> bool:
        """The pass computes the last token of the ledger, so its logits tell the next one."""
        return self.start + self.count == len(self.sequence.tokens)

    def came_true(self, index: int) -> bool:
        """The ledger has gone on with the draft, and no further: its KV is computed, and so is what comes after it."""
        position, sequence = self.start + self.count + index, self.sequence
        return (
            index < len(self.drafts)
            and sequence.turn is not None
            and sequence.cache.computed == position == len(sequence.tokens) - 1
            and sequence.tokens[position] == self.drafts[index]
        )


@dataclass(frozen=True, slots=True)
class Restore:
    """Bring back `count` positions of a sequence, from `start` on, which is the beginning of a page."""

    sequence: Sequence
    start: int
    count: int
    key: SegmentKey
    offset: int  # of `start` in the segment


@dataclass(slots=True)
class Plan:
    """One step."""

    work: list[Work] = field(default_factory=list)
    copies: list[tuple[PageId, PageId]] = field(default_factory=list)  # to be made before the pass
    restores: list[Restore] = field(default_factory=list)  # to be made before the pass
    relieved: bool = False  # idle KV went down a tier though nobody needed its pages yet
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
