"""Installed packages to which code belongs, so that a name and a version identify the code.

Code that is not below a folder for installed packages, or has no version there, is the user's own (also
a package that was installed in editable mode), and is read instead.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from torch2ort.support.install_paths import INSTALLED, below, is_pythons, real_path

_TORCH = os.path.realpath(os.path.dirname(torch.__file__))
_OWN = os.path.realpath(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))


@dataclass(frozen=True, slots=True)
class Package:
    """A package whose code does not change without its version.

    Attributes:
        name: ``torch``, ``python`` for the standard library, ...
        version: its version.
    """

    name: str
    version: str


@functools.lru_cache(maxsize=4096)
def package_of_file(path: str) -> Package | None:
    """Return the package of a source file or extension module; ``None`` if it is the user's own."""
    if path.startswith("<"):
        return _python() if path.startswith("<frozen ") else None
    path = real_path(path)
    if below(path, _TORCH):
        return Package("torch", torch.__version__)
    if below(path, _OWN):
        return Package("torch2ort", own_digest())
    for folder in INSTALLED:
        if below(path, folder):
            return _distribution(path[len(folder) + 1 :].split(os.sep, 1)[0])
    return _python() if is_pythons(path) else None


def package_of_module(name: str) -> Package | None:
    """Return the package of an imported module; ``None`` if it is the user's own or is not imported."""
    module = sys.modules.get(name)
    if module is None:
        return None
    file = getattr(module, "__file__", None)
    if file is not None:
        return package_of_file(file)
    if name in sys.builtin_module_names or name.partition(".")[0] in sys.stdlib_module_names:
        return _python()
    top = name.partition(".")[0]
    # torch makes modules in C that have no file: torch._C._nn.
    return package_of_module(top) if top != name else None


def package_of_import(name: str) -> Package | None:
    """Return the package that an import of ``name`` would find; nothing is imported."""
    top = name.partition(".")[0]
    spec = importlib.util.find_spec(top) if top else None
    if spec is None or spec.origin is None:
        return None
    return _python() if spec.origin in ("built-in", "frozen") else package_of_file(spec.origin)


def package_of_function(function: FunctionType) -> Package | None:
    """Return the package of a Python function, by the file that it was compiled from."""
    return package_of_file(function.__code__.co_filename)


def package_of_class(cls: type) -> Package | None:
    """Return the package that defines a class under its name; a class made at run time is the user's."""
    package = package_of_module(cls.__module__)
    return package if package is not None and by_name(cls.__module__, cls.__qualname__) is cls else None


def by_name(module: str, qualified_name: str) -> Any:
    """Return the object at a dotted name of an imported module, or ``None``; no user's code runs."""
    found: Any = sys.modules.get(module)
    for part in qualified_name.split("."):
        try:
            found = vars(found).get(part)
        except TypeError:
            return None
    return found


@functools.cache
def own_digest() -> str:
    """Return torch2ort's version; for a working copy, also a digest of its Python sources, which change."""
    if any(below(_OWN, folder) for folder in INSTALLED):
        return version("torch2ort")
    digest = hashlib.sha256()
    for path in sorted(_sources(_OWN)):
        digest.update(path[len(_OWN) :].encode() + b"\0" + _content_of(path) + b"\0")
    return f"{version('torch2ort')} {digest.hexdigest()[:16]}"


def _content_of(path: str) -> bytes:
    """Return the content of a file, in half of the time that a Python file object takes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = os.read(descriptor, os.fstat(descriptor).st_size)
        while more := os.read(descriptor, 1 << 16):
            content += more
    finally:
        os.close(descriptor)
    return content


def _sources(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                if entry.name != "__pycache__":
                    yield from _sources(entry.path)
            elif entry.name.endswith(".py"):
                yield entry.path


@functools.cache
def version(distribution: str) -> str:
    """Return the version of an installed distribution, or ``"none"``."""
    try:
        found = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"
    # The attribute `version` of importlib.metadata parses the whole file, which contains the package's
    # README.
    line = re.search(r"^Version: *(\S+)", found.read_text("METADATA") or "", re.MULTILINE)
    return line[1] if line else found.version


@functools.cache
def _distribution(top: str) -> Package | None:
    name = top.partition(".")[0]
    if version(name) != "none":
        return Package(name, f"{version(name)} {_content(name)}")
    owners = _owners().get(name)
    if not owners:
        return None
    return Package(name, " ".join(f"{o} {version(o)} {_content(o)}" for o in sorted(set(owners))))


@functools.cache
def _content(distribution: str) -> str:
    """Return the digest of the installed code: users may install their own package twice with one version."""
    record = _record(distribution)
    # Scripts contain the path of their environment. They come first, as the lines are sorted.
    start = 0
    while record.startswith(b"../", start):
        start = record.find(b"\n", start) + 1 or len(record)
    # A view, as a large package's record is half a megabyte.
    return hashlib.sha256(memoryview(record)[start:]).hexdigest()[:16]


def _record(distribution: str) -> bytes:
    """Return the list of a distribution's files, with a digest of each."""
    found = importlib.metadata.distribution(distribution)
    name = f"{distribution.replace('-', '_')}-{version(distribution)}.dist-info"
    try:
        # Nearly all installers put it there; `read_text` takes three times as long for half a megabyte.
        return _content_of(str(found.locate_file(f"{name}/RECORD")))
    except OSError:
        return (found.read_text("RECORD") or "").encode()


@functools.cache
def _owners() -> dict[str, list[str]]:
    # This reads the file list of every installed package, so it is tried last.
    return {name: list(owners) for name, owners in importlib.metadata.packages_distributions().items()}


@functools.cache
def _python() -> Package:
    return Package("python", sys.version)
