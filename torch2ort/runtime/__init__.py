"""Sessions of ONNX Runtime, the callees of their PythonOp nodes, and values."""

from torch2ort.runtime._ort_private import (
    DISABLED_OPTIMIZERS,
    drop_model_bytes,
    onnxruntime,
    version,
)
from torch2ort.runtime.inference import InferenceEngine
from torch2ort.runtime.session import inference_session
from torch2ort.runtime.stock import custom_ops_library_path

__all__ = [
    "DISABLED_OPTIMIZERS",
    "InferenceEngine",
    "custom_ops_library_path",
    "drop_model_bytes",
    "inference_session",
    "onnxruntime",
    "version",
]
