"""What a turn that was cut short has cost for nothing. What its commit policy took back is counted by the engine."""

from segue_server.events import Finished, Tokens
from segue_server.sessions import ActiveTurn


def reason_of(turn: ActiveTurn) -> str:
    """Label of the counter. The engine ends a turn for its slow reader by itself; every other cause comes from here."""
    return "slow_client" if turn.cause is None else "cancelled"


def wasted_tokens(turn: ActiveTurn, end: Finished) -> int:
    """Tokens that nobody has, of a turn that nobody reads any more.

    Sampled ones that no reader took; and the computed prompt, where not one token was taken and no session keeps its
    KV. Whoever attaches later still finds the tokens, but by then they have been counted.
    """
    if not end.finish_reason.cut_short:
        return 0
    left = [event for event in turn.stream.left if isinstance(event, Tokens)]
    unread = sum(max(0, min(len(event.token_ids), end.position - event.position)) for event in left)
    answered = any(isinstance(event, Tokens) for event in turn.stream.taken)
    return unread + (_computed_prompt(end) if turn.session.ephemeral and not answered else 0)


def _computed_prompt(end: Finished) -> int:
    """Prompt positions that were run before the turn left."""
    usage = end.usage
    prompt_end = usage.context_tokens + usage.prompt_tokens
    return max(0, min(end.cache.cached_tokens, prompt_end) - (prompt_end - usage.computed_tokens))
