"""The command line: ``python -m torch2ort``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from torch2ort._commands import cache, compare, info


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        arguments: those of the command line; the process's own by default.

    Returns:
        0, or 1 if the subcommand could not do what was asked.
    """
    parser = argparse.ArgumentParser(prog="python -m torch2ort", description="Tools around torch2ort.")
    commands = parser.add_subparsers(required=True, metavar="command")
    for command in (info, cache, compare):
        command.add_parser(commands)
    parsed = parser.parse_args(arguments)
    return int(parsed.run(parsed))


if __name__ == "__main__":
    raise SystemExit(main())
