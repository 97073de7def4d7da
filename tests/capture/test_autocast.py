"""Calls under torch.autocast: the graph has eager PyTorch's casts, and serves these settings alone."""

from __future__ import annotations

import contextlib
import copy
import re
import warnings

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch2ort
from tests.support.sweeps import sample_cases
from torch2ort.errors import EngineError, UnsupportedOperatorError

X = torch.randn(3, 6)


def under(dtype: torch.dtype = torch.bfloat16, **settings):
    """Autocast on the CPU."""
    return torch.autocast("cpu", dtype, **settings)


class Calls(nn.Module):
    """A layer, and code that calls it."""

    def __init__(self, code) -> None:
        super().__init__()
        self.layer, self.norm, self.code = nn.Linear(6, 6), nn.LayerNorm(6), code

    def forward(self, x):
        return self.code(self, x)


def without_gradient(m, x):
    with torch.no_grad():
        skipped = m.layer(x) * 2
    return m.layer(x) + skipped


def switched_off(m, x):
    h = m.layer(x)
    with torch.autocast("cpu", enabled=False):
        h = m.layer(h.float())
    with torch.autocast("cpu", torch.float16):
        other = h @ h.t()
    return m.layer(h), other


def called(m, x):
    # As dynamo rewrites a `with torch.autocast(...)`.
    entered = torch.amp.autocast_mode._enter_autocast("cpu", torch.float16, True, True)
    h = m.layer(x)
    torch.amp.autocast_mode._exit_autocast(entered)
    return h @ x.t(), h


@torch.autocast("cpu", torch.bfloat16)
def decorated(m, x):
    return m.layer(x)


def asks(m, x):
    on, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return m.layer(x) * (2 if on else 3) + (1 if dtype is torch.float16 else 0)


def forgets(m, x):
    h = m.layer(x)
    torch.clear_autocast_cache()
    return m.layer(h)


LABELS = torch.tensor([0, 2, 5])
CODE = {
    "layer": lambda m, x: m.layer(x),
    "layer twice": lambda m, x: m.layer(m.layer(x).relu()),
    "norm": lambda m, x: m.norm(m.layer(x)),
    "groups": lambda m, x: F.relu(F.group_norm(m.layer(x), 2, m.norm.weight, m.norm.bias)),
    "batch norm": lambda m, x: F.batch_norm(
        m.layer(x), None, None, m.norm.weight, m.norm.bias, training=True
    ),
    "attention": lambda m, x: F.scaled_dot_product_attention(*[m.layer(x)[None, None]] * 3),
    "attention with a bias that is trained": lambda m, x: F.scaled_dot_product_attention(
        *[m.layer(x)[None, None]] * 3, attn_mask=m.norm.weight[None, None, None, :3]
    ),
    "attention of several types": lambda m, x: F.scaled_dot_product_attention(
        x[None, None], *[m.layer(x)[None, None]] * 2, attn_mask=x[:, :3] > 0
    ),
    "einsum": lambda m, x: torch.einsum("ij,kj->ik", x, m.layer.weight) + m.layer(x),
    "cat": lambda m, x: torch.cat([m.layer(x), x]),
    "cross entropy": lambda m, x: F.cross_entropy(m.layer(x) * 300, LABELS),
    "soft labels": lambda m, x: F.cross_entropy(m.layer(x), x.softmax(1), label_smoothing=0.1),
    "nll": lambda m, x: F.nll_loss(m.layer(x).log_softmax(1), LABELS),
    "bce": lambda m, x: F.binary_cross_entropy_with_logits(m.layer(x), torch.ones(3, 6)),
    "mse": lambda m, x: F.mse_loss(m.layer(x), x),
    "kl": lambda m, x: F.kl_div(m.layer(x).log_softmax(1), x.softmax(1), reduction="batchmean"),
    "product": lambda m, x: m.layer(x).prod(1) + m.layer(x).norm(),
    "without gradient": without_gradient,
    "switched off": switched_off,
    "decorated": decorated,
    "called": called,
    "asks": asks,
    "forgets what was cast": forgets,
}


