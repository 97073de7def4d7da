"""Random Functions: whatever they keep, alias, omit or return, three steps equal eager's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime_ext.calls import assert_same, make_site, run_eager, run_native

# test_memory_aliasing tests the warnings about aliasing.
pytestmark = pytest.mark.filterwarnings("ignore::torch2ort.errors.Torch2OrtWarning")

KEEP = {
    "nothing": lambda ctx, i, x: None,
    "the tensor": lambda ctx, i, x: ctx.kept.append((i, x)),
    "a view": lambda ctx, i, x: ctx.kept.append((i, x.t()[1:])),
    "a copy": lambda ctx, i, x: ctx.kept.append((i, x * 1)),
}
MAKE = {
    "product": lambda tensors, made, i: tensors[i] * 2,
    "the argument": lambda tensors, made, i: tensors[i],
    "a view of it": lambda tensors, made, i: tensors[i].view(-1),
    "a strided view": lambda tensors, made, i: tensors[i].t(),
    "a view of an earlier one": lambda tensors, made, i: made[-1][...] if made else tensors[i] * 3,
    "a mask": lambda tensors, made, i: tensors[i] > 0,
    "a constant": lambda tensors, made, i: i,
}
GIVE = {
    "a sum": lambda total, gradients: total * 2,
    "the sum in another dtype": lambda total, gradients: total.double(),
    "an incoming gradient": lambda total, gradients: next((g for g in gradients if g.shape == (2, 3)), total),
    "a view of one": lambda total, gradients: gradients[0].reshape(2, 3) if gradients else total,
    "more dimensions": lambda total, gradients: total.expand(4, 2, 3),
    "none": lambda total, gradients: None,
}


@dataclass
class Plan:
    """The behaviour of one Function."""

    needs: list[bool]  # one entry per tensor argument
    constant: int  # position of the argument that is not a tensor
    keep: list[str]
    outputs: list[tuple[str, int]]
    give: list[str]
    materialize: bool
    given: list[bool]  # outputs that have a gradient
    saved: bool


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    count = draw(st.integers(1, 3))
    each = {"min_size": count, "max_size": count}
    needs = draw(st.lists(st.booleans(), **each).filter(any))
    outputs = st.tuples(st.sampled_from(sorted(MAKE)), st.integers(0, count - 1))
    return Plan(
        needs=needs,
        constant=draw(st.integers(0, count)),
        keep=draw(st.lists(st.sampled_from(sorted(KEEP)), **each)),
        outputs=draw(st.lists(outputs, min_size=1, max_size=3)),
        give=draw(st.lists(st.sampled_from(sorted(GIVE)), **each)),
        materialize=draw(st.booleans()),
        given=draw(st.lists(st.booleans(), min_size=3, max_size=3)),
        saved=draw(st.booleans()),
    )


def function_of(plan: Plan) -> type[torch.autograd.Function]:
    class Random(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
            ctx.kept = []
            ctx.set_materialize_grads(plan.materialize)
            for i, (way, tensor) in enumerate(zip(plan.keep, tensors, strict=True)):
                KEEP[way](ctx, i, tensor)
            if plan.saved:
                ctx.save_for_backward(*(t for _, t in ctx.kept))
                ctx.kept = [(i, None) for i, _ in ctx.kept]
            made: list[torch.Tensor] = []
            values: list[Any] = []
            for kind, i in plan.outputs:
                values.append(MAKE[kind](tensors, made, i))
                if isinstance(values[-1], torch.Tensor) and values[-1].is_floating_point():
                    made.append(values[-1])
            return tuple(values)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
            usable = [g for g in gradients if g is not None and g.is_floating_point()]
            kept = ctx.saved_tensors if plan.saved else [t for _, t in ctx.kept]
            total = torch.zeros(2, 3)
            for weight, gradient in enumerate(usable, 1):
                total = total + weight * (
                    gradient.t() if gradient.shape == (3, 2) else gradient.reshape(2, 3)
                )
            total = total + sum(t.sum() for t in kept)
            results = [GIVE[way](total, usable) for way in plan.give]
            return *results[: plan.constant], None, *results[plan.constant :]

    return Random


@given(plans())
def test_random_functions_equal_eager(plan: Plan) -> None:
    function = function_of(plan)
    tensors = [torch.randn(2, 3).requires_grad_(needs) for needs in plan.needs]
    arguments = [*tensors[: plan.constant], 0.5, *tensors[plan.constant :]]
    site = make_site(function, *arguments)
    for _ in range(3):
        arguments = [
            torch.randn(2, 3).requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a
            for a in arguments
        ]
        result = function.apply(*arguments)
        outputs = [v for v in result if isinstance(v, torch.Tensor)]
        gradients = [
            torch.randn(v.shape) if v.requires_grad and given else None
            for v, given in zip(outputs, plan.given, strict=False)
        ]
        expected = run_eager(function, arguments, gradients)
        found = run_native(site, arguments, gradients)
        assert_same(found[0], expected[0])
        if any(g is not None for g in gradients):
            assert_same(found[1], expected[1])
