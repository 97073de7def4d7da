"""The table of alternatives: other ways to compute an operator of a half than the rule's.

All of them are equal to eager PyTorch within rounding. A measurement chooses among them and the rule's way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from torch2ort._torch.dispatch import OpOverload
from torch2ort.differentiate.op_signature import signature
from torch2ort.program.kernel_sites import SiteMaker
from torch2ort.pythonop import Site
from torch2ort.support.provenance import origin_of

aten = torch.ops.aten


class Rewriting:
    """Changes to a half that make its operators run in another way than by the rule.

    Args:
        graph: the half's graph; changed in place.

    Attributes:
        graph: the half's graph.
        in_onnx: signatures of operators that ONNX Runtime computes, against the rule.
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph = graph
        self._maker = SiteMaker(graph)
        self.in_onnx: set[str] = set()

    @property
    def sites(self) -> list[Site]:
        """Calls of PyTorch's kernels, which the caller must keep alive."""
        return self._maker.sites

    def to_kernel(self, node: torch.fx.Node, *, any_order: bool = False) -> None:
        """Replace an operator by a call of PyTorch's kernel.

        Args:
            node: the operator.
            any_order: whether the kernel accepts tensors with their dimensions in any order.
        """
        self._maker.replace(node, any_order=any_order)

    def to_onnx(self, node: torch.fx.Node) -> None:
        """Mark an operator to be computed by ONNX Runtime's operator."""
        self.in_onnx.add(signature(node))


class _Parts:
    """Insertion of operators before another one, which they replace.

    Args:
        node: the operator that is replaced.
    """

    def __init__(self, node: torch.fx.Node) -> None:
        self._node = node

    def __call__(self, target: Any, *args: Any) -> torch.fx.Node:
        """Insert a call of an operator."""
        with self._node.graph.inserting_before(self._node):
            made = self._node.graph.call_function(target, args)
        made.meta = origin_of(self._node)
        made.meta["val"] = target(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]))
        return made


def _in_parts(function: Callable[..., torch.fx.Node]) -> Callable[[Rewriting, torch.fx.Node], None]:
    """Return the function that replaces an operator with one result by other operators.

    Args:
        function: from a :class:`_Parts` and the operator's arguments to the result.
    """

    def rewrite(rewriting: Rewriting, node: torch.fx.Node) -> None:
        if node.kwargs:
            # Factors, or a dtype of the result.
            raise NotPossibleError
        result = function(_Parts(node), *node.args)
        node.replace_all_uses_with(result)
        node.graph.erase_node(node)

    return rewrite


def _transposed_product(call: _Parts, left: torch.fx.Node, right: torch.fx.Node) -> torch.fx.Node:
    """Compute ``(right.T @ left.T).T``."""
    product = aten.mm.default if left.meta["val"].dim() == 2 else aten.bmm.default
    left, right = (call(aten.transpose.int, matrix, -2, -1) for matrix in (left, right))
    return call(aten.transpose.int, call(product, right, left), -2, -1)


def _transposed_product_with_bias(
    call: _Parts, bias: torch.fx.Node, left: torch.fx.Node, right: torch.fx.Node
) -> torch.fx.Node:
    return call(aten.add.Tensor, _transposed_product(call, left, right), bias)


def _of_softmax(
    call: _Parts, gradient: torch.fx.Node, output: torch.fx.Node, dim: int, dtype: torch.dtype
) -> torch.fx.Node:
    product = call(aten.mul.Tensor, gradient, output)
    total = call(aten.sum.dim_IntList, product, [dim], True)
    return call(aten.mul.Tensor, call(aten.sub.Tensor, gradient, total), output)


def _of_log_softmax(
    call: _Parts, gradient: torch.fx.Node, output: torch.fx.Node, dim: int, dtype: torch.dtype
) -> torch.fx.Node:
    total = call(aten.sum.dim_IntList, gradient, [dim], True)
    share = call(aten.mul.Tensor, call(aten.exp.default, output), total)
    return call(aten.sub.Tensor, gradient, share)


def _silu(call: _Parts, input: torch.fx.Node) -> torch.fx.Node:
    # As in eager PyTorch. ONNX Runtime's Sigmoid is zero already for moderate negative numbers.
    below = call(aten.exp.default, call(aten.neg.default, input))
    return call(aten.div.Tensor, input, call(aten.add.Tensor, below, 1))


def _of_tanh(call: _Parts, gradient: torch.fx.Node, output: torch.fx.Node) -> torch.fx.Node:
    square = call(aten.mul.Tensor, output, output)
    return call(aten.mul.Tensor, gradient, call(aten.rsub.Scalar, square, 1))


def _of_sigmoid(call: _Parts, gradient: torch.fx.Node, output: torch.fx.Node) -> torch.fx.Node:
    rest = call(aten.rsub.Scalar, output, 1)
    return call(aten.mul.Tensor, call(aten.mul.Tensor, gradient, rest), output)


