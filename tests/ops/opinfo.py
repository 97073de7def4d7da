"""PyTorch's own samples of its operators, run in eager PyTorch and on ONNX Runtime.

``python -m tests.ops.opinfo float32 export`` (or ``float64``, or ``train``) prints what is not equal and what
is refused, operator by operator. PyTorch's descriptions import ``expecttest``; install it before.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import torch2ort
from tests.ops.dtypes import gradient

TOLERANCES = {torch.float32: (1e-4, 5e-5), torch.float64: (1e-9, 1e-11)}
# They draw, leave memory as it is, or have results that are unique up to signs and order only.
_UNCOMPARABLE = (
    *("bernoulli", "normal", "multinomial", "uniform", "cauchy", "exponential", "geometric", "poisson"),
    *("rand", "dropout", "rrelu", "empty", "resize_", "as_strided", "svd", "lstsq", "eig", "lowrank"),
)
SAMPLES = 6


def operators(dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    """Name and description of each operator whose results can be compared."""
    for described in op_db:
        name = ".".join(filter(None, (described.name, described.variant_test_name)))
        if dtype in described.supported_dtypes("cpu") and not any(word in name for word in _UNCOMPARABLE):
            yield name, described


class Call(torch.nn.Module):
    """Calls of one operator, whose tensors are the module's inputs."""

    def __init__(self, operator: Any, samples: list[Any]) -> None:
        super().__init__()
        self.operator = operator
        self.tensors: list[torch.Tensor] = []
        self._calls = [pytree.tree_flatten((s.input, s.args, s.kwargs)) for s in samples]
        for leaves, _ in self._calls:
            for position, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor):
                    leaves[position] = _Place(len(self.tensors))
                    self.tensors.append(leaf.detach().clone())

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        """The result of each call."""
        results = []
        for leaves, structure in self._calls:
            given = [tensors[leaf] if isinstance(leaf, _Place) else leaf for leaf in leaves]
            input, args, kwargs = pytree.tree_unflatten(given, structure)
            results.append(_plain(self.operator(input, *args, **kwargs)))
        return tuple(results)


class _Place(int):
    """A tensor's number, which no argument of the operator is taken for."""


def _plain(result: Any) -> Any:
    """Named tuples of operators as tuples."""
    return tuple(map(_plain, result)) if isinstance(result, (tuple, list)) else result


def samples_of(described: Any, dtype: torch.dtype) -> list[Any]:
    """Samples of one operator that eager PyTorch takes, spread over all that there are."""
    torch.manual_seed(0)
    found = list(itertools.islice(described.sample_inputs("cpu", dtype), 40))
    return [s for s in found[:: max(1, len(found) // SAMPLES)][:SAMPLES] if _is_taken(described.op, s)]


def _is_taken(operator: Any, sample: Any) -> bool:
    call = Call(operator, [sample])
    try:
        call(*call.tensors)
    except Exception:
        return False
    return True


def outcome(operator: Any, samples: list[Any], dtype: torch.dtype, *, trained: bool) -> str:
    """What is not equal to eager PyTorch: a difference, or the class of an error and what it says."""
    run = _trained if trained else _exported
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return run(operator, samples, dtype)
        except torch2ort.Torch2OrtError:
            said = {_refusal(run, operator, sample, dtype) for sample in samples}
            return "; ".join(sorted(said - {""}))


def _refusal(run: Any, operator: Any, sample: Any, dtype: torch.dtype) -> str:
    try:
        text: str = run(operator, [sample], dtype)
    except torch2ort.Torch2OrtError as error:
        text = f"{type(error).__name__}: {error}"
    return text


def _exported(operator: Any, samples: list[Any], dtype: torch.dtype) -> str:
    call = Call(operator, samples)
    with torch.no_grad():
        exported = torch2ort.export(call.eval(), tuple(_copies(call)), training=False)
        return _difference(exported(*_copies(call)), call(*_copies(call)), dtype)


def _trained(operator: Any, samples: list[Any], dtype: torch.dtype) -> str:
    ways = []
    for wrap in (torch2ort.ORTModule, lambda call: call):
        call = Call(operator, samples)
        inputs = [t.requires_grad_(t.is_floating_point()) for t in _copies(call)]
        results = [r for r in pytree.tree_leaves(wrap(call)(*inputs)) if isinstance(r, torch.Tensor)]
        trained = [r for r in results if r.requires_grad]
        torch.autograd.backward(trained, [gradient(r) for r in trained])
        ways.append(([r.detach() for r in results], [x.grad for x in inputs]))
    return _difference(*ways, dtype)


def _copies(call: Call) -> list[torch.Tensor]:
    return [t.clone() for t in call.tensors]


def _difference(found: Any, expected: Any, dtype: torch.dtype) -> str:
    rtol, atol = TOLERANCES[dtype]
    try:
        torch.testing.assert_close(
            pytree.tree_leaves(found), pytree.tree_leaves(expected), rtol=rtol, atol=atol, equal_nan=True
        )
    except AssertionError as error:
        return str(error)
    return ""


def main(dtype: torch.dtype, *, trained: bool) -> None:
    """Print what comes of every operator that is not equal."""
    for name, described in operators(dtype):
        samples = samples_of(described, dtype)
        text = outcome(described.op, samples, dtype, trained=trained) if samples else ""
        if text:
            print(f"{name}: {text}", flush=True)


if __name__ == "__main__":
    main(getattr(torch, sys.argv[1]), trained=sys.argv[2] == "train")
