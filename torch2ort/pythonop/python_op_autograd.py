"""The opaque operator with a derivative that is opaque, too, for the joint trace to differentiate.

``torch2ort::python_op``, which a trace of the model records, has no derivative. In a joint trace the same
call is ``differentiable_python_op``, whose last output is a token, and its derivative is ``python_op_grad``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch2ort.pythonop.abstract_run.fake_run import fake_outputs
from torch2ort.pythonop.interception import suspended
from torch2ort.pythonop.site import needed_inputs, site_by_key

_library = torch.library.Library("torch2ort", "FRAGMENT")
_library.define("differentiable_python_op(Tensor[] inputs, str site) -> Tensor[]")
_library.define("python_op_grad(Tensor? token, Tensor?[] grads, str site, SymInt[] sizes) -> Tensor[]")
DIFFERENTIABLE_PYTHON_OP = torch.ops.torch2ort.differentiable_python_op.default
PYTHON_OP_GRAD = torch.ops.torch2ort.python_op_grad.default
for _operator in (DIFFERENTIABLE_PYTHON_OP, PYTHON_OP_GRAD):
    torch.fx.node.has_side_effect(_operator)


@torch.library.register_fake("torch2ort::differentiable_python_op", lib=_library)
def _fake_call(inputs: Sequence[torch.Tensor], site: str) -> list[torch.Tensor]:
    with suspended():
        outputs = fake_outputs(site_by_key(site), inputs)
    return [*outputs, torch.empty(1, dtype=torch.int64, device=inputs[0].device)]


@torch.library.register_fake("torch2ort::python_op_grad", lib=_library)
def _fake_gradients(
    token: torch.Tensor | None, grads: Sequence[torch.Tensor | None], site: str, sizes: Sequence[int]
) -> list[torch.Tensor]:
    called = site_by_key(site)
    device = next((t.device for t in (token, *grads) if t is not None), None)
    found = []
    start = 0
    for i in needed_inputs(called):
        kind = called.known_result.inputs[i]
        shape = sizes[start : start + kind.rank]
        start += kind.rank
        found.append(torch.empty(shape, dtype=kind.dtype, device=device))
    return found


def _note(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    tensors, key = inputs
    ctx.torch2ort_site = key
    ctx.count = len(tensors)
    ctx.sizes = [size for i in needed_inputs(site_by_key(key)) for size in tensors[i].shape]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[-1])


def _differentiate(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[Any, None]:
    site = site_by_key(ctx.torch2ort_site)
    (token,) = ctx.saved_tensors
    needed = needed_inputs(site)
    given = list(grads[:-1])
    found = iter(PYTHON_OP_GRAD(token, given, ctx.torch2ort_site, ctx.sizes) if needed else ())
    return [next(found) if i in needed else None for i in range(ctx.count)], None


torch.library.register_autograd(
    "torch2ort::differentiable_python_op", _differentiate, setup_context=_note, lib=_library
)
