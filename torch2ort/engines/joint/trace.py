"""From a traced program to one functional graph of its forward and its backward, by PyTorch's autograd."""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

import sympy
import torch

from torch2ort.cache.key.exclusive import exclusive
from torch2ort.engines.joint import _torch_private as private
from torch2ort.engines.joint.assigned import read_from_copies
from torch2ort.engines.joint.masks import share_positions
from torch2ort.engines.joint.reach import Reach, traced_reach
from torch2ort.engines.joint.read_numbers import take_read_numbers
from torch2ort.engines.joint.sizes import Replay, refuse_assumed, settle_sizes, without_names
from torch2ort.engines.joint.whole import keep_whole
from torch2ort.engines.no_gradient import refuse_sparse_and_complex
from torch2ort.errors import Torch2OrtError, UnsupportedOperatorError
from torch2ort.exports.source import Source
from torch2ort.kernels.result_types import tell_eagers_types
from torch2ort.pythonop import Site
from torch2ort.pythonop.abstract_run.observe import UserError
from torch2ort.pythonop.differentiable import DIFFERENTIABLE_PYTHON_OP
from torch2ort.sizes.guessed import forget_assumed, forget_new_sizes
from torch2ort.sizes.symbols import is_number
from torch2ort.symbolics.eager_formulas import eager_formulas
from torch2ort.symbolics.grad_regions import inline_grad_regions
from torch2ort.symbolics.gradients import makes_constants
from torch2ort.symbolics.hidden_writes import refuse_hidden_writes
from torch2ort.symbolics.operators import checked_index, extreme, must_compute, number_as_sizes
from torch2ort.symbolics.registered.own_gradients import MAPPED_CALL, MappedCall
from torch2ort.symbolics.selected import select_by_tensors
from torch2ort.symbolics.shared_memory import writes_outside
from torch2ort.symbolics.sites import is_random
from torch2ort.symbolics.source import source_line
from torch2ort.symbolics.strides import draw_in_order_of_memory
from torch2ort.symbolics.unread_checks import keep_unread_checks
from torch2ort.symbolics.value_checks import drop_guesses

_PYTHON_OP = torch.ops.torch2ort.python_op.default
aten = torch.ops.aten
_DETACH = aten.detach.default
# Behind it PyTorch says what only who traces can do.
_MORE = "\n\n"
# What torch2ort itself says of them is not compared with a derivative.
_OWN = (operator.getitem, _PYTHON_OP, MAPPED_CALL, checked_index, must_compute, extreme, number_as_sizes)


@dataclass(frozen=True)
class Joint:
    """Forward and backward in one graph.

    Attributes:
        graph_module: functional; its inputs are the program's and one gradient an output.
        inputs: placeholder -> position among the program's inputs.
        tangents: placeholder -> position of the output that it is the gradient of.
        outputs: node of each output of the program.
        written: position among the program's inputs -> node of its new value.
        gradients: position among the program's inputs -> node of its gradient.
        shared: positions of the outputs that are a view, an input or another output in eager PyTorch.
        sites: the calls of PyTorch's kernels, and those with registered gradients, kept alive.
        checked: what the trace took sizes for that a run of forward checks, as of
            :func:`torch2ort.engines.joint.sizes.without_names`.
    """

    graph_module: torch.fx.GraphModule
    inputs: dict[torch.fx.Node, int]
    tangents: dict[torch.fx.Node, int]
    outputs: tuple[torch.fx.Node, ...]
    written: dict[int, torch.fx.Node]
    gradients: dict[int, torch.fx.Node]
    shared: frozenset[int]
    sites: Sequence[Site | MappedCall] = ()
    checked: frozenset[str] = frozenset()


class _Flat(torch.nn.Module):
    """The program with outputs that share no memory with each other or with an input."""

    def __init__(self, program: torch.fx.GraphModule) -> None:
        super().__init__()
        # Not a submodule: what the program holds is no parameter of this module.
        self._run = (Replay(program),)

    @property
    def checked(self) -> set[sympy.Basic]:
        """What the trace took sizes for that a run checks."""
        return self._run[0].checked

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The program's outputs."""
        results = self._run[0].run(*tensors)
        shared = _shared(results, tensors)
        return tuple(r.clone() if i in shared else r for i, r in enumerate(results))


