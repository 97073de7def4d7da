"""The versions that torch2ort was tested with, and the messages for other versions.

torch2ort depends on private names of torch and of the ONNX packages, which any release may change. A missing
name raises an error at import, and an untested version causes a warning.
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
    """A range of tested releases, both ends included.

    Attributes:
        first: the oldest one.
        last: the newest one.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]

    def holds(self, version: str) -> bool:
        """Return True if a version is one of these releases, or a patch of one."""
        numbers = tuple(map(int, re.findall(r"\d+", version)[: len(self.last)]))
        return self.first <= numbers <= self.last

    @property
    def requirement(self) -> str:
        """The range in pip's notation: ``>=2.11,<2.16``."""
        after = (*self.last[:-1], self.last[-1] + 1)
        return f">={_text(self.first)},<{_text(after)}"

    def __str__(self) -> str:
        return f"{_text(self.first)} to {_text(self.last)}"


# The versions of the test matrix; pyproject.toml allows no others. A test compares the two.
TESTED: Mapping[str, Tested] = {
    "torch": Tested((2, 11), (2, 15)),
    "onnxscript": Tested((0, 7), (0, 7)),
    "onnx-ir": Tested((1, 1), (1, 1)),
}


# Each of these distributions is imported as onnxruntime, from the same folder.
RUNTIMES = ("onnxruntime-training-cpu", "onnxruntime-training", "onnxruntime", "onnxruntime-gpu")


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def installed(distribution: str) -> str:
    """Return the version of an installed distribution."""
    return metadata.version(distribution)


def remedy(distribution: str) -> str:
    """Return the tested versions and how to install one, as the end of a message."""
    tested = TESTED[distribution]
    return (
        f"torch2ort was tested with {distribution} {tested}. "
        f"Install one of those: pip install '{distribution}{tested.requirement}'"
    )


def warn_of_untested() -> None:
    """Issue one warning per process for each package whose version is untested."""
    for distribution, tested in TESTED.items():
        try:
            version = installed(distribution)
        except metadata.PackageNotFoundError:
            # Training files run without these packages; code that needs one raises its own error.
            continue
        if not tested.holds(version):
            warn(f"{distribution} {version} is untested. {remedy(distribution)}")


def warn_of_two_runtimes() -> None:
    """Issue a warning if more than one onnxruntime is installed: the later one overwrote the earlier."""
    found = dict(_runtimes())
    if len(found) > 1:
        warn(
            f"{' and '.join(f'{name} {version}' for name, version in found.items())} are both installed, and "
            f"share one folder: its files may be a mixture. Remove both with pip uninstall "
            f"{' '.join(found)}, then install one of them"
        )


def _runtimes() -> Iterator[tuple[str, str]]:
    for name in RUNTIMES:
        with suppress(metadata.PackageNotFoundError):
            yield name, installed(name)


@contextmanager
def private_names(distribution: str) -> Iterator[None]:
    """Return a context for reading private names at import that explains a missing name.

    Raises:
        ImportError: a name is missing; names it, and the versions that have it.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"torch2ort does not work with {distribution} {installed(distribution)}, which lacks a private "
            f"name that torch2ort reads ({error}). {remedy(distribution)}"
        ) from error


def need(owner: Any, *names: str) -> None:
    """Check that a module or class has attributes, or that a class sets them on its instances.

    Raises:
        AttributeError: an attribute is missing; names the first one.
    """
    for name in names:
        if not hasattr(owner, name) and not _sets(owner, name):
            kind = "type" if isinstance(owner, type) else "module"
            raise AttributeError(f"{kind} {owner.__name__!r} has no attribute {name!r}")


def _sets(owner: Any, name: str) -> bool:
    """Return True if a class's own code names or annotates an attribute, as code that sets it does."""
    classes = getattr(owner, "__mro__", ())
    codes = (getattr(value, "__code__", None) for one in classes for value in vars(one).values())
    annotated = any(name in getattr(one, "__annotations__", ()) for one in classes)
    return annotated or any(code is not None and name in code.co_names for code in codes)