def trained(module: nn.Module, x: torch.Tensor, context) -> list[torch.Tensor]:
    """Outputs, and gradients of the input and the parameters."""
    leaf = x.clone().requires_grad_()
    with context:
        outputs = module(leaf)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    outputs[0].float().sum().backward()
    return [*(o.detach() for o in outputs), leaf.grad, *(p.grad for p in module.parameters())]


def same(actual, expected) -> None:
    """Assert equal dtypes, and equal bits in half precision."""
    for a, e in zip(actual, expected, strict=True):
        if e is None:
            assert a is None
            continue
        half = e.dtype in (torch.bfloat16, torch.float16)
        torch.testing.assert_close(a, e, rtol=0 if half else 1e-5, atol=0 if half else 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long)])
@pytest.mark.parametrize("code", sample_cases(CODE.values(), 2), ids=CODE)
def test_the_graph_has_eagers_casts(code, dtype) -> None:
    model = Calls(code)
    module = torch2ort.ORTModule(copy.deepcopy(model))
    same(*(trained(m, X, under(dtype)) for m in (module, model)))


@contextlib.contextmanager
def by_hand(dtype):
    """Autocast to a dtype that the context does not accept."""
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", False)
        torch.set_autocast_dtype("cpu", before)
        torch.clear_autocast_cache()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_other_dtypes_that_are_set_by_hand_are_cast_to(dtype) -> None:
    model = Calls(lambda m, x: m.layer(x.bfloat16()))
    module = torch2ort.ORTModule(copy.deepcopy(model))
    same(*(trained(m, X, by_hand(dtype)) for m in (module, model)))


def test_a_weight_that_is_kept_in_another_dtype_is_refused_as_by_eager() -> None:
    def nested(m, x):
        h = m.layer(x)
        with under(torch.float16):
            return m.layer(h)

    model = Calls(nested)
    with under(), pytest.raises(RuntimeError, match="mat1 and mat2 must have the same dtype"):
        model(X)
    message = (
        "its tensors must have the same dtype, but got torch.bfloat16 and torch.float16. Convert the model "
        "and its inputs with .to(dtype)"
    )
    with under(), pytest.raises(torch2ort.DtypeError, match=re.escape(message)):
        torch2ort.ORTModule(model)(X)


def test_a_region_inside_of_the_model_needs_none_around_it() -> None:
    model = Calls(decorated)
    module = torch2ort.ORTModule(copy.deepcopy(model))
    same(*(trained(m, X, under(enabled=False)) for m in (module, model)))


def test_each_setting_has_its_graph() -> None:
    model = Calls(asks)
    module = torch2ort.ORTModule(copy.deepcopy(model))
    settings = [under(enabled=False), under(), under(torch.float16), under(), under(enabled=False)]
    for setting in settings:
        model.zero_grad()
        module.zero_grad()
        same(*(trained(m, X, setting) for m in (module, model)))


def test_the_model_evaluates_without_gradients() -> None:
    model = Calls(CODE["norm"]).eval()
    module = torch2ort.ORTModule(copy.deepcopy(model))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), under():
            same([module(X)], [model(X)])


def test_sizes_vary() -> None:
    model = Calls(lambda m, x: F.cross_entropy(m.layer(x), torch.zeros(x.shape[0], dtype=torch.long)))
    module = torch2ort.ORTModule(copy.deepcopy(model))
    for size in (3, 5, 4):
        model.zero_grad()
        module.zero_grad()
        x = torch.randn(size, 6)
        same(*(trained(m, x, under()) for m in (module, model)))