def _shared(results: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> frozenset[int]:
    """Positions of the results that may share memory with each other or with what was given."""
    return frozenset(
        i
        for i, result in enumerate(results)
        # The joint trace hands in weights that are no leaves.
        if result._is_view() or result.is_leaf or any(result is t for t in (*tensors, *results[:i]))
    )


@exclusive.exporting()
def trace_joint(source: Source, required: Sequence[bool], *, has_kernels: bool = True) -> tuple[Joint, Reach]:
    """Let autograd differentiate a program.

    Args:
        source: the program.
        required: of each of its inputs, whether a gradient is wanted.
        has_kernels: whether PyTorch's kernels are there when the graph runs. Where they are not, an operator
            that fits into a graph unless it is differentiated stays in it.

    Returns:
        The joint graph, and which inputs get a gradient from which outputs.

    Raises:
        UnsupportedOperatorError: the program has something that was not compared with eager PyTorch.
    """
    program, sites, unread = _prepared(source, required, has_kernels=has_kernels)
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    mode = next(v.fake_mode for v in values if isinstance(v, private.FakeTensor))
    # Autograd's graph is of what the caller's threads and modes do not change.
    with (
        _named_errors(),
        torch.enable_grad(),
        torch.autograd.set_multithreading_enabled(False),
        eager_formulas(has_kernels=has_kernels),
    ):
        # As the joint trace has them: some kernels in C++ would take sizes that vary for numbers.
        with mode, private.python_formulas():
            arguments = [v.detach().requires_grad_(r) for v, r in zip(values, required, strict=True)]
            again = [v.detach().requires_grad_(r) for v, r in zip(values, required, strict=True)]
            results = program(*again)
            forget_new_sizes(program.graph)
            forget_assumed(program.graph)
        reach = traced_reach(results, again)
        flat = _Flat(program)
        joint = private.joint_graph(flat, arguments, mode)
    settle_sizes(joint.graph)
    tell_eagers_types(joint.graph)
    described = _described(joint, source, _shared(results, again), len(results))
    pairs = [(t.meta["val"], described.outputs[i].meta["val"]) for t, i in described.tangents.items()]
    refuse_assumed(joint.graph, pairs, flat.checked)
    outputs = described.outputs[: len(results) - unread]
    checked = frozenset(map(without_names, flat.checked))
    described = replace(described, outputs=outputs, sites=sites, checked=checked)
    if set(described.tangents.values()) != {i for i, tracked in enumerate(reach.tracked) if tracked}:
        raise UnsupportedOperatorError(
            "the joint trace and autograd disagree on which outputs require a gradient. Train with "
            "onnxruntime-training (engine='ort_training')"
        )
    return described, reach


@contextlib.contextmanager
def _named_errors() -> Iterator[None]:
    """Say of what PyTorch raises that the program is not differentiated.

    Raises:
        UnsupportedOperatorError: it raised something.
    """
    try:
        yield
    except (Torch2OrtError, UserError):
        raise
    except Exception as error:
        raise UnsupportedOperatorError(
            f"PyTorch's autograd does not differentiate the program that torch.export traced "
            f"({str(error).partition(_MORE)[0]}). "
            f"Put the part of the model that it names into a torch.autograd.Function"
        ) from error


def _prepared(
    source: Source, required: Sequence[bool], *, has_kernels: bool
) -> tuple[torch.fx.GraphModule, list[Site], int]:
    """The program as autograd is to see it.

    Returns:
        The program, sites that it calls besides the source's, and the number of results that nobody reads
        behind its own.

    Raises:
        UnsupportedOperatorError: it has something that was not compared with eager PyTorch.
    """
    program = copy.deepcopy(source.graph_module)
    inline_grad_regions(program)
    refuse_hidden_writes(program.graph)
    draw_in_order_of_memory(program.graph)
    read_from_copies(program.graph)
    select_by_tensors(program.graph)
    keep_unread_checks(program.graph)
    drop_guesses(program.graph)
    placeholders = program.graph.find_nodes(op="placeholder")
    differentiated = (n for n, r in zip(placeholders, required, strict=True) if r)
    take_read_numbers(program.graph)
    sites = keep_whole(program.graph, differentiated, if_differentiated=not has_kernels)
    _refuse(program, _device_of(placeholders) if has_kernels else torch.device("cpu"))
    for node in program.graph.nodes:
        if node.target is _PYTHON_OP:
            node.target = DIFFERENTIABLE_PYTHON_OP
    for node in list(program.graph.nodes):
        if node.op == "call_function" and "_assert_tensor_metadata" in str(node.target):
            program.graph.erase_node(node)
    share_positions(program.graph)
    _stop_gradients(program.graph)
    unread = _give_unread(program.graph)
    program.recompile()
    return program, sites, unread


def _stop_gradients(graph: torch.fx.Graph) -> None:
    """Keep gradients from what only takes its size and type from a tensor, as eager does."""
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


def _give_unread(graph: torch.fx.Graph) -> int:
    """Have the program return what it draws and nobody reads, as the joint trace would drop the draw.

    Returns:
        The number of results that there are more, behind the others.
    """
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
    return len(given)


def _is_many(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (list, tuple))


def refuse_write(feed: object) -> NoReturn:
    """Refuse a write into a tensor from outside.

    Raises:
        UnsupportedOperatorError: always.
    """
    what = repr(feed) if isinstance(feed, str) else "a constant"
    raise UnsupportedOperatorError(
        f"forward writes into {what}, which requires a gradient or gets a value that does, and the joint "
        f"engine takes no such write. Return the value instead, or train with engine='ort_training'"
    )


def _described(
    graph_module: torch.fx.GraphModule, source: Source, shared: frozenset[int], count: int
) -> Joint:
    """A joint graph with what its descriptors say."""
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
            raise UnsupportedOperatorError(
                f"forward checks a value as it computes it ({node.meta['desc'].expr()}), which the joint "
                f"engine does not take. Train with onnxruntime-training (engine='ort_training')"
            )
        tangents[node] = output
    result = graph_module.graph.output_node()
    outputs: dict[int, torch.fx.Node] = {}
    written: dict[int, torch.fx.Node] = {}
    gradients: dict[int, torch.fx.Node] = {}
    for node, description in zip(cast("list[Any]", result.args[0]), result.meta["desc"], strict=True):
        for found, read in (
            (outputs, private.output_position),
            (written, private.written_input),
            (gradients, private.gradient_of_input),
        ):
            position = read(description)
            if position is not None and isinstance(node, torch.fx.Node):
                found[position] = node
    known = (
        len(outputs)
        + len(written)
        + sum(d is None or private.gradient_of_input(d) is not None for d in result.meta["desc"])
    )
    if sorted(outputs) != list(range(count)) or known != len(result.meta["desc"]):
        raise UnsupportedOperatorError(
            "the joint trace gives outputs of a kind that the joint engine does not know. Use "
            "engine='ort_training'"
        )
    ordered = tuple(outputs[i] for i in range(count))
    return Joint(graph_module, inputs, tangents, ordered, written, gradients, shared)


def _device_of(placeholders: Iterable[torch.fx.Node]) -> torch.device:
    """The GPU that inputs are on; else the CPU."""
    values = (node.meta.get("val") for node in placeholders)
    devices = (value.device for value in values if isinstance(value, torch.Tensor))
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))


