"""snntorch: spiking neurons, whose step has a surrogate gradient.

The step becomes two operators, for which training keeps the surrogate's ``backward``. An inference graph
needs no Python.
"""

from __future__ import annotations

from typing import Any

import torch

from torch2ort.pythonop.registry import register_exporter

# Without StochasticSpikeOperator, whose backward draws random numbers, and LeakySpikeOperator, whose backward
# is incomplete in snntorch 1.0.0.
_SURROGATES = (
    "ATan",
    "FastSigmoid",
    "Heaviside",
    "Sigmoid",
    "SparseFastSigmoid",
    "SpikeRateEscape",
    "StraightThroughEstimator",
    "Triangular",
)


def _spike(g: Any, membrane: Any, *parameters: Any) -> Any:
    return g.op("Cast", g.op("Greater", membrane, 0), to=torch.float32)


for _name in _SURROGATES:
    register_exporter(f"snntorch.surrogate.{_name}", _spike, gradient="function")
