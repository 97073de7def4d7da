"""A process that trains a compiled function with the export cache, and prints what it found as JSON.

With the variable ``NO_TRANSLATION`` it fails where it translates a graph.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.nn.functional as F

import torch2ort
from tests.support.functions import Numpy
from torch2ort.dynamo import backend


def function(x: torch.Tensor) -> torch.Tensor:
    """Use a NumPy Function, an operator that is not decomposed, random numbers and a varying size."""
    x = Numpy.apply(F.gelu(x) * x.shape[0]).cumsum(0)
    return F.dropout(x, 0.0) * x.prod(1).sum() + torch.tensor([1.0, 2.0])


def refuse(*_: Any) -> None:
    """Raise in place of the translation of a graph."""
    raise AssertionError("a graph was translated")


def trained(run: Any) -> list[float]:
    """Output and gradient of one step."""
    torch.manual_seed(7)
    x = torch.rand(3, 2, requires_grad=True)
    output = run(x)
    output.square().sum().backward()
    assert x.grad is not None
    return [*output.flatten().tolist(), *x.grad.flatten().tolist()]


def main(folder: str) -> None:
    """Train the compiled function with the cache in `folder`, and print the results."""
    if "NO_TRANSLATION" in os.environ:
        backend.lower_half = refuse  # type: ignore[assignment]
    options = {"cache_dir": folder, "keep_functions": True}
    results = trained(torch.compile(function, backend="torch2ort", dynamic=True, options=options))
    (graph,) = torch2ort.compile_report().graphs
    found = {
        "results": results,
        "eager": trained(function),
        "cached": [half.cached for half in graph.halves],
        "functions": dict(graph.halves[0].functions),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
