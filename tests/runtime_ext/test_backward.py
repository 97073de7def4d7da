"""The arguments of backward, and the treatment of the gradients it returns, are as in eager PyTorch."""

from __future__ import annotations

import weakref
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
    run_backward,
    run_eager,
    run_forward,
    run_native,
)
from torch2ort.errors import EngineError

Function = torch.autograd.Function
# test_memory_aliasing tests the warnings about aliasing.
pytestmark = pytest.mark.filterwarnings("ignore::torch2ort.errors.Torch2OrtWarning")


def data(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


class Several(Function):
    """Outputs with and without gradients, and two that are not tensors."""

    materialize = True
    seen: list[Any]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor) -> tuple[Any, ...]:
        ctx.set_materialize_grads(Several.materialize)
        marked = x * 3
        ctx.mark_non_differentiable(marked)
        return x * 2, x > 0, "text", marked, index * 2, None, x.sum(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        Several.seen = [None if g is None else (g.dtype, g.shape, g.tolist()) for g in gradients]
        total = gradients[0] if gradients[0] is not None else 0
        return total + (0 if gradients[6] is None else gradients[6][:, None].expand(-1, 3)), None


@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("given", [(0, 5), (0,), (5,)], ids=str)
def test_backward_gets_what_eager_passes(
    materialize: bool, given: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Several, "materialize", materialize)
    arguments = [data(2, 3), torch.arange(4)]
    outputs, _ = run_eager(Several, arguments, [None] * 5)
    differentiable = {0: 0, 4: 5}
    gradients = [
        torch.randn(o.shape) if i in differentiable and differentiable[i] in given else None
        for i, o in enumerate(outputs)
    ]
    expected = run_eager(Several, arguments, gradients)
    seen = Several.seen
    found = run_native(make_site(Several, *arguments), arguments, gradients)
    assert Several.seen == seen
    assert_same(found[1], expected[1])


def test_zeros_have_the_sizes_of_this_run() -> None:
    site = make_site(Several, data(2, 3), torch.arange(4))
    for rows in (2, 5):
        with InRun():
            run_forward(site, torch.ones(rows, 3), torch.arange(rows))
            run_backward(site, *[None] * 5)
            assert [s and tuple(s[1]) for s in Several.seen] == [
                (rows, 3), (rows, 3), None, (rows, 3), (rows,), None, (rows,)
            ]  # fmt: skip


def test_a_gradient_that_arrives_for_a_marked_output_counts_as_none() -> None:
    x = data(2, 3)
    site = make_site(Several, x, torch.arange(4))
    with InRun():
        run_forward(site, x, torch.arange(4))
        run_backward(site, torch.ones(2, 3), None, torch.ones(2, 3), None, None)
    assert Several.seen[3] == (torch.float32, (2, 3), [[0.0] * 3] * 2)


class Answer(Function):
    """Backward returns ``answer`` of the gradient."""

    answer: Callable[[torch.Tensor], Any] = staticmethod(lambda gradient: gradient)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, other: torch.Tensor, constant: int) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return Answer.answer(gradient)


def answers(monkeypatch: pytest.MonkeyPatch, answer: Callable[[torch.Tensor], Any]) -> None:
    monkeypatch.setattr(Answer, "answer", staticmethod(answer))


@pytest.mark.parametrize(
    "answer",
    [
        lambda g: g,
        lambda g: (g, None),
        lambda g: (g, None, None, g),
        lambda g: [g, None, None],
        lambda g: None,
        lambda g: (g, None, g),
        lambda g: (g, None, 0),
        lambda g: (3, None, None),
        lambda g: (g, "a", None),
        lambda g: ([g], None, None),
        lambda g: (torch.ones(4), None, None),
        lambda g: (torch.ones(3), None, None),
        lambda g: (torch.ones(()), None, None),
        lambda g: (torch.ones(2, 0), None, None),
        lambda g: (torch.ones(3, 2), None, None),
        lambda g: (g * 1j, None, None),
        lambda g: (g.to("meta"), None, None),
    ],
)
def test_wrong_gradients_raise_what_eager_raises(
    answer: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, answer)
    arguments = [data(2, 3), torch.ones(2), 5]
    gradients = [torch.ones(2, 3)]
    expected = error_of(run_eager, Answer, arguments, gradients)
    found = error_of(run_native, make_site(Answer, *arguments), arguments, gradients)
    assert (type(found), str(found)) == (type(expected), str(expected))


