"""The backend of ``torch.compile(model, backend="torch2ort")``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch2ort.dynamo.backend import compile_graph
from torch2ort.dynamo.opaque_functions import keep_functions_of
from torch2ort.dynamo.report import forget


def backend(
    graph_module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one graph that dynamo captured, for ONNX Runtime.

    torch.compile finds it by its entry point, and wraps its exceptions into ``BackendCompilerFailed``.

    Args:
        graph_module: the graph.
        example_inputs: its arguments, fake.
        options: ``keep_functions``, ``providers``, ``cache_dir``, ``cache_limit``, ``log_level``,
            ``opset``, ``intra_op_threads``, ``save_onnx_dir`` and ``deterministic``; see
            :class:`torch2ort.Options`.
        mode: one of Inductor's, which is ignored with a warning.

    Returns:
        A function that runs the graph.

    Raises:
        OptionError: an option is unknown, or has a value that is not allowed.
        UnsupportedOperatorError: a part of the graph, or of its backward, cannot run in any session.
    """
    return compile_graph(graph_module, example_inputs, options=options, mode=mode)


keep_functions_of(backend)
# dynamo calls it in torch.compiler.reset().
backend.reset = forget  # type: ignore[attr-defined]
