"""The versions that torch2ort was tested with, and what is said outside of them.

What torch2ort does hangs on private names of torch and of the ONNX packages, which any release may move: A
name that is missing is named at import, and a version that nobody tried gets a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from torch2ort.support.user_warnings import warn


@dataclass(frozen=True)
class Tested:
    """A range of releases, both ends in it.

    Attributes:
        first: the oldest one that the whole range was tested from.
        last: the newest one.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]

    def holds(self, version: str) -> bool:
        """Whether a version is one of these releases, or a patch of one."""
        numbers = tuple(map(int, re.findall(r"\d+", version)[: len(self.last)]))
        return self.first <= numbers <= self.last

    @property
    def requirement(self) -> str:
        """The range as pip takes it: ``>=2.11,<2.16``."""
        after = (*self.last[:-1], self.last[-1] + 1)
        return f">={_text(self.first)},<{_text(after)}"

    def __str__(self) -> str:
        return f"{_text(self.first)} to {_text(self.last)}"


# What the matrix of versions runs; pyproject.toml allows no others. A test compares the two.
TESTED: Mapping[str, Tested] = {
    "torch": Tested((2, 11), (2, 15)),
    "onnxscript": Tested((0, 7), (0, 7)),
    "onnx-ir": Tested((1, 1), (1, 1)),
}


# Each of them is imported as onnxruntime, out of the same folder.
RUNTIMES = ("onnxruntime-training-cpu", "onnxruntime-training", "onnxruntime", "onnxruntime-gpu")


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def installed(distribution: str) -> str:
    """The version of an installed distribution."""
    return metadata.version(distribution)


def remedy(distribution: str) -> str:
    """Which versions were tested and how to get one, as the end of a message."""
    tested = TESTED[distribution]
    return (
        f"torch2ort was tested with {distribution} {tested}. "
        f"Install one of those: pip install '{distribution}{tested.requirement}'"
    )


def warn_of_untested() -> None:
    """Issue one warning a process for each package whose version nobody tried."""
    for distribution, tested in TESTED.items():
        try:
            version = installed(distribution)
        except metadata.PackageNotFoundError:
            # What runs training files needs none of them, and what does need one says so.
            continue
        if not tested.holds(version):
            warn(f"{distribution} {version} is outside of what was tried. {remedy(distribution)}")


def warn_of_two_runtimes() -> None:
    """Issue a warning where more than one onnxruntime is installed: the later one wrote over the earlier."""
    found = dict(_runtimes())
    if len(found) > 1:
        warn(
            f"{' and '.join(f'{name} {version}' for name, version in found.items())} are both installed, and "
            f"share one folder: what runs may be a mixture. Remove both with pip uninstall "
            f"{' '.join(found)}, then install one of them"
        )


def _runtimes() -> Iterator[tuple[str, str]]:
    for name in RUNTIMES:
        with suppress(metadata.PackageNotFoundError):
            yield name, installed(name)


@contextmanager
def private_names(distribution: str) -> Iterator[None]:
    """Around the reading of private names at import: one that is missing gets a sentence.

    Raises:
        ImportError: a name is missing; says which, and the versions that have it.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"torch2ort does not work with {distribution} {installed(distribution)}, which lacks a private "
            f"name that torch2ort reads ({error}). {remedy(distribution)}"
        ) from error


def need(owner: Any, *names: str) -> None:
    """Check that a module or class has attributes, or that a class gives them to its instances.

    Raises:
        AttributeError: names the first one that it has not.
    """
    for name in names:
        if not hasattr(owner, name) and not _sets(owner, name):
            kind = "type" if isinstance(owner, type) else "module"
            raise AttributeError(f"{kind} {owner.__name__!r} has no attribute {name!r}")


def _sets(owner: Any, name: str) -> bool:
    """Whether a class's own code names an attribute, which is how an instance gets it."""
    classes = getattr(owner, "__mro__", ())
    codes = (getattr(value, "__code__", None) for one in classes for value in vars(one).values())
    annotated = any(name in getattr(one, "__annotations__", ()) for one in classes)
    return annotated or any(code is not None and name in code.co_names for code in codes)
