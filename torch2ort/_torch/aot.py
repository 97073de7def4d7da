"""Private names of AOTAutograd, and the versions tried.

| name | tried on |
| --- | --- |
| torch._functorch.aot_autograd.aot_export_joint_with_descriptors | 2.13.0, 2.15.0 |
| torch._functorch._aot_autograd.descriptors (PlainAOTInput, TangentAOTInput, ...) | 2.13.0, 2.15.0 |
| torch.fx._lazy_graph_module._LazyGraphModule | 2.13.0 |
| torch.export.exported_program._create_graph_module_for_export | 2.13.0 |
| torch._guards.tracing, TracingContext | 2.13.0, 2.15.0 |
| torch._subclasses.fake_tensor.FakeTensorMode.from_tensor | 2.13.0, 2.15.0 |
| torch.fx.experimental.symbolic_shapes (ShapeEnv, DimDynamic, StatelessSymbolicContext) | 2.13.0 |
| torch.fx.experimental.symbolic_shapes._constrain_range_for_size | 2.11-2.15.0 |
| torch._dynamo.source.ConstantSource | 2.13.0 |
| torch._check | 2.11-2.15.0 |
| torch._C._dispatch_has_kernel_for_dispatch_key | 2.13.0 |
| torch._functorch.predispatch, whose functions begin and end transforms in a trace | 2.13.0, 2.15.0 |
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, cast

import torch

from torch2ort.support.replaced import replaced
from torch2ort.support.versions import need, private_names

with private_names("torch"):
    from torch._functorch import predispatch
    from torch._functorch._aot_autograd.descriptors import (
        GradAOTOutput,
        InputMutationAOTOutput,
        PlainAOTInput,
        PlainAOTOutput,
        TangentAOTInput,
    )
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch._guards import TracingContext, tracing
    from torch._ops import OpOverload as OpOverload
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.export import exported_program
    from torch.fx._lazy_graph_module import _LazyGraphModule
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic,
        ShapeEnv,
        StatelessSymbolicContext,
        _constrain_range_for_size,
    )

    need(torch._C, "_dispatch_has_kernel_for_dispatch_key")
    need(exported_program, "_create_graph_module_for_export")


def is_of_transform(target: object) -> bool:
    """Return True if a node begins or ends ``vmap`` or ``jvp``, or wraps or unwraps a tensor for one."""
    return getattr(target, "__module__", None) == predispatch.__name__


def has_formula(operator: OpOverload, device: torch.device) -> bool:
    """Return True if autograd has a formula for an operator on a device, or differentiates its composition.

    Without a formula, eager PyTorch runs the kernel and differentiates the operators that the kernel calls.
    """
    keys = ("Autograd", f"Autograd{device.type.upper()}", "CompositeImplicitAutograd")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key) for key in keys)


def functional(target: OpOverload) -> OpOverload | None:
    """Return the out-of-place variant of an in-place operator; ``None`` if there is none.

    An operator that is not in-place is returned unchanged.
    """
    if not target._schema.is_mutable:
        return target
    packet = getattr(torch.ops.aten, target._schema.name.partition("::")[2].removesuffix("_"), None)
    return getattr(packet, target._overloadname, None)


def joint_graph(
    module: torch.nn.Module, arguments: Sequence[torch.Tensor], mode: FakeTensorMode
) -> torch.fx.GraphModule:
    """Trace forward and backward of ``module`` into one functional graph.

    Args:
        module: takes and returns tensors.
        arguments: fake tensors of ``mode``.
        mode: the mode.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing(TracingContext(mode)))
        traced = aot_export_joint_with_descriptors(stack, module, tuple(arguments), decompositions={})
        graph_module: torch.fx.GraphModule = traced.graph_module
    return graph_module


def fake_constant(mode: FakeTensorMode, value: torch.Tensor) -> torch.Tensor:
    """Return the fake tensor of ``mode`` for a tensor of fixed sizes."""
    return mode.from_tensor(value, static_shapes=True)


