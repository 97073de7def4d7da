"""One functional graph of forward and backward, traced from a program by PyTorch's autograd."""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

import torch

from torch2ort._torch import aot as private
from torch2ort.cache.key.export_lock import exclusive
from torch2ort.differentiate.assigned_buffers import read_from_copies
from torch2ort.differentiate.boolean_masks import share_positions
from torch2ort.differentiate.grad_reachability import Reach, traced_reach
from torch2ort.differentiate.item_calls import replace_read_numbers
from torch2ort.differentiate.lstm_layers import decompose_lstms, settle_workspaces
from torch2ort.differentiate.opaque_ops import keep_whole
from torch2ort.differentiate.symbolic_shapes import Replay, check_assumed, keep_sizes, settle_sizes
from torch2ort.differentiate.unsupported_dtypes import refuse_sparse_and_complex
from torch2ort.errors import Torch2OrtError, UnsupportedOperatorError
from torch2ort.kernels.meta_dtype_fixes import fix_fake_dtypes
from torch2ort.program.alias_analysis import sources_of, writes_outside, written_by
from torch2ort.program.decomposition_overrides import eager_formulas
from torch2ort.program.gradient_flow import carrying, makes_constants
from torch2ort.program.gradient_storage import DETACHES
from torch2ort.program.internal_ops import (
    checked_index,
    extreme,
    fill_rows,
    must_compute,
    number_as_sizes,
    packed_attention,
    put_rows,
    python_number,
    take_rows,
)
from torch2ort.program.keep_raising_ops import keep_unread_checks
from torch2ort.program.kernel_sites import is_random
from torch2ort.program.runtime_assertions import drop_guesses
from torch2ort.program.strides import draw_in_order_of_memory
from torch2ort.program.tensor_index_select import select_by_tensors
from torch2ort.program.traced_program import TracedProgram
from torch2ort.pythonop import Site
from torch2ort.pythonop.abstract_run.forward_probe import UserError
from torch2ort.pythonop.python_op_autograd import DIFFERENTIABLE_PYTHON_OP
from torch2ort.sizes.symbols import is_number
from torch2ort.sizes.unbacked_sizes import clear_deferred_asserts, forget_new_sizes
from torch2ort.support.provenance import source_line
from torch2ort.symbolics.registered.user_gradient_ops import MAPPED_CALL

_PYTHON_OP = torch.ops.torch2ort.python_op.default
aten = torch.ops.aten
_DETACH = aten.detach.default
# The text behind it in PyTorch's messages is advice for whoever traces the program.
_MORE = "\n\n"
# torch2ort itself defines these operators and their derivatives.
_OWN = (
    *(operator.getitem, _PYTHON_OP, MAPPED_CALL),
    *(checked_index, must_compute, extreme, number_as_sizes, python_number),
    *(take_rows, fill_rows, put_rows, packed_attention),
)


@dataclass(frozen=True)
class Joint:
    """Forward and backward in one graph.

    Attributes:
        graph_module: functional; its inputs are those of the program and one gradient per output.
        inputs: placeholder -> position among the program's inputs.
        tangents: placeholder -> position of the output that it is the gradient of.
        outputs: node of each output of the program.
        written: position among the program's inputs -> node of its new value.
        gradients: position among the program's inputs -> node of its gradient.
        shared: positions of the outputs that are a view, an input or another output in eager PyTorch.
        sites: the sites of its calls, which it keeps alive.
        checked: assumptions of the trace about sizes that a run of forward checks, as texts of
            :func:`torch2ort.differentiate.symbolic_shapes.without_names`.
    """

    graph_module: torch.fx.GraphModule
    inputs: dict[torch.fx.Node, int]
    tangents: dict[torch.fx.Node, int]
    outputs: tuple[torch.fx.Node, ...]
    written: dict[int, torch.fx.Node]
    gradients: dict[int, torch.fx.Node]
    shared: frozenset[int]
    sites: tuple[object, ...] = ()
    checked: frozenset[str] = frozenset()


