"""Which engine runs a graph, and so what the graph is translated for."""

from __future__ import annotations

from torch2ort.engines.interface import Engine
from torch2ort.engines.ort_training.engine import TrainingEngine
from torch2ort.engines.ort_training.target import GRADIENT_RULES
from torch2ort.errors import RuntimeNotFoundError
from torch2ort.exports.built import Built
from torch2ort.options import DEFAULT_OPSET, Options
from torch2ort.runtime.probe import can_run
from torch2ort.symbolics.target import GradientRules, Target

JOINT, ORT_TRAINING = "joint", "ort_training"


def engine_name(options: Options) -> str:
    """The engine that trains an ORTModule with these options.

    Raises:
        RuntimeNotFoundError: the one that they ask for is not there.
    """
    if options.engine == JOINT:
        raise RuntimeNotFoundError(
            "engine='joint' is not part of this version of torch2ort; use engine='ort_training' with "
            "onnxruntime-training, pip install 'torch2ort[training]'"
        )
    return ORT_TRAINING


def target_of(options: Options, *, differentiate: bool) -> Target:
    """What a graph must be to run on the installed onnxruntime.

    Args:
        options: the opset.
        differentiate: whether gradients are wanted.
    """
    return Target(
        opset=options.opset or DEFAULT_OPSET,
        differentiates=differentiate,
        can_run=can_run,
        gradients=GRADIENT_RULES if differentiate else GradientRules(),
    )


def engine_of(built: Built, requires_grad: frozenset[str], options: Options) -> Engine:
    """The engine that trains a graph.

    Args:
        built: the graph.
        requires_grad: the graph inputs (model inputs and weights) that require gradients.
        options: which engine, threads and debugging.

    Raises:
        RuntimeNotFoundError: no onnxruntime is installed that can train.
        UnsupportedOperatorError: the engine cannot train an operator.
    """
    engine_name(options)
    return TrainingEngine(built.graph, requires_grad, options, built.shelf)
