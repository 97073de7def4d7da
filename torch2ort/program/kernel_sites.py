"""Internal sites: nodes of a program that become calls of PyTorch's own kernels."""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import torch

from torch2ort._torch import fake_tensors as private
from torch2ort._torch.dispatch import SAVES_LU_BY_LAYOUT, OpOverload
from torch2ort.errors import UnsupportedOperatorError
from torch2ort.kernels.custom_ops import is_of_library
from torch2ort.kernels.functions import (
    AtenKernel,
    Bernoulli,
    Dropout,
    DropoutNoise,
    encode_call,
    is_callable,
)
from torch2ort.kernels.index_check import IndexCheck
from torch2ort.kernels.library import LibraryKernel, with_results
from torch2ort.kernels.packed_attention import PackedAttention, PackedAttentionGrad
from torch2ort.kernels.recurrent import is_recurrent, original
from torch2ort.program import internal_ops
from torch2ort.program.dim_order import inverse, order_of, order_of_memory, unpermuted
from torch2ort.program.fx_insert import replace_call
from torch2ort.program.runtime_assertions import READS
from torch2ort.program.unsupported_custom_ops import refuse_unsupported_custom_op
from torch2ort.pythonop import TENSOR, Site
from torch2ort.pythonop.abstract_run.fake_run import copy_abstract_run
from torch2ort.pythonop.autocast import Autocast
from torch2ort.pythonop.caught_exceptions import handlers_around
from torch2ort.pythonop.interception import internal_site
from torch2ort.sizes.symbols import size_hint
from torch2ort.support.provenance import origin_of, places_of, source_line

# Operators whose numeric arguments determine the number of elements of their result.
_COUNTING = frozenset({"arange", "range"})
# Operators that read tensors in any memory layout. Derivatives may not: native_group_norm_backward expects
# its tensors to have the same layout, which autograd provides.
_READ_ANY_ORDER = frozenset(
    {
        "addmm", "baddbmm", "bmm", "mm", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    }
)  # fmt: skip
_PYTHON_OP = torch.ops.torch2ort.python_op.default
_DETACH = torch.ops.aten.detach.default
_FULL = torch.ops.aten.full.default


_PACKED_ATTENTION: Mapping[Any, type[torch.autograd.Function]] = {
    internal_ops.packed_attention: PackedAttention,
    internal_ops.packed_attention_backward: PackedAttentionGrad,
}


