"""Commands that need more than the extra `cli`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_OF_LOAD = {"httpx2", "jinja2", "msgspec", "numpy", "plotly"}


@contextmanager
def extra_load() -> Iterator[None]:
    """Says what to install where it is missing. Imports inside, so that other commands do not pay for them."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in _OF_LOAD:
            raise
        sys.exit(f"segue load needs the package {error.name}: pip install 'segue[load]'")
