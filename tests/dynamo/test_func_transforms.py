"""autograd.Functions inside torch.func transforms, traced and kept: eager PyTorch's results, or a refusal."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

from tests.support.comparison import assert_same
from tests.support.sweeps import sample_cases
from torch2ort.errors import UnsupportedOperatorError


class Tripled(torch.autograd.Function):
    """Its derivatives are not those of its forward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad * 3

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * 5


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return Tripled.apply(self.linear(x))


LAYER = Layer()
TRANSFORMS = {
    "grad": grad(lambda x: Tripled.apply(x).sum()),
    "vjp": lambda x: vjp(Tripled.apply, x)[1](torch.ones(4))[0],
    "jvp": lambda x: jvp(Tripled.apply, (x,), (torch.ones(4),))[1],
    "jacrev": lambda x: jacrev(Tripled.apply)(x),
    "vmap": lambda x: vmap(lambda y: Tripled.apply(y.cos()).sum())(x.outer(x)),
    "vmap of grad": lambda x: vmap(grad(lambda y: Tripled.apply(y).sum()))(x.outer(x)),
    "functional_call": lambda x: functional_call(
        LAYER, {name: p * 2 for name, p in LAYER.named_parameters()}, (x,)
    ),
    "grad of functional_call": lambda x: grad(lambda p: functional_call(LAYER, p, (x,)).sum())(
        dict(LAYER.named_parameters())
    )["linear.weight"],
    "grad of something else": lambda x: grad(lambda y: (y * Tripled.apply(x)).sum())(x * 2),
}


def results(function):
    x = torch.linspace(-1, 1, 4).requires_grad_()
    output = function(x)
    if output.requires_grad:
        output.square().sum().backward()
    return output, x.grad


@pytest.fixture(autouse=True)
def _afresh() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize(("name", "keep"), sample_cases(itertools.product(TRANSFORMS, (False, True)), 3))
def test_a_function_in_a_transform_has_its_own_derivatives(name: str, keep: bool) -> None:
    compiled = torch.compile(TRANSFORMS[name], backend="torch2ort", options={"keep_functions": keep})
    assert_same(results(compiled), results(TRANSFORMS[name]), "output and gradient")


@pytest.mark.parametrize("keep", [False, True])
def test_a_single_graph_of_one_is_refused(keep: bool) -> None:
    compiled = torch.compile(
        TRANSFORMS["grad"], backend="torch2ort", fullgraph=True, options={"keep_functions": keep}
    )
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        compiled(torch.ones(4))
    assert isinstance(caught.value.inner_exception, UnsupportedOperatorError)
    assert str(caught.value.inner_exception) == (
        "tests.dynamo.test_func_transforms.Tripled: called inside of a torch.func transform (grad, vmap, "
        "jvp, ...), where torch.compile differentiates what forward computes, and not by the Function's own "
        "backward. Keep the transform out of the compiled code, with torch.compiler.disable, or the Function "
        "out of the transform"
    )
