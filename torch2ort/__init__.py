"""torch2ort: PyTorch models with custom autograd Functions, on ONNX Runtime.

>>> import torch, torch2ort
>>> exported = torch2ort.export(torch.nn.Linear(4, 2), torch.randn(3, 4))
>>> [value.name for value in exported.proto.graph.input]
['input']

Names are imported when they are asked for: ``torch2ort.artifacts`` runs where there is no torch.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch2ort.support.versions import warn_of_two_runtimes, warn_of_untested

if TYPE_CHECKING:
    from torch2ort._public import *  # noqa: F403


# Public packages below this one, which are imported when they are asked for.
_ROOMS = ("artifacts", "hooks", "trainer")


@functools.cache
def _places() -> dict[str, str]:
    """Public name -> the module that has it, as ``_public.py`` imports it; it is read here, and never run.

    A name costs its own module's imports alone: a start out of the cache needs no tracer.
    """
    statements = ast.parse(Path(__file__).with_name("_public.py").read_text(encoding="utf-8")).body
    imports = [statement for statement in statements if isinstance(statement, ast.ImportFrom)]
    return {alias.name: statement.module or "" for statement in imports for alias in statement.names}


class _Package(ModuleType):
    """The package, in which a function keeps its name although the file that it is in has the same."""

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return sorted(_places())
        if name == "__version__":
            return importlib.metadata.version(self.__name__)
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        # A file goes first: what is public may be half imported by now, and what imports it asks for files.
        if importlib.util.find_spec(f"{self.__name__}.{name}") is None:
            if name not in _places():
                raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
            setattr(self, name, getattr(importlib.import_module(_places()[name]), name))
            return vars(self)[name]
        module = importlib.import_module(f"{self.__name__}.{name}")
        return vars(self).get(name, module)

    def __setattr__(self, name: str, value: Any) -> None:
        # What an import leaves: torch2ort.export is the function, whoever imports the file first.
        if isinstance(value, ModuleType) and callable(vars(value).get(name)):
            value = vars(value)[name]
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_places(), *_ROOMS, "__version__"})


sys.modules[__name__].__class__ = _Package

warn_of_untested()
warn_of_two_runtimes()