@pytest.mark.parametrize(
    "answer",
    [
        lambda g: (g, None, None),
        lambda g: (g, None, None, None, None),
        lambda g: (g * 2, g, None),
        lambda g: (g * 2, torch.ones(7), None),
        lambda g: (torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(1)), None, None),
        lambda g: (torch.ones(1, 1, 2, 3), None, None),
        lambda g: (g.double(), None, None),
        lambda g: (g.half(), None, None),
        lambda g: (g.long(), None, None),
        lambda g: (g.bool(), None, None),
        lambda g: (torch.ones(4, 2, 3, dtype=torch.int64), None, None),
        lambda g: (None, None, None),
        lambda g: (g.expand(4, 2, 3), None, None),
    ],
)
def test_gradients_are_brought_to_shape_and_dtype_as_in_eager(
    answer: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, answer)
    arguments = [data(2, 3), torch.ones(2), 5]
    gradients = [torch.randn(2, 3)]
    expected = run_eager(Answer, arguments, gradients)
    found = run_native(make_site(Answer, *arguments), arguments, gradients)
    assert_same(found[1], expected[1])


def test_a_gradient_is_summed_where_the_argument_has_size_one(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, lambda g: (torch.arange(6.0).reshape(2, 3), None, None))
    arguments = [data(2, 1), torch.ones(2), 5]
    expected = run_eager(Answer, arguments, [torch.ones(2, 1)])
    found = run_native(make_site(Answer, *arguments), arguments, [torch.ones(2, 1)])
    assert_same(found[1], expected[1])


def test_a_sparse_gradient_arrives_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, lambda g: (g.to_sparse(), None, None))
    arguments = [data(2, 3), torch.ones(2), 5]
    found = run_native(make_site(Answer, *arguments), arguments, [torch.ones(2, 3)])
    assert_same(found[1], [torch.ones(2, 3), None])


def test_an_omitted_gradient_becomes_zeros_and_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, lambda g: (None, None, None))
    x = data(2, 3)
    site = make_site(Answer, x, torch.ones(2), 5)
    with InRun() as run:
        run_forward(site, x, torch.ones(2))
        assert_same(run_backward(site, torch.ones(2, 3)), [torch.zeros(2, 3), None])
        assert run.undefined == {(site.key, 0)}
    assert run.undefined == set()


@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("arrive", [(True,), (False, False, False, False, True)], ids=str)
def test_what_autograd_would_not_have_is_missing_though_a_runtime_gives_zeros(
    materialize: bool, arrive: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Several, "materialize", materialize)
    arguments = [data(2, 3), torch.arange(4)]
    gradients = [torch.randn(2, 3), None, None, None, torch.randn(2)]
    arrived = [g if any(arrive[i : i + 1]) else None for i, g in enumerate(gradients)]
    expected = run_eager(Several, arguments, arrived)[1]
    seen_in_eager = Several.seen
    site = make_site(Several, *arguments)
    with InRun() as run:
        run.partial, run.arrivals = True, {site.key: arrive}.get
        run_forward(site, *arguments)
        assert_same(run_backward(site, *gradients), expected)
    assert Several.seen == seen_in_eager


def test_a_backward_that_autograd_does_not_run_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, lambda g: pytest.fail("called"))
    arguments = [data(2, 3), torch.ones(2)]
    site = make_site(Answer, *arguments, 5)
    with InRun() as run:
        run.partial, run.arrivals = True, lambda key: ()
        run_forward(site, *arguments)
        assert_same(run_backward(site, torch.ones(2, 3)), [torch.zeros(2, 3), None])
        assert len(run) == 0


