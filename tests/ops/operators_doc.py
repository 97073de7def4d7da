"""Writes docs/operators.md: ``python -m tests.ops.operators_doc > docs/operators.md``."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping

import torch

from tests.ops.snippets import GROUPS
from tests.ops.sweep import Outcome, run

INTRODUCTION = """# Operators

The {total} small uses of PyTorch's operators in `tests/ops`, and where they run: each of them trains with
eager PyTorch's outputs and gradients (float32, CPU, rtol 1e-4, atol 1e-5), or is refused by name before the
first step.
`python -m tests.ops.operators_doc` writes this page; a test keeps it up to date.

- **ONNX**: {onnx} are ONNX operators in an exported graph.
- **PyTorch's kernel**: {kernel} run, wholly or partly, in PyTorch's own kernels, called by the graph like a
  custom Function. Random numbers are always PyTorch's: `torch.manual_seed` gives what it gives in eager.
- **refused**: {refused} raise `ExportError` (mostly `UnsupportedOperatorError`).

Whatever else a model uses is treated the same way: an operator with an exact translation is ONNX, any other
ATen operator is given to PyTorch's kernel, and what fits into no graph is refused. In the graphs of a
training step each operator that is not on the list in `torch2ort/differentiate/step_target.py` runs in
PyTorch's kernel, too.

PyTorch's own samples of its operators, more than 600, run in exported files and in training in four types
(`tests/ops/test_opinfo.py`, a part of `make test-long`). A *file* has operators of ONNX for more of them than
this page says: where these are near eager's results, a session of torch2ort's runs PyTorch's kernel, and the
file holds the operators ([stock_runtime.md](stock_runtime.md)). `python -m tests.ops.plain_files` compares
each sample with `torch.onnx.export`, in `float32`, `int64` and `bool`: what that writes in ONNX with eager's
results, a file does, too, but for 17 samples that it names with the reason. `torch.sort`, `argsort` and
`topk` leave it open in which order equal values come; so it is here, and with `stable=True` it is eager's.
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
