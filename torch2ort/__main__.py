"""The command line: ``python -m torch2ort``."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata

from torch2ort._commands import cache, calibrate, compare, info, show
from torch2ort.support.versions import RUNTIMES


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        arguments: those of the command line; the process's own by default.

    Returns:
        0, or 1 if the subcommand failed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m torch2ort",
        description="Tools around torch2ort.",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # leaves the versions in one line
    )
    parser.add_argument("--version", action="version", version=_versions())
    commands = parser.add_subparsers(required=True, metavar="command")
    for command in (info, show, compare, cache, calibrate):
        command.add_parser(commands)
    parsed = parser.parse_args(arguments)
    return int(parsed.run(parsed))


def _versions() -> str:
    """Return the versions of torch2ort and of the packages it needs, as one line."""
    found = []
    for name in ("torch2ort", "torch", "onnx", *RUNTIMES):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return ", ".join([*found, f"Python {platform.python_version()}"])


def _run() -> int:
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe. Python would flush the rest, and fail, at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


if __name__ == "__main__":
    raise SystemExit(_run())
