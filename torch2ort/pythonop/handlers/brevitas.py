"""brevitas: quantizers whose steps pass the gradient straight through.

Each step becomes operators. Training keeps the Function's ``backward`` for them, which returns the gradient
that it gets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch2ort.pythonop.registry import register_exporter, register_inplace_map


def _round_to_zero(g: Any, x: Any) -> Any:
    return g.op("Mul", g.op("Sign", x), g.op("Floor", g.op("Abs", x)))


def _binary_sign(g: Any, x: Any) -> Any:
    return g.op("Where", g.op("GreaterOrEqual", x, 0), g.constant(1.0, x.dtype), g.constant(-1.0, x.dtype))


def _tensor_clamp(g: Any, x: Any, low: Any, high: Any) -> Any:
    capped = g.op("Where", g.op("Greater", x, high), high, x)
    return g.op("Where", g.op("Less", capped, low), low, capped)


register_exporter(
    "brevitas.ops.autograd_ste_ops.AbsBinarySignGradFn", lambda g, x: g.op("Abs", x), gradient="function"
)

_STEPS: dict[str, Callable[..., Any]] = {
    "BinarySignSteFn": _binary_sign,
    "CeilSteFn": lambda g, x: g.op("Ceil", x),
    "FloorSteFn": lambda g, x: g.op("Floor", x),
    "RoundSteFn": lambda g, x: g.op("Round", x),
    "RoundToZeroSteFn": _round_to_zero,
    "ScalarClampMinSteFn": lambda g, x, low: g.op("Clip", x, low),
    "ScalarClampSteFn": lambda g, x, low, high: g.op("Clip", x, low, high),
    "TensorClampSteFn": _tensor_clamp,
    "TernarySignSteFn": lambda g, x: g.op("Sign", x),
}

for _name, _exporter in _STEPS.items():
    register_exporter(f"brevitas.ops.autograd_ste_ops.{_name}", _exporter, gradient="function")
    register_inplace_map(f"brevitas.ops.autograd_ste_ops.{_name}", backward={0: 0})
