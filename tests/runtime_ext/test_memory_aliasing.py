"""Ownership of memory: tensors that a Function keeps are safe, and the runtime alone owns its results."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.runtime_ext.calls import (
    InRun,
    assert_same,
    check_against_eager,
    error_of,
    make_site,
    overwrite,
    run_backward,
    run_eager,
    run_forward,
    run_native,
)
from torch2ort.errors import EngineError, InplaceMapError, Torch2OrtWarning
from torch2ort.pythonop.native import native

pytestmark = pytest.mark.usefixtures("holders_known_by")
Function = torch.autograd.Function


def data(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def inner_graph(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return (x.detach().requires_grad_() ** 2).sum()


KEPT: list[Any] = []

# Ways for forward to keep its argument, and for backward to read it.
WAYS: dict[str, tuple[Callable[[Any, torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "saved": (lambda ctx, x: ctx.save_for_backward(x), lambda ctx: ctx.saved_tensors[0]),
    "saved view": (lambda ctx, x: ctx.save_for_backward(x[1:]), lambda ctx: ctx.saved_tensors[0]),
    "attribute": (lambda ctx, x: setattr(ctx, "x", x), lambda ctx: ctx.x),
    "view as attribute": (lambda ctx, x: setattr(ctx, "x", x.view(-1)[2:]), lambda ctx: ctx.x),
    "detached": (lambda ctx, x: setattr(ctx, "x", x.detach()), lambda ctx: ctx.x),
    "in a closure": (lambda ctx, x: setattr(ctx, "f", lambda: x * 1), lambda ctx: ctx.f()),
    "in a list": (lambda ctx, x: setattr(ctx, "x", [{"x": x.t()}]), lambda ctx: ctx.x[0]["x"]),
    "in a cycle": (lambda ctx, x: setattr(ctx, "x", (ctx, x)), lambda ctx: ctx.x[1]),
    "global": (lambda ctx, x: KEPT.append(x), lambda ctx: KEPT[-1]),
    "view in a global": (lambda ctx, x: KEPT.append(x.reshape(3, 2)), lambda ctx: KEPT[-1]),
    "numpy": (lambda ctx, x: setattr(ctx, "x", x.detach().numpy()), lambda ctx: torch.from_numpy(ctx.x)),
    "autograd graph": (
        lambda ctx, x: setattr(ctx, "y", inner_graph(x)),
        lambda ctx: torch.autograd.grad(
            ctx.y, ctx.y.grad_fn.next_functions[0][0].next_functions[0][0].variable
        )[0],
    ),
}


class Keep(Function):
    way: Any

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Keep.way[0](ctx, x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * Keep.way[1](ctx).sum()


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(Keep, "way", WAYS[request.param], raising=False)
    KEPT.clear()
    return request.param


def test_what_forward_keeps_survives_the_runtimes_writes(way: str) -> None:
    site = check_against_eager(Keep, data(2, 3), gradients=[torch.randn(2, 3)])
    assert site.copied_bytes == 3 * 24 + 24  # each step's argument, and the first step's gradient


def test_an_argument_that_is_not_kept_is_not_copied() -> None:
    site = make_site(result(lambda x: (x.view(-1) * 2).view_as(x)), data(2, 3))
    copied = [copied_by(site, run_forward, torch.ones(2, 3)) for _ in range(3)]
    assert copied == [24, 0, 0]  # the first call shows that nothing is kept


class Triple(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


@pytest.mark.parametrize(("probed", "copied"), [(True, 2 * 24), (False, 0)])
def test_a_first_step_works_on_copies_unless_told_that_it_need_not(probed: bool, copied: int) -> None:
    site = check_against_eager(Triple, data(2, 3), gradients=[torch.ones(2, 3)], probed=probed)
    assert site.copied_bytes == copied


def test_an_inference_call_drops_its_context_before_it_looks_at_what_is_kept() -> None:
    class Save(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.x = x
            return x * 2

    site = make_site(Save, data(2, 3), training=False)
    assert [copied_by(site, run_forward, torch.ones(2, 3)) for _ in range(3)] == [24, 0, 0]


class KeepLater(Function):
    """Keeps nothing in the first step, and then one of the two arguments."""

    step = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        Keep.way[0](ctx, [torch.ones(2, 3), x, y][KeepLater.step % 3])
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient * Keep.way[1](ctx).sum(), gradient * 3


def test_every_step_may_keep_another_argument(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "numpy":
        pytest.xfail(
            "an array holds a bare address, so memory that it keeps cannot move; seen in a first call it is "
            "copied"
        )
    x, y = data(2, 3), data(2, 3)
    site = make_site(KeepLater, x, y)
    for step in range(6):
        monkeypatch.setattr(KeepLater, "step", step)
        expected = run_eager(KeepLater, [x, y], [torch.ones(2, 3)])
        assert_same(run_native(site, [x, y], [torch.ones(2, 3)])[1], expected[1])


def test_all_views_of_a_kept_argument_move_together() -> None:
    views: list[torch.Tensor] = []

    class Views(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if x[0, 1] == 1:
                views[:] = [x, x[1:], x.t()]
            return x * 2

    site = make_site(Views, torch.zeros(2, 3))
    run_forward(site, torch.zeros(2, 3))
    run_forward(site, torch.arange(6.0).reshape(2, 3))
    with torch.no_grad():
        views[0][1, 0] = 50
    assert views[1].tolist() == [[50.0, 4.0, 5.0]]
    assert views[2][0].tolist() == [0.0, 50.0]


def test_memory_that_cannot_be_moved_is_refused_and_copied_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.UntypedStorage, "share_memory_", lambda storage: storage)
    monkeypatch.setattr(Keep, "way", WAYS["saved"], raising=False)
    monkeypatch.setattr(KeepLater, "step", 0)
    x, y = data(2, 3), data(2, 3)
    site = make_site(KeepLater, x, y)
    run_native(site, [x, y], [torch.ones(2, 3)])
    monkeypatch.setattr(KeepLater, "step", 1)
    error = error_of(run_native, site, [x, y], [torch.ones(2, 3)])
    assert isinstance(error, EngineError)
    assert str(error) == (
        f"{site.name} began to keep memory of ONNX Runtime after its first call, and it could not be given "
        "memory of its own: save a clone() of the tensor instead"
    )
    expected = run_eager(KeepLater, [x, y], [torch.ones(2, 3)])
    assert_same(run_native(site, [x, y], [torch.ones(2, 3)])[1], expected[1])


class KeepGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.gradients = []
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradients.append(gradient.view(-1) if gradient[0] >= 0 else gradient.sum())
        KEPT.append(ctx.gradients[-1])
        return gradient * 2


@pytest.mark.parametrize("first", [1.0, -1.0], ids=["from the first call", "later"])
def test_what_backward_keeps_survives_the_runtimes_writes(first: float) -> None:
    KEPT.clear()
    site = make_site(KeepGradient, data(2))
    for value in (first, 2.0, 3.0, 4.0):
        with InRun():
            run_forward(site, torch.ones(2))
            run_backward(site, torch.full((2,), value))
    assert [g.tolist() for g in KEPT[1:]] == [[2.0, 2.0], [3.0, 3.0], [4.0, 4.0]]


class WriteGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient[0] = 0
        return gradient * 2


def test_backward_writes_to_a_copy_of_its_gradient() -> None:
    site = make_site(WriteGradient, data(2))
    for _ in range(3):
        with torch.no_grad(), InRun():
            run_forward(site, torch.ones(2))
            gradient = torch.ones(2)
            assert_same(native.call_backward(site, [gradient]), [torch.tensor([0.0, 2.0])])
            assert gradient.tolist() == [1.0, 1.0]


def test_a_first_write_to_a_gradient_in_a_later_step_is_refused() -> None:
    class WriteLater(Function):
        write = False

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient.mul_(2) * 1 if WriteLater.write else gradient * 2

    site = make_site(WriteLater, data(2))
    with InRun():
        run_forward(site, torch.ones(2))
        run_backward(site, torch.ones(2))
    with InRun():
        run_forward(site, torch.ones(2))
        WriteLater.write = True
        error = error_of(run_backward, site, torch.ones(2))
    assert str(error) == (
        f"{site.name}: backward wrote to the gradient of output 0, but did not in its first call: write to a "
        "clone()"
    )


def copied_by(site: native.Site, call: Callable[..., Any], *args: Any) -> int:
    """Bytes that the site copies in ``call``."""
    before = site.copied_bytes
    with InRun():
        call(site, *args)
    return site.copied_bytes - before


def result(
    make: Callable[[torch.Tensor], Any], back: Callable[[torch.Tensor], Any] | None = None
) -> type[Function]:
    class Result(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            return make(x)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            return (back or (lambda g: g * 2))(gradients[0])

    return Result


@pytest.mark.parametrize(
    "make",
    [lambda x: x, lambda x: x.view(-1), lambda x: x[1:], lambda x: x.detach(), lambda x: x[..., None]],
)
def test_an_output_in_an_arguments_memory_is_copied_with_one_warning(
    make: Callable[[torch.Tensor], Any],
) -> None:
    site = make_site(result(make), data(2, 3))
    x = torch.randn(2, 3)
    with pytest.warns(Torch2OrtWarning, match="output 0 shares memory with argument 0"):
        run_forward(site, x)
    for _ in range(2):
        assert_same(run_forward(site, x), [make(x)])
    assert site.copied_bytes == x.nbytes + 3 * make(x).numel() * 4  # the first call's argument is a copy, too


def test_the_warning_names_the_map_that_saves_the_copy() -> None:
    site = make_site(result(lambda x: (1, x)), data(2))
    with pytest.warns(Torch2OrtWarning) as found:
        run_forward(site, torch.ones(2))
    assert str(found[0].message) == (
        f"{site.name}: output 1 shares memory with argument 0, which was made correct by a copy. To save the "
        f"copy, declare torch2ort.register_inplace_map({site.name!r}, forward={{1: 0}})"
    )


def test_a_warning_that_is_an_error_reaches_the_caller() -> None:
    site = make_site(result(lambda x: x), data(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(error_of(run_forward, site, torch.ones(2)), Torch2OrtWarning)


def test_a_strided_view_of_an_argument_is_copied_once_and_without_warning() -> None:
    site = make_site(result(lambda x: x.t()), data(2, 3))
    x = torch.randn(2, 3)
    run_forward(site, x)
    before = site.copied_bytes
    assert_same(run_forward(site, x), [x.t()])
    assert site.copied_bytes == before


def test_two_outputs_never_share_memory() -> None:
    def twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        return y, y.view(-1)

    site = make_site(result(twice), data(2, 3))
    with torch.no_grad():
        first, second = native.call_forward(site, [torch.ones(2, 3)])
        overwrite([first])
    assert second.tolist() == [2.0] * 6


def test_empty_outputs_share_nothing() -> None:
    site = make_site(result(lambda x: (x[:0], x[:0])), data(2))
    assert [copied_by(site, run_forward, torch.ones(2)) for _ in range(3)] == [8, 0, 0]


def test_a_gradient_in_an_incoming_ones_memory_is_copied_with_one_warning() -> None:
    site = make_site(result(lambda x: x * 2, lambda g: g.view(-1).view_as(g)), data(2))
    given = torch.ones(2)

    def step() -> torch.Tensor:
        with torch.no_grad(), InRun():
            run_forward(site, torch.ones(2))
            (gradient,) = native.call_backward(site, [given])
        return gradient

    with pytest.warns(Torch2OrtWarning) as found:
        step()
    assert [str(w.message) for w in found] == [
        f"{site.name}: the gradient of argument 0 shares memory with the gradient of output 0, which was "
        f"made correct by a copy. To save the copy, declare torch2ort.register_inplace_map({site.name!r}, "
        "backward={0: 0})"
    ]
    assert all(step().data_ptr() != given.data_ptr() for _ in range(2))


def test_two_gradients_never_share_memory() -> None:
    class Same(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            both = gradient * 1
            return both, both

    site = make_site(Same, data(2), data(2))
    with torch.no_grad(), InRun():
        run_forward(site, torch.ones(2), torch.ones(2))
        first, second = native.call_backward(site, [torch.ones(2)])
        overwrite([first])
    assert second is not None
    assert second.tolist() == [1.0, 1.0]


def test_accumulating_into_a_gradient_never_reaches_what_was_saved() -> None:
    class ReturnSaved(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            ctx.save_for_backward(x, x * 2)
            ctx.attribute, ctx.y = x * 3, y
            return y

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            holders.append(ctx)
            returned = [*ctx.saved_tensors, ctx.attribute, ctx.y][len(holders) - 1]
            seen.append(returned)
            return returned.view(-1)

    holders: list[Any] = []
    seen: list[torch.Tensor] = []
    site = make_site(ReturnSaved, data(2))
    for expected in (1.0, 2.0, 3.0, 2.0):
        with torch.no_grad(), InRun():
            x = torch.ones(2)
            (y,) = native.call_forward(site, [x])
            (gradient,) = native.call_backward(site, [torch.ones(2)])
            assert gradient is not None
            assert gradient.tolist() == [expected] * 2
            gradient += 100
            assert (x.tolist(), y.tolist(), seen[-1].tolist()) == ([1.0] * 2, [2.0] * 2, [expected] * 2)


def test_a_forward_map_lets_an_output_take_over_an_arguments_memory() -> None:
    site = make_site(result(lambda x: x.view(-1)), data(2, 3), forward_map={0: 0})
    with torch.no_grad():
        x = torch.randn(2, 3)
        (y,) = native.call_forward(site, [x])
    assert y.data_ptr() == x.data_ptr()
    assert (y.shape, site.copied_bytes) == ((6,), 0)


def test_a_forward_map_lets_forward_write_to_the_argument() -> None:
    site = make_site(result(lambda x: x.mul_(2)), data(3), forward_map={0: 0})
    with torch.no_grad():
        x = torch.ones(3)
        (y,) = native.call_forward(site, [x])
    assert (x.tolist(), y.data_ptr(), site.copied_bytes) == ([2.0] * 3, x.data_ptr(), 0)


def test_what_forward_keeps_of_a_mapped_argument_survives() -> None:
    KEPT.clear()

    class MapAndKeep(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            KEPT.append(x.view(-1))
            return x

    site = make_site(MapAndKeep, data(2), forward_map={0: 0})
    for step in range(3):
        with torch.no_grad():
            x = torch.full((2,), float(step))
            (y,) = native.call_forward(site, [x])
            overwrite([y])
        assert y.data_ptr() == x.data_ptr()
    assert [t.tolist() for t in KEPT[1:]] == [[float(step)] * 2 for step in range(3)]


def test_a_mapped_outputs_memory_outlives_the_argument() -> None:
    site = make_site(result(lambda x: x), data(1000), forward_map={0: 0})
    with torch.no_grad():
        (y,) = native.call_forward(site, [torch.full((1000,), 7.0)])
        torch.full((1000,), 8.0)
    assert y.eq(7).all()


def test_a_forward_map_that_is_contradicted_is_refused() -> None:
    site = make_site(result(lambda x: (1, x * 2)), data(2), forward_map={1: 0})
    error = error_of(run_forward, site, torch.ones(2))
    assert isinstance(error, InplaceMapError)
    assert str(error) == (
        f"{site.name}: the in-place map says that output 1 of forward is the memory of argument 0, but "
        "forward returned other memory: correct the map or unregister it"
    )


def test_a_backward_map_lets_a_gradient_take_over_an_incoming_ones_memory() -> None:
    site = make_site(result(lambda x: x * 2, lambda g: g.mul_(2)), data(2), backward_map={0: 0}, probed=False)
    for _ in range(2):
        with torch.no_grad(), InRun():
            run_forward(site, torch.ones(2))
            given = torch.ones(2)
            (gradient,) = native.call_backward(site, [given])
            assert gradient is not None
            assert (gradient.data_ptr(), gradient.tolist()) == (given.data_ptr(), [2.0, 2.0])
    assert site.copied_bytes == 0


def test_a_backward_map_that_is_contradicted_is_refused() -> None:
    site = make_site(result(lambda x: x * 2), data(2), backward_map={0: 0})
    with InRun():
        run_forward(site, torch.ones(2))
        error = error_of(run_backward, site, torch.ones(2))
    assert isinstance(error, InplaceMapError)
    assert str(error) == (
        f"{site.name}: the in-place map says that the gradient of argument 0 is the memory of the gradient "
        "of output 0, but backward returned other memory: correct the map or unregister it"
    )
