"""The engines: inference session and training session."""

from torch2ort.runtime.graph import Graph, Mutation
from torch2ort.runtime.inference import InferenceEngine, inference_session
from torch2ort.runtime.training import ForwardState, TrainingEngine

__all__ = ["ForwardState", "Graph", "InferenceEngine", "Mutation", "TrainingEngine", "inference_session"]
