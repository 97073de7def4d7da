"""Comparison of a graph's first step with eager PyTorch, for ``Options.verify``."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from typing import Any

import torch

from torch2ort import io_schema
from torch2ort.capture.plain_tensors import as_plain_leaf, plain_leaf_tensors
from torch2ort.effects import EffectError, SideEffectRecorder
from torch2ort.errors import EngineError
from torch2ort.graph.identical_inputs import as_passed, identical
from torch2ort.pythonop.abstract_run.object_rollback import Generators, restoring_state
from torch2ort.pythonop.abstract_run.object_snapshot import Snapshot
from torch2ort.pythonop.abstract_run.tensor_rollback import TensorRollback

RTOL = 1e-3
ATOL = 1e-5


class Verification:
    """One eager run on a copy of the model, with the random numbers that the graph's run will draw.

    Args:
        model: the module; it is copied, so its buffers do not change.
        signature: names of its arguments.
        schema: structure of the call.
        tensors: the call's tensors.

    Attributes:
        RTOL and ATOL of this module bound the differences, as in ``torch.testing.assert_close``.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        signature: io_schema.Signature,
        schema: io_schema.Schema,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        with plain_leaf_tensors(model):
            eager = copy.deepcopy(model)
        copies = [as_plain_leaf(t).detach().clone().requires_grad_(t.requires_grad) for t in tensors]
        self._inputs = as_passed(copies, identical(tensors))
        args, kwargs = signature.unbind(io_schema.unflatten(self._inputs, schema))
        held = Snapshot([(type(eager).__name__, eager)], code=False).values()
        self._own = [*self._inputs, *(t for _, t in held if isinstance(t, torch.Tensor))]
        # Effects of forward on objects and tensors outside of the copy are undone.
        with (
            torch.random.fork_rng(devices=range(torch.cuda.device_count())),
            TensorRollback(self._own),
            SideEffectRecorder(eager, None, left=True) as watched,
        ):
            outputs: Any = eager.forward(*args, **kwargs)
            with contextlib.suppress(EffectError):  # effects of Functions are not compared
                watched.find(known=False)
        self._outputs, described = io_schema.flatten(outputs)
        self._returned = len(self._outputs)
        self._outputs += watched.tensors
        self._output_names = [leaf.name or "output" for leaf in described.leaves]
        self._output_names += [f"left in {place}" for place in watched.places]
        self._input_names = [leaf.name for leaf in schema.leaves]
        self._eager = eager
        self._weights = dict(eager.named_parameters(remove_duplicate=False))
        self._expected: list[tuple[str, int, torch.Tensor | None]] = []

    def check_outputs(self, outputs: Sequence[torch.Tensor]) -> None:
        """Compare the graph's outputs with those of eager PyTorch.

        Raises:
            EngineError: an output differs; names it.
        """
        if len(outputs) != len(self._outputs):
            # An effect was found as another leaf, as its tensor is older than the call.
            outputs, self._outputs = outputs[: self._returned], self._outputs[: self._returned]
        for name, actual, expected in zip(self._output_names, outputs, self._outputs, strict=False):
            if actual.requires_grad != expected.requires_grad:
                kinds = ["requires" if t.requires_grad else "does not require" for t in (expected, actual)]
                raise EngineError(
                    f"verify: output '{name}': eager PyTorch's {kinds[0]} a gradient, ONNX Runtime's "
                    f"{kinds[1]} one"
                )
            _compare(f"output '{name}'", actual, expected)

    def run_backward(self, given: Sequence[torch.Tensor | None], weights: Sequence[str]) -> None:
        """Compute the gradients of inputs and weights before the graph does, as backward may change values.

        Args:
            given: the gradient of each output.
            weights: names of the weights after the graph's inputs.
        """
        self._expected = []
        if any(gradient is not None for gradient in given[len(self._outputs) :]):
            return
        names = [*(f"input '{n}'" for n in self._input_names), *(f"'{n}'" for n in weights)]
        leaves = [*self._inputs, *(self._weights.get(name) for name in weights)]
        wanted = [i for i, leaf in enumerate(leaves) if leaf is not None and leaf.requires_grad]
        pairs = [
            (o, g) for o, g in zip(self._outputs, given, strict=False) if g is not None and o.requires_grad
        ]
        if not pairs or not wanted:
            return
        outputs, grad_outputs = zip(*pairs, strict=True)
        inputs = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        found = self._gradients(outputs, inputs, grad_outputs)
        self._expected = [(names[i], i, gradient) for i, gradient in zip(wanted, found, strict=True)]

    def _gradients(self, outputs: Any, inputs: Any, grad_outputs: Any) -> Sequence[torch.Tensor | None]:
        generators = Generators()
        try:
            with (
                torch.random.fork_rng(devices=range(torch.cuda.device_count())),
                restoring_state(type(self._eager).__name__, self._eager, code=True),
                TensorRollback(self._own),
            ):
                found: Sequence[torch.Tensor | None] = torch.autograd.grad(
                    outputs, inputs, grad_outputs, allow_unused=True, retain_graph=True
                )
                return found
        finally:
            generators.restore()

    def check_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Compare the gradients with those of :meth:`run_backward`.

        Args:
            gradients: the gradient of each feed: the inputs, then the weights.

        Raises:
            EngineError: a gradient differs; names it.
        """
        for name, i, gradient in self._expected:
            _compare(f"gradient of {name}", gradients[i], gradient)


def _compare(what: str, actual: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    if actual is None or expected is None:
        if actual is expected:
            return
        kinds = ["none" if t is None else "a tensor" for t in (expected, actual)]
        raise EngineError(f"verify: {what}: eager PyTorch gives {kinds[0]}, ONNX Runtime gives {kinds[1]}")
    # Half precision has fewer digits than RTOL.
    rounding = torch.finfo(expected.dtype).eps if expected.is_floating_point() else 0
    rtol, atol = (4 * rounding, rounding) if rounding > RTOL / 4 else (RTOL, ATOL)
    try:
        torch.testing.assert_close(actual.detach(), expected.detach(), rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        raise EngineError(f"verify: {what} differs from eager PyTorch's: {error}") from None
