"""Every error that torch2ort raises of its own accord.

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
    """An operator gets tensors of different dtypes, of which eager PyTorch, too, wants one."""


class SchemaError(Torch2OrtError, TypeError):
    """Nested data holds something that cannot be flattened, or tensors do not fit a schema."""


class SchemaMismatchError(SchemaError):
    """A call's inputs differ from those that the graph was exported for."""


class RegistryError(Torch2OrtError, ValueError):
    """A registration is malformed, or its name is already taken or unknown."""


class FunctionNotFoundError(Torch2OrtError, LookupError):
    """A loaded model names Functions that were not supplied."""


class ShapeInferenceError(ExportError):
    """A shape inferer returned something that cannot be the shape of its Function's outputs."""


class InplaceMapError(Torch2OrtError):
    """A declared in-place map contradicts what the Function does."""


class OptionError(Torch2OrtError, ValueError):
    """An option is unknown or has a value that is not allowed."""


class RuntimeNotFoundError(Torch2OrtError, ImportError):
    """No ONNX Runtime package that can do the job is installed."""


class EngineError(Torch2OrtError, RuntimeError):
    """ONNX Runtime failed while it ran a graph."""


class TrainerError(Torch2OrtError, RuntimeError):
    """A trainer's state, checkpoint or processes do not fit together."""


class TrainerNotStartedError(Torch2OrtError, RuntimeWarning):
    """A trainer is asked for what its first step makes; a ``RuntimeWarning``, as its reference says."""


class Torch2OrtWarning(UserWarning):
    """Class of every Python warning that torch2ort issues."""
