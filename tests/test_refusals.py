"""Unsupported models and calls are refused by name, before any step has run."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap

import pytest
import torch

import torch2ort


@torch.library.custom_op("torch2ort_refusals::thrice", mutates_args=())
def thrice(x: torch.Tensor) -> torch.Tensor:
    """An operator of a library, which ONNX does not have."""
    return x * 3


@thrice.register_fake
def _(x):
    return torch.empty_like(x)


X = torch.ones(2, 4)


class Unknown(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.steps = 0

    def forward(self, x):
        return thrice(self.layer(x))


def test_an_unknown_operator_is_named_with_its_line():
    model, x = Unknown(), torch.randn(2, 4)
    with pytest.raises(torch2ort.UnsupportedOperatorError) as caught:
        torch2ort.export(model, x)
    text = str(caught.value)
    assert "torch2ort_refusals.thrice.default" in text
    assert "test_refusals.py" in text
    assert "return thrice(self.layer(x))" in text
    assert model.layer.weight.grad is None


class Steps(torch.autograd.Function):
    """Takes no tensor."""

    @staticmethod
    def forward(ctx, size):
        return torch.arange(float(size))


@pytest.mark.parametrize("wrap", ["export", "ORTModule"])
def test_a_function_without_a_tensor_is_refused(wrap):
    class Model(torch.nn.Module):
        def forward(self, x):
            return x + Steps.apply(4)

    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.export(Model(), X) if wrap == "export" else torch2ort.ORTModule(Model())(X)
    assert str(caught.value) == (
        f"{__name__}.Steps was called without a tensor, but a PythonOp node needs at least one as input. "
        "Pass it a tensor of the model, such as the one whose sizes it uses"
    )


def test_a_tensor_that_forward_gives_to_numpy_is_refused():
    class Model(torch.nn.Module):
        def forward(self, x):
            return x + torch.from_numpy(x.numpy())

    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.export(Model(), X)
    source, first = inspect.getsourcelines(Model.forward)
    assert str(caught.value) == (
        f"Model: forward calls .numpy() on a tensor at {__file__}:{first + 1} in forward "
        f"({source[1].strip()}), and a trace has no values for NumPy. Compute with torch, or put that part "
        f"of the model into a torch.autograd.Function"
    )


def test_a_models_own_error_about_numpy_arrives_unchanged():
    class Model(torch.nn.Module):
        def forward(self, x):
            raise RuntimeError("x.numpy() is not supported here")

    with pytest.raises(RuntimeError, match=r"^x\.numpy\(\) is not supported here$") as caught:
        torch2ort.export(Model(), X)
    assert type(caught.value) is RuntimeError


def run_without_onnxruntime(code: str) -> str:
    """Return the output of a fresh interpreter in which onnxruntime cannot be imported."""
    blocked = "import sys; sys.modules['onnxruntime'] = None\n"
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", blocked + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


def test_without_a_runtime_exports_work_and_runs_name_the_pip_command():
    printed = run_without_onnxruntime(
        """
        import torch, torch2ort
        exported = torch2ort.export(torch.nn.Linear(2, 2), torch.randn(1, 2))
        print(len(exported.proto.graph.node))
        for run in (exported, torch2ort.ORTModule(torch.nn.Linear(2, 2))):
            try:
                run(torch.randn(1, 2))
            except torch2ort.RuntimeNotFoundError as error:
                print(error)
        """
    )
    first, *errors = printed.splitlines()
    assert first == "1"
    assert len(errors) == 2
    for error in errors:
        assert error == (
            "running a model needs an ONNX Runtime package, and `import onnxruntime` failed (import of "
            "onnxruntime halted; None in sys.modules). Install one: pip install 'torch2ort[cpu]' (or gpu, "
            "training, training-gpu)"
        )


def test_training_files_without_a_runtime_name_the_pip_command():
    printed = run_without_onnxruntime(
        """
        import torch2ort.artifacts
        try:
            torch2ort.artifacts.TrainingSession
        except torch2ort.errors.RuntimeNotFoundError as error:
            print(error)
        """
    )
    assert printed == (
        "training files need an ONNX Runtime package, and `import onnxruntime` failed (import of "
        "onnxruntime halted; None in sys.modules); pip install onnxruntime, or onnxruntime-gpu\n"
    )


class Hooked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.layer(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * 2)
        return hidden.tanh()


HOOK = (
    ", which a graph cannot call. Hooks of the model itself and of its parameters work; for others put the "
    "computation into the backward of a torch.autograd.Function"
)


def test_a_hook_on_a_tensor_is_refused_with_its_line():
    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.ORTModule(Hooked())(torch.ones(2, 4))
    assert str(caught.value).startswith(f"Hooked: {__file__}:")
    assert str(caught.value).endswith(
        "in forward (hidden.register_hook(lambda gradient: gradient * 2)) puts a hook on a gradient" + HOOK
    )


def test_a_hook_on_a_tensor_does_not_matter_without_gradients():
    model = Hooked().eval()
    x = torch.ones(2, 4)
    torch.testing.assert_close(torch2ort.export(model, x)(x), model(x).detach())


def test_a_backward_hook_of_a_submodule_is_refused_also_after_a_first_step():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    wrapped = torch2ort.ORTModule(model)
    x = torch.ones(2, 4)
    wrapped(x).sum().backward()
    handle = model[0].register_full_backward_hook(lambda module, given, made: None)
    with pytest.raises(torch2ort.ExportError) as caught:
        wrapped(x)
    assert str(caught.value) == "Sequential: its module '0' has a backward hook" + HOOK
    handle.remove()
    wrapped(x).sum().backward()


def test_a_backward_hook_of_every_module_is_refused_by_name():
    wrapped = torch2ort.ORTModule(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()))
    handle = torch.nn.modules.module.register_module_full_backward_hook(lambda module, given, made: None)
    try:
        with pytest.raises(torch2ort.ExportError) as caught:
            wrapped(torch.ones(2, 4, requires_grad=True))
    finally:
        handle.remove()
    said = "every module has a backward hook, by torch.nn.modules.module"
    assert str(caught.value) == f"Sequential: {said}{HOOK}"


class MakesAMask(torch.nn.Module):
    """Makes no mask while it is compiled, as libraries do, and then lacks one."""

    def forward(self, x, mask=None):
        if mask is None and not torch.compiler.is_compiling():
            mask = torch.ones(x.shape)
        return x * mask.sum()


def test_an_error_of_tracing_alone_names_the_line_and_the_way_out():
    x = torch.ones(2, 4)
    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.export(MakesAMask(), x)
    line = MakesAMask.forward.__code__.co_firstlineno + 3
    assert str(caught.value) == (
        f"MakesAMask: forward raises AttributeError at {__file__}:{line} in forward (return x * mask.sum()) "
        f"while torch.export traces it, and not in eager PyTorch ('NoneType' object has no attribute 'sum'). "
        f"Code that asks whether it is compiled does something else then: pass the arguments that it makes "
        f"itself in eager PyTorch, such as a mask, or put that part of the model into a "
        f"torch.autograd.Function"
    )
    assert isinstance(caught.value.__cause__, AttributeError)
    torch.testing.assert_close(torch2ort.export(MakesAMask(), (x, x))(x, x), MakesAMask()(x, x))


class Branching(torch.nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


@pytest.mark.parametrize("wrap", [torch2ort.export, lambda model, x: torch2ort.ORTModule(model)(x)])
def test_branches_are_refused_with_what_to_do(wrap):
    with pytest.raises(torch2ort.ExportError) as caught:
        wrap(Branching(), torch.ones(2, 4))
    line = Branching.forward.__code__.co_firstlineno + 1
    assert str(caught.value) == (
        f"Branching: {__file__}:{line} in forward (return torch.cond(x.sum() > 0, torch.sin, torch.cos, "
        "(x,))) has a part of it traced by dynamo, as torch.cond and torch.while_loop do, which a graph "
        "cannot do. "
        "Compute both branches and choose with torch.where, unroll the loop, or put that part of the model "
        "into a torch.autograd.Function"
    )
