"""The public names of ``torch2ort``; each is imported at the first access, see ``__init__.py``."""

from torch2ort import io_schema, optim
from torch2ort.cache.report import CacheReport
from torch2ort.dynamo.report import CompileReport, compile_report
from torch2ort.errors import (
    DtypeError,
    EngineError,
    ExportError,
    FunctionNotFoundError,
    InplaceMapError,
    ModelLoadError,
    OptionError,
    RegistryError,
    RuntimeNotFoundError,
    SchemaError,
    SchemaMismatchError,
    ShapeInferenceError,
    Torch2OrtError,
    Torch2OrtWarning,
    TrainerError,
    TrainerNotStartedError,
    UnsupportedOperatorError,
)
from torch2ort.export import export
from torch2ort.export_training import export_training
from torch2ort.exported_model import ExportedModel, load
from torch2ort.module import ORTModule, density, profile, startup
from torch2ort.options import Options
from torch2ort.pythonop import (
    Exporter,
    InplaceMap,
    PythonOpSite,
    Registration,
    register_exporter,
    register_function,
    register_gradient,
    register_inline,
    register_inplace_map,
    register_shape_inferer,
    register_symbolic,
    registered,
    unregister,
)
from torch2ort.runtime import custom_ops_library_path
from torch2ort.symbolics.registered import GraphBuilder, GraphValue
from torch2ort.training_artifacts import TrainingArtifacts

__all__ = [
    "CacheReport",
    "CompileReport",
    "DtypeError",
    "EngineError",
    "ExportError",
    "ExportedModel",
    "Exporter",
    "FunctionNotFoundError",
    "GraphBuilder",
    "GraphValue",
    "InplaceMap",
    "InplaceMapError",
    "ModelLoadError",
    "ORTModule",
    "OptionError",
    "Options",
    "PythonOpSite",
    "Registration",
    "RegistryError",
    "RuntimeNotFoundError",
    "SchemaError",
    "SchemaMismatchError",
    "ShapeInferenceError",
    "Torch2OrtError",
    "Torch2OrtWarning",
    "TrainerError",
    "TrainerNotStartedError",
    "TrainingArtifacts",
    "UnsupportedOperatorError",
    "compile_report",
    "custom_ops_library_path",
    "density",
    "export",
    "export_training",
    "io_schema",
    "load",
    "optim",
    "profile",
    "register_exporter",
    "register_function",
    "register_gradient",
    "register_inline",
    "register_inplace_map",
    "register_shape_inferer",
    "register_symbolic",
    "registered",
    "startup",
    "unregister",
]
