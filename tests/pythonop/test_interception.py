"""Every call of a user's Function is intercepted, however it is written, and torch is left unchanged."""

from __future__ import annotations

import functools
import queue
import threading

import pytest
import torch

import torch2ort
from torch2ort import _native
from torch2ort.pythonop import interception as capture
from torch2ort.pythonop import self_test
from torch2ort.support.versions import installed


class Scaled(torch.autograd.Function):
    """Has a keyword and a default; it would have another gradient if it were traced through."""

    @staticmethod
    def forward(ctx, x, factor=2.0):
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * 7, None


class Sub(Scaled):
    pass


class SubSub(Sub):
    @staticmethod
    def forward(ctx, x, factor=5.0):
        return x * factor


class OwnApply(Scaled):
    @classmethod
    def apply(cls, x):
        return super().apply(x, 3.0) + 1


class SetUp(torch.autograd.Function):
    @staticmethod
    def forward(x, factor=2.0, shift=1.0):
        return x * factor + shift

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.count = len(inputs)

    @staticmethod
    def backward(ctx, grad):
        return grad * 7, None, None


class KeywordOnly(torch.autograd.Function):
    @staticmethod
    def forward(x, *, factor=2.0):
        return x * factor

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad * 7


class Mapped(SetUp):
    generate_vmap_rule = True


keywords = pytest.mark.skipif(
    tuple(map(int, installed("torch").split(".")[:2])) < (2, 13),
    reason="apply took no keywords before torch 2.13",
)
bound = Scaled.apply
bound_sub = SubSub.apply
partial = functools.partial(SetUp.apply, factor=4.0)


class Calls(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        return self.call(x)


def exported_sites(call, x):
    """The sites of an export of ``call``, whose result is eager's."""
    exported = torch2ort.export(Calls(call), x)
    torch.testing.assert_close(exported(x), call(x))
    return [(site.function, site.arguments) for site in exported.python_ops]


@pytest.mark.parametrize(
    ("call", "site"),
    [
        pytest.param(bound, (Scaled, {}), id="bound at import"),
        pytest.param(bound_sub, (SubSub, {}), id="bound, of a subclass of a subclass"),
        pytest.param(lambda x: Sub.apply(x), (Sub, {}), id="of a subclass"),
        pytest.param(OwnApply.apply, (OwnApply, {1: 3.0}), id="an apply of the class's own"),
        pytest.param(super(Sub, Sub).apply, (Sub, {}), id="through super"),
        pytest.param(lambda x: bound(x, 3.0), (Scaled, {1: 3.0}), id="with an argument"),
        pytest.param(lambda x: bound(x=x), (Scaled, {}), marks=keywords, id="a tensor by keyword"),
        pytest.param(
            lambda x: bound(x, factor=3.0), (Scaled, {1: 3.0}), marks=keywords, id="a constant by keyword"
        ),
        pytest.param(SetUp.apply, (SetUp, {1: 2.0, 2: 1.0}), id="setup_context fills in defaults"),
        pytest.param(partial, (SetUp, {1: 4.0, 2: 1.0}), marks=keywords, id="setup_context and a keyword"),
        pytest.param(
            lambda x: SetUp.apply(shift=3.0, x=x),
            (SetUp, {1: 2.0, 2: 3.0}),
            marks=keywords,
            id="setup_context, all by keyword",
        ),
    ],
)
def test_a_call_is_a_site_however_it_is_written(call, site):
    assert exported_sites(call, torch.randn(3)) == [site]


def test_a_function_of_a_library_is_a_site(tmp_path, monkeypatch):
    (tmp_path / "some_library.py").write_text(
        "import torch\n"
        "class Op(torch.autograd.Function):\n"
        "    forward = staticmethod(lambda ctx, x: x * 2)\n"
        "    backward = staticmethod(lambda ctx, grad: grad * 7)\n"
        "_op = Op.apply\n"
        "class Layer(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return _op(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import some_library

    assert exported_sites(some_library.Layer(), torch.randn(3)) == [(some_library.Op, {})]


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda x: KeywordOnly.apply(x, factor=3.0), id="without a position"),
        pytest.param(lambda x: SetUp.apply(x, other=3.0), id="unknown"),
        pytest.param(lambda x: SetUp.apply(factor=3.0), id="without the tensor"),
        pytest.param(lambda x: Scaled.apply(x, x=x), id="twice"),
    ],
)
def test_arguments_that_eager_refuses_raise_a_type_error_too(call):
    x = torch.randn(3)
    with pytest.raises(TypeError):
        call(x)
    with pytest.raises(TypeError):
        torch2ort.export(Calls(call), x)


def test_a_call_inside_a_transform_is_refused():
    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.export(Calls(torch.vmap(Mapped.apply)), torch.randn(3))
    assert str(caught.value) == (
        f"{__name__}.Mapped: argument 0 is inside a torch.func transform (vmap, grad, ...), which an opaque "
        f"call cannot be part of. Call the Function outside of the transform"
    )


def test_functions_inside_transforms_work_outside_of_exports():
    x = torch.randn(3)
    torch2ort.export(Calls(Scaled.apply), x)
    torch.testing.assert_close(torch.vmap(Mapped.apply)(x), x * 2 + 1)


