"""What is told of a turn when it has ended, to the log and to the tracer."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from segue_server.events import Event, Failed, Finished, Timings, Tokens, Usage
from segue_server.origin import Origin
from segue_server.requests import CancelCause, FinishReason, Input
from segue_server.sessions import ActiveTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnReport:
    """A turn that has ended. Times in seconds; `ended` in Unix seconds."""

    request_id: str
    session_id: str
    turn: int  # its number in the session, from 0 on
    position: int  # ledger length after it
    finish_reason: FinishReason
    error: str = ""  # reason of the error that ended it, such as ENGINE_ERROR
    cause: str = ""  # of a cancelled turn, such as disconnect
    usage: Usage
    timings: Timings
    total: float  # from the arrival of the call on
    ended: float
    origin: Origin
    given: Input  # what the caller sent
    output: Callable[[], str | list[int]]  # text; token ids where no text was asked for


TurnObserver = Callable[[TurnReport], None]


def report_of(turn: ActiveTurn, end: Finished | Failed, *, now: float) -> TurnReport:
    """`now`: on the clock of the claim's arrival."""
    if isinstance(end, Failed):
        reason, error = FinishReason.ERROR, end.error.reason
    else:
        reason, error = end.finish_reason, ""
    return TurnReport(
        request_id=turn.request_id,
        session_id=turn.session.session_id,
        turn=turn.number,
        position=end.position,
        finish_reason=reason,
        error=error,
        cause=(turn.cause or CancelCause.SLOW_CLIENT).value if reason.cut_short else "",
        usage=end.usage,
        timings=end.timings,
        total=now - turn.claim.arrival,
        ended=time.time(),
        origin=turn.claim.origin,
        given=turn.given,
        output=partial(_output, turn),
    )


def _output(turn: ActiveTurn) -> str | list[int]:
    events: list[Event] = [*turn.stream.taken, *turn.stream.left]
    answer = [event for event in events if isinstance(event, Tokens)]
    text = "".join(event.text for event in answer)
    return text or [token for event in answer for token in event.token_ids]