def test_what_arrives_is_asked_for_once_a_gradient_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, lambda g: (None, None, None))
    arguments = [data(2, 3), torch.ones(2)]
    first, second = (make_site(Answer, *arguments, 5) for _ in range(2))
    asked: list[str] = []
    with InRun() as run:
        run.arrivals = asked.append
        for site in (first, second):
            run_forward(site, *arguments)
        for site in (first, second):
            run_backward(site, torch.ones(2, 3))
    assert asked == [second.key]


@pytest.mark.parametrize(("answer", "error"), [(1, "arrivals gave a int, not a tuple"), (None, "by name")])
def test_an_error_of_what_tells_the_arrivals_is_raised(answer: Any, error: str) -> None:
    arguments = [data(2, 3), torch.ones(2)]
    site = make_site(Answer, *arguments, 5)

    def arrivals(key: str) -> Any:
        if answer is None:
            raise TypeError(error)
        return answer

    with InRun() as run:
        run.partial, run.arrivals = True, arrivals
        run_forward(site, *arguments)
        with pytest.raises(TypeError, match=f"^{error}$"):
            run_backward(site, torch.ones(2, 3))


class Unneeded(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        return gradient * weight if needs[0] else None, gradient * x if needs[1] else None


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)], ids=str)
def test_only_needed_gradients_come_back(needs: tuple[bool, bool]) -> None:
    arguments = [torch.randn(3).requires_grad_(n) for n in needs]
    check_against_eager(Unneeded, *arguments, gradients=[torch.randn(3)])


def test_backward_lets_go_of_what_its_forward_saved() -> None:
    class Saves(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            kept = x * 2
            storages.append(weakref.ref(kept.untyped_storage()))
            ctx.save_for_backward(kept)
            return x * 3

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * ctx.saved_tensors[0]

    storages: list[weakref.ref[Any]] = []
    site = make_site(Saves, data(3))
    storages.clear()
    with InRun() as run:
        run_forward(site, data(3))
        assert storages[0]() is not None
        run_backward(site, torch.ones(3))
        assert (storages[0](), len(run)) == (None, 0)


@pytest.mark.parametrize("end", ["clear", "backward"])
def test_a_run_serves_one_backward(end: str) -> None:
    site = make_site(Unneeded, data(3), torch.ones(3))
    with InRun() as run:
        run_forward(site, torch.ones(3), torch.ones(3))
        if end == "clear":
            run.clear()
        else:
            run_backward(site, torch.ones(3))
        error = error_of(run_backward, site, torch.ones(3))
    assert isinstance(error, EngineError)
    assert str(error) == (
        f"{__name__}.Unneeded: backward was called, but the current run holds no context of its forward: "
        "forward did not run in it, or its backward has run already"
    )


def test_backward_outside_of_a_run_is_refused() -> None:
    site = make_site(Unneeded, data(3), torch.ones(3))
    error = error_of(run_backward, site, torch.ones(3))
    assert str(error) == (
        f"{__name__}.Unneeded: backward was called outside of a run: begin() the Run that its forward ran in"
    )


def test_a_second_forward_in_one_run_is_refused() -> None:
    site = make_site(Unneeded, data(3), torch.ones(3))
    with InRun():
        run_forward(site, torch.ones(3), torch.ones(3))
        error = error_of(run_forward, site, torch.ones(3), torch.ones(3))
    assert isinstance(error, EngineError)
    assert str(error) == (
        f"{__name__}.Unneeded: forward ran twice in one run, but a run holds one context a site: use a new "
        "Run for each forward"
    )


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        ([], "backward was given 0 gradients, but its site has 1 tensor outputs"),
        (
            [torch.ones(1)],
            "output 0 of forward has shape [3], but a gradient of shape [1] arrived for it",
        ),
    ],
)
def test_gradients_that_do_not_fit_the_outputs_are_refused(
    gradients: list[torch.Tensor], message: str
) -> None:
    site = make_site(Unneeded, data(3), torch.ones(3))
    with InRun():
        run_forward(site, torch.ones(3), torch.ones(3))
        error = error_of(run_backward, site, *gradients)
    assert isinstance(error, EngineError)
    assert str(error) == f"{__name__}.Unneeded: {message}"
