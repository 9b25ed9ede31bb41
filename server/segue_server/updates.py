"""UpdateSession: which fields of a session may change, and what they become."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from segue_server.errors import FieldInvalid
from segue_server.requests import SessionSettings, UpdateSessionRequest
from segue_server.sessions import Session
from segue_server.validation import Checker

SETTINGS = (
    *("ttl", "max_context_tokens", "context_policy", "keep_tokens", "commit_policy", "priority", "pinned"),
    *("default_sampling", "default_stop"),
)
PATHS = ("display_name", "labels", *(f"settings.{name}" for name in SETTINGS))


@dataclass(frozen=True, slots=True)
class Update:
    """What a session's changeable fields are to be."""

    display_name: str
    labels: Mapping[str, str]
    settings: SessionSettings

    def apply(self, session: Session) -> None:
        """No use of the session: its time to live runs on."""
        session.display_name, session.labels, session.settings = self.display_name, self.labels, self.settings
        session.version += 1


def update_of(session: Session, request: UpdateSessionRequest, defaults: SessionSettings) -> Update:
    """The session's fields with those that the mask names replaced; what is named and unset gets its default."""
    named = {name: _given(request.settings, defaults, name) for name in SETTINGS if f"settings.{name}" in request.paths}
    return Update(
        display_name=request.display_name if "display_name" in request.paths else session.display_name,
        labels=dict(request.labels) if "labels" in request.paths else session.labels,
        settings=replace(session.settings, **named),
    )


def check_paths(checker: Checker, paths: Iterable[str]) -> None:
    """Refuse an empty mask, and every path that does not exist or may not change."""
    if not paths:
        checker.refuse("update_mask", "must name at least one field")
    for number, path in enumerate(paths):
        if path not in PATHS:
            changeable = ", ".join(PATHS)
            checker.refuse(f"update_mask.paths[{number}]", f"{path[:80]!r} cannot be changed; these can: {changeable}")


def check_length(session: Session, settings: SessionSettings) -> None:
    """Raises FieldInvalid when the ledger is longer already."""
    limit = settings.max_context_tokens or 0
    if session.position > limit:
        message = f"the ledger holds {session.position} tokens already, got {limit}"
        raise FieldInvalid.one("settings.max_context_tokens", message)


def _given(settings: SessionSettings, defaults: SessionSettings, name: str) -> Any:
    value = getattr(settings, name)
    return getattr(defaults, name) if value is None else value
