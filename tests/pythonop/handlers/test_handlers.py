"""The built-in handlers with their libraries, compared with eager PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim

import torch2ort
from tests.support.comparison import assert_trains_like_eager
from tests.support.sweeps import sample_cases


def library(name):
    return pytest.importorskip(name, reason=f"{name} is not installed; `pip install torch2ort[test]` has it")


def operators(exported):
    return [node.op_type for node in exported.proto.graph.node if node.op_type != "Constant"]


def exports(model, width=4, *, python_ops=0, rows=3):
    """Export for inference with a batch that varies, compare at another size, and return the export."""
    model = model.eval()
    exported = torch2ort.export(model, torch.randn(rows, width), dynamic_shapes=({0: Dim("batch")},))
    x = torch.randn(rows + 4, width)
    torch.testing.assert_close(exported(x), model(x), rtol=1e-5, atol=1e-6)
    assert len(exported.python_ops) == python_ops
    return exported


class Around(torch.nn.Module):
    """A layer on either side of a call."""

    def __init__(self, call, width=4):
        super().__init__()
        self.first = torch.nn.Linear(width, width)
        self.last = torch.nn.Linear(width, 2)
        self._call = call

    def forward(self, x):
        return self.last(self._call(self.first(x)))


def trains(call, width=4):
    return assert_trains_like_eager(
        Around(call, width), [(torch.randn(5, width, requires_grad=True),)], steps=4
    )


# --- entmax ------------------------------------------------------------------------------------------

ACTIVATIONS = {
    "sparsemax": lambda m: m.sparsemax,
    "entmax15": lambda m: m.entmax15,
    "entmax15 of the largest two": lambda m: lambda x: m.entmax15(x, dim=-1, k=2),
    "entmax_bisect": lambda m: lambda x: m.entmax_bisect(x, alpha=1.3),
    "sparsemax_bisect": lambda m: m.sparsemax_bisect,
    "normmax_bisect": lambda m: lambda x: m.normmax_bisect(x, alpha=2),
    "budget_bisect": lambda m: lambda x: m.budget_bisect(x, budget=2),
}


@pytest.mark.parametrize("name", sample_cases(ACTIVATIONS, 2))
def test_entmax_activations_keep_sizes_and_gradients(name):
    call = ACTIVATIONS[name](library("entmax"))
    exported = exports(Around(call), python_ops=1)
    node = next(n for n in exported.proto.graph.node if n.op_type == "PythonOp")
    shapes = {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in exported.proto.graph.value_info
    }
    assert shapes[node.output[1]] == ["batch", 4]
    trains(call)


@pytest.mark.parametrize(
    "name", ["SparsemaxLoss", "Entmax15Loss", "SparsemaxBisectLoss", "EntmaxBisectLoss", "NormmaxBisectLoss"]
)
def test_entmax_losses_train_like_eager(name):
    losses = library("entmax.losses")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 3)
            self.loss = getattr(losses, name)()

        def forward(self, x, target):
            return self.loss(self.linear(x), target)

    assert_trains_like_eager(Model(), [(torch.randn(5, 4), torch.tensor([0, 1, 2, 1, 0]))], steps=4)


# --- snntorch ----------------------------------------------------------------------------------------

SURROGATES = {
    "ATan": lambda m: m.atan(),
    "FastSigmoid": lambda m: m.fast_sigmoid(slope=10),
    "Heaviside": lambda m: m.heaviside(),
    "Sigmoid": lambda m: m.sigmoid(),
    "SparseFastSigmoid": lambda m: m.SFS(),
    "SpikeRateEscape": lambda m: m.spike_rate_escape(),
    "StraightThroughEstimator": lambda m: m.straight_through_estimator(),
    "Triangular": lambda m: m.triangular(),
}


@pytest.mark.parametrize("name", SURROGATES)
def test_snntorch_spikes_are_operators_with_the_surrogates_gradient(name):
    call = SURROGATES[name](library("snntorch.surrogate"))
    assert operators(exports(Around(call))) == ["Gemm", "Greater", "Cast", "Gemm"]
    trains(call)


def test_a_spiking_network_of_snntorch():
    snntorch = library("snntorch")

    class Spiking(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(4, 6)
            self.neuron = snntorch.Leaky(beta=0.9)
            self.last = torch.nn.Linear(6, 2)

        def forward(self, x):
            membrane, spikes = torch.zeros(x.shape[0], 6), 0.0
            for _ in range(3):
                spike, membrane = self.neuron(self.first(x), membrane)
                spikes = spikes + self.last(spike)
            return spikes

    # The neuron also assigns its membrane to a buffer that is empty at first, and its reset to an attribute.
    with (
        pytest.warns(torch2ort.Torch2OrtWarning, match=r"assigns to its buffer 'neuron\.mem'"),
        pytest.warns(torch2ort.Torch2OrtWarning, match=r"forward changes Spiking\.neuron\.reset"),
    ):
        exports(Spiking())


# --- brevitas ----------------------------------------------------------------------------------------

QUANTISERS = {
    "AbsBinarySignGradFn": lambda m: m.abs_binary_sign_grad,
    "BinarySignSteFn": lambda m: m.binary_sign_ste,
    "CeilSteFn": lambda m: m.ceil_ste,
    "FloorSteFn": lambda m: m.floor_ste,
    "RoundSteFn": lambda m: m.round_ste,
    "RoundToZeroSteFn": lambda m: m.round_to_zero_ste,
    "ScalarClampMinSteFn": lambda m: lambda x: m.scalar_clamp_min_ste(x, -0.1),
    "ScalarClampSteFn": lambda m: lambda x: m.scalar_clamp_ste(x, -0.1, 0.2),
    "TensorClampSteFn": lambda m: lambda x: m.tensor_clamp_ste(x, x.mean() - 0.1, x.mean() + 0.1),
    "TernarySignSteFn": lambda m: m.ternary_sign_ste,
}


@pytest.mark.parametrize("name", sample_cases(QUANTISERS, 2))
def test_brevitas_steps_are_operators_with_a_straight_through_gradient(name):
    ste = QUANTISERS[name](library("brevitas.function.ops_ste"))

    def call(x):
        return ste(x * 3)

    exports(Around(call))
    trains(call)


def test_a_quantised_layer_of_brevitas():
    library("brevitas")
    from brevitas.nn import QuantIdentity

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)
            self.quant = QuantIdentity(bit_width=4, scaling_impl_type="const", scaling_init=1.0)

        def forward(self, x):
            return self.quant(self.linear(x))

    exports(Model())


# --- efficientnet_pytorch, pytorch_revgrad -----------------------------------------------------------


def test_efficientnets_swish_is_two_operators_in_both_modes():
    call = library("efficientnet_pytorch.utils").SwishImplementation.apply
    assert operators(exports(Around(call))) == ["Gemm", "Sigmoid", "Mul", "Gemm"]
    assert trains(call).exported.python_ops == ()


def test_a_reversed_gradient_costs_nothing_forward():
    revgrad = library("pytorch_revgrad")
    layer = revgrad.RevGrad(alpha=0.5)
    assert operators(exports(Around(layer))) == ["Gemm", "Gemm"]
    module = trains(layer)
    node = next(n for n in module.exported.proto.graph.node if n.op_type == "PythonOp")
    assert [list(a.ints) for a in node.attribute if a.name == "tensor_reuse_map"] == [[-1, 0]]


# --- bitsandbytes ------------------------------------------------------------------------------------

KINDS = pytest.mark.parametrize(
    ("quant_type", "nested"), [("nf4", False), ("nf4", True), ("fp4", False), ("fp4", True)]
)


def quantised(quant_type, nested, *, before=None):
    bnb = library("bitsandbytes")
    layer = bnb.nn.Linear4bit(
        128, 16, compute_dtype=torch.float32, quant_type=quant_type, compress_statistics=nested
    )
    layer = layer.to("cpu")  # which quantises it
    layer.support_avx512bf16_for_cpu = False
    return layer if before is None else torch.nn.Sequential(before, layer)


@KINDS
def test_bitsandbytes_products_are_one_operator(quant_type, nested):
    exported = exports(quantised(quant_type, nested), 128)
    assert "MatMulBnb4" in operators(exported)


@KINDS
def test_bitsandbytes_products_behind_a_trained_layer_are_one_operator(quant_type, nested):
    exported = exports(quantised(quant_type, nested, before=torch.nn.Linear(128, 128)), 128)
    assert operators(exported).count("MatMulBnb4") == 1


@KINDS
def test_bitsandbytes_trains_through_its_own_backward(quant_type, nested):
    model = quantised(quant_type, nested, before=torch.nn.Linear(128, 128))
    module = torch2ort.ORTModule(model)
    x = torch.randn(5, 128)
    expected = model(x)
    expected.square().sum().backward()
    gradient = model[0].weight.grad.clone()
    model.zero_grad()
    output = module(x)
    output.square().sum().backward()
    torch.testing.assert_close((output, model[0].weight.grad), (expected, gradient), rtol=1e-4, atol=1e-4)
    assert [s.func_name for s in module.exported.python_ops] == [
        "bitsandbytes.autograd._functions.MatMul4Bit"
    ]


# --- torch.utils.checkpoint --------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_recompute_with_the_same_random_numbers(reentrant):
    from torch.utils.checkpoint import checkpoint

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(4, 4)
            self.block = torch.nn.Sequential(
                torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(4, 4)
            )

        def forward(self, x):
            return checkpoint(self.block, self.first(x), use_reentrant=reentrant)

    assert_trains_like_eager(Model(), [(torch.randn(5, 4, requires_grad=True),)], steps=4)
