"""The trace of a model, its loss and its gradients, from which all files of a training step are made."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from torch2ort.capture.sample_call import Call
from torch2ort.differentiate.constant_sizes import fold_constants
from torch2ort.differentiate.joint_trace import Joint, trace_joint
from torch2ort.differentiate.registered_gradients import map_calls
from torch2ort.errors import ExportError, UnsupportedOperatorError
from torch2ort.exports.build import build
from torch2ort.options import Options
from torch2ort.program.program import Program
from torch2ort.program.target import GradientRules, GradientSource
from torch2ort.program.traced_program import Constant, TracedProgram
from torch2ort.sizes.unbacked_sizes import Conditions
from torch2ort.training.ort_targets import target_of
from torch2ort.training_files.kernel_op_decompositions import decompose_kernel_ops
from torch2ort.training_files.module_with_loss import WithLoss
from torch2ort.training_files.recurrent import unroll
from torch2ort.training_files.sdpa_decomposition import write_out


@dataclass(frozen=True)
class StepInput:
    """The description of an input of a traced step.

    Attributes:
        kind: ``"batch"``, ``"parameter"``, ``"buffer"`` (which the step changes) or ``"constant"``.
        name: the name of the graph's input, or in the model's ``state_dict``; a constant has a new name.
        value: the tensor; ``None`` for one of the batch.
    """

    kind: str
    name: str
    value: torch.Tensor | None


@dataclass(frozen=True)
class TracedStep:
    """Forward and backward of a model with its loss.

    Attributes:
        joint: the graph.
        given: position of an input of the graph -> its description.
        reached: positions of the inputs for which the loss has a gradient.
        program: the export of the forward.
        known: the number of conditions on sizes in the description of the batch.
    """

    joint: Joint
    given: Mapping[int, StepInput]
    reached: frozenset[int]
    program: Program
    known: Conditions


def trace_step(wrapped: WithLoss, call: Call, trained: Collection[str], options: Options) -> TracedStep:
    """Trace a step.

    Args:
        wrapped: the model with its loss.
        call: a sample batch.
        trained: names, in ``wrapped``, of the parameters that are trained.
        options: options of the export.

    Raises:
        ExportError: the model cannot be exported, or has an effect in a step that no file can have.
        UnsupportedOperatorError: an operator cannot be in a graph.
    """
    rules = GradientRules(source=GradientSource.PROGRAM)
    target = replace(target_of(options), gradients=rules, training=wrapped.training)
    with requiring(wrapped, trained):
        program = build(wrapped, call, training=None, target=target, options=options)
    _refuse_effects(wrapped, program)
    assert program.traced is not None
    source = _unrolled(fold_constants(program.traced.get()))
    wanted = {id(p) for name, p in wrapped.named_parameters(remove_duplicate=False) if name in trained}
    required = [isinstance(feed, str) and id(program.weights.get(feed)) in wanted for feed in source.feeds]
    source = map_calls(source, required, target)
    joint, reach = trace_joint(source, required, has_kernels=False)
    given = _given(program, source, joint, required, state_names(wrapped.model, wrapped))
    # Calls of Functions count as operators: a file does not know which gradients a run of theirs omits.
    reached = reach.rename(range(len(source.feeds)), {}, {}).inputs([0])
    return TracedStep(joint, given, reached, program, source.conditions)


@contextlib.contextmanager
def requiring(module: torch.nn.Module, trained: Collection[str]) -> Iterator[None]:
    """Context in which the parameters of these names require a gradient, and no others."""
    flags = {parameter: parameter.requires_grad for parameter in module.parameters()}
    wanted = {p for name, p in module.named_parameters(remove_duplicate=False) if name in trained}
    try:
        for parameter in flags:
            parameter.requires_grad_(parameter in wanted)
        yield
    finally:
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)


def _unrolled(source: TracedProgram) -> TracedProgram:
    program = copy.deepcopy(source.graph_module)
    unroll(program.graph)
    write_out(program.graph)
    decompose_kernel_ops(program.graph)
    return replace(source, graph_module=program)


def _refuse_effects(wrapped: WithLoss, program: Program) -> None:
    if program.effects:
        raise ExportError(
            f"{type(wrapped.model).__name__}: forward leaves something in Python objects besides its "
            f"buffers, which a file of a training step cannot. Make it a buffer, or return it"
        )


def _origin(program: Program, feed: str | Constant) -> str:
    """Return the name of a feed in the wrapper; empty for one of the batch."""
    return program.signature.weights.get(feed, "") if isinstance(feed, str) else feed.owner


def state_names(model: torch.nn.Module, within: torch.nn.Module) -> dict[int, str]:
    """Map the id of each parameter and buffer to its name in a ``state_dict``; the first of several names.

    Args:
        model: the model, whose names have no prefix.
        within: a module that contains it.
    """
    found: dict[int, str] = {}
    for module in (model, within):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            found.setdefault(id(tensor), name)
    return found


def _given(
    program: Program, source: TracedProgram, joint: Joint, required: Sequence[bool], names: Mapping[int, str]
) -> dict[int, StepInput]:
    found: dict[int, StepInput] = {}
    for position, feed in enumerate(source.feeds):
        origin = _origin(program, feed).removeprefix("model.")
        name = names.get(id(program.weights.get(feed)), origin) if isinstance(feed, str) else origin
        if isinstance(feed, str) and feed in program.signature.inputs:
            found[position] = StepInput("batch", feed, None)
            _refuse_write(joint, position, f"argument {feed!r}")
            continue
        value = feed.value if isinstance(feed, Constant) else program.weights[feed]
        if required[position]:
            _refuse_write(joint, position, f"parameter {name!r}")
            found[position] = StepInput("parameter", name, value)
        elif position in joint.written:
            if not name:
                _refuse_write(joint, position, "a tensor that is no buffer")
            found[position] = StepInput("buffer", name, value)
        else:
            # A tied constant may have several positions.
            found[position] = StepInput("constant", f"constant.{position}.{name}", value)
    _refuse_twice([given.name for given in found.values()])
    return found


def _refuse_twice(names: Sequence[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise UnsupportedOperatorError(
                f"{name!r} is tied, and the traced model has an input for each of its names, of which a "
                f"training step would train each by itself. Use one attribute for both"
            )


def _refuse_write(joint: Joint, position: int, what: str) -> None:
    if position in joint.written:
        raise UnsupportedOperatorError(
            f"forward writes into {what}, and a training step as a file writes into buffers alone. Write "
            f"into a copy, or make it a buffer with register_buffer"
        )
