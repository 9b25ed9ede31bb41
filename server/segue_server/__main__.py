"""The `segue-server` command."""

import argparse
import asyncio
import gc
import sys
from collections.abc import Sequence

from segue_server.config import IN_MEMORY, ConfigError, ServerConfig, add_options, from_arguments

# ruff: noqa: PLC0415 - a command imports what it needs: a health check needs no model, a build no server


def main(words: Sequence[str] | None = None) -> int:
    """Exit codes: 0 stopped as asked, 1 failed while serving, 2 could not start."""
    arguments = _parser().parse_args(words)
    if arguments.command == "health":
        from segue_server.health_check import check

        return check(arguments.target, arguments.timeout)
    if arguments.command == "build-kernels":
        return build_kernels(arguments.isa)
    try:
        config = from_arguments(arguments)
    except ConfigError as error:
        return _refused(error)
    return serve(config)


def serve(config: ServerConfig) -> int:
    """Serve until stopped; the exit code.

    Python looks for garbage only from when the server serves, see `app.run`: modules and a vocabulary are no garbage,
    and looking through them again and again takes a tenth of the start. A ledger may refuse, so it comes before the
    model, which takes time and memory.
    """
    gc.disable()
    from segue_server.loading import CANNOT_START, begin_loading
    from segue_server.logs import set_up

    set_up(config.log_level, config.log_format)
    try:
        loading = begin_loading(config) if config.ledger == IN_MEMORY else None
        from segue_server.app import run  # while threads pack the weights

        return asyncio.run(run(config, loading))
    except CANNOT_START as error:
        return _refused(error)
    finally:
        gc.enable()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="segue-server", description="A gRPC inference server that keeps one KV cache per session."
    )
    add_options(parser)
    commands = parser.add_subparsers(dest="command", metavar="")
    health = commands.add_parser("health", help="exit 0 when a server is ready for turns, else 1")
    health.add_argument("--target", default="127.0.0.1:50051", help="host:port of the gRPC port (default: %(default)s)")
    health.add_argument("--timeout", type=float, default=2.0, help="seconds (default: %(default)s)")
    kernels = commands.add_parser("build-kernels", help="compile the native kernels ahead of the first start")
    kernels.add_argument("--isa", help="instruction set, such as avx2 (default: the best that this CPU has)")
    return parser


def build_kernels(isa: str | None) -> int:
    """0 with the library's path on standard output, 2 when it cannot be built here."""
    from segue_model.runner.native.build import NativeUnavailable, build

    try:
        sys.stdout.write(f"{build(isa)}\n")
    except NativeUnavailable as error:
        return _refused(error)
    return 0


def _refused(error: Exception) -> int:
    sys.stderr.write(f"segue-server: {error}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
