"""The `segue-server` command."""

import argparse
import asyncio
import sys
from collections.abc import Sequence

from segue_model.checkpoint import CheckpointError
from segue_model.runner.native import NativeUnavailable
from segue_model.runner.native.build import ISAS, build
from segue_server.app import run
from segue_server.config import ConfigError, add_options, from_arguments
from segue_server.errors import SegueError
from segue_server.health_check import check
from segue_server.ledger.schema import LedgerError
from segue_server.logs import set_up


def main(words: Sequence[str] | None = None) -> int:
    """Exit codes: 0 stopped as asked, 1 failed while serving, 2 could not start."""
    parser = _parser()
    arguments = parser.parse_args(words)
    if arguments.command == "health":
        return check(arguments.target, arguments.timeout)
    if arguments.command == "build-kernels":
        return build_kernels(arguments.isa)
    try:
        config = from_arguments(arguments)
        set_up(config.log_level, config.log_format)
        return asyncio.run(run(config))
    except (ConfigError, CheckpointError, LedgerError, NativeUnavailable, SegueError, OSError, ValueError) as error:
        sys.stderr.write(f"segue-server: {error}\n")
        return 2


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
    kernels.add_argument("--isa", choices=ISAS, help="instruction set (default: the best that this CPU has)")
    return parser


def build_kernels(isa: str | None) -> int:
    """0 with the library's path on standard output, 2 when it cannot be built here."""
    try:
        sys.stdout.write(f"{build(isa)}\n")
    except NativeUnavailable as error:
        sys.stderr.write(f"segue-server: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
