"""Eager PyTorch beside ORTModule, step by step, from the same start."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

import torch2ort

RTOL, ATOL = 1e-4, 1e-5


def loss_of(output: Any) -> torch.Tensor:
    """A scalar that depends on every floating-point tensor of a model's output."""
    if isinstance(output, torch.Tensor):
        return output.sum() if output.dim() == 0 else output.square().mean()
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    values = output.values() if isinstance(output, dict) else output
    return sum(
        loss_of(v)
        for v in values
        if v is not None and (not isinstance(v, torch.Tensor) or v.is_floating_point())
    )


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Every tensor of a model's output, in order."""
    return torch2ort.io_schema.flatten(output)[0]


def assert_same(actual: Any, expected: Any, what: str, rtol: float = RTOL, atol: float = ATOL) -> None:
    """Assert equal structures, values, dtypes and ``None``s."""
    if expected is None or actual is None:
        assert actual is expected, f"{what}: {actual} is not {expected}"
        return
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")


def assert_trains_like_eager(
    model: torch.nn.Module,
    batches: Sequence[dict[str, Any] | tuple[Any, ...]],
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    *,
    lr: float = 0.05,
    steps: int = 20,
    loss: Callable[[Any], torch.Tensor] = loss_of,
) -> torch2ort.ORTModule:
    """Train ``model`` eager and on ONNX Runtime; compare outputs, gradients and buffers at each step."""
    eager, wrapped = model, torch2ort.ORTModule(copy.deepcopy(model))
    optimizers = [optimizer(m.parameters(), lr=lr) for m in (eager, wrapped)]
    for step in range(steps):
        batch = batches[step % len(batches)]
        results = []
        for module, updates in zip((eager, wrapped), optimizers, strict=True):
            torch.manual_seed(100 + step)
            updates.zero_grad(set_to_none=True)
            given, inputs = _fresh(batch)
            output = module(**given) if isinstance(given, dict) else module(*given)
            loss(output).backward()
            results.append((output, {i: t.grad for i, t in enumerate(inputs)}))
        (expected, expected_inputs), (actual, actual_inputs) = results
        for i, (a, e) in enumerate(zip(tensors_of(actual), tensors_of(expected), strict=True)):
            assert_same(a, e, f"step {step}, output {i}")
        for i, gradient in expected_inputs.items():
            assert_same(actual_inputs[i], gradient, f"step {step}, gradient of input {i}")
        for (name, e), (other, a) in zip(eager.named_parameters(), wrapped.named_parameters(), strict=True):
            assert name == other
            assert_same(a.grad, e.grad, f"step {step}, gradient of {name}")
        for (name, e), (_, a) in zip(eager.named_buffers(), wrapped.named_buffers(), strict=True):
            assert_same(a, e, f"step {step}, buffer {name}")
        for updates in optimizers:
            updates.step()
    return wrapped


def _fresh(batch: Any) -> tuple[Any, list[torch.Tensor]]:
    """Copies of the batch's tensors as leaves, and those of them that require gradients."""
    tensors, schema = torch2ort.io_schema.flatten(batch)
    copies = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    return torch2ort.io_schema.unflatten(copies, schema), [t for t in copies if t.requires_grad]
