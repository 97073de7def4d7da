"""Calls that draw random numbers as ONNX's own operators, for graphs that any runtime reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from torch2ort.kernels.functions import Bernoulli, Dropout
from torch2ort.pythonop import Site
from torch2ort.symbolics.graph_builder import constant, op, ops


def drawn_node(site: Site, inputs: Sequence[ir.Value]) -> Sequence[ir.Value]:
    """The results of the operator that draws as ``site`` does, by numbers of its own; empty without one.

    Its first inputs are tensors that the call could be given.
    """
    if site.function is Dropout:
        ratio = constant(np.array(site.arguments[0], np.float32))
        kinds = (inputs[0].dtype, ir.DataType.BOOL)
        return ops("Dropout", inputs[0], ratio, constant(True), dtypes=kinds)
    if site.function is Bernoulli:
        p = constant(site.arguments[0], inputs[0].dtype)
        return [op("Bernoulli", op("Expand", p, op("Shape", inputs[0])))]
    return ()
