"""The ctx object: torch's own interface, with equal values and errors."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.runtime_ext.calls import InRun, check_against_eager, error_of, make_site, run_backward, run_forward
from torch2ort.pythonop.native import native

Function = torch.autograd.Function


def context() -> native.Context:
    return native.Context((True, False))


def eager_error(use: Callable[[Any, torch.Tensor], Any]) -> Exception:
    """The exception that ``apply`` raises for ``use(ctx, x)`` in a forward."""

    class Use(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            use(ctx, x)
            return x * 1

    return error_of(Use.apply, torch.ones(2, requires_grad=True))


def native_error(use: Callable[[Any, torch.Tensor], Any], **overrides: Any) -> Exception:
    """The exception that a site's call raises for the same forward."""

    class Use(Function):
        active = False

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if Use.active:
                use(ctx, x)
            return x * 1

    site = make_site(Use, torch.ones(2, requires_grad=True), **overrides)
    Use.active = True
    return error_of(run_forward, site, torch.ones(2))


@pytest.mark.parametrize(
    ("method", "attribute"),
    [
        ("save_for_backward", "to_save"),
        ("save_for_forward", "saved_for_forward"),
        ("mark_dirty", "dirty_tensors"),
        ("mark_non_differentiable", "non_differentiable"),
    ],
)
def test_what_was_given_reads_back_under_torchs_name(method: str, attribute: str) -> None:
    ctx, tensors = context(), (torch.ones(1), torch.ones(2))
    assert getattr(ctx, attribute) is None
    assert getattr(ctx, method)(*tensors) is None
    assert all(a is b for a, b in zip(getattr(ctx, attribute), tensors, strict=True))


def test_needs_input_grad_is_the_tuple_given() -> None:
    needs = (True, False)
    assert native.Context(needs).needs_input_grad is needs


def test_needs_input_grad_must_be_a_tuple() -> None:
    with pytest.raises(TypeError, match=r"Context\(\) argument 1 must be tuple, not list"):
        native.Context([True])  # type: ignore[arg-type]


def test_materialize_grads_defaults_to_true_and_can_be_set() -> None:
    ctx = context()
    assert ctx.materialize_grads is True
    ctx.set_materialize_grads(False)
    assert ctx.materialize_grads is False


def test_mark_shared_storage_warns_as_torch_does() -> None:
    ours, theirs = context(), torch.autograd.function.FunctionCtx()
    with pytest.warns(FutureWarning) as found:
        ours.mark_shared_storage((1, 2))
    with pytest.warns(FutureWarning) as expected:
        theirs.mark_shared_storage((1, 2))
    assert str(found[0].message) == str(expected[0].message)


@pytest.mark.parametrize(
    "use",
    [
        lambda ctx, x: ctx.save_for_backward(x, 3),
        lambda ctx, x: ctx.save_for_backward([x]),
        lambda ctx, x: ctx.save_for_forward(x, 3),
        lambda ctx, x: ctx.set_materialize_grads(1),
        lambda ctx, x: setattr(ctx, "to_save", x),
        lambda ctx, x: ctx.no_such_attribute,
    ],
)
def test_misuse_raises_what_torch_raises(use: Callable[[Any, torch.Tensor], Any]) -> None:
    found, expected = native_error(use), eager_error(use)
    message = str(expected).replace("UseBackward", "Context")
    # Before 2.15 torch omits the type at the end of this message.
    message = re.sub(r"but is $", "but is Tensor", message)
    assert (type(found), str(found).replace("torch2ort._native.", "")) == (type(expected), message)


def test_a_call_that_is_not_recorded_saves_nothing_and_checks_nothing() -> None:
    with pytest.raises(AssertionError, match="nothing was raised"):
        native_error(lambda ctx, x: ctx.save_for_backward(x, 3), training=False)


def test_a_context_of_its_own_checks_at_once() -> None:
    with pytest.raises(
        TypeError, match=r"^save_for_backward can only save variables, but argument 1 is of type int$"
    ):
        context().save_for_backward(torch.ones(1), 3)  # type: ignore[arg-type]


def test_saved_tensors_are_the_saved_objects() -> None:
    ctx, x = context(), torch.ones(2)
    ctx.save_for_backward(x, None)
    assert ctx.saved_tensors[0] is x
    assert ctx.saved_tensors[1] is None


