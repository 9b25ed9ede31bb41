"""What the engine counts of its turns and steps, and what counts as what."""

import time
from collections.abc import Callable
from dataclasses import replace

from segue_model.paging import PAGE_TOKENS
from segue_server.events import Usage
from segue_server.jobs import Job
from segue_server.plan import Plan
from segue_server.requests import FinishReason
from segue_server.stats import EngineStats

SMOOTHING = 0.2  # weight of the latest prefill in the estimate of its speed


class Accountant:
    """Writes `EngineStats` for the engine, on the engine's thread."""

    def __init__(self, stats: EngineStats, clock: Callable[[], float]) -> None:
        self._stats = stats
        self._clock = clock
        self.seconds_per_token = 0.0  # of prefill, smoothed: what losing a token of KV would cost

    def opening(self, job: Job) -> Usage:
        """Where the context and prompt of a turn come from, at the moment it has its place."""
        turn, reused = job.turn, job.sequence.cache.computed
        adopted = min(turn.adopted, reused)  # it may have given way, and lost pages, in this very step
        restored = min(turn.restored, reused - adopted)
        return Usage(
            context_tokens=turn.start,
            prompt_tokens=turn.prompt_end - turn.start,
            computed_tokens=0 if job.spec.defer_compute else turn.prompt_end - reused,
            session_reused_tokens=reused - adopted - restored,
            prefix_reused_tokens=adopted,
            restored_tokens=restored,
        )

    def turn_started(self, job: Job, recomputed: int) -> None:
        """`recomputed`: positions of the context whose KV was lost; 0 if none was."""
        stats, turn, sequence, usage = self._stats, job.turn, job.sequence, job.usage
        if turn.reads_prefixes and sequence.salt is not None:
            own = usage.session_reused_tokens + usage.restored_tokens
            stats.prefix_query_tokens += turn.prompt_end - own
            stats.prefix_hit_tokens += usage.prefix_reused_tokens
        stats.recomputed_tokens.add(sequence.lost_by, amount=recomputed)
        sequence.lost_by = "evicted"
        stats.prompt_tokens.add("computed", amount=usage.computed_tokens)
        stats.prompt_tokens.add("session", amount=usage.session_reused_tokens)
        stats.prompt_tokens.add("restored", amount=usage.restored_tokens)
        stats.prompt_tokens.add("prefix", amount=usage.prefix_reused_tokens)
        stats.queue.observe((turn.admitted or turn.arrival) - turn.arrival)

    def computed(self, job: Job, start: int, end: int) -> None:
        """A pass has run these positions of a turn: again, where the turn had them before it gave way."""
        if start < job.reached:
            self._stats.recomputed_tokens.add("evicted", amount=min(end, job.reached) - start)
        job.reached = max(job.reached, end)

    def rolled_back(self, job: Job, before: int, after: int) -> None:
        """A commit policy has cut the computed positions from `before` to `after`; what was reused is not lost work."""
        reused = job.turn.prompt_end - job.usage.computed_tokens
        self._stats.wasted_tokens.add("rolled_back", amount=max(0, before - max(after, reused)))

    def token(self, job: Job, now: float) -> None:
        """A token was drawn."""
        job.generated += 1
        self._stats.generated_tokens += 1
        gap = job.note_token(now)
        if gap is None:
            self._stats.time_to_first_token[job.context].observe(now - job.turn.arrival)
            self._stats.prefill.observe(now - (job.started or job.turn.arrival))
        else:
            self._stats.inter_token.observe(gap)

    def step(self, plan: Plan, seconds: float) -> None:
        """A forward pass is over; one that computed any prompt counts as prefill."""
        prompt = sum(w.count for w in plan.work if w.count > 1)
        phase = "prefill" if prompt else "decode"
        self._stats.prefilled_tokens += prompt
        self._stats.step[phase].observe(seconds)
        self._stats.busy_seconds.add(phase, amount=seconds)
        self._stats.step_batch_size.observe(len(plan.work))
        self._stats.last_step_time = time.time()
        if prompt >= 2 * PAGE_TOKENS:
            each, known = seconds / prompt, self.seconds_per_token
            self.seconds_per_token = known + SMOOTHING * (each - known) if known else each

    def turn_ended(self, job: Job, reason: FinishReason) -> None:
        """A turn has left, however it ended."""
        stats = self._stats
        job.usage = replace(job.usage, generated_tokens=job.generated)
        stats.turns.add(reason.name.lower())
        stats.turn_duration.observe(self._clock() - job.turn.arrival)
        stats.turn_prompt_tokens.observe(job.turn.prompt_end - job.turn.start)
        stats.turn_generated_tokens.observe(job.generated)
        stats.session_context_tokens.observe(len(job.sequence.tokens))
        if job.generated > 1 and job.first_token is not None and job.last_token is not None:
            stats.time_per_output_token.observe((job.last_token - job.first_token) / (job.generated - 1))