class _Flat(torch.nn.Module):
    """The program with outputs that share no memory with each other or with an input.

    Attributes:
        reach: the differentiable paths of its first run.
        shared: positions of the outputs that its first run found to share memory.
    """

    reach: Reach
    shared: frozenset[int]

    def __init__(self, program: torch.fx.GraphModule) -> None:
        super().__init__()
        # In a tuple, so it is no submodule: the program's parameters are none of this module.
        self._run = (Replay(program),)
        self._has_run = False

    @property
    def run(self) -> Replay:
        """The interpreter of the program."""
        return self._run[0]

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the program's outputs."""
        results = self.run.run(*tensors)
        shared = _shared(results, tensors)
        if not self._has_run:
            # In its second run, the joint trace passes weights that are no leaves.
            self._has_run, self.shared, self.reach = True, shared, traced_reach(results, tensors)
        return tuple(r.clone() if i in shared else r for i, r in enumerate(results))


def _shared(results: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> frozenset[int]:
    """Return the positions of the results that may share memory with each other or with an argument."""
    return frozenset(
        i
        for i, result in enumerate(results)
        # A weight of the joint trace is no leaf.
        if result._is_view() or result.is_leaf or any(result is t for t in (*tensors, *results[:i]))
    )


@exclusive.exporting()
def trace_joint(
    source: TracedProgram, required: Sequence[bool], *, has_kernels: bool = True
) -> tuple[Joint, Reach]:
    """Differentiate a program by autograd.

    Args:
        source: the program.
        required: for each of its inputs, whether a gradient is wanted.
        has_kernels: whether PyTorch's kernels are available when the graph runs. If they are not, an operator
            that fits into a graph as long as it is not differentiated stays in the graph.

    Returns:
        The joint graph, and the inputs that get a gradient from each output.

    Raises:
        UnsupportedOperatorError: the program has an operator that was not compared with eager PyTorch.
    """
    program, sites, written = _prepared(source, required, has_kernels=has_kernels)
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    mode = next(v.fake_mode for v in values if isinstance(v, private.FakeTensor))
    # Autograd's graph must not depend on the caller's threads and modes.
    with (
        _named_errors(),
        torch.enable_grad(),
        torch.autograd.set_multithreading_enabled(False),
        eager_formulas(has_kernels=has_kernels),
    ):
        with mode:
            arguments = [v.detach().requires_grad_(r) for v, r in zip(values, required, strict=True)]
        # Symbols and assumptions of earlier traces, whose sizes are in no tensor of this one.
        forget_new_sizes(program.graph)
        clear_deferred_asserts(program.graph)
        flat = _Flat(program)
        joint = private.joint_graph(flat, arguments, mode)
    settle_workspaces(joint.graph)
    settle_sizes(joint.graph)
    fix_fake_dtypes(joint.graph)
    reach = flat.reach
    described = _described(joint, source, flat.shared, len(reach.tracked))
    checked = check_assumed(joint.graph, flat.run.names(), flat.run.checked)
    own = len(cast("tuple[Any, ...]", source.graph_module.graph.output_node().args[0]))
    new = dict(zip(written, described.outputs[own:], strict=False))
    described = replace(
        described,
        outputs=described.outputs[:own],
        written={**described.written, **new},
        sites=(*source.sites, *sites),
        checked=checked,
    )
    if set(described.tangents.values()) != {i for i, tracked in enumerate(reach.tracked) if tracked}:
        raise UnsupportedOperatorError(
            "the joint trace and autograd disagree on which outputs require a gradient. Put the part of the "
            "model that computes them into a torch.autograd.Function, or detach those that need none"
        )
    return described, reach


@contextlib.contextmanager
def _named_errors() -> Iterator[None]:
    """Raise errors of PyTorch as errors that say that the program cannot be differentiated.

    Raises:
        UnsupportedOperatorError: PyTorch raised an error.
    """
    try:
        yield
    except (Torch2OrtError, UserError):
        raise
    except Exception as error:
        raise UnsupportedOperatorError(
            f"PyTorch's autograd does not differentiate the program that torch.export traced "
            f"({str(error).partition(_MORE)[0].rstrip('.')}). "
            f"Put the part of the model that it names into a torch.autograd.Function"
        ) from error


def _prepared(
    source: TracedProgram, required: Sequence[bool], *, has_kernels: bool
) -> tuple[torch.fx.GraphModule, list[Site], list[int]]:
    """Return the program in the form that autograd differentiates.

    Returns:
        The program, the sites that it calls besides those of ``source``, and the positions of inputs whose
        new values it returns after its own results.

    Raises:
        UnsupportedOperatorError: it has an operator that was not compared with eager PyTorch.
    """
    program = copy.deepcopy(source.graph_module)
    draw_in_order_of_memory(program.graph)
    read_from_copies(program.graph)
    select_by_tensors(program.graph)
    keep_unread_checks(program.graph)
    drop_guesses(program.graph)
    placeholders = program.graph.find_nodes(op="placeholder")
    differentiated = [n for n, r in zip(placeholders, required, strict=True) if r]
    replace_read_numbers(program.graph, has_kernels=has_kernels)
    keep_sizes(program.graph)
    if has_kernels:
        decompose_lstms(program.graph)
    sites = keep_whole(program.graph, differentiated, if_differentiated=not has_kernels)
    device = _device_of(placeholders) if has_kernels else torch.device("cpu")
    _refuse(program.graph, device, carrying(program.graph, differentiated))
    for node in program.graph.nodes:
        if node.target is _PYTHON_OP:
            node.target = DIFFERENTIABLE_PYTHON_OP
    for node in list(program.graph.nodes):
        if node.op == "call_function" and "_assert_tensor_metadata" in str(node.target):
            program.graph.erase_node(node)
    share_positions(program.graph)
    _stop_gradients(program.graph)
    written = _return_written(program.graph, required)
    _return_unused_draws(program.graph)
    return program, sites, written


def _stop_gradients(graph: torch.fx.Graph) -> None:
    """Detach the tensors from which operators read only size and dtype, as eager PyTorch does."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is _DETACH or not makes_constants(node.target):
            continue
        for read in node.all_input_nodes:
            if not isinstance(read.meta.get("val"), torch.Tensor):
                continue
            with graph.inserting_before(node):
                stopped = graph.call_function(_DETACH, (read,))
            stopped.meta = dict(read.meta)
            node.replace_input_with(read, stopped)


def _return_written(graph: torch.fx.Graph, required: Sequence[bool]) -> list[int]:
    """Make the program write into copies of inputs that require a gradient, and return the new values.

    Autograd does not see these writes, but the joint trace would ask for a gradient of the new value.

    Returns:
        Positions of these inputs, whose new values are after the program's own results.
    """
    given = graph.find_nodes(op="placeholder")
    written, seen = set[torch.fx.Node](), set[torch.fx.Node]()
    for target in (target for node in graph.nodes for target in written_by(node)):
        *_, memory = way = list(sources_of(target))
        (seen if all(node.target not in DETACHES for node in way) else written).add(memory)
    positions = [i for i, r in enumerate(required) if r and given[i] in written - seen]
    result, first = graph.output_node(), next(n for n in graph.nodes if n.op != "placeholder")
    for node in (given[i] for i in positions):
        with graph.inserting_before(first):
            copied = graph.call_function(aten.clone.default, (node,))
        copied.meta = dict(node.meta)
        node.replace_all_uses_with(copied, delete_user_cb=lambda user, made=copied: user is not made)
        with graph.inserting_before(result):
            new = graph.call_function(_DETACH, (copied,))
        result.args = ((*cast("tuple[Any, ...]", result.args[0]), new),)
    return positions


def _return_unused_draws(graph: torch.fx.Graph) -> None:
    """Make the program return random numbers that are unused, as the joint trace would drop the draw."""
    result = graph.output_node()
    read = {result}
    for node in reversed(graph.nodes):
        if node in read or writes_outside(node) or node.target is DIFFERENTIABLE_PYTHON_OP:
            read.update((node, *node.all_input_nodes))
    given = []
    for node in graph.nodes:
        if node in read or not is_random(node):
            continue
        with graph.inserting_before(result):
            first = graph.call_function(operator.getitem, (node, 0)) if _is_many(node) else node
            given.append(graph.call_function(_DETACH, (first,)))
    result.args = ((*cast("tuple[Any, ...]", result.args[0]), *given),)


def _is_many(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (list, tuple))


def refuse_write(feed: object) -> NoReturn:
    """Refuse a write into a tensor from outside.

    Raises:
        UnsupportedOperatorError: always.
    """
    what = repr(feed) if isinstance(feed, str) else "a constant"
    raise UnsupportedOperatorError(
        f"forward writes into {what}, and a graph that is trained carries on values without a gradient, in "
        f"buffers and arguments. Write a detach(), make it a buffer with register_buffer, or return the "
        f"value instead"
    )


def _described(
    graph_module: torch.fx.GraphModule, source: TracedProgram, shared: frozenset[int], count: int
) -> Joint:
    """Return a joint graph, by the descriptors of its placeholders and results."""
    inputs: dict[torch.fx.Node, int] = {}
    tangents: dict[torch.fx.Node, int] = {}
    for node in graph_module.graph.find_nodes(op="placeholder"):
        position = private.input_position(node.meta["desc"])
        if position is not None:
            inputs[node] = position
            continue
        output = private.tangent_of(node.meta["desc"])
        into = private.written_input(node.meta["desc"])
        if into is not None:
            refuse_write(source.feeds[into])
        if output is None:
            _refuse_effect(node.meta["desc"])
        tangents[node] = output
    result = graph_module.graph.output_node()
    outputs: dict[int, torch.fx.Node] = {}
    written: dict[int, torch.fx.Node] = {}
    gradients: dict[int, torch.fx.Node] = {}
    kinds = (
        (outputs, private.output_position),
        (written, private.written_input),
        (gradients, private.gradient_of_input),
    )
    for node, description in zip(cast("list[Any]", result.args[0]), result.meta["desc"], strict=True):
        positions = [(found, read(description)) for found, read in kinds]
        if description is not None and all(position is None for _, position in positions):
            _refuse_effect(description)
        for found, position in positions:
            if position is not None and isinstance(node, torch.fx.Node):
                found[position] = node
    ordered = tuple(outputs[i] for i in range(count))
    return Joint(graph_module, inputs, tangents, ordered, written, gradients, shared)


def _refuse_effect(description: Any) -> NoReturn:
    """Refuse inputs and outputs of a joint graph that are none of the program's, and keep effects in order.

    Raises:
        UnsupportedOperatorError: always.
    """
    raise UnsupportedOperatorError(
        f"forward has an effect besides its results ({description.expr()}), which a graph that is trained "
        f"does not have. Put what has it into a torch.autograd.Function"
    )


def _device_of(placeholders: Iterable[torch.fx.Node]) -> torch.device:
    """Return the GPU of the inputs; the CPU if they are on none."""
    values = (node.meta.get("val") for node in placeholders)
    devices = (value.device for value in values if isinstance(value, torch.Tensor))
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))


def _refuse(graph: torch.fx.Graph, device: torch.device, carried: Collection[torch.fx.Node]) -> None:
    """Refuse operators that autograd does not differentiate as eager PyTorch does, or that no graph computes.

    Args:
        graph: the nodes that are differentiated.
        device: device of its tensors. A number may be on the CPU, as in PyTorch.
        carried: nodes that carry a gradient.

    Raises:
        UnsupportedOperatorError: there is such an operator; names its line, and what to do.
    """
    for node in graph.nodes:
        values = node.meta.get("val")
        for value in values if isinstance(values, (list, tuple)) else (values,):
            if isinstance(value, torch.Tensor) and _is_elsewhere(value, node, device):
                raise UnsupportedOperatorError(
                    f"{node.target} at {source_line(node)} gives a tensor on {value.device}, and a graph "
                    f"that is trained runs on one device, here {device}. Make it there, or put all that "
                    f"computes with it into one torch.autograd.Function"
                )
        refuse_sparse_and_complex(node)
        if not is_number(values) and not _is_known(node, device, is_differentiated=node in carried):
            raise UnsupportedOperatorError(
                f"{node.target} at {source_line(node)} has no derivative that PyTorch knows. Register one "
                f"with torch.library.register_autograd, or put the call into a torch.autograd.Function"
            )


def _is_elsewhere(value: torch.Tensor, node: torch.fx.Node, device: torch.device) -> bool:
    """Return True if a tensor that ``node`` computes is on another device than the graph's."""
    if value.device.type == "meta":
        # It has no values, and the program contains the sizes that were read of it.
        return any(user.op == "output" for user in node.users)
    return value.device != device and (value.dim() > 0 or value.device.type != "cpu")


def _is_known(node: torch.fx.Node, device: torch.device, *, is_differentiated: bool) -> bool:
    """Return True if PyTorch itself defines a node's result and, where it is needed, its derivative."""
    if node.target in _OWN or private.is_of_transform(node.target):
        return True
    if isinstance(node.target, private.OpOverload):
        is_atens = node.target.namespace == "aten"
        return is_atens or not is_differentiated or private.has_formula(node.target, device)
    return node.op in ("placeholder", "output")
