"""torch.compile(backend="torch2ort") gives eager PyTorch's results."""

from __future__ import annotations

import copy
import itertools
import re
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support.comparison import assert_same
from torch2ort.dynamo import backend, compiled_call
from torch2ort.errors import OptionError, Torch2OrtWarning, UnsupportedOperatorError


@pytest.fixture(autouse=True)
def _afresh() -> None:
    torch._dynamo.reset()


def compiled(function, *, dynamic=None, fullgraph=True, mode=None, **options):
    return torch.compile(
        function,
        backend="torch2ort",
        dynamic=dynamic,
        fullgraph=fullgraph,
        mode=mode,
        options=options or None,
    )


def results(function, *arguments):
    """Outputs, gradients, the arguments' values afterwards, and the next random number."""
    arguments = [a.detach().clone().requires_grad_(a.requires_grad) for a in arguments]
    torch.manual_seed(3)
    outputs = function(*(a.view_as(a) if a.requires_grad else a for a in arguments))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    tracked = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    if tracked:
        torch.autograd.backward([o.double().square().sum() for o in tracked])
    return outputs, [a.grad for a in arguments], [a.detach() for a in arguments], torch.rand(1)


def assert_like_eager(function, *arguments, **settings):
    expected, found = results(function, *arguments), results(compiled(function, **settings), *arguments)
    assert_same(found, expected, "outputs, gradients, arguments or random numbers")
    for actual, wanted in zip(found[0], expected[0], strict=True):
        if isinstance(wanted, torch.Tensor):
            assert actual.stride() == wanted.stride()
            assert actual.requires_grad == wanted.requires_grad


def refusal(function, *arguments, **settings):
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        compiled(function, **settings)(*arguments)
    return caught.value.inner_exception


def tracked(*sizes):
    return torch.randn(sizes, requires_grad=True)


def assert_trains_like_eager(model, *batches, **settings):
    """Compare three steps of SGD: outputs, buffers, and parameters afterwards."""
    eager = copy.deepcopy(model)
    faster = compiled(model, **settings)
    for number, batch in enumerate(batches):
        found = []
        for one in (eager, faster):
            torch.manual_seed(number)
            output = one(batch)
            output.square().mean().backward()
            found.append(output)
        assert_same(found[1], found[0], f"output of step {number}")
        for one in (eager, model):
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    assert_same(dict(model.state_dict()), dict(eager.state_dict()), "parameters and buffers")