def test_apply_is_the_same_object_before_during_and_after_an_export():
    def applies():
        base = torch.autograd.Function
        private = torch.autograd.function
        return [
            vars(base)["apply"],
            vars(private._SingleLevelFunction).get("apply"),
            vars(Scaled).get("apply"),
        ]

    # A queue: an item that forward appends to a list would be removed again.
    noted = queue.SimpleQueue()

    def call(x):
        noted.put(applies())
        return Scaled.apply(x)

    before = applies()
    transform = torch.autograd.function.custom_function_call
    torch2ort.export(Calls(call), torch.randn(3))
    during = [noted.get() for _ in range(noted.qsize())]
    assert during
    for seen in (*during, applies()):
        assert all(one is other for one, other in zip(before, seen, strict=True))
    assert torch.autograd.function.custom_function_call is transform


def test_an_export_on_one_thread_ends_while_another_still_captures():
    inside, done = threading.Event(), threading.Event()
    sites = []

    def captures():
        with capture.Capture(training=True) as own:
            inside.set()
            assert done.wait(60)
            with capture.private.fake_mode():
                bound(torch.empty(3))
        sites.extend(site.function for site in own.sites.values())

    thread = threading.Thread(target=captures)
    thread.start()
    assert inside.wait(60)
    assert exported_sites(bound, torch.randn(3)) == [(Scaled, {})]
    done.set()
    thread.join()
    assert sites == [Scaled]


def test_a_call_after_an_export_has_its_gradient():
    torch2ort.export(Calls(bound), torch.randn(3))
    x = torch.randn(3, requires_grad=True)
    bound(x).sum().backward()
    assert x.grad.tolist() == [7.0, 7.0, 7.0]


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (Scaled.backward, "it is of type function and not a method of C code"),
        (torch._C._FunctionBase.register_hook, "it is of type method_descriptor and not a method of C code"),
        (len, "it takes its arguments in another way (flags 8)"),
    ],
)
def test_a_method_that_cannot_be_intercepted_is_refused(method, reason):
    with pytest.raises(RuntimeError) as caught:
        _native.intercept(method, method.__name__, print)
    assert str(caught.value) == reason


@pytest.fixture
def first_export(monkeypatch):
    """The state of a process that has not exported yet."""
    monkeypatch.setattr(self_test, "_passed", False)


@pytest.mark.usefixtures("first_export")
def test_a_first_export_that_sees_no_function_is_refused(monkeypatch):
    monkeypatch.setattr(capture.private, "intercept_apply", lambda stand_in: None)
    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.export(Calls(Scaled.apply), torch.randn(3))
    assert str(caught.value) == (
        f"torch {installed('torch')} runs autograd Functions where torch2ort cannot see it: of 3 calls in a "
        f"test model, 0 were seen. A model's Functions would be traced through and lose their backward. "
        f"torch2ort was tested with torch 2.11 to 2.15. Install one of those: pip install 'torch>=2.11,<2.16'"
    )


@pytest.mark.usefixtures("first_export")
def test_a_first_export_that_misses_one_way_of_calling_is_refused(monkeypatch):
    def misses_subclasses(function, args, kwargs):
        return NotImplemented if function is self_test._RoundAgain else stand_in(function, args, kwargs)

    stand_in = capture._stand_in
    monkeypatch.setattr(capture, "_stand_in", misses_subclasses)
    with pytest.raises(torch2ort.ExportError, match="of 3 calls in a test model, 2 were seen"):
        torch2ort.export(Calls(Scaled.apply), torch.randn(3))


@pytest.mark.usefixtures("first_export")
def test_an_apply_that_cannot_be_intercepted_is_an_error(monkeypatch):
    monkeypatch.setattr(capture.private, "_apply", Scaled.backward)
    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.export(Calls(Scaled.apply), torch.randn(3))
    assert str(caught.value) == (
        f"torch2ort cannot see the calls of autograd Functions in torch {installed('torch')}: `apply` cannot "
        f"be intercepted, it is of type function and not a method of C code. torch2ort was tested with torch "
        f"2.11 to 2.15. Install one of those: pip install 'torch>=2.11,<2.16'"
    )


@pytest.mark.usefixtures("first_export")
def test_the_self_test_runs_at_the_first_export_only(monkeypatch):
    runs = []
    monkeypatch.setattr(self_test, "_check", lambda: runs.append(1))
    for _ in range(2):
        torch2ort.export(Calls(Scaled.apply), torch.randn(3))
    assert runs == [1]


@pytest.mark.usefixtures("first_export")
def test_a_graph_out_of_the_cache_needs_no_self_test(tmp_path, monkeypatch):
    def export():
        return torch2ort.export(torch.nn.Linear(2, 2), torch.randn(3, 2), cache_dir=tmp_path)

    monkeypatch.setattr(self_test, "_passed", True)
    export()
    monkeypatch.setattr(self_test, "_passed", False)
    monkeypatch.setattr(self_test, "_check", lambda: pytest.fail("the self-test ran"))
    assert export().cache.hit
