"""What this client knows of a session's ledger: how long it is, and whether that is certain. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from segue.v1.generation_pb2 import AppendContextRequest, Finished, GenerateRequest
from segue.v1.session_pb2 import Session as SessionInfo
from segue_client.errors import SegueError, may_have_run


class Ledger:
    """Follows one session from turn to turn.

    Attributes:
        info: what the server last said of the session as a whole.
        position: the ledger's length after the last turn whose end was seen.
        etag: of the same moment.
        uncertain: a turn was sent and its end is not known, so that `position` may be behind.
    """

    def __init__(self, info: SessionInfo) -> None:
        self.adopt(info)

    def adopt(self, info: SessionInfo) -> None:
        """Takes the server's word for where the session stands."""
        self.info = info
        self.position = info.position
        self.etag = info.etag
        self.uncertain = False

    @contextmanager
    def turn(self, request: GenerateRequest | AppendContextRequest, check_position: bool) -> Iterator[None]:
        """Around a turn that is one call."""
        self.begin(request, check_position)
        try:
            yield
        except SegueError as error:
            self.fail(error, started=False)
            raise

    def begin(self, request: GenerateRequest | AppendContextRequest, check_position: bool) -> None:
        """A turn is about to be sent."""
        if check_position:
            request.expected_position = self.position
        self.uncertain = True

    def end(self, finished: Finished) -> None:
        """The turn has ended."""
        self.position = finished.position
        self.etag = finished.etag
        self.uncertain = False

    def fail(self, error: SegueError, started: bool) -> None:
        """The turn has failed; one that was refused has left the session as it was."""
        self.uncertain = started or may_have_run(error)