def test_the_old_name_of_saved_tensors_warns_as_torch_does() -> None:
    ctx, x = context(), torch.ones(2, requires_grad=True)
    ctx.save_for_backward(x)
    result = Look.apply(x)  # until torch 2.12 its node also releases the saved tensors
    with pytest.warns(DeprecationWarning, match="'saved_variables' is deprecated") as expected:
        assert len(result.grad_fn.saved_variables) == 1
    with pytest.warns(DeprecationWarning, match="'saved_variables' is deprecated") as found:
        assert ctx.saved_variables[0] is x
    assert str(found[0].message) == str(expected[0].message)


class Look(Function):
    """Reads the context's state in forward and in backward."""

    seen: list[Any]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Look.seen = [ctx.saved_tensors]
        ctx.save_for_backward(x)
        ctx.mark_non_differentiable()
        Look.seen += [ctx.saved_tensors, len(ctx.to_save)]
        ctx.save_for_forward(x, None)
        Look.seen += [len(ctx.saved_tensors)]
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Look.seen += [len(ctx.saved_tensors), ctx.saved_for_forward]
        return gradient * 2


def test_saved_tensors_fill_when_forward_has_returned_as_in_eager() -> None:
    x = torch.ones(2, requires_grad=True)
    site = make_site(Look, x)
    with InRun():
        run_forward(site, x)
        run_backward(site, torch.ones(2))
    found = Look.seen
    Look.apply(x).sum().backward()
    assert found == Look.seen


class Reassigns(Function):
    """Sets ``ctx.to_save``, which has no effect on the saved tensors, to more tensors than were saved."""

    value: Any

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        ctx.to_save = Reassigns.value
        (x,) = ctx.saved_tensors
        return gradient * x


@pytest.mark.parametrize(
    "value", [(torch.ones(1),) * 100, (), None, 5], ids=["more", "none", "None", "a number"]
)
def test_what_backward_puts_in_to_save_is_not_what_was_saved(monkeypatch, value: Any) -> None:
    monkeypatch.setattr(Reassigns, "value", value, raising=False)
    check_against_eager(Reassigns, torch.randn(3, requires_grad=True), gradients=[torch.randn(3)])


def test_saved_tensors_of_a_released_context_raise_what_torch_raises() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    y.sum().backward()
    expected = error_of(lambda: y.grad_fn._saved_result)
    ctx = context()
    ctx.save_for_backward(x)
    ctx.release()
    found = error_of(lambda: ctx.saved_tensors)
    assert (type(found), str(found)) == (type(expected), str(expected))


class SaveBuffer(Function):
    """Saves a buffer that outlives the call, as kernels with a workspace do."""

    buffer = torch.ones(2, 3)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(SaveBuffer.buffer)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (buffer,) = ctx.saved_tensors
        return gradient * buffer


def test_a_saved_tensor_that_was_written_since_raises_what_torch_raises() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    y = SaveBuffer.apply(x).sum()
    site = make_site(SaveBuffer, x)
    with InRun():
        run_forward(site, x)
        before = SaveBuffer.buffer._version
        SaveBuffer.buffer.mul_(2)
        found = error_of(run_backward, site, torch.ones(2, 3))
    expected = error_of(y.backward)
    assert SaveBuffer.buffer._version == before + 1
    # The hint at the end differs between versions of torch.
    assert type(found) is type(expected)
    assert str(found).split(" Hint:")[0] == str(expected).split(" Hint:")[0]


def test_attributes_are_free() -> None:
    ctx = context()
    ctx.anything = ctx.other = 5
    del ctx.other
    assert vars(ctx) == {"anything": 5}


def test_contexts_can_be_subclassed() -> None:
    class Wider(native.Context):
        def extra(self) -> int:
            return len(self.needs_input_grad)

    assert Wider((True,)).extra() == 1


def test_a_context_in_a_cycle_is_collected() -> None:
    ctx = context()
    ctx.cycle = ctx
    ctx.save_for_backward(torch.ones(1))
    gone = weakref.ref(ctx)
    del ctx
    gc.collect()
    assert gone() is None


def test_clearing_a_run_releases_a_context_that_the_function_still_holds() -> None:
    held = []

    class Hold(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x * 1)
            held.append(ctx)
            return x * 2

    site = make_site(Hold, torch.ones(2, requires_grad=True))
    with InRun() as run:
        run_forward(site, torch.ones(2))
        assert len(held[-1].saved_tensors) == 1
        run.clear()
        assert isinstance(error_of(lambda: held[-1].saved_tensors), RuntimeError)
