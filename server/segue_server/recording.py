"""Sessions as the ledger keeps them, and back."""

from segue_server.ledger.records import SessionCreated, SessionForked, SessionUpdated
from segue_server.ledger.store import RecoveredSession
from segue_server.sessions import Session


class ModelChanged(ValueError):
    """A ledger holds sessions of another model, and tokens mean nothing to another model."""

    def __init__(self, session_id: str, theirs: str, ours: str) -> None:
        super().__init__(
            f"the ledger's session {session_id!r} belongs to model {theirs}, and this is {ours}; "
            "serve that model, or give another --ledger"
        )


def created(session: Session, fingerprint: str) -> SessionCreated:
    """`fingerprint`: of the model whose tokens these are."""
    return SessionCreated(
        session_id=session.session_id,
        settings=session.settings,
        create_time=session.create_time,
        last_used_time=session.last_used_time,
        display_name=session.display_name,
        labels=session.labels,
        version=session.version,
        model_fingerprint=fingerprint,
    )


def forked(child: Session, fingerprint: str) -> SessionForked:
    """Raises ValueError for a session that is no fork."""
    if child.forked_from is None:
        raise ValueError(f"session {child.session_id} was not forked")
    parent_id, position = child.forked_from
    return SessionForked(created(child, fingerprint), parent_id, position)


def updated(session: Session) -> SessionUpdated:
    return SessionUpdated(
        session_id=session.session_id,
        settings=session.settings,
        last_used_time=session.last_used_time,
        display_name=session.display_name,
        labels=session.labels,
    )


def restored(found: RecoveredSession) -> Session:
    """The session that a restarted server goes on with."""
    forked_from = None
    if found.parent_id is not None and found.fork_position is not None:
        forked_from = found.parent_id, found.fork_position
    return Session(
        session_id=found.session_id,
        settings=found.settings,
        display_name=found.display_name,
        labels=found.labels,
        position=len(found.tokens),
        version=found.version,
        turns=list(found.turns),
        forked_from=forked_from,
        create_time=found.create_time,
        last_used_time=found.last_used_time,
    )