class TakenTwice(torch.autograd.Function):
    """Its backward is not the derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * grad * (x > 0)


class Drawing(torch.autograd.Function):
    """Its forward draws numbers that are unused."""

    @staticmethod
    def forward(ctx, x):
        torch.rand(2)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class DrawingBackward(Drawing):
    """Its backward draws, too."""

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.rand_like(grad)


class Checking(Drawing):
    """Its forward calls an operator that may raise an error and whose result is unused."""

    @staticmethod
    def forward(ctx, x):
        torch.linalg.inv(x)
        return x * 2


class Counting(torch.nn.Module):
    """Writes to a buffer, splits rows into pairs, and passes a number on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        x = self.layer(x).view(x.shape[0] // 2, 2, 4)
        return TakenTwice.apply(x.transpose(0, 1)) * x.shape[1] + torch.tensor([1.0, 2.0, 3.0, 4.0])


def test_torch_finds_the_backend_by_its_entry_point() -> None:
    (found,) = metadata.entry_points(group="torch_dynamo_backends", name="torch2ort")
    assert found.value == "torch2ort.compile:backend"
    assert "torch2ort" in torch._dynamo.list_backends()


def test_a_convolutional_net_trains_like_eager() -> None:
    layers = [torch.nn.Conv2d(2, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
    model = torch.nn.Sequential(*layers, torch.nn.Dropout(0.3), torch.nn.Flatten(), torch.nn.Linear(16, 3))
    assert_trains_like_eager(model, *(torch.randn(3, 2, 6, 6) for _ in range(3)))


@pytest.mark.long
def test_a_transformer_trains_like_eager() -> None:
    model = torch.nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True)
    assert_trains_like_eager(model, *(torch.randn(2, 5, 8) for _ in range(3)))


def test_functions_are_traced_into_and_buffers_written() -> None:
    assert_trains_like_eager(Counting(), *(torch.randn(6, 4) for _ in range(3)))


def test_sizes_that_vary_share_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    session = compiled_call.HalfSession
    monkeypatch.setattr(compiled_call, "HalfSession", lambda *a, **k: made.append(a[0]) or session(*a, **k))
    assert_trains_like_eager(Counting(), *(torch.randn(n, 4) for n in (6, 8, 12)), dynamic=True)
    assert made == ["compiled_forward", "compiled_backward"]


def test_inference_is_eagers_in_value_and_in_memory() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Softmax(-1)).eval()
    with torch.no_grad():
        assert_like_eager(
            lambda x: (model(x).t(), model(x).sum(1, keepdim=True).expand(3, 5), x[0]), torch.randn(3, 4)
        )


def test_numbers_of_varying_sizes_are_outputs() -> None:
    assert_like_eager(lambda x: (x * x.shape[0], 2 * x.shape[0] + 1), torch.randn(5, 3), dynamic=True)


def test_a_graph_may_have_no_tensor_to_begin_with() -> None:
    assert_like_eager(lambda: torch.ones(3) * torch.arange(3))


def test_arguments_are_written_to() -> None:
    assert_like_eager(lambda x, y: y.mul_(2).sin() * x, tracked(3), torch.randn(3))


def test_random_numbers_are_eagers_also_where_nobody_reads_them() -> None:
    def function(x):
        torch.rand(2)
        torch.empty(3).normal_()
        return F.dropout(Drawing.apply(x), 0.5) + torch.rand_like(x)

    assert_like_eager(function, tracked(4, 3))


def test_threads_that_compile_at_once_keep_what_nobody_reads() -> None:
    def drawing(factor):
        def function(x):
            torch.rand(2)
            return x * factor

        return function

    def start(function):
        together.wait()
        return function(torch.ones(3))

    functions = [drawing(factor) for factor in range(3)]
    together = threading.Barrier(len(functions))
    # torch 2.11 does not reset fullgraph=True where several threads compile at once: afterwards no code
    # behind a graph break is compiled in the whole process, whatever the backend.
    faster = [compiled(function, fullgraph=False) for function in functions]
    with ThreadPoolExecutor(len(functions)) as pool:
        assert [found[0].item() for found in pool.map(start, faster)] == [0, 1, 2]
    for function, quick in zip(functions, faster, strict=True):
        assert_same(results(quick, torch.ones(3)), results(function, torch.ones(3)), "random numbers")


def test_an_error_of_what_nobody_reads_is_raised() -> None:
    def function(x):
        torch.linalg.inv(x)
        return x * 2

    for each in (function, Checking.apply):
        with pytest.raises(torch.linalg.LinAlgError, match="singular"):
            compiled(each)(torch.zeros(2, 2, requires_grad=True))


def test_derivatives_that_a_trace_takes_another_way_are_eagers() -> None:
    # The gradient of an element that is not the largest is 0, not 0 times infinity.
    assert_like_eager(
        lambda x: (x.max() * float("inf"), x.prod()), torch.tensor([3.0, 2.0], requires_grad=True)
    )


def test_a_matrix_is_inverted_and_checked() -> None:
    assert_like_eager(torch.linalg.inv, torch.eye(3).mul(2).requires_grad_())


def test_classes_that_there_are_not_are_refused_as_in_eager() -> None:
    with pytest.raises(RuntimeError, match="Class values must be smaller than num_classes"):
        compiled(lambda x: F.one_hot(x, 3))(torch.tensor([0, 5]))


def test_backward_runs_again_where_the_graph_is_retained() -> None:
    x = tracked(3)
    loss = compiled(lambda x: x.exp().prod())(x)
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    loss.backward()
    assert_same(x.grad, 2 * first, "both gradients")


def test_a_write_to_a_weight_before_backward_is_refused_as_in_eager() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    for one in (copy.deepcopy(model), compiled(model)):
        output = one(torch.randn(2, 3))
        with torch.no_grad():
            one.get_submodule("1").weight.add_(1)
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            output.sum().backward()


def test_a_size_may_be_a_stride_of_the_argument_before() -> None:
    def function(x, y):
        return x.sum() * y.flatten().sin() + torch.arange(y.shape[0] * 3)

    faster = compiled(function, dynamic=True)
    for size in (5, 7):
        given = torch.randn(2, size)[:, :1], torch.randn(size, 3, requires_grad=True)
        assert_same(results(faster, *given), results(function, *given), f"size {size}")


def test_sizes_that_vary_count_from_the_end() -> None:
    def function(x, y):
        return (x[:, -y.shape[0] :] * 2).sum(0) * y

    faster = compiled(function, dynamic=True)
    for size in (3, 4):
        given = tracked(2, 6), torch.randn(size)
        assert_same(results(faster, *given), results(function, *given), f"size {size}")
    with torch.no_grad():
        assert_same(faster(*given), function(*given), "without gradients")


def test_a_size_may_be_the_larger_of_two() -> None:
    def function(x, y):
        return x.sum() * y * torch.ones(torch.sym_max(x.shape[0], y.shape[1]), 1).sum()

    faster = compiled(function, dynamic=True)
    for sizes in ((3, 5), (6, 4)):
        given = torch.randn(sizes[0]), tracked(2, sizes[1])
        assert_same(results(faster, *given), results(function, *given), f"sizes {sizes}")


def with_numpys_numbers(x):
    np.random.seed(3)
    return x * torch.from_numpy(np.random.rand(3))


def test_numpys_random_numbers_out_of_torchs_generator_are_refused() -> None:
    error = refusal(with_numpys_numbers, tracked(3), fullgraph=False)
    line = with_numpys_numbers.__code__.co_firstlineno + 1
    assert str(error) == (
        f"numpy.random.seed at {__file__}:{line}, in with_numpys_numbers: np.random.seed(3) would draw from "
        "PyTorch's generator, or seed that, and not NumPy's. Set "
        "torch._dynamo.config.use_numpy_random_stream = True: then NumPy draws, outside of the graphs"
    )


def test_numpy_draws_its_random_numbers_where_dynamo_lets_it() -> None:
    with torch._dynamo.config.patch(use_numpy_random_stream=True):
        assert_like_eager(with_numpys_numbers, tracked(3), fullgraph=False)


def test_graphs_break_where_python_reads_values() -> None:
    def function(x):
        x = x * 2
        if x.sum().item() > 0:
            return x.sin()
        return x.t()

    for sign in (1, -1):
        assert_like_eager(function, (sign * torch.ones(2, 3)).requires_grad_(), fullgraph=False)


def test_fullgraph_makes_an_error_of_a_break() -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(lambda x: x.sin() if x.sum() > 0 else x)(torch.ones(3))


def test_another_dtype_mode_or_need_of_gradients_is_compiled_anew() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5))
    eager = copy.deepcopy(model)
    faster = compiled(model)
    for training, dtype, tracking in itertools.product(
        (True, False), (torch.float32, torch.float64), (True, False)
    ):
        outputs = []
        for one, called in ((model, faster), (eager, eager)):
            one.train(training).to(dtype)
            torch.manual_seed(2)
            with torch.set_grad_enabled(tracking):
                outputs.append(called(torch.ones(2, 3, dtype=dtype)))
        assert_same(outputs[0], outputs[1], f"{training}, {dtype}, {tracking}")
        assert outputs[0].requires_grad == tracking


