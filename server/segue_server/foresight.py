"""What a turn would meet if it came now: admission is asked about a turn that is not there, and nothing changes."""

from array import array
from dataclasses import dataclass

from segue_server.cache.session import SessionCache
from segue_server.jobs import TurnSpec, excess, new_turn
from segue_server.scheduler import Scheduler
from segue_server.sequence import Sequence, Turn


@dataclass(frozen=True, slots=True)
class Speeds:
    """As measured, in seconds; 0 = not yet."""

    prefill_token: float
    decode_step: float


@dataclass(frozen=True, slots=True)
class Foresight:
    """The turn's prospects."""

    starts: bool  # without waiting
    to_compute: int  # positions that would run through prefill
    claimed_pages: int  # that it could come to hold
    evicted_pages: int  # of idle KV, if it uses all it claims
    time_to_first_token: float | None  # seconds, a guess; None: nothing has been measured yet


def foresee(scheduler: Scheduler, spec: TurnSpec, *, position: int, salt: str | None, speeds: Speeds) -> Foresight:
    """What would become of `spec`, whose session need not exist, after the first `position` tokens of its ledger."""
    shadow, turn = _shadow(scheduler, spec, position, salt)
    preview = scheduler.preview(shadow)
    ahead = [s for s in scheduler.waiting if s.turn and s.turn.order <= turn.order]
    full = len(scheduler.running) + len(ahead) >= scheduler.max_running
    to_compute = turn.prompt_end - preview.reused
    starts = preview.fits and not ahead and not full
    return Foresight(
        starts=starts,
        to_compute=to_compute,
        claimed_pages=preview.claimed_pages,
        evicted_pages=preview.evicted_pages,
        time_to_first_token=_first_token(scheduler, ahead, to_compute, speeds, waits=full or not preview.fits),
    )


def _shadow(scheduler: Scheduler, spec: TurnSpec, position: int, salt: str | None) -> tuple[Sequence, Turn]:
    """The session with the turn in it, as it would be in the queue. It owns no pages: it is only to be looked at."""
    real = scheduler.holdings.sequences.get(spec.session_id)
    tokens = real.tokens[:position] if real else array("i")
    dropped = excess(spec, len(tokens), len(spec.prompt) + spec.samples)
    kept = (spec.keep_tokens or 0) if dropped else position
    if dropped:
        del tokens[kept : kept + dropped]
    cache = real.cache.glance(kept) if real else SessionCache(scheduler.holdings.pool)
    turn = new_turn(spec, len(tokens))
    tokens.extend(spec.prompt)
    return Sequence(session_id=spec.session_id, cache=cache, tokens=tokens, turn=turn, salt=salt), turn


def _first_token(
    scheduler: Scheduler, ahead: list[Sequence], to_compute: int, speeds: Speeds, *, waits: bool
) -> float | None:
    """A place in the batch is had when the shortest running turn ends; prompts ahead take their share of the steps."""
    if not speeds.prefill_token:
        return None
    prompts = [s.remaining for s in (*scheduler.running, *ahead) if s.remaining > 1]
    seconds = max((sum(prompts) + to_compute) * speeds.prefill_token, speeds.decode_step)
    if waits:
        left = [s.turn.limit - len(s.tokens) for s in scheduler.running if s.turn]
        seconds += max(min(left, default=0), 0) * speeds.decode_step
    return seconds
