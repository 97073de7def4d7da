"""Writes docs/operators.md: ``python -m tests.ops.operators_doc > docs/operators.md``."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping

import torch

from tests.ops.snippets import GROUPS
from tests.ops.sweep import Outcome, run

INTRODUCTION = """# Operators

This page lists the {total} small uses of PyTorch's operators in `tests/ops`, and the implementation that
runs each of them. Each use trains with eager PyTorch's outputs and gradients (float32, CPU, rtol 1e-4, atol
1e-5), or is refused by name before the first step. `python -m tests.ops.operators_doc` writes this page; a
test keeps it up to date.

- **ONNX**: {onnx} uses are ONNX operators in an exported graph.
- **PyTorch's kernel**: {kernel} uses run, partly or completely, in PyTorch's own kernels, which the graph
  calls like a custom Function. Random numbers always come from PyTorch, so `torch.manual_seed` has the same
  effect as in eager.
- **refused**: {refused} uses raise `ExportError` (mostly `UnsupportedOperatorError`).

The same rule applies to all other operators. An operator with an exact translation is ONNX, any other ATen
operator runs in PyTorch's kernel, and an operator that fits into no graph is refused. In the graphs of a
training step, PyTorch's kernels also run all operators that are not listed in
`torch2ort/differentiate/step_target.py`.

PyTorch's own samples of its operators, more than 600, run in exported files and in training in four dtypes
(`tests/ops/test_opinfo.py`, a part of `make test-long`). An exported *file* contains ONNX operators for
more of them than this page lists: if their results are close to eager's, a torch2ort session runs PyTorch's
kernel, and the file contains the ONNX operators ([stock_runtime.md](stock_runtime.md)).
`python -m tests.ops.plain_files` compares each sample with `torch.onnx.export`, in `float32`, `int64` and
`bool`: a file is ONNX wherever torch.onnx.export writes ONNX with eager's results, except for 17 samples
that it lists with the reason. `torch.sort`, `argsort` and `topk` do not specify the order of equal values,
here as in PyTorch; with `stable=True` the order is eager's.
"""


def page(outcomes: Mapping[str, Mapping[str, Outcome]]) -> str:
    """The page for the outcome of each snippet, by group and name."""
    every = [o for group in outcomes.values() for o in group.values()]
    lines = [
        INTRODUCTION.format(
            total=len(every),
            onnx=sum(o.state == "equal" and not o.kernels for o in every),
            kernel=sum(bool(o.kernels) for o in every),
            refused=sum(o.state == "refused" for o in every),
        )
    ]
    for group, found in outcomes.items():
        lines += [f"## {group}", "", "| use | runs as |", "| --- | --- |"]
        lines += [f"| {name} | {_state(outcome)} |" for name, outcome in found.items()]
        lines.append("")
    return "\n".join(lines)


def _state(outcome: Outcome) -> str:
    if outcome.state != "equal":
        return outcome.state
    if not outcome.kernels:
        return "ONNX"
    return "PyTorch's kernel: " + ", ".join(f"`{name.removesuffix('.default')}`" for name in outcome.kernels)


def main() -> None:
    """Run every snippet by itself and print the page."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    print(page({g: {n: run({n: s}) for n, s in snippets.items()} for g, snippets in GROUPS.items()}), end="")


if __name__ == "__main__":
    main()
