"""Times of typical operators of each kind in both libraries."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch2ort._torch.aot import FakeTensorMode
from torch2ort._torch.dispatch import OpOverload
from torch2ort.autotune.alternatives import PRODUCT
from torch2ort.autotune.microbenchmark import RULE, timer, ways
from torch2ort.options import Options
from torch2ort.program.target import Target
from torch2ort.runtime.kernel_support import can_run, checked_opset

aten = torch.ops.aten
# Seconds for one operator; a dozen of them take two seconds with their sessions.
_SECONDS = 0.08
_SAME = [[1, 1], [1, 1], [1, 1], False, [0, 0], 1]

# Sizes of tensors, whether each is read transposed, and the other arguments. They are those of a step of a
# transformer of 256 to 1024 columns, and of a convolutional net over images of 32 by 32.
_Case = tuple[OpOverload, Sequence[tuple[tuple[int, ...], bool]], Sequence[Any]]
_CASES: Mapping[str, Sequence[_Case]] = {
    "products": [
        (aten.mm.default, [((1024, 256), False), ((256, 1024), False)], []),
        (aten.mm.default, [((1024, 256), True), ((1024, 1024), False)], []),
        (aten.addmm.default, [((256,), False), ((1024, 1024), False), ((256, 1024), True)], []),
        (aten.bmm.default, [((32, 128, 64), False), ((32, 64, 128), False)], []),
    ],
    "convolutions": [
        (aten.convolution.default, [((8, 32, 32, 32), False), ((32, 32, 3, 3), False)], [None, *_SAME]),
        (aten.convolution.default, [((8, 64, 16, 16), False), ((64, 64, 3, 3), False)], [None, *_SAME]),
    ],
    "GELU": [(aten.gelu.default, [((1024, 1024), False)], [])],
    "softmax": [(aten._softmax.default, [((32, 128, 128), False)], [-1, False])],
    "sums": [(aten.sum.dim_IntList, [((1024, 1024), False)], [[0]])],
}


def ratios(options: Options, seconds: float = _SECONDS) -> dict[str, float]:
    """Return the time of PyTorch's kernels divided by that of ONNX Runtime's, by kind of operator.

    Args:
        options: threads and opset.
        seconds: the time for one operator.
    """
    target = Target(opset=checked_opset(options.opset), can_run=can_run)
    clock = timer(options, seconds)
    return {
        kind: math.exp(statistics.mean(math.log(_ratio(case, target, options, clock)) for case in cases))
        for kind, cases in _CASES.items()
    }


def _ratio(case: _Case, target: Target, options: Options, clock: Callable[..., Mapping[str, float]]) -> float:
    node = _node(case)
    found = ways(node, [PRODUCT], target, options)
    timed = clock({name: found[name] for name in (RULE, PRODUCT.name)})
    return timed[PRODUCT.name] / timed[RULE]


def _node(case: _Case) -> torch.fx.Node:
    """Return the node of a graph of one operator."""
    operator, tensors, rest = case
    graph, mode = torch.fx.Graph(), FakeTensorMode()
    read = []
    for i, (sizes, is_transposed) in enumerate(tensors):
        given = graph.placeholder(f"given_{i}")
        given.meta["val"] = mode.from_tensor(torch.empty(sizes))
        if is_transposed:
            source, given = given, graph.call_function(aten.t.default, (given,))
            given.meta["val"] = source.meta["val"].t()
        read.append(given)
    made = graph.call_function(operator, (*read, *rest))
    with mode:
        made.meta["val"] = operator(*(n.meta["val"] for n in read), *rest)
    graph.output((made,))
    return made
