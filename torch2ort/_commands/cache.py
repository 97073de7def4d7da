"""``python -m torch2ort cache``: list, explain and clear the export cache."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from torch2ort.cache.store.explain import differences, nearest, on_miss
from torch2ort.cache.store.location import cache_folder
from torch2ort.cache.store.store import Listed, RefusedError, Store
from torch2ort.options import Options
from torch2ort.support.replaced import replaced

_VARIABLE = "TORCH2ORT_CACHE_DIR"
_UNITS = ("B", "KiB", "MiB", "GiB")


def add_parser(commands: Any) -> None:
    """Add the subcommand to ``commands``, the result of ``ArgumentParser.add_subparsers``."""
    folder = argparse.ArgumentParser(add_help=False)
    folder.add_argument(
        "--dir",
        metavar="FOLDER",
        # The option may come before or after the action; the action's own parser must not reset it.
        default=argparse.SUPPRESS,
        help="folder of the cache (default: the variable TORCH2ORT_CACHE_DIR, else the user's cache folder)",
    )
    parser = commands.add_parser("cache", help="list, explain or clear the export cache", parents=[folder])
    actions = parser.add_subparsers(required=True, metavar="action")
    listing = actions.add_parser("list", help="one line per entry, last used first", parents=[folder])
    listing.set_defaults(run=_list)
    actions.add_parser("clear", help="remove every entry", parents=[folder]).set_defaults(run=_clear)
    explain = actions.add_parser(
        "explain",
        help="show the parts of a key that differ from another one, or from the nearest entry of that model",
        parents=[folder],
    )
    explain.add_argument(
        "key",
        nargs="?",
        default="",
        metavar="KEY or SCRIPT",
        help="first digits of the entry's key (default: the newest export); or a Python file, which is run "
        "until its first export that the cache lacks",
    )
    explain.add_argument(
        "arguments",
        nargs="*",
        metavar="OTHER KEY or ARGUMENT",
        help="first digits of the key to compare it with; or arguments of the script, after -- if they "
        "begin with a dash",
    )
    explain.add_argument("--all", action="store_true", help="print every part of the key")
    explain.set_defaults(run=_explain)


def _list(arguments: argparse.Namespace) -> int:
    store = _open(arguments)
    entries = [] if store is None else store.list_entries()
    for entry in entries:
        manifest = entry.manifest
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        print(f"{manifest.digest[:12]}  {used}  {_size(entry.size):>9}  {manifest.kind:<18}  {manifest.name}")
    print(f"{len(entries)} entries, {_size(sum(entry.size for entry in entries))}")
    return int(store is None)


def _clear(arguments: argparse.Namespace) -> int:
    store = _open(arguments)
    if store is None:
        return 1
    count, size = store.clear()
    print(f"removed {count} entries, {_size(size)}")
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    if arguments.key.endswith(".py"):
        return _explain_script(arguments)
    store = _open(arguments)
    if store is None:
        return 1
    entries = store.list_entries()
    chosen = _choose(entries, arguments.key)
    if chosen is None:
        return 1
    manifest = chosen.manifest
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.created))
    print(f"{manifest.digest}: {manifest.kind} of {manifest.name}, made {made}")
    if arguments.all:
        for name, content in manifest.components.items():
            print(f"  {name}: {content}")
        return 0
    if arguments.arguments:
        other = _choose(entries, arguments.arguments[0])
        if other is None:
            return 1
        noun = f"the {other.manifest.kind} of {other.manifest.name}"
    else:
        other = nearest(manifest.kind, manifest.name, manifest.components, entries)
        if other is None:
            print(f"There is no other {manifest.kind} of {manifest.name} to compare it with.")
            return 0
        noun = "the nearest other one"
    print(f"It differs from {noun}, {other.manifest.digest[:12]}, in:")
    for difference in differences(other.manifest.components, manifest.components):
        print(f"  {difference}")
    return 0


def _explain_script(arguments: argparse.Namespace) -> int:
    """Run a script until its first miss; return 0, also if there is none."""
    script = Path(arguments.key)
    if not script.is_file():
        print(f"{script} is not a file", file=sys.stderr)
        return 1
    folder = getattr(arguments, "dir", None)
    variables = dict(os.environ)
    if folder:
        os.environ[_VARIABLE] = folder

    class Missed(BaseException):
        """The end of the script; an ``except Exception`` of the script does not catch it."""

    def end(sentence: str) -> None:
        print(sentence)
        raise Missed

    on_miss.append(end)
    argv, path = [str(script), *arguments.arguments], [str(script.resolve().parent), *sys.path]
    try:
        with replaced(sys, argv=argv, path=path):
            runpy.run_path(str(script), run_name="__main__")
    except Missed:
        return 0
    finally:
        on_miss.remove(end)
        os.environ.clear()
        os.environ.update(variables)
    print(f"The export cache had an entry for every export of {script}.")
    return 0


def _choose(entries: list[Listed], start: str) -> Listed | None:
    """Return the entry whose key begins with ``start``; the newest graph if that is empty."""
    found = [
        e for e in entries if e.manifest.digest.startswith(start) and (start or e.manifest.kind == "graph")
    ]
    if not found or (start and len(found) > 1):
        what = "no entry" if not found else f"{len(found)} entries"
        wanted = f"with a key that starts with {start!r}" if start else "of an export"
        print(f"{what} {wanted}; `python -m torch2ort cache list` shows the keys", file=sys.stderr)
        return None
    return max(found, key=lambda entry: entry.manifest.created)


def _open(arguments: argparse.Namespace) -> Store | None:
    """Return the store of the requested folder; ``None``, with a message, if there is none."""
    given = getattr(arguments, "dir", None)
    try:
        folder = Path(given) if given else cache_folder(Options())
        if folder is None:
            print(
                "the cache is switched off: pass --dir FOLDER, or unset TORCH2ORT_CACHE_DIR", file=sys.stderr
            )
            return None
        if not folder.is_dir():
            print(f"{folder} is not a folder", file=sys.stderr)
            return None
        return Store(folder)
    except RefusedError as error:
        print(error, file=sys.stderr)
        return None


def _size(count: float) -> str:
    """Return a number of bytes as a text, such as ``1.5 MiB`` for 1572864."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.1f} {_UNITS[unit]}" if unit else f"{count} B"
