"""The backend that dynamo calls with each graph that it captured."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch2ort._torch import dynamo as private
from torch2ort.differentiate.lower_step import lower_half
from torch2ort.differentiate.step_target import half_of
from torch2ort.dynamo.activation_checkpointing import redraws_in_backward
from torch2ort.dynamo.compile_cache import kept_or_lowered
from torch2ort.dynamo.compiled_call import GraphRunner
from torch2ort.dynamo.execution_providers import on_its_devices
from torch2ort.dynamo.graph_report import described_graph, described_half
from torch2ort.dynamo.none_grads import UndefinedGradients
from torch2ort.dynamo.opaque_functions import calls_in
from torch2ort.dynamo.opaque_ops import keep_operators_whole, return_unused_values
from torch2ort.dynamo.partition import partition
from torch2ort.dynamo.report import CompiledGraph, note, number
from torch2ort.dynamo.settings import settings_of
from torch2ort.dynamo.tensor_only_graph import tensors_only
from torch2ort.dynamo.undefined_grads import with_undefined_gradients_recorded
from torch2ort.dynamo.unsupported_graphs import refuse_numpys_draws
from torch2ort.graph.debug_dumps import save_stage
from torch2ort.kernels.meta_dtype_fixes import fix_fake_dtypes
from torch2ort.log import suppress_libraries
from torch2ort.options import Options
from torch2ort.pythonop import Site
from torch2ort.runtime.step_session import Bindings
from torch2ort.support.startup_timing import DIFFERENTIATE, TRACE, TRANSLATE, Startup
from torch2ort.training.ort_targets import live_target

_Boxed = Callable[[list[Any]], list[Any]]


def compile_graph(
    graph_module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None,
    mode: str | None,
) -> Callable[..., Any]:
    """Compile a graph of dynamo for ONNX Runtime; see :func:`torch2ort.compile.backend`."""
    settings = settings_of(options, mode)
    refuse_numpys_draws(graph_module.graph)
    asked = on_its_devices(graph_module.graph, inputs, settings.options)
    report = described_graph(graph_module)
    report.started = Startup(f"graph {number()} of torch.compile")
    report.started.add(TRACE, private.seconds_of_frame())
    step = _Step(asked, report, redraws_in_backward(graph_module))
    with report.started.recording(_phase(inputs)):
        unread = return_unused_values(graph_module)
        keep_operators_whole(graph_module, step.sites)
        compiler = private.aot_autograd(
            fw_compiler=step.forward,
            bw_compiler=step.backward,
            inference_compiler=step.inference,
            partition_fn=step.partition,
        )
        with private.whole_steps(), calls_in(step.sites):
            compiled: Callable[..., Any] = compiler(graph_module, inputs)
    note(report)
    if len(step.gradients) > 1:
        compiled = with_undefined_gradients_recorded(compiled)
    return private.uncompiled(lambda *args: compiled(*args)[:-unread]) if unread else compiled


def _phase(inputs: Sequence[Any]) -> str:
    """Return the phase of AOTAutograd's work: it differentiates where an input requires a gradient."""
    tensors = (value for value in inputs if isinstance(value, torch.Tensor))
    return DIFFERENTIATE if torch.is_grad_enabled() and any(t.requires_grad for t in tensors) else TRACE


class _Step:
    """The compilers of one graph of dynamo.

    Args:
        options: the user's, with the providers of the graph's devices.
        report: receives the compiled halves.
        redraws: True if checkpointed code in the graph draws other random numbers in backward.

    Attributes:
        sites: the calls in its graphs, kept alive.
        gradients: name of the argument that is the gradient of an output -> position of the output.
    """

    def __init__(self, options: Options, report: CompiledGraph, redraws: bool) -> None:
        self._report, self._redraws = report, redraws
        self.sites: list[Site] = []
        self.gradients: dict[str, int] = {}
        # Shared by both halves: backward finds the contexts of forward's calls.
        self._bindings = Bindings(options.providers)
        self._options = options
        self._target = half_of(live_target(options))
        # The number of forward's results that are returned to the user.
        self._returned = 0

    def partition(
        self, joint: torch.fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **others: Any
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        """See :func:`torch2ort.dynamo.partition.partition`."""
        self._returned = num_fwd_outputs
        self.gradients = private.gradients_of(joint, num_fwd_outputs)
        return partition(joint, inputs, redraws=self._redraws, num_fwd_outputs=num_fwd_outputs, **others)

    def inference(self, graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> _Boxed:
        """Compile a graph without a backward."""
        fix_fake_dtypes(graph_module.graph)
        return self._compile("inference", graph_module, len(graph_module.graph.output_node().args[0]))  # type: ignore[arg-type]

    def forward(self, graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> _Boxed:
        """Compile a forward, whose last results are the values that backward reads."""
        private.lend_no_buffers()
        return self._compile("forward", graph_module, self._returned)

    def backward(self, graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> _Boxed:
        """Compile a backward."""
        return self._compile("backward", graph_module, 0)

    def _compile(self, kind: str, graph_module: torch.fx.GraphModule, restrided: int) -> _Boxed:
        compiled = self._graph(kind, graph_module, restrided, frozenset())
        return private.boxed(lambda arguments: compiled(arguments))

    def _graph(
        self, kind: str, graph_module: torch.fx.GraphModule, restrided: int, missing: frozenset[int]
    ) -> GraphRunner:
        without = None
        arguments = graph_module.graph.find_nodes(op="placeholder")
        gradients = {self.gradients[n.name]: i for i, n in enumerate(arguments) if n.name in self.gradients}
        if kind == "backward" and len(gradients) > 1 and not missing:
            without = functools.partial(self._graph, kind, graph_module, restrided)
        started = self._report.started
        with started.recording(TRANSLATE), suppress_libraries(), private.apart(graph_module.graph):
            half, interface = tensors_only(graph_module, restrided, missing)
            obtained = kept_or_lowered(
                half.graph_module.graph,
                self._target.opset,
                self._options,
                lambda: lower_half(half, self._target),
            )
            lowered = obtained.lowered
            self._report.halves.append(described_half(kind, obtained))
            save_stage(self._options, f"compiled_{kind}_exported", lowered.proto)
            left_out = None
            if kind == "backward" and interface.token is not None:
                given = set(arguments[i] for i in range(len(arguments)) if i not in missing)
                left_out = UndefinedGradients(
                    graph_module.graph, lambda n: n in given and private.is_tangent(n)
                )
            return GraphRunner(
                kind, lowered, interface, self._bindings, self._options, started, gradients, without, left_out
            )