def test_mode_is_ignored_with_a_word() -> None:
    with pytest.warns(
        Torch2OrtWarning, match="mode='max-autotune' chooses among Inductor's settings and is ignored"
    ):
        compiled(torch.sin, mode="max-autotune")(torch.randn(3))


def test_no_mode_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", Torch2OrtWarning)
        compiled(torch.sin, mode="default")(torch.randn(3))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("epilogue", True, "Option 'epilogue' does not exist for torch.compile"),
        ("opset", 9, "Option 'opset' is 9; allowed is an integer of at least 18"),
        ("engine", "joint", "Option 'engine' was removed, as there is one engine; leave it out."),
        ("providers", ["TPU"], "Option 'providers' names 'TPU', which is not an execution provider;"),
        ("verify", True, "Option 'verify' does not exist for torch.compile"),
        ("fuse", True, "Option 'fuse' does not exist for torch.compile"),
        ("autotune", True, "Option 'autotune' does not exist for torch.compile"),
    ],
)
def test_options_that_are_not_allowed_are_named(name, value, words) -> None:
    error = refusal(torch.sin, torch.randn(3), **{name: value})
    assert isinstance(error, OptionError)
    assert words in str(error)


def test_fused_regions_that_the_environment_asks_for_are_refused(monkeypatch) -> None:
    monkeypatch.setenv("TORCH2ORT_FUSE", "1")
    error = refusal(torch.sin, torch.randn(3))
    assert str(error) == (
        "Option 'fuse' is True; it is for ORTModule. torch.compile(backend='inductor') fuses by itself."
    )