def _refuse(program: torch.fx.GraphModule, device: torch.device) -> None:
    """Refuse by name what the joint engine was not compared with eager PyTorch for.

    Args:
        program: what is differentiated.
        device: that its tensors are on. A number may be on the CPU, as in PyTorch.
    """
    for node in program.graph.nodes:
        values = node.meta.get("val")
        flat = values if isinstance(values, (list, tuple)) else (values,)
        for value in flat:
            if (
                isinstance(value, torch.Tensor)
                and value.device != device
                and (value.dim() or value.device.type != "cpu")
            ):
                what = f"is on {value.device}"
            elif isinstance(value, torch.Tensor) and value.is_sparse:
                what = "gives sparse numbers"
            else:
                continue
            raise UnsupportedOperatorError(
                f"{node.target} at {source_line(node)} {what}, which the joint engine does not take. Train "
                f"with onnxruntime-training (engine='ort_training'), or in eager PyTorch"
            )
        refuse_sparse_and_complex(node)
        if is_number(node.meta.get("val")):
            continue
        if node.op not in ("placeholder", "call_function", "output") or not _is_known(node):
            raise UnsupportedOperatorError(
                f"{node.target} at {source_line(node)} is no operator of ATen's, and the joint engine does "
                f"not differentiate it. Train with onnxruntime-training (engine='ort_training'), or put it "
                f"into a torch.autograd.Function"
            )


def _is_known(node: torch.fx.Node) -> bool:
    """Whether PyTorch itself says what a node computes and what its derivative is."""
    if node.op != "call_function" or node.target in _OWN or private.is_of_transform(node.target):
        return True
    return isinstance(node.target, private.OpOverload) and node.target.namespace == "aten"