def symbolic_sizes(hints: Sequence[int], *, unbacked: int = 0) -> tuple[FakeTensorMode, list[Any]]:
    """Create a mode with a symbolic size for each hint.

    Args:
        hints: the value of each size in the sample.
        unbacked: the number of further, data-dependent sizes.
    """
    from torch._dynamo.source import ConstantSource  # slow to import; few graphs out of the cache need it

    mode = FakeTensorMode(shape_env=ShapeEnv())
    dynamic: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    sizes: list[Any] = [
        mode.from_tensor(
            torch.empty(hint), source=ConstantSource(f"size_{i}"), symbolic_context=dynamic
        ).shape[0]
        for i, hint in enumerate(hints)
    ]
    for _ in range(unbacked):
        sizes.append(_unbacked_size(mode.shape_env))
    return mode, sizes


def backed_size(mode: FakeTensorMode, hint: int, name: str) -> Any:
    """Create a symbolic size of an input in the trace of a mode.

    Args:
        mode: the mode.
        hint: the value in the sample.
        name: name of the input, for messages.
    """
    from torch._dynamo.source import ConstantSource  # as in `symbolic_sizes`

    dynamic: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    sample = torch.empty(hint)
    return mode.from_tensor(sample, source=ConstantSource(name), symbolic_context=dynamic).shape[0]


def new_size(like: torch.SymInt) -> torch.SymInt:
    """Create an unbacked size in the trace of another size."""
    return _unbacked_size(like.node.shape_env)


def vector_of_unbacked_size(like: torch.Tensor) -> torch.Tensor:
    """Create a vector of the dtype of a trace's tensor, of data-dependent size."""
    mode = cast(FakeTensor, like).fake_mode
    with mode:
        return torch.empty(_unbacked_size(mode.shape_env), dtype=like.dtype)


def _unbacked_size(environment: Any) -> torch.SymInt:
    made: torch.SymInt = environment.create_unbacked_symint()
    _constrain_range_for_size(made, min=0)
    return made


def assert_sizes_equal(size: Any, other: Any) -> None:
    """Tell torch that two sizes are equal, at least one of which is symbolic."""
    torch._check(size == other)


def input_position(description: Any) -> int | None:
    """Return the position of a joint graph's placeholder among the arguments; ``None`` for a gradient."""
    return int(description.idx) if isinstance(description, PlainAOTInput) else None


def tangent_of(description: Any) -> int | None:
    """Return the position of the output whose gradient a placeholder is; ``None`` for others."""
    of = description.output if isinstance(description, TangentAOTInput) else None
    return int(of.idx) if isinstance(of, PlainAOTOutput) else None


def output_position(description: Any) -> int | None:
    """Return the position of a joint graph's result among the module's outputs; ``None`` for others."""
    return int(description.idx) if isinstance(description, PlainAOTOutput) else None


def written_input(description: Any) -> int | None:
    """Return the position of the argument whose new value a result is; ``None`` for others.

    The gradient of such a new value has the same position.
    """
    if isinstance(description, TangentAOTInput):
        description = description.output
    of = description.mutated_input if isinstance(description, InputMutationAOTOutput) else None
    return None if of is None else input_position(of)


def gradient_of_input(description: Any) -> int | None:
    """Return the position of the argument whose gradient a result is; ``None`` for others."""
    return input_position(description.grad_of) if isinstance(description, GradAOTOutput) else None


def graph_module(graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """Return a module of a graph, whose Python code is generated when it is first read or called."""
    return _LazyGraphModule(torch.nn.Module(), graph)


def program_of(
    graph_module: torch.fx.GraphModule, inputs: Sequence[torch.fx.Node], outputs: Sequence[torch.fx.Node]
) -> torch.export.ExportedProgram:
    """Build an ExportedProgram of a functional graph of tensors."""
    from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
    from torch.export.graph_signature import (
        ExportGraphSignature,
        InputKind,
        InputSpec,
        OutputKind,
        OutputSpec,
        TensorArgument,
    )
    from torch.utils import _pytree as pytree

    signature = ExportGraphSignature(
        [InputSpec(InputKind.USER_INPUT, TensorArgument(n.name), None) for n in inputs],
        [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(n.name), None) for n in outputs],
    )
    given = pytree.tree_structure((tuple(inputs), {}))
    taken = pytree.tree_structure(tuple(outputs))
    call = ModuleCallSignature(inputs=[], outputs=[], in_spec=given, out_spec=taken)
    with replaced(exported_program, _create_graph_module_for_export=_LazyGraphModule):
        return torch.export.ExportedProgram(
            root=graph_module,
            graph=graph_module.graph,
            graph_signature=signature,
            state_dict={},
            range_constraints={},
            module_call_graph=[ModuleCallEntry("", call)],
            constants={},
        )
