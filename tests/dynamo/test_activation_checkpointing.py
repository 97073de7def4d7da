"""torch.utils.checkpoint through torch.compile: equal to eager PyTorch, or refused by name."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.comparison import assert_same
from tests.support.functions import Numpy, TwoOutputs
from torch2ort.errors import UnsupportedOperatorError
from torch2ort.runtime import version

pytestmark = pytest.mark.skipif(
    version() < (1, 20), reason="onnxruntime-training puts its own checkpoint in torch's place"
)
NORM = torch.nn.BatchNorm1d(3)


@pytest.fixture(autouse=True)
def _afresh() -> None:
    torch._dynamo.reset()
    NORM.reset_running_stats()


def compiled(function, **options):
    return torch.compile(function, backend="torch2ort", fullgraph=True, options=options or None)


def again(function, *arguments, **settings):
    return checkpoint(function, *arguments, use_reentrant=False, **settings)


def results(function):
    """Output, gradient, statistics, and the random numbers that come after forward and after backward."""
    torch.manual_seed(5)
    x = torch.randn(4, 3, requires_grad=True)
    output = function(x)
    after = torch.rand(1)
    output.square().sum().backward()
    return output.detach(), x.grad, [b.clone() for b in NORM.buffers()], after, torch.rand(1)


def dropped(x):
    return F.dropout(again(lambda y: F.dropout(y.sin(), 0.5).exp() * torch.rand_like(y), x), 0.3)


def one_in_another(x):
    return again(lambda y: again(lambda z: F.dropout(z.exp(), 0.5).sin(), y.cos()).exp(), x)


def attended(x):
    return again(lambda q: F.scaled_dot_product_attention(q.sin(), q, q * 2, dropout_p=0.3), x[None, None])


def drawn_for_nobody(x):
    def inner(y):
        torch.rand(2)
        return y.sin().exp()

    return again(inner, x)


def with_functions(x):
    return again(lambda y: Numpy.apply(TwoOutputs.apply(Numpy.apply(y.sin()) * y)[1]).exp(), x)


def whole(x):
    return again(lambda y: y.exp().prod(0).exp().expand(4, 3), x)


def beside_statistics(x):
    return again(lambda y: F.dropout(y.exp(), 0.5).sin(), NORM(x))


@pytest.mark.parametrize(
    "function",
    [dropped, one_in_another, attended, drawn_for_nobody, with_functions, whole, beside_statistics],
)
def test_checkpointed_code_is_eagers(function) -> None:
    expected = results(function)
    NORM.reset_running_stats()
    assert_same(results(compiled(function, keep_functions=True)), expected, "results")


def test_backward_computes_again_what_draws_no_numbers(tmp_path: Path) -> None:
    results(compiled(lambda x: again(lambda y: F.dropout(y.sin(), 0.5).exp(), x), save_onnx_dir=tmp_path))
    (path,) = tmp_path.glob("*compiled_backward_exported.onnx")
    assert "Exp" in {node.op_type for node in onnx.load(path).graph.node}


def statistics(x):
    return again(lambda y: NORM(y.sin()).exp(), x)


def other_numbers(x):
    return again(lambda y: F.dropout(y.sin(), 0.5).exp(), x, preserve_rng_state=False)


def weights_alone(x):
    return checkpoint(lambda y: NORM(y).exp(), x.detach(), use_reentrant=True)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            statistics,
            "is checkpointed and reads a tensor that forward writes to, as BatchNorm its statistics",
        ),
        (other_numbers, "eager PyTorch draws other ones in backward, as preserve_rng_state is False"),
        (
            weights_alone,
            "has no gradient in eager PyTorch, as use_reentrant=True checks the arguments alone",
        ),
    ],
)
def test_what_eager_does_otherwise_the_second_time_is_refused(function, words: str) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        results(compiled(function))
    assert isinstance(caught.value.inner_exception, UnsupportedOperatorError)
    assert f"{Path(__file__).name}:" in str(caught.value)
    assert words in str(caught.value)
