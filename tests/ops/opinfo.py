"""PyTorch's own samples of its operators, run in eager PyTorch and on ONNX Runtime.

``python -m tests.ops.opinfo bfloat16 export`` (or another dtype, or ``train``) prints differences and
refusals, operator by operator.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

import torch2ort
from tests.ops.dtypes import gradient

HALF = (torch.bfloat16, torch.float16)
# In half precision the tolerances of docs/precision.md.
TOLERANCES = {
    torch.float32: (1e-4, 5e-5),
    torch.float64: (1e-9, 1e-11),
    torch.bfloat16: (3e-2, 1e-2),
    torch.float16: (4e-3, 1e-3),
}
# These draw, leave memory uninitialized, or have results that are unique only up to signs and order.
_UNCOMPARABLE = (
    *("bernoulli", "normal", "multinomial", "uniform", "cauchy", "exponential", "geometric", "poisson"),
    *("rand", "dropout", "rrelu", "empty", "resize_", "as_strided", "svd", "lstsq", "eig", "lowrank"),
)
# PyTorch does not define the order of equal values, of which samples in half precision have many.
_TIED = ("sort", "topk")
SAMPLES = 4


class Call(torch.nn.Module):
    """Calls of one operator, whose tensors are the module's inputs."""

    def __init__(self, operator: Any, samples: list[Any]) -> None:
        super().__init__()
        self.operator = operator
        self._tensors: list[torch.Tensor] = []
        self._calls = [pytree.tree_flatten((s.input, s.args, s.kwargs)) for s in samples]
        for leaves, _ in self._calls:
            for position, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor):
                    leaves[position] = _Place(len(self._tensors))
                    self._tensors.append(leaf.detach().clone())

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        """The result of each call."""
        results = []
        for leaves, structure in self._calls:
            given = [tensors[leaf] if isinstance(leaf, _Place) else leaf for leaf in leaves]
            input, args, kwargs = pytree.tree_unflatten(given, structure)
            results.append(_plain(self.operator(input, *args, **kwargs)))
        return tuple(results)

    def inputs(self, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """New copies of the tensors, those of floating point in ``dtype``."""
        return [
            t.to(dtype, copy=True) if dtype and t.is_floating_point() else t.clone() for t in self._tensors
        ]


class _Place(int):
    """The position of a tensor; a class of its own, so that no integer argument is mistaken for one."""


def _plain(result: Any) -> Any:
    """Named tuples of operators as tuples."""
    return tuple(map(_plain, result)) if isinstance(result, (tuple, list)) else result


def _evaluated(call: Call, inputs: list[torch.Tensor]) -> Any:
    with torch.no_grad():
        return call(*inputs)


def _exported(call: Call, inputs: list[torch.Tensor]) -> Any:
    with torch.no_grad():
        return torch2ort.export(call.eval(), tuple(call.inputs()), training=False)(*inputs)


def _stepped(call: torch.nn.Module, inputs: list[torch.Tensor]) -> Any:
    """Results, and the gradients of the inputs."""
    inputs = [t.requires_grad_(t.is_floating_point()) for t in inputs]
    results = [r for r in pytree.tree_leaves(call(*inputs)) if isinstance(r, torch.Tensor)]
    trained = [r for r in results if r.requires_grad]
    torch.autograd.backward(trained, [gradient(r) for r in trained])
    return [r.detach() for r in results], [x.grad for x in inputs]


def _trained(call: Call, inputs: list[torch.Tensor]) -> Any:
    return _stepped(torch2ort.ORTModule(call), inputs)


@dataclass(frozen=True)
class Way:
    """A function that runs a call on ONNX Runtime, and one that runs it in eager PyTorch."""

    ours: Callable[[Call, list[torch.Tensor]], Any]
    eager: Callable[[Call, list[torch.Tensor]], Any]


WAYS = {"export": Way(_exported, _evaluated), "train": Way(_trained, _stepped)}


def operators(dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    """Name and description of each operator whose results can be compared."""
    # Imported here, as it takes seconds and is not in every build of torch.
    from torch.testing._internal.common_methods_invocations import op_db

    left_out = _UNCOMPARABLE + (_TIED if dtype in HALF else ())
    for described in op_db:
        name = ".".join(filter(None, (described.name, described.variant_test_name)))
        if dtype in described.supported_dtypes("cpu") and not any(word in name for word in left_out):
            yield name, described


def outcomes(described: Any, dtype: torch.dtype, way: Way) -> set[str]:
    """The differences from eager PyTorch, or the classes and messages of errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = _samples(described, dtype, way)
        # All samples in one graph, or one by one.
        if not samples or not _said(Call(described.op, samples), dtype, way):
            return set()
        return {_said(Call(described.op, [sample]), dtype, way) for sample in samples} - {""}


def _samples(described: Any, dtype: torch.dtype, way: Way) -> list[Any]:
    """Samples that eager PyTorch accepts, spread evenly over all samples."""
    torch.manual_seed(0)
    found = list(itertools.islice(described.sample_inputs("cpu", dtype), 40))
    return [s for s in found[:: max(1, len(found) // SAMPLES)][:SAMPLES] if _is_taken(described.op, s, way)]


def _is_taken(operator: Any, sample: Any, way: Way) -> bool:
    call = Call(operator, [sample])
    try:
        way.eager(call, call.inputs())
    except Exception:
        return False
    return True


def _said(call: Call, dtype: torch.dtype, way: Way) -> str:
    try:
        return _difference(call, dtype, way)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _difference(call: Call, dtype: torch.dtype, way: Way) -> str:
    found, expected = (pytree.tree_leaves(run(call, call.inputs())) for run in (way.ours, way.eager))
    text = _apart(found, expected, dtype)
    if text and dtype in HALF and len(found) == len(expected):
        text = _apart_from_exact(found, expected, pytree.tree_leaves(_exact(call, way)), dtype)
    return text


def _exact(call: Call, way: Way) -> Any:
    """Eager PyTorch's result of the same numbers, in ``float64``."""
    return way.eager(call, call.inputs(torch.float64))


def _apart_from_exact(found: list[Any], expected: list[Any], exact: list[Any], dtype: torch.dtype) -> str:
    """Differences both from eager and from ``exact``, beyond the rounding error of its largest number."""
    said = []
    for one, other, true in zip(found, expected, exact, strict=True):
        text = _apart(one, other, dtype)
        if text and isinstance(true, torch.Tensor) and one.dtype == other.dtype:
            largest = true.abs().nan_to_num(posinf=0).max().item()
            text = _apart(one.double(), true.double(), dtype, torch.finfo(dtype).eps * largest)
        said.append(text)
    return "; ".join(filter(None, said))


def _apart(found: Any, expected: Any, dtype: torch.dtype, beside: float = 0) -> str:
    rtol, atol = TOLERANCES[dtype]
    try:
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol + beside, equal_nan=True)
    except AssertionError as error:
        return str(error)
    return ""


def main(dtype: torch.dtype, way: Way) -> None:
    """Print the outcomes of each operator that differs."""
    for name, described in operators(dtype):
        for text in sorted(outcomes(described, dtype, way)):
            print(f"{name}: {text}", flush=True)


if __name__ == "__main__":
    main(getattr(torch, sys.argv[1]), WAYS[sys.argv[2]])
