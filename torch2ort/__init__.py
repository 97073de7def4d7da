"""torch2ort: PyTorch models with custom autograd Functions, on ONNX Runtime.

>>> import torch, torch2ort
>>> exported = torch2ort.export(torch.nn.Linear(4, 2), torch.randn(3, 4))
>>> [value.name for value in exported.proto.graph.input]
['input']

Names are imported when they are asked for: ``torch2ort.artifacts`` runs where there is no torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch2ort.support.versions import warn_of_two_runtimes, warn_of_untested

if TYPE_CHECKING:
    from torch2ort._public import *  # noqa: F403


# Public packages below this one, which are imported when they are asked for.
_ROOMS = ("artifacts", "hooks", "trainer")


class _Package(ModuleType):
    """The package, in which a function keeps its name although the file that it is in has the same."""

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return importlib.import_module(f"{self.__name__}._public").__all__
        if name == "__version__":
            return importlib.metadata.version(self.__name__)
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        # A file goes first: what is public may be half imported by now, and what imports it asks for files.
        if importlib.util.find_spec(f"{self.__name__}.{name}") is None:
            public = importlib.import_module(f"{self.__name__}._public")
            if name not in public.__all__:
                raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
            setattr(self, name, getattr(public, name))
            return vars(self)[name]
        module = importlib.import_module(f"{self.__name__}.{name}")
        return vars(self).get(name, module)

    def __setattr__(self, name: str, value: Any) -> None:
        # What an import leaves: torch2ort.export is the function, whoever imports the file first.
        if isinstance(value, ModuleType) and callable(vars(value).get(name)):
            value = vars(value)[name]
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        public = importlib.import_module(f"{self.__name__}._public")
        return sorted({*super().__dir__(), *public.__all__, *_ROOMS, "__version__"})


sys.modules[__name__].__class__ = _Package

warn_of_untested()
warn_of_two_runtimes()