@pytest.mark.parametrize(
    "kind", ["torch.cpu.amp.autocast()", "torch.cuda.amp.autocast()", "torch.autocast('cuda')"]
)
def test_deprecated_and_absent_devices_do_what_they_do_in_eager(kind) -> None:
    model = Calls(CODE["layer"])
    module = torch2ort.ORTModule(copy.deepcopy(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same(*(trained(m, X, eval(kind)) for m in (module, model)))


def test_an_export_keeps_the_casts(tmp_path) -> None:
    model = Calls(CODE["norm"]).eval()
    with under(), torch.no_grad():
        exported, expected = torch2ort.export(model, X), model(X)
    exported.save(tmp_path / "model.onnx")
    loaded = torch2ort.load(tmp_path / "model.onnx")
    assert not loaded.python_ops
    for run in (exported, loaded):
        with under(torch.float16):  # A graph contains its casts already.
            torch.testing.assert_close(run(X), expected, rtol=3e-2, atol=1e-2)


def test_a_weight_is_cast_once(tmp_path) -> None:
    module = torch2ort.ORTModule(
        Calls(CODE["layer twice"]), options=torch2ort.Options(save_onnx_dir=tmp_path)
    )
    trained(module, X, under())
    (file,) = tmp_path.glob("*_forward.onnx")
    casts = [n for n in onnx.load(file).graph.node if n.op_type == "Cast"]
    # The input, the weight and the bias.
    assert len(casts) == 3


def test_backward_under_autocast_is_refused_by_name() -> None:
    module = torch2ort.ORTModule(Calls(CODE["layer"]))
    with (
        under(),
        pytest.raises(EngineError, match=r"^ORTModule: backward was called under torch\.autocast, "),
    ):
        module(X).sum().backward()


class Pair(nn.Bilinear):
    """A bilinear form of a vector with itself."""

    def forward(self, x):
        return super().forward(x, x)


class Before(nn.Module):
    """A layer, and behind it an operator whose kernel casts."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.layer, self.inside = nn.Linear(6, 6), inside

    def forward(self, x):
        result = self.inside(self.layer(x).float())
        return (result[0], result[0] * 2, *result[1:]) if isinstance(result, tuple) else (result, result * 2)


INSIDE = {
    "LSTM": lambda: nn.LSTM(6, 4, num_layers=2, bidirectional=True),
    "GRU": lambda: nn.GRU(6, 4),
    "RNN": lambda: nn.RNN(6, 4),
    "projection": lambda: nn.LSTM(6, 4, proj_size=2),
    "Bilinear": lambda: Pair(6, 6, 2),
}


def has_lstm() -> bool:
    """Return True if this processor has the LSTM that autocast calls: oneDNN's in bfloat16."""
    try:
        with under():
            nn.LSTM(1, 1)(torch.zeros(1, 1, 1))
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("LSTM", "Bilinear") else pytest.mark.long) for n in INSIDE]
)
def test_what_casts_inside_of_its_kernel_does_so_in_a_graph(name) -> None:
    model = Before(INSIDE[name]())
    module = torch2ort.ORTModule(copy.deepcopy(model))
    if name == "LSTM" and not has_lstm():
        pytest.skip("oneDNN has no LSTM in bfloat16 on this processor: eager raises, too")
    for length in (3, 5, 4):
        model.zero_grad()
        module.zero_grad()
        results = []
        for run in (module, model):
            leaf = torch.randn(length, 2, 6, generator=torch.Generator().manual_seed(length))
            leaf.requires_grad_()
            with under():
                outputs = torch.utils._pytree.tree_leaves(run(leaf))
            outputs[0].float().sum().backward()
            results.append([*outputs, leaf.grad, *(p.grad for p in run.parameters())])
        for a, e in zip(*results, strict=True):
            assert a.dtype == e.dtype
            # A weight that eager casts once for all steps gets its gradient added up in bfloat16.
            assert (a - e).norm() <= (3e-2 if name in ("GRU", "RNN", "projection") else 1e-6) * e.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_lstm_without_a_kernel_for_the_type_raises_eagers_error(dtype) -> None:
    layer, x = nn.LSTM(6, 4), torch.randn(3, 2, 6)
    with under(dtype):
        try:
            layer(x)
        except RuntimeError as error:
            # oneDNN has one on processors with AVX-512 BF16 or FP16 alone.
            with pytest.raises(RuntimeError, match=re.escape(str(error))):
                torch2ort.ORTModule(layer)(x)


def test_eagers_fast_path_of_another_type_is_refused_by_name() -> None:
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True).eval()
    module = torch2ort.ORTModule(layer)
    with (
        under(),
        torch.no_grad(),
        pytest.raises(UnsupportedOperatorError, match=r"set_fastpath_enabled\(False\)$"),
    ):
        module(X[None])
