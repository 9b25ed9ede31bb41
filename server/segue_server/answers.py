"""What a step has computed, on its way to ledger and stream: progress, logprobs, tokens. Engine thread only."""

from collections.abc import Callable
from collections.abc import Sequence as Seq

from segue_model.arrays import Logits
from segue_model.sampling import Sampled, TokenLogprob, token_logprobs
from segue_server.accountant import Accountant
from segue_server.events import Prefill, Tokens
from segue_server.in_flight import Jobs
from segue_server.jobs import Job
from segue_server.ledger.records import TokensAppended
from segue_server.plan import Plan, Work
from segue_server.requests import FinishReason


class Answers:
    """Writes down what was drawn, and ends the turns that end by it."""

    def __init__(self, jobs: Jobs, accounts: Accountant, clock: Callable[[], float]) -> None:
        self._jobs = jobs
        self._accounts = accounts
        self._clock = clock

    def update(self, plan: Plan, logits: Seq[Logits | None], drawn: dict[str, Sampled]) -> None:
        """`logits` by the plan's work, `drawn` by request id; a turn that no token could be drawn for has left."""
        now = self._clock()
        for work, out in zip(plan.work, logits, strict=True):
            if work.sequence.turn is None:
                continue  # no token could be drawn for it
            job = self._jobs.of(work.sequence)
            if work.start < job.turn.prompt_end - 1:
                self._report_prefill(job, work, out)
            if token := drawn.get(job.spec.request_id):
                self.take(job, token, now)
            elif not job.spec.samples and not work.sequence.remaining:
                self._jobs.finish(job, FinishReason.MAX_TOKENS)

    def take(self, job: Job, drawn: Sampled, now: float) -> None:
        """Append a sampled token to the ledger, put it on the stream, and end the turn if it says so."""
        spec, token = job.spec, drawn.token_id
        self._accounts.token(job, now)
        if token in spec.stop_token_ids and token not in spec.eos_token_ids and not spec.include_stop:
            self._jobs.finish(job, FinishReason.STOP_TOKEN, token=token)  # neither in the output nor in the ledger
            return
        position = len(job.sequence.tokens)
        self._jobs.note(spec, job.turn.start, TokensAppended(spec.session_id, position, (token,)))
        job.sequence.tokens.append(token)
        step = spec.text.push(token) if spec.text else None
        logprobs = (drawn.logprob,) if drawn.logprob else ()
        self._jobs.emit(job.spec.sink, Tokens(position, (token,), step.text if step else "", logprobs))
        if token in spec.eos_token_ids:
            self._jobs.finish(job, FinishReason.EOS, token=token)
        elif token in spec.stop_token_ids:
            self._jobs.finish(job, FinishReason.STOP_TOKEN, token=token)
        elif step and step.stop is not None:
            self._jobs.finish(job, FinishReason.STOP_SEQUENCE, text=step.stop, overhang=step.overhang_tokens)
        elif job.generated >= spec.max_tokens:
            self._jobs.finish(job, FinishReason.MAX_TOKENS if not spec.open_ended else FinishReason.CONTEXT_FULL)
        elif len(job.sequence.tokens) >= job.turn.limit:
            dropped = self._jobs.make_room(spec, job.sequence, 1)
            job.dropped += dropped
            job.reached = job.sequence.cache.computed
            if not dropped:
                self._jobs.finish(job, FinishReason.CONTEXT_FULL)

    def _report_prefill(self, job: Job, work: Work, out: Logits | None) -> None:
        """Tell how far the prompt is. One chunk that is the whole prompt needs no progress, unless logprobs are due.

        What is computed again after a preemption has been reported before.
        """
        done = min(work.start + work.count, job.turn.prompt_end)
        if done <= job.prefilled:
            return
        job.prefilled = done
        logprobs = self._prompt_logprobs(job, work, out)
        if logprobs or done < job.turn.prompt_end:
            base = job.turn.prompt_end - job.usage.computed_tokens
            self._jobs.emit(job.spec.sink, Prefill(done - base, job.usage.computed_tokens, logprobs))

    def _prompt_logprobs(self, job: Job, work: Work, out: Logits | None) -> tuple[TokenLogprob, ...]:
        """Logprobs of the prompt tokens that follow a position of this chunk; the row of p - 1 tells about token p."""
        if not job.spec.prompt_logprobs or out is None:
            return ()
        first = max(work.start + 1, job.logprobs_from)
        end = min(work.start + work.count + 1, job.turn.prompt_end)
        if first >= end:
            return ()
        job.logprobs_from = end
        rows = out[first - 1 - work.start : end - 1 - work.start]
        return tuple(token_logprobs(rows, job.sequence.tokens[first:end], job.spec.top_logprobs or 0))
