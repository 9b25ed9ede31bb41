"""The beginning of a start: the checkpoint is read at once, its weights are packed and its files hashed on threads.

Imports no more than that takes, so that the rest of the server can be imported meanwhile: packing and hashing leave the
interpreter to others.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Final, NamedTuple

from segue_model.checkpoint import Checkpoint, CheckpointError
from segue_model.fingerprint import fingerprint
from segue_model.loaders import find_embedded_model, load_checkpoint
from segue_model.runner.native import NativeUnavailable
from segue_server.config import ServerConfig
from segue_server.errors import SegueError
from segue_server.ledger.schema import LedgerError
from segue_server.runners import Built, make_runner

# What a start raises for a reason that whoever starts the server can mend.
CANNOT_START: Final = (CheckpointError, LedgerError, NativeUnavailable, SegueError, OSError, ValueError)


class Loading(NamedTuple):
    """A model that is on its way into memory."""

    checkpoint: Checkpoint  # without weights, so that no file stays mapped once they are packed
    fingerprint: Future[str]
    built: Future[Built]  # raises what `make_runner` raises


def begin_loading(config: ServerConfig) -> Loading:
    """Raises CheckpointError."""
    path = config.model or find_embedded_model()
    threads = ThreadPoolExecutor(2, thread_name_prefix="load")
    try:
        digest = threads.submit(fingerprint, path)
        checkpoint = load_checkpoint(path)
        built = threads.submit(make_runner, config, checkpoint)
        return Loading(replace(checkpoint, weights={}), digest, built)
    finally:
        threads.shutdown(wait=False)
