"""Activations that backward recomputes instead of keeping them.

What takes a few operations an element from values that are kept anyway is not kept itself: a GELU or a
normalisation, which the next layer's weight gradient reads, the steps of an activation that the model writes
out, the probabilities of attention. What is recomputed takes a share of the step's time that is given, and
frees most memory for it. Nothing is kept for it that eager PyTorch would not save, so that no more
tensors must stay as they are until backward. Known as selective activation recomputation: Korthikanti et al.,
Reducing Activation Recomputation in Large Transformer Models, 2022, section 5.

Eager's backward reads the activation, whatever became of the tensors behind it, and writes by ``.data`` or
NumPy leave no mark. So nothing is computed from memory that code outside of the graph can write to: of a
small input, such as a normalisation's weight, forward makes a copy, and what needs another is kept.
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

# The share of a step's time that recomputation takes at most by default.
DEFAULT_SHARE = 0.01
# They pass over their input once, or a few times.
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
# Longest rows of such a product's operands: a head's size. With longer ones the product is no longer cheap.
_LONGEST_ROWS = 256
# Operations between a value and what it is computed from. All that lies between is in memory at once, so that
# a long chain would be kept after all, only later.
_DEEPEST = 8
# The same of values that a fused region computes in registers, and how many elements these have at most.
_DEEPEST_FUSED = 64
_TINY = 4096
# Smaller values, in bytes, are not worth the operators.
SMALLEST = 1 << 16


# A copy of an input is worth an activation that is this many times as large.
_TIMES_A_COPY = 8
_Nodes = frozenset[torch.fx.Node]


class Recomputed(NamedTuple):
    """What backward recomputes.

    Attributes:
        values: nodes of forward whose value backward reads.
        copied: inputs that they are computed from, by copies that forward makes.
    """

    values: _Nodes
    copied: tuple[torch.fx.Node, ...]


def recomputed(
    joint: Joint, read: Collection[torch.fx.Node], *, fuses: bool = False, share: float = DEFAULT_SHARE
) -> Recomputed:
    """Those among what backward reads that it can compute cheaply from the others.

    Args:
        joint: the graph.
        read: nodes whose value backward reads.
        fuses: whether what is cheap runs in fused regions, where a value of few elements takes less time to
            compute than to hand over.
        share: of the step's estimated time that recomputation may take.
    """
    possible = _recomputable(joint, set(read), read, fuses=fuses)
    chosen = _affordable(joint, possible.values, read, share)
    return possible if chosen == possible.values else _recomputable(joint, chosen, read, fuses=fuses)


def _affordable(joint: Joint, possible: _Nodes, read: Collection[torch.fx.Node], share: float) -> _Nodes:
    """Those that free most memory for their time, as long as that is within a share of the step's."""
    left = share * sum(map(estimated_nanoseconds, joint.graph_module.graph.nodes))
    # What is kept ends the way back from a value, and what is recomputed for itself.
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
    """Those among some candidates that are cheap to compute from the rest of what is read."""
    given = set(read)
    again: set[torch.fx.Node] = set()
    copied: set[torch.fx.Node] = set()
    outputs = {owner_of(node) for node in joint.outputs}
    held, exposed = outputs | {owner_of(n) for n in held_by_functions(joint)}, outputs | joint.inputs.keys()
    # How many operations are between a value and what is kept, and what of that others can write to.
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
    """Operations between a node and what is kept; ``None`` if it is not to be computed from that."""
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
        # A call of PyTorch's kernel, which takes longer than one of ONNX Runtime's, and the memory is half.
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
    """Whether a node's memory is worth an operator."""
    return isinstance(node.meta["val"], torch.Tensor) and _bytes(node) >= SMALLEST


def _bytes(node: torch.fx.Node) -> int:
    value: torch.Tensor = node.meta["val"]
    return elements(value) * value.element_size()
