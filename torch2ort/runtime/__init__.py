"""The engines: inference session and training session."""

from torch2ort.runtime.classes import bind_classes
from torch2ort.runtime.graph import Graph, Mutation, with_outputs
from torch2ort.runtime.inference import InferenceEngine
from torch2ort.runtime.large import content_of
from torch2ort.runtime.nodes import load_sites, python_op_nodes
from torch2ort.runtime.session import inference_session
from torch2ort.runtime.stock import custom_ops_library_path
from torch2ort.runtime.training import ForwardState, TrainingEngine

__all__ = [
    "ForwardState",
    "Graph",
    "InferenceEngine",
    "Mutation",
    "TrainingEngine",
    "bind_classes",
    "content_of",
    "custom_ops_library_path",
    "inference_session",
    "load_sites",
    "python_op_nodes",
    "with_outputs",
]
