"""The engines: inference session and training session."""

from torch2ort.runtime.inference import InferenceEngine
from torch2ort.runtime.session import inference_session
from torch2ort.runtime.stock import custom_ops_library_path

__all__ = [
    "InferenceEngine",
    "custom_ops_library_path",
    "inference_session",
]
