"""The cost of the check that a graph is still valid: torch2ort's guards, beside those of torch.compile.

Both check the same model in one process, in turn. For torch.compile these are the guards of every frame that
it compiled for one call, run as it runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from _models import bert
from _timing import interleaved_medians
from pythonop_overhead import FUNCTIONS, Chain
from torch import nn
from torch._dynamo.guards import CheckFunctionManager

from torch2ort import io_schema
from torch2ort.cache.key.key import dependencies


def ours(model: nn.Module, x: torch.Tensor) -> tuple[int, Callable[[], object]]:
    """Return the number of guards, and the check that an ORTModule makes before a step."""
    tensors, schema = io_schema.flatten({"x": x})
    guards = dependencies(model, tensors, schema, with_hooks=False).arm_guards()
    assert guards.accept() is None
    return len(guards), guards.accept


def dynamos(model: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    """Return the checks that torch.compile makes before a call."""
    made: list[tuple[Any, dict[str, Any]]] = []
    before = CheckFunctionManager.__init__

    def noting(self: Any, code: Any, output_graph: Any, *args: Any, **kwargs: Any) -> None:
        scope = dict(output_graph.local_scope)
        before(self, code, output_graph, *args, **kwargs)
        made.append((self.guard_manager, scope))

    CheckFunctionManager.__init__ = noting
    try:
        torch._dynamo.reset()
        torch.compile(model, backend="eager")(x)
    finally:
        CheckFunctionManager.__init__ = before
    assert all(manager.check(scope) for manager, scope in made)
    return lambda: [manager.check(scope) for manager, scope in made]


def compare(name: str, model: nn.Module, x: torch.Tensor) -> None:
    """Print one line."""
    compiled = dynamos(model, x)  # first, as compiling sets attributes of the model, which guards detect
    count, check = ours(model, x)
    seconds = interleaved_medians({"ours": check, "dynamo": compiled}, rounds=300, calls=20)
    assert check() is None
    print(
        f"{name}: {count} guards in {1e6 * seconds['ours']:.1f} us, "
        f"{seconds['ours'] / seconds['dynamo']:.2f} of torch.compile's ({1e6 * seconds['dynamo']:.1f} us)"
    )


def main() -> None:
    """Compare a transformer and a row of Functions."""
    torch.set_num_threads(1)
    compare("BERT, 4 layers", bert(), torch.zeros(2, 8, dtype=torch.long))
    compare(f"{FUNCTIONS} Functions", Chain(FUNCTIONS), torch.randn(4, 8))


if __name__ == "__main__":
    main()
