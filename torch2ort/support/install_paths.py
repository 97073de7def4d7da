"""Folders of installed code. They determine the owner of a file, as a user's files may have any name."""

from __future__ import annotations

import functools
import importlib.util
import os
import site
import sys
import sysconfig

# Folders of installed packages; in some layouts they are below that of the standard library.
INSTALLED = tuple(
    dict.fromkeys(
        os.path.realpath(folder)
        for folder in (
            sysconfig.get_path("purelib"),
            sysconfig.get_path("platlib"),
            *site.getsitepackages(),
            site.getusersitepackages(),
        )
    )
)
# Folders of Python's own modules.
STANDARD_LIBRARY = tuple({os.path.realpath(sysconfig.get_path(p)) for p in ("stdlib", "platstdlib")})


def real_path(path: str) -> str:
    """Return ``os.path.realpath(path)``, with the folders' real paths cached."""
    folder, name = os.path.split(path)
    path = os.path.join(_real_folder(folder), name)
    return os.path.realpath(path) if os.path.islink(path) else path


@functools.lru_cache(maxsize=4096)
def _real_folder(folder: str) -> str:
    name = os.path.basename(folder)
    return os.path.realpath(folder) if name in ("", ".", "..") else real_path(folder)


def below(path: str, folder: str) -> bool:
    """Return True if a path is in a folder; both are real paths."""
    return path.startswith(folder) and path[len(folder) : len(folder) + 1] == os.sep


@functools.cache
def folder_of(package: str) -> str | None:
    """Return the real folder of a package that is imported or can be found; nothing is imported."""
    module = sys.modules.get(package)
    file = getattr(module, "__file__", None)
    if file is None and module is None:
        spec = importlib.util.find_spec(package)
        file = None if spec is None else spec.origin
    return None if file is None else os.path.realpath(os.path.dirname(file))


def is_pythons(path: str) -> bool:
    """Return True if a real path is a file of the standard library."""
    return any(below(path, folder) for folder in STANDARD_LIBRARY) and not any(
        below(path, folder) for folder in INSTALLED
    )


def is_pythons_module(name: str) -> bool:
    """Return True if a name is that of a module of the standard library that no other module shadows."""
    top = name.partition(".")[0]
    if top not in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(top), "__file__", None)
    return file is None or _is_pythons_file(file)


@functools.lru_cache(maxsize=1024)
def _is_pythons_file(file: str) -> bool:
    return is_pythons(real_path(file))
