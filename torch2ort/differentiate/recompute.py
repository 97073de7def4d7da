"""Activations that backward recomputes instead of forward saving them.

Values are not saved that take a few operations per element to compute from saved values: a GELU or a
normalisation, which the next layer's weight gradient reads, the steps of an activation that the model writes
out, the probabilities of attention. Their recomputation takes at most a given share of the step's time, and
frees the most memory for it. It saves no value that eager PyTorch would not save, so no more tensors must
stay unchanged until backward. The method is known as selective activation recomputation: Korthikanti et al.,
Reducing Activation Recomputation in Large Transformer Models, 2022, section 5.

Eager PyTorch's backward reads the saved activation, even if the tensors that it was computed from have
changed since, and writes by ``.data`` or NumPy do not change a version. So nothing is recomputed from memory
that code outside of the graph can write to: forward copies a small input, such as a normalisation's weight,
and a value that needs a larger input is saved.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import NamedTuple

import torch

from torch2ort._torch.dispatch import OpOverload
from torch2ort.differentiate.aliasing import VIEWS, held_by_functions, owner_of
from torch2ort.differentiate.fusible_ops import is_fusible
from torch2ort.differentiate.joint_trace import Joint
from torch2ort.differentiate.node_cost import estimated_nanoseconds
from torch2ort.differentiate.symbolic_shapes import elements
from torch2ort.program.half_precision import rounds_in_half
from torch2ort.sizes.symbols import size_hint

aten = torch.ops.aten

# The default of the highest share of a step's time that recomputation takes.
DEFAULT_SHARE = 0.01
# Operators that pass over their input once, or a few times.
_CHEAP = frozenset(
    {
        "_softmax", "_to_copy", "abs", "add", "arange", "bitwise_and", "bitwise_not", "bitwise_or", "ceil",
        "clamp", "clamp_max", "clamp_min", "clone", "cos", "div", "elu", "eq", "erf", "exp", "expm1",
        "floor", "full", "full_like", "ge", "gelu", "gt", "hardsigmoid", "hardswish", "hardtanh", "le",
        "leaky_relu", "log", "log1p", "logical_and", "logical_not", "logical_or", "lt", "masked_fill",
        "maximum", "minimum", "mish", "mul", "native_layer_norm", "ne", "neg", "ones", "ones_like", "pow",
        "reciprocal", "relu", "round", "rsqrt", "rsub", "scalar_tensor", "sigmoid", "sign", "silu", "sin",
        "softplus", "sqrt", "sub", "tanh", "where", "zeros", "zeros_like",
    }
)  # fmt: skip
_PRODUCTS = frozenset({"baddbmm", "bmm"})
# The longest rows of such a product's operands: a head's size. With longer ones the product is not cheap.
_LONGEST_ROWS = 256
# The most operations between a value and those that it is computed from. All values in between are in memory
# at once, so a long chain would only be stored later.
_DEEPEST = 8
# The same for values that a fused region computes in registers, and the most elements of such a value.
_DEEPEST_FUSED = 64
_TINY = 4096
# Values of fewer bytes are not worth the operators.
SMALLEST = 1 << 16


# A copy of an input is worthwhile for an activation that is so many times as large.
_TIMES_A_COPY = 8
_Nodes = frozenset[torch.fx.Node]


class Recomputed(NamedTuple):
    """The values that backward recomputes.

    Attributes:
        values: nodes of forward whose values backward reads.
        copied: inputs that they are computed from, by copies that forward makes.
    """

    values: _Nodes
    copied: tuple[torch.fx.Node, ...]


def recomputed(
    joint: Joint, read: Collection[torch.fx.Node], *, fuses: bool = False, share: float = DEFAULT_SHARE
) -> Recomputed:
    """Return the values that backward reads and can compute cheaply from the others.

    Args:
        joint: the joint graph.
        read: nodes whose values backward reads.
        fuses: whether cheap operators run in fused regions, where a value of few elements takes less time to
            compute than to save and read.
        share: fraction of the step's estimated time that recomputation may take.
    """
    possible = _recomputable(joint, set(read), read, fuses=fuses)
    chosen = _affordable(joint, possible.values, read, share)
    return possible if chosen == possible.values else _recomputable(joint, chosen, read, fuses=fuses)


def _affordable(joint: Joint, possible: _Nodes, read: Collection[torch.fx.Node], share: float) -> _Nodes:
    """Return the nodes that free the most memory for their time, within a share of the step's time."""
    left = share * sum(map(estimated_nanoseconds, joint.graph_module.graph.nodes))
    # The way back from a value ends at saved values, and at those that are recomputed for themselves.
    ends = {*read, *joint.inputs}
    costs: dict[torch.fx.Node, float] = {}
    for node in possible:
        between, stack = {node}, [node]
        while stack:
            new = {n for n in stack.pop().all_input_nodes if n not in between and n not in ends}
            between |= new
            stack.extend(new)
        costs[node] = sum(map(estimated_nanoseconds, between))
    chosen = []
    for node in sorted(possible, key=lambda n: costs[n] / max(_bytes(n), 1)):
        if costs[node] <= left:
            chosen.append(node)
            left -= costs[node]
    return frozenset(chosen)


