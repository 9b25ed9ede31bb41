"""The `segue` command. Needs the extra `cli` (typer and rich); the library beside it does not."""

import sys

_OF_THE_EXTRA = {"typer", "rich"}


def main() -> None:
    """Entry point of the `segue` command."""
    try:
        from segue_client.cli.app import app  # noqa: PLC0415  to say what to install when it is not there
    except ModuleNotFoundError as error:
        if error.name not in _OF_THE_EXTRA:
            raise
        sys.exit(f"The segue command needs the package {error.name}: pip install 'segue[cli]'")
    app()
