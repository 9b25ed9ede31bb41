"""Which steps run drafts of tokens to come, and what becomes of them. Integers only."""

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

from segue_model.paging import PAGE_TOKENS
from segue_server.drafts import LONGEST, ROWS, lookup
from segue_server.in_flight import Jobs
from segue_server.jobs import Job
from segue_server.plan import Plan, Work
from segue_server.stats import EngineStats


class Drafter:
    """Adds drafts to steps that only decode a few sequences. Engine thread only.

    `limit` bounds the drafts of a sequence; `guess` returns up to so many tokens that may come after the given ones.
    """

    def __init__(
        self,
        jobs: Jobs,
        stats: EngineStats,
        limit: int,
        *,
        guess: "Callable[[array[int], int], Seq[int]]" = lookup,
    ) -> None:
        self._jobs = jobs
        self._stats = stats
        self._limit = min(limit, LONGEST)
        self._guess = guess

    def extend(self, plan: Plan) -> None:
        """Put drafts behind the tokens of a step, where there is room for further rows."""
        each = min(self._limit, ROWS // max(len(plan.work), 1) - 1)
        if each > 0 and all(work.count == 1 for work in plan.work):
            plan.work = [self._extended(work, each) for work in plan.work]

    def _extended(self, work: Work, most: int) -> Work:
        """The work with drafts that fit into the pages it has: nothing is evicted for a guess."""
        sequence, job = work.sequence, self._jobs.of(work.sequence)
        room = min(len(sequence.cache.pages) * PAGE_TOKENS, job.turn.limit - 1) - len(sequence.tokens)
        count = min(most, room)
        if not job.generated or count <= 0 or not (count := min(count, job.pace.ask())):
            return work
        return replace(work, drafts=self._guess(sequence.tokens, count))

    def learn(self, job: Job, drafted: int, accepted: int) -> None:
        """The ledger went on with the first `accepted` of `drafted` tokens, at least one."""
        job.pace.learn(drafted, accepted)
        self._stats.draft_tokens.add("accepted", amount=accepted)
        self._stats.draft_tokens.add("rejected", amount=drafted - accepted)
