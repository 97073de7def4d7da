"""The errors that torch2ort raises.

All derive from :class:`Torch2OrtError`, so one ``except`` clause catches them. Errors of the user's
own code (a Function's ``forward`` or ``backward``, a module's ``forward``) are never wrapped.
"""

from __future__ import annotations


class Torch2OrtError(Exception):
    """Base class of torch2ort's errors."""


class ExportError(Torch2OrtError):
    """The model cannot be exported, or an export cannot be written to a file."""


class ModelLoadError(Torch2OrtError):
    """A file is not a model that torch2ort can load."""


class UnsupportedOperatorError(ExportError):
    """An operator has no translation, or the engine has no correct gradient or kernel for it."""


class DtypeError(ExportError, RuntimeError):
    """An operator gets tensors of different dtypes; eager PyTorch also requires one dtype."""


class SchemaError(Torch2OrtError, TypeError):
    """Nested data contains an object that cannot be flattened, or tensors do not match a schema."""


class SchemaMismatchError(SchemaError):
    """A call's inputs differ from those that the graph was exported for."""


class RegistryError(Torch2OrtError, ValueError):
    """A registration is malformed, or its name is already taken or unknown."""


class FunctionNotFoundError(Torch2OrtError, LookupError):
    """A loaded model names Functions that were not supplied."""


class ShapeInferenceError(ExportError):
    """A shape inferer's result cannot be the shapes of its Function's outputs."""


class InplaceMapError(Torch2OrtError):
    """A declared in-place map contradicts the Function."""


class OptionError(Torch2OrtError, ValueError):
    """An option is unknown or has a value that is not allowed."""


class RuntimeNotFoundError(Torch2OrtError, ImportError):
    """No suitable ONNX Runtime package is installed."""


class EngineError(Torch2OrtError, RuntimeError):
    """ONNX Runtime failed while it ran a graph."""


class TrainerError(Torch2OrtError, RuntimeError):
    """A trainer's state, checkpoint or processes are inconsistent."""


class TrainerNotStartedError(Torch2OrtError, RuntimeWarning):
    """A result of a trainer's first step is requested before it; a ``RuntimeWarning``, as its API states."""


class Torch2OrtWarning(UserWarning):
    """The class of all Python warnings that torch2ort issues."""
