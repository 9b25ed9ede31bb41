"""One line of the log for each turn, when it has ended. No prompt and no output, unless the operator asks for both."""

import logging
from dataclasses import asdict

from segue_server.engine import Engine
from segue_server.reports import TurnReport
from segue_server.requests import ChatTurn, Input, TextInput, TokenInput

log = logging.getLogger(__name__)

Field = str | int | float | None


class TurnLog:
    """A TurnObserver."""

    def __init__(self, *, prompts: bool) -> None:
        """`prompts`: write what callers send and what they are answered."""
        self._prompts = prompts

    def __call__(self, report: TurnReport) -> None:
        level = logging.WARNING if report.error else logging.INFO
        if log.isEnabledFor(level):
            log.log(level, "turn", extra=fields_of(report) | (texts_of(report) if self._prompts else {}))


def fields_of(report: TurnReport) -> dict[str, Field]:
    """What docs/logs.md lists. Durations in seconds; None: it has not come to that."""
    usage, timings = report.usage, report.timings
    first = timings.time_to_first_token
    return {
        "request_id": report.request_id,
        "session_id": report.session_id,
        "turn": report.turn,
        "position": report.position,
        "prompt_tokens": usage.prompt_tokens,
        "computed_tokens": usage.computed_tokens,
        "reused_tokens": usage.session_reused_tokens,
        "prefix_tokens": usage.prefix_reused_tokens,
        "restored_tokens": usage.restored_tokens,
        "generated_tokens": usage.generated_tokens,
        "queue_seconds": round(timings.queue, 6),
        "time_to_first_token_seconds": None if first is None else round(first, 6),
        "total_seconds": round(report.total, 6),
        "finish_reason": report.finish_reason.name.lower(),
        "error": report.error or None,
        "cause": report.cause or None,
        "peer": report.origin.peer,
    }


def totals(engine: Engine) -> dict[str, Field]:
    """What the server has done since it started, and what eviction has cost."""
    stats = engine.stats
    lost = engine.figures.evictions().items()
    evictions = [figures for (_, reason), figures in lost if reason != "caller"]  # who deleted them
    return {
        "turns": round(stats.turns.sum),
        "generated_tokens": stats.generated_tokens,
        "evictions": sum(count for count, _ in evictions),
        "evicted_bytes": sum(size for _, size in evictions),
        "recomputed_tokens": round(stats.recomputed_tokens.sum),
        "preemptions": stats.preemptions,
    }


def texts_of(report: TurnReport) -> dict[str, object]:
    return {"prompt": _shown(report.given), "output": report.output()}


def _shown(given: Input) -> object:
    match given:
        case TextInput(text):
            return text
        case TokenInput(ids):
            return list(ids)
        case ChatTurn(messages):
            return [asdict(message) for message in messages]
        case None:
            return None