def _recomputable(
    joint: Joint, candidates: Collection[torch.fx.Node], read: Collection[torch.fx.Node], *, fuses: bool
) -> Recomputed:
    """Return those of some candidates that are cheap to compute from the other values that are read."""
    given = set(read)
    again: set[torch.fx.Node] = set()
    copied: set[torch.fx.Node] = set()
    outputs = {owner_of(node) for node in joint.outputs}
    held, exposed = outputs | {owner_of(n) for n in held_by_functions(joint)}, outputs | joint.inputs.keys()
    # The number of operations between a value and saved values, and those of the latter that others can write
    # to.
    depths: dict[torch.fx.Node, int] = {}
    behind: dict[torch.fx.Node, _Nodes] = {}
    for node in joint.graph_module.graph.nodes:
        depth = _depth(node, depths)
        changeable: _Nodes = frozenset().union(*(behind.get(n, ()) for n in node.all_input_nodes))
        if node in given:
            deepest = _DEEPEST_FUSED if fuses and _is_tiny(node) else _DEEPEST if is_large(node) else 0
            cheap = depth is not None and 0 < depth <= deepest and node not in held and node in candidates
            if cheap and changeable <= joint.inputs.keys() and _are_small(changeable, node):
                again.add(node)
                copied |= changeable
            else:
                depth, changeable = 0, frozenset({node} if owner_of(node) in exposed else ())
        if depth is not None and depth <= (_DEEPEST_FUSED if fuses else _DEEPEST):
            depths[node], behind[node] = depth, changeable
    return Recomputed(frozenset(again), tuple(n for n in joint.inputs if n in copied))


def _are_small(nodes: Collection[torch.fx.Node], beside: torch.fx.Node) -> bool:
    return _TIMES_A_COPY * sum(map(_bytes, nodes)) <= _bytes(beside)


def _depth(node: torch.fx.Node, depths: dict[torch.fx.Node, int]) -> int | None:
    """Return the operations between a node and saved values; ``None`` if it cannot be computed from them."""
    read = node.all_input_nodes
    if node.op != "call_function" or not depths.keys() >= set(read):
        return None
    deepest = max((depths[n] for n in read), default=0)
    if node.target in VIEWS or node.target is operator.getitem:
        return deepest
    return deepest + 1 if _is_cheap(node) else None


def _is_cheap(node: torch.fx.Node) -> bool:
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return False
    name = node.target._schema.name.removeprefix("aten::")
    if rounds_in_half(node):
        # A call of PyTorch's kernel, which takes longer than ONNX Runtime's operators, for half of the
        # memory.
        return False
    if name in _PRODUCTS:
        first, second = (n.meta["val"] for n in node.all_input_nodes[-2:])
        rows = first.shape[-1]
        made = elements(node.meta["val"])
        return size_hint(rows) <= _LONGEST_ROWS and made >= max(elements(first), elements(second))
    return name in _CHEAP


def _is_tiny(node: torch.fx.Node) -> bool:
    return is_fusible(node) and elements(node.meta["val"]) <= _TINY


def is_large(node: torch.fx.Node) -> bool:
    """Return True if a node's memory is worth an operator."""
    return isinstance(node.meta["val"], torch.Tensor) and _bytes(node) >= SMALLEST


def _bytes(node: torch.fx.Node) -> int:
    value: torch.Tensor = node.meta["val"]
    return elements(value) * value.element_size()