def test_a_mode_that_the_environment_asks_for_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("TORCH2ORT_MODE", "max")
    error = refusal(torch.sin, torch.randn(3))
    assert str(error) == (
        "Option 'mode' is 'max'; it is for ORTModule. torch.compile(backend='inductor') fuses by itself."
    )


def test_measured_operators_that_the_environment_asks_for_are_refused(monkeypatch) -> None:
    monkeypatch.setenv("TORCH2ORT_AUTOTUNE", "1")
    error = refusal(torch.sin, torch.randn(3))
    assert str(error) == (
        "Option 'autotune' is True; it is for ORTModule. torch.compile(backend='inductor', "
        "mode='max-autotune') measures by itself."
    )


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), "as torch.cond and other"),
        (
            lambda x: x.to("meta"),
            "aten._to_copy.default at .* is on meta, which torch2ort's graphs do not support",
        ),
        (
            lambda x: torch.ones(3, device="meta"),
            "the tensors of the compiled code are on meta, which no execution provider is known for",
        ),
        (
            DrawingBackward.apply,
            "draws random numbers in backward, which no graph here does. Keep the Function",
        ),
    ],
)
def test_what_no_session_runs_is_named(function, words) -> None:
    error = refusal(function, tracked(4))
    assert isinstance(error, UnsupportedOperatorError)
    assert re.search(words, str(error))


def test_a_refusal_is_read_at_once_with_the_users_line() -> None:
    def spectrum(x):
        return torch.fft.fft(x).real

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        compiled(spectrum)(torch.randn(4))
    line = spectrum.__code__.co_firstlineno + 1
    assert str(caught.value).startswith(
        "backend='torch2ort' raised:\nUnsupportedOperatorError: aten._fft_r2c.default at "
        f"{__file__}:{line}, in spectrum: return torch.fft.fft(x).real returns complex, sparse or "
        "quantized numbers, which torch2ort's graphs do not support. Exclude that part from the compiled "
        "code, with torch.compiler.disable"
    )


def test_a_backward_that_cannot_run_is_named_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    lower = backend.lower_half
    calls = []

    def second_fails(half, target):
        calls.append(half)
        if len(calls) == 2:
            raise UnsupportedOperatorError("no backward")
        return lower(half, target)

    monkeypatch.setattr(backend, "lower_half", second_fails)
    assert str(refusal(torch.sin, tracked(3))) == "no backward"