class SiteMaker:
    """Replacement of nodes of one program by internal sites.

    Args:
        graph: the program's nodes; changed in place.
        carrying: the nodes that carry a gradient; ``None`` if the sites are not differentiated.
        has_libraries: True if operators of libraries may be called.

    Attributes:
        sites: the sites made, which live as long as this object does.
    """

    def __init__(
        self,
        graph: torch.fx.Graph,
        carrying: Collection[torch.fx.Node] | None = None,
        *,
        has_libraries: bool = False,
    ) -> None:
        self.sites: list[Site] = []
        self._has_libraries = has_libraries
        self._graph = graph
        self._differentiated = carrying is not None
        self._mode = private.fake_mode(graph)
        self._needed = set(carrying or ())
        self._token: torch.fx.Node | None = None
        # The first site of each call; sites with an equal call share its abstract run.
        self._firsts: dict[Hashable, Site] = {}

    def record_unreplaced(self, node: torch.fx.Node) -> None:
        """Note a node that is kept, so that later random calls come after it if it is random."""
        if node.target is _PYTHON_OP and node.users:
            self._token = next((u for u in node.users if u.target is operator.getitem), self._token)

    def replace(
        self,
        node: torch.fx.Node,
        autocast: Autocast | None = None,
        *,
        any_order: bool = False,
        plain: Sequence[torch.fx.Node] | None = None,
    ) -> None:
        """Replace ``node`` by a call of PyTorch's kernel.

        Args:
            node: the call of an operator.
            autocast: the state of autocast while it runs; ``None`` if it is off.
            any_order: True if its kernel is known to read tensors with their dimensions in any order.
            plain: nodes that files use in place of its results.

        Raises:
            UnsupportedOperatorError: it has arguments or results that a graph cannot represent.
        """
        if node.target is internal_ops.dropout_noise:
            like, p = node.args
            order = _memory_order(node.meta["val"])
            outputs = self.call(node, DropoutNoise, [p, order], [like], random=True)  # type: ignore[list-item]
        elif node.target is internal_ops.dropout:
            source, p, dtype = node.args
            order = _memory_order(node.meta["val"][0])
            # A session orders them: ONNX's nodes have no token.
            outputs = self.call(node, Dropout, [p, order, dtype], [source])  # type: ignore[list-item]
        elif node.target is internal_ops.bernoulli:
            like, p = node.args
            outputs = self.call(node, Bernoulli, [p], [like])  # type: ignore[list-item]
        elif node.target is internal_ops.checked_index:
            _, tensors, text = node.args
            outputs = self.call(node, IndexCheck, [text], tensors)  # type: ignore[arg-type]
        elif node.target in _PACKED_ATTENTION:
            *tensors, is_causal, scale = node.args
            outputs = self.call(node, _PACKED_ATTENTION[node.target], [is_causal, scale], tensors)  # type: ignore[arg-type]
        else:
            outputs = self._aten(node, autocast, any_order=any_order)
        if plain is not None:
            with self._graph.inserting_before(node):
                pairs = zip(plain, outputs, strict=True)
                outputs = [self._node(node, internal_ops.exact, pair) for pair in pairs]
        numbers = _numbers_of(node)
        replace_call(node, outputs)
        for number in numbers:
            if not number.users:
                self._graph.erase_node(number)

    def _aten(
        self, node: torch.fx.Node, autocast: Autocast | None, *, any_order: bool
    ) -> list[torch.fx.Node]:
        alone = not self._differentiated
        orders = [_layout_of_readers(result) if alone else None for result in _results_of(node)]
        is_library = self._has_libraries and is_of_library(node.target)
        if is_library:
            refuse_unsupported_custom_op(node)
        text, tensors, sizes = _call_of(
            node,
            sizes_vary=alone,
            permutes=alone,
            any_order=any_order,
            orders=orders,
            is_known=is_library,
        )
        if sizes:
            tensors.append(self.of_sizes(node, sizes))
        outputs = self.call(
            node,
            LibraryKernel if is_library else AtenKernel,
            [text],
            tensors,
            random=is_random(node),
            differentiable=not _draws_only(node.target),
            autocast=autocast,
        )
        if is_library:
            site = self.sites[-1]
            inputs, results = ([n.meta["val"] for n in nodes] for nodes in (tensors, outputs))
            site.arguments = (with_results(text, inputs, results), *site.arguments[1:])
        for i, (result, order) in enumerate(zip(_results_of(node), orders, strict=True)):
            if result is not None and order is not None:
                outputs[i] = self._in_memory_layout(result, outputs[i], order)
        return outputs

    def of_sizes(self, node: torch.fx.Node, sizes: Sequence[torch.fx.Node]) -> torch.fx.Node:
        """Insert a tensor without elements before ``node``, of the shape ``sizes``, then 0, for a call."""
        with self._graph.inserting_before(node):
            return self._node(node, _FULL, ([*sizes, 0], 0), {"dtype": torch.int64})

    def _in_memory_layout(
        self, result: torch.fx.Node, output: torch.fx.Node, order: list[int]
    ) -> torch.fx.Node:
        """Return the replacement of ``result`` by ``output``, which has its dimensions in another order."""
        for user in [user for user in result.users if order_of(user) == order]:
            user.replace_all_uses_with(output)
            self._graph.erase_node(user)
        if not result.users:
            return output
        with self._graph.inserting_after(output):
            return self._node(result, torch.ops.aten.permute.default, (output, inverse(order)))

    def call(
        self,
        node: torch.fx.Node,
        function: type[torch.autograd.Function],
        constants: Sequence[Any],
        tensors: Sequence[torch.fx.Node],
        *,
        random: bool = False,
        differentiable: bool = False,
        autocast: Autocast | None = None,
    ) -> list[torch.fx.Node]:
        """Call one of torch2ort's Functions before ``node``.

        Args:
            node: the node with the place of the call in the model.
            function: the Function.
            constants: its first arguments.
            tensors: its other arguments.
            random: True if it draws from PyTorch's generator: then a token is an argument and a result.
            differentiable: True if its results carry the gradients of its arguments.
            autocast: as for :meth:`replace`.

        Returns:
            Its results.
        """
        inputs = list(tensors)
        if random or not inputs:
            inputs.append(self._token or self._first_token(node))
        needed = [differentiable and n in self._needed and _is_float(n) for n in inputs]
        site = internal_site(
            function,
            [*constants, *(TENSOR for _ in inputs)],
            [*(False for _ in constants), *needed],
            training=self._differentiated,
            autocast=autocast,
        )
        site.caught = handlers_around(places_of(node))
        self.sites.append(site)
        shapes = tuple(str(n.meta["val"].shape) for n in inputs)
        like = (function, site.arguments, site.needs_input_grad, autocast, shapes)
        copy_abstract_run(self._firsts.setdefault(like, site), site)
        with self._graph.inserting_before(node):
            call = self._node(node, _PYTHON_OP, (inputs, site.key))
            count = len(call.meta["val"])
            outputs = [self._node(node, operator.getitem, (call, i)) for i in range(count)]
            if random:
                self._token = outputs.pop()
            if any(needed):
                self._needed.update(outputs)
            elif self._differentiated:
                outputs = [self._node(node, _DETACH, (o,)) if _is_float(o) else o for o in outputs]
        return outputs

    def _first_token(self, node: torch.fx.Node) -> torch.fx.Node:
        # A site needs a tensor, and the first random call may have no other.
        with self._graph.inserting_before(node):
            return self._node(node, torch.ops.aten.zeros.default, ([1],), {"dtype": torch.int64})

    def _node(
        self, origin: torch.fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> torch.fx.Node:
        result: torch.fx.Node = self._graph.call_function(target, args, kwargs)
        result.meta = origin_of(origin)
        values = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
        assert self._mode is not None
        with self._mode:
            result.meta["val"] = target(*values, **(kwargs or {}))
        return result


def is_random(node: torch.fx.Node) -> bool:
    """Return True if ``node`` draws from PyTorch's random generator.

    Recurrent nets do so only in training with dropout between layers, and attention only with dropout,
    independently of their tags.
    """
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    values = arguments_of(node)
    if "dropout_p" in values:
        return bool(values["dropout_p"])
    if is_recurrent(target):
        return bool(values["train"]) and bool(values["dropout"])
    return torch.Tag.nondeterministic_seeded in target.tags


# Random operators without a gradient to their arguments. PyTorch computes zeros for the gradient of others.
_DRAWS = re.compile(r"(rand|randn|randint)(_like)?|randperm|multinomial")


def _draws_only(target: Any) -> bool:
    """Return True if an operator's result is random numbers that never require a gradient."""
    return _DRAWS.fullmatch(target._schema.name.removeprefix("aten::")) is not None


def _call_of(
    node: torch.fx.Node,
    *,
    sizes_vary: bool = False,
    permutes: bool = False,
    any_order: bool = False,
    orders: Sequence[list[int] | None] = (),
    is_known: bool = False,
) -> tuple[str, list[torch.fx.Node], list[torch.fx.Node]]:
    """Return the text of ``node``'s call, its tensor arguments in the order of their numbers, and its sizes.

    Args:
        node: a call of an ATen operator.
        sizes_vary: True if sizes that vary may be among the arguments.
        permutes: True if the call itself may permute the dimensions of its arguments.
        any_order: True to permute all arguments, not only those of operators known to read any order.
        orders: for each result the order of dimensions in which the call returns it; ``None`` for its own.
        is_known: True if the operator may be called in any case.
    """
    target = original(node.target)
    tensors: list[torch.fx.Node] = []
    sizes: list[torch.fx.Node] = []
    numbers = _numbers_of(node)

    def convert(value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            number = value.meta["val"]
            if isinstance(number, torch.Tensor):
                source, order = value, None
                if target in SAVES_LU_BY_LAYOUT and not number.is_contiguous():
                    source, order = _columns_in_rows(node, value)
                elif permutes and (any_order or operator_name(node) in _READ_ANY_ORDER):
                    source, order = unpermuted(value)
                tensors.append(source)
                i = len(tensors) - 1
                return {"tensor": i} if order is None else {"permuted": [i, order]}
            if value in numbers:
                tensors.append(value.all_input_nodes[0])
                return {"item": len(tensors) - 1}
            if sizes_vary and isinstance(number, torch.SymInt):
                return _size_in_call(value, number, sizes)
            raise UnsupportedOperatorError(
                f"{target} at {source_line(node)} would run in PyTorch's kernel, which takes no size "
                f"that varies as an argument ({value.name}). Export with that size fixed, or compute the "
                f"result with other operators"
            )
        if isinstance(value, (list, tuple)):
            return [convert(v) for v in value]
        return value

    is_known = is_known or (isinstance(target, OpOverload) and is_callable(target))
    if not is_known or not _gives_tensors(node):
        raise UnsupportedOperatorError(
            f"{target} at {source_line(node)} has no translation to ONNX. Register one with "
            f"torch2ort.register_symbolic, or use other operators"
        )
    arguments = [convert(a) for a in node.args]
    keywords = {k: convert(v) for k, v in node.kwargs.items()}
    try:
        text = encode_call(target, arguments, keywords, random=is_random(node), orders=orders)
        return text, tensors, sizes
    except TypeError as error:
        raise UnsupportedOperatorError(
            f"{target} at {source_line(node)} has no translation to ONNX, and {error}. Use other operators, "
            f"or wrap the call in a torch.autograd.Function"
        ) from None


def _size_in_call(node: torch.fx.Node, number: torch.SymInt, sizes: list[torch.fx.Node]) -> dict[str, Any]:
    """Describe a number that a node computes from sizes for a call; add missing sizes to ``sizes``."""
    if private.is_known(number >= 0):
        return {"size": _position(node, sizes)}
    if private.is_known(number <= 0):
        return {"minus": _position(_negated(node), sizes)}
    return {"difference": [_position(part, sizes) for part in _parts(node)]}


def _results_of(node: torch.fx.Node) -> list[torch.fx.Node | None]:
    """Return the nodes of the results of ``node``, in order; ``None`` for an unused one or one read twice."""
    value = node.meta.get("val")
    if not isinstance(value, (list, tuple)):
        return [node]
    found = [
        [u for u in node.users if u.target is operator.getitem and u.args[1] == i] for i in range(len(value))
    ]
    return [nodes[0] if len(nodes) == 1 else None for nodes in found]


def _layout_of_readers(result: torch.fx.Node | None) -> list[int] | None:
    """Return a result's order of dimensions in memory, if a node reads the result in that order.

    In PyTorch that is a view. Every value of an ONNX graph is contiguous: the result would be copied, and
    copied again for the node that reads it.
    """
    value = None if result is None else result.meta.get("val")
    order = order_of_memory(value) if isinstance(value, torch.Tensor) else None
    if result is None or order is None or order == sorted(order):
        return None
    return order if any(order_of(user) == order for user in result.users) else None


def _position(size: torch.fx.Node, sizes: list[torch.fx.Node]) -> int:
    if size not in sizes:
        sizes.append(size)
    return sizes.index(size)


def _negated(size: torch.fx.Node) -> torch.fx.Node:
    """Return the negative of a number, which is a size if the number counts from the end."""
    with size.graph.inserting_after(size):
        made = size.graph.call_function(operator.mul, (size, -1))
    made.meta = {"val": -size.meta["val"]}
    return made


def _parts(number: torch.fx.Node) -> tuple[torch.fx.Node, torch.fx.Node]:
    """Return two sizes whose difference is a number of unknown sign; one of them is 0."""
    graph, negative = number.graph, _negated(number)
    parts = []
    for part in (number, negative):
        with graph.inserting_after(negative):
            made = graph.call_function(torch.sym_max, (part, 0))
        made.meta = {"val": torch.sym_max(part.meta["val"], 0)}
        parts.append(made)
    return parts[0], parts[1]


def _columns_in_rows(node: torch.fx.Node, value: torch.fx.Node) -> tuple[torch.fx.Node, list[int] | None]:
    """Return the transpose of a matrix that is column-major in eager, and the order that undoes it."""
    with node.graph.inserting_before(node):
        transposed = node.graph.call_function(torch.ops.aten.transpose.int, (value, -2, -1))
    transposed.meta = {**value.meta, "val": value.meta["val"].mT}
    rank = value.meta["val"].dim()
    return transposed, [*range(rank - 2), rank - 1, rank - 2]


def arguments_of(node: torch.fx.Node) -> dict[str, Any]:
    """Return ``node``'s arguments by the names in its operator's schema, in their order, with defaults."""
    schema = node.target._schema  # type: ignore[union-attr]
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
    return {a.name: given.get(a.name, a.default_value) for a in schema.arguments}


def is_operator(node: torch.fx.Node) -> bool:
    """Return True if ``node`` calls an operator of torch."""
    return isinstance(node.target, OpOverload)


def _numbers_of(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the numbers that a call itself reads out of tensors; no size of its result depends on them.

    A number computed from others is not included: a graph computes fractions in float32.
    """
    if not is_operator(node) or operator_name(node) in _COUNTING:
        return []
    types = {argument.name: str(argument.type) for argument in node.target._schema.arguments}  # type: ignore[union-attr]
    return [
        value
        for name, value in arguments_of(node).items()
        # A number may be an argument of type Tensor, too.
        if isinstance(value, torch.fx.Node) and value.target in READS and _takes_numbers(types[name])
    ]


def _takes_numbers(kind: str) -> bool:
    return "number" in kind or "Tensor" in kind


def operator_name(node: torch.fx.Node) -> str:
    """Return the operator's name, such as ``add`` for a call of ``aten.add.Tensor``."""
    name: str = node.target._schema.name.rpartition("::")[2]  # type: ignore[union-attr]
    return name


def _gives_tensors(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, (torch.Tensor, list, tuple))


def _is_float(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def _memory_order(value: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions of ``value`` from the slowest to the fastest in memory."""
    strides = value.stride()
    order = list(range(value.dim()))
    # Strides that depend on varying sizes are compared by their values in the sample.
    return tuple(sorted(order, key=lambda d: -size_hint(strides[d])))
