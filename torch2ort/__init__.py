"""torch2ort: PyTorch models with custom autograd Functions, on ONNX Runtime.

>>> import torch, torch2ort
>>> exported = torch2ort.export(torch.nn.Linear(4, 2), torch.randn(3, 4))
>>> [value.name for value in exported.proto.graph.input]
['input']

Names are imported at the first access, so ``torch2ort.artifacts`` runs without torch.
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


# Public packages below this one, which are imported at the first access.
_ROOMS = ("artifacts", "hooks", "trainer")


@functools.cache
def _places() -> dict[str, str]:
    """Return public name -> its module, as ``_public.py`` imports it; that file is parsed, and never run.

    So an access to a name imports only that name's module: a start from the cache needs no tracer.
    """
    statements = ast.parse(Path(__file__).with_name("_public.py").read_text(encoding="utf-8")).body
    imports = [statement for statement in statements if isinstance(statement, ast.ImportFrom)]
    return {alias.name: statement.module or "" for statement in imports for alias in statement.names}


class _Package(ModuleType):
    """The class of the package, in which a function is not replaced by its file's module of the same name."""

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return sorted(_places())
        if name == "__version__":
            return importlib.metadata.version(self.__name__)
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        # A file takes precedence: public names may be partly imported, and importing them accesses files.
        if importlib.util.find_spec(f"{self.__name__}.{name}") is None:
            if name not in _places():
                raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
            setattr(self, name, getattr(importlib.import_module(_places()[name]), name))
            return vars(self)[name]
        module = importlib.import_module(f"{self.__name__}.{name}")
        return vars(self).get(name, module)

    def __setattr__(self, name: str, value: Any) -> None:
        # An import sets the module: torch2ort.export stays the function, whichever code imports the file
        # first.
        if isinstance(value, ModuleType) and callable(vars(value).get(name)):
            value = vars(value)[name]
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_places(), *_ROOMS, "__version__"})


sys.modules[__name__].__class__ = _Package

warn_of_untested()
warn_of_two_runtimes()