def _transposed(rewriting: Rewriting, node: torch.fx.Node) -> None:
    """Compute the gradient of a convolution's input as a transposed convolution, the others as before.

    Raises:
        NotPossibleError: it is not requested, or the convolution is a transposed one.
    """
    gradient, input, weight, _, stride, padding, dilation, is_transposed, _, groups, mask = node.args
    if is_transposed or not cast("list[bool]", mask)[0]:
        raise NotPossibleError
    if len({len(cast("list[int]", sizes)) for sizes in (stride, padding, dilation)}) > 1:
        raise NotPossibleError  # one number for all dimensions
    size, kernel, given = (cast(torch.fx.Node, n).meta["val"].shape[2:] for n in (input, weight, gradient))
    # The number of last positions that no window reaches.
    more = [
        size[d] - ((given[d] - 1) * stride[d] - 2 * padding[d] + dilation[d] * (kernel[d] - 1) + 1)  # type: ignore[index, operator]
        for d in range(len(size))
    ]
    call = _Parts(node)
    made = call(
        aten.convolution.default, gradient, weight, None, stride, padding, dilation, True, more, groups
    )
    _replace_result(node, 0, made)
    if any(cast("list[bool]", mask)[1:]):
        rest = call(node.target, *node.args[:10], [False, *cast("list[bool]", mask)[1:]])
        node.replace_all_uses_with(rest)
    node.graph.erase_node(node)


def _replace_result(node: torch.fx.Node, number: int, instead: torch.fx.Node) -> None:
    """Replace one of an operator's several results by another value."""
    for user in list(node.users):
        if user.target is operator.getitem and user.args[1] == number:
            user.replace_all_uses_with(instead)
            node.graph.erase_node(user)


class NotPossibleError(Exception):
    """An alternative cannot compute this call."""


@dataclass(frozen=True)
class Alternative:
    """Another way to compute an operator.

    Attributes:
        name: the key of its measured time.
        words: its description in a sentence: "it runs ...".
        rewrite: called with the rewriting of a graph and the operator in it; may raise
            :class:`NotPossibleError`, with nothing changed.
    """

    name: str
    words: str
    rewrite: Callable[[Rewriting, torch.fx.Node], None]


def _parts(function: Callable[..., torch.fx.Node]) -> Alternative:
    return Alternative("parts", "in parts in ONNX Runtime", _in_parts(function))


KERNEL = Alternative("kernel", "in PyTorch's kernel", Rewriting.to_kernel)
PRODUCT = Alternative(
    "kernel", "in PyTorch's kernel", lambda rewriting, node: rewriting.to_kernel(node, any_order=True)
)
ONNX = Alternative("onnx", "in ONNX Runtime's operator", Rewriting.to_onnx)
TURNED = Alternative("turned", "as the transposed product", _in_parts(_transposed_product))
TURNED_WITH_BIAS = Alternative(
    "turned", "as the transposed product", _in_parts(_transposed_product_with_bias)
)
TRANSPOSED = Alternative(
    "transposed", "with ONNX Runtime's ConvTranspose for the input's gradient", _transposed
)

# These alternatives are omitted, as they were slower wherever they were measured: PyTorch's kernels of
# operators that pass over their input once (add, mul, relu, exp, where, cat), which take ONNX Runtime half of
# the time; LayerNorm (1.05 to 2.5 times) and powers (1 to 11 times) in ONNX Runtime; a call for each gradient
# of a convolution (0.97 to 1.1); in parts in ONNX Runtime, the derivatives of BatchNorm, LayerNorm, GELU and
# embedding, which PyTorch has in one kernel (1.1 to 5 times), and attention (0.96 to 1.5 times), whose
# operator in ONNX Runtime does not return the values that backward reads. A recurrent net is oneDNN's in
# PyTorch, and ONNX Runtime's has no derivative. GroupNorm is not exact: torch.onnx's translation computes a
# standard deviation without epsilon.
ALTERNATIVES: dict[OpOverload, tuple[Alternative, ...]] = {
    aten.convolution.default: (KERNEL, ONNX),
    aten.convolution_backward.default: (TRANSPOSED,),
    aten._native_batch_norm_legit_functional.default: (KERNEL,),
    aten._native_batch_norm_legit.no_stats: (KERNEL,),
    aten._softmax.default: (KERNEL,),
    aten._softmax_backward_data.default: (_parts(_of_softmax),),
    aten._log_softmax.default: (KERNEL,),
    aten._log_softmax_backward_data.default: (_parts(_of_log_softmax),),
    aten.embedding.default: (ONNX,),
    aten.gelu.default: (KERNEL, ONNX),
    aten.sigmoid.default: (ONNX,),
    aten.sigmoid_backward.default: (KERNEL, _parts(_of_sigmoid)),
    aten.silu.default: (_parts(_silu),),
    aten.tanh.default: (KERNEL,),
    aten.tanh_backward.default: (KERNEL, _parts(_of_tanh)),
    aten.mean.dim: (KERNEL,),
    aten.sum.dim_IntList: (KERNEL,),
    aten.addmm.default: (PRODUCT, ONNX, TURNED_WITH_BIAS),
    aten.bmm.default: (PRODUCT, ONNX, TURNED),
    aten.mm.default: (PRODUCT, ONNX, TURNED),
}

# The alternatives that every start measures: the faster library depends most on the processor here.
BETWEEN_LIBRARIES: dict[OpOverload, tuple[Alternative, ...]] = {
    operator: tuple(a for a in ALTERNATIVES[operator] if a.name in ("kernel", "onnx"))
    for operator in (
        *(aten.addmm.default, aten.bmm.default, aten.mm.default),
        *(aten.convolution.default, aten.gelu.default),
    )
}
