"""A chain runs its sites one after the other, as one node."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from typing import Any

import pytest
import torch

from tests.runtime_ext.calls import InRun, assert_same, error_of, make_site, run_backward, run_forward
from tests.support.memory import resident_bytes
from torch2ort.pythonop.native import native

Function = torch.autograd.Function
_serial = itertools.count()


class Times(Function):
    """The product of two tensors; saves them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = ctx.saved_tensors
        return gradient * y, gradient * x


class Halves(Function):
    """Two outputs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 0.5, x * 0.25

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return first * 0.5 + second * 0.25


def tensor(shape: tuple[int, int] = (2, 3)) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def times(shape: tuple[int, int] = (2, 3)) -> native.Site:
    return make_site(Times, tensor(shape), tensor(shape))


def three(shape: tuple[int, int] = (2, 3)) -> tuple[native.Chain, list[native.Site]]:
    """A chain of three sites that computes ``w * (x * (h * x))``."""
    sites = [times(shape) for _ in range(3)]
    return native.Chain(key=f"chain{next(_serial)}", sites=tuple(sites), links=(-1, 1, 0)), sites


def test_a_chain_computes_what_its_functions_compute() -> None:
    chain, sites = three()
    for _ in range(3):
        h, x, w, gradient = tensor(), tensor(), tensor(), torch.randn(2, 3)
        y = x.detach().clone().requires_grad_()
        expected = Times.apply(Times.apply(y, Times.apply(h, x)), w)
        expected.backward(gradient)
        with InRun():
            assert_same(run_forward(chain, h, x, y, w), [expected.detach()])
            assert_same(run_backward(chain, gradient), [h.grad, x.grad, y.grad, w.grad])
    assert [site.calls for site in sites] == [3, 3, 3]


def step(chain: native.Chain, shape: tuple[int, int] = (2, 3), *, backward: bool = True) -> None:
    with InRun():
        run_forward(chain, *[torch.ones(shape)] * 4)
        if backward:
            run_backward(chain, torch.ones(shape))


def test_what_passes_between_sites_is_not_copied() -> None:
    chain, sites = three()
    copied = []
    for _ in range(3):
        before = [site.copied_bytes for site in sites]
        step(chain)
        copied.append([site.copied_bytes - b for site, b in zip(sites, before, strict=True)])
    # A site copies the runtime's memory that it keeps. A first backward works on a copy of its gradient.
    assert copied == [[48 + 24, 24 + 24, 24 + 24], [48, 24, 24], [48, 24, 24]]


def test_each_site_leaves_a_context_until_its_backward() -> None:
    chain, _ = three()
    with InRun() as run:
        run_forward(chain, *[torch.ones(2, 3)] * 4)
        assert len(run) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("backward", [True, False], ids=["with backward", "forward alone"])
def test_steps_leave_no_memory_behind(backward: bool) -> None:
    shape = (128, 256)
    chain, _ = three(shape)
    for _ in range(50):
        step(chain, shape, backward=backward)
    before = resident_bytes()
    for _ in range(400):
        step(chain, shape, backward=backward)
    assert resident_bytes() - before < 20 * torch.ones(shape).nbytes


def test_a_chain_keeps_its_sites_and_goes_with_its_holder() -> None:
    site = times()
    chain = native.Chain(key="short", sites=(site,), links=(-1,))
    chain_gone, held = weakref.ref(chain), sys.getrefcount(site)
    assert chain.key == "short"
    del chain
    gc.collect()
    assert chain_gone() is None
    assert sys.getrefcount(site) == held - 1


LINKS = "Chain: links must hold -1 for the first member, and an index of a tensor argument for others"
COUNT = "Chain: links needs one entry a site, and a chain has at least one"


@pytest.mark.parametrize(
    ("functions", "links", "message"),
    [
        ("t", (0,), LINKS),
        ("tt", (-1, -1), LINKS),
        ("tt", (-1, 2), LINKS),
        ("tt", (-1,), COUNT),
        ("", (), COUNT),
        ("ht", (-1, 0), "Chain: every member but the last must have exactly one tensor output"),
    ],
)
def test_sites_that_make_no_chain_are_refused(functions: str, links: tuple[int, ...], message: str) -> None:
    sites = tuple(times() if f == "t" else make_site(Halves, tensor()) for f in functions)
    error = error_of(lambda: native.Chain(key="bad", sites=sites, links=links))
    assert (type(error), str(error)) == (ValueError, message)


def test_what_is_no_site_is_refused() -> None:
    error = error_of(lambda: native.Chain(key="bad", sites=(Times,), links=(-1,)))  # type: ignore[arg-type]
    assert (type(error), str(error)) == (TypeError, "Chain: a member is of type FunctionMeta, not Site")
