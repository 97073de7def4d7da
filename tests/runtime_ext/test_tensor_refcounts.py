"""The extension reads the reference count of a tensor's memory and its version counter from torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.runtime_ext.calls import InRun, make_site, run_backward, run_forward
from torch2ort._torch import autograd_functions as private
from torch2ort.pythonop.native import native

Function = torch.autograd.Function

HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "nobody": lambda x: None,
    "a detached tensor": lambda x: x.detach(),
    "two tensors": lambda x: (x.detach(), x.detach()),
    "a numpy array of a detached tensor": lambda x: x.detach().numpy(),
    "a handle on the storage": lambda x: x.untyped_storage(),
    "a tensor over a part": lambda x: x.detach()[2:],
}


def result() -> torch.Tensor:
    """A tensor that torch allocated, as an operator of a Function returns it."""
    return torch.ones(6) * 2


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_it_counts_what_torch_counts(hold: Callable[[torch.Tensor], Any]) -> None:
    tensor = result()
    held = hold(tensor)
    found = native.holders(tensor)
    handle = tensor.untyped_storage()
    assert private.use_count is not None
    assert found == private.use_count(handle._cdata) - (held is not handle)
    del held


def test_who_let_go_counts_no_longer() -> None:
    tensor = result()
    alias = tensor.detach()
    assert native.holders(tensor) == 2
    del alias
    assert native.holders(tensor) == 1


FOREIGN: dict[str, Callable[[], torch.Tensor]] = {
    "bytes": lambda: torch.frombuffer(bytearray(8), dtype=torch.uint8),
    "an array": lambda: torch.from_numpy(torch.ones(3).numpy().copy()),
    "another library": lambda: torch.from_dlpack(torch.ones(3).numpy().copy()),
    "shared memory": lambda: torch.ones(3).share_memory_(),
    "no memory": lambda: torch.ones(3).to_sparse(),
    "no elements": lambda: torch.ones(0),
}


@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN)
def test_memory_that_torch_did_not_allocate_is_not_counted(make: Callable[[], torch.Tensor]) -> None:
    assert native.holders(make()) == -1


BESIDE: dict[str, Callable[[torch.Tensor], Any]] = {
    "a capsule": lambda x: x.__dlpack__(),
    "a view": lambda x: x.view(2, 3),
    "a tensor through DLPack": lambda x: torch.from_dlpack(x),
}


@pytest.mark.parametrize("hold", BESIDE.values(), ids=BESIDE)
def test_a_tensor_that_more_than_its_object_holds_is_not_counted(hold: Callable[[torch.Tensor], Any]) -> None:
    tensor = result()
    held = hold(tensor)
    assert native.holders(tensor) == -1
    del held
    assert native.holders(tensor) == 1


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "nothing": lambda x: None,
    "a write": lambda x: x.add_(1),
    "two writes": lambda x: x.add_(1).mul_(2),
    "a write to a view": lambda x: x.view(2, 3).zero_(),
    "a write to a part of a detached tensor": lambda x: x.detach()[2:].fill_(3),
    "a write that is not told of": lambda x: x.data.add_(1),
    "other memory": lambda x: setattr(x, "data", torch.ones(2)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_it_counts_writes_as_torch_does(write: Callable[[torch.Tensor], Any]) -> None:
    tensor = result()
    write(tensor)
    assert native.writes(tensor) == tensor._version


def test_writes_of_inference_mode_are_not_counted() -> None:
    with torch.inference_mode():
        assert native.writes(result()) == -1


@pytest.mark.usefixtures("layout_unknown")
def test_nothing_is_counted_before_it_was_found() -> None:
    assert (native.holders(result()), native.writes(result())) == (-1, -1)


def test_it_is_not_found_where_it_does_not_fit() -> None:
    own, foreign = private.tensors_of_known_memory()
    try:
        assert not native.find_layout(own, ())
        assert not native.find_layout(own[:1], foreign)
        assert not native.find_layout((*own, own[0].view(-1)), foreign)
        assert not native.find_layout(own, (*foreign, own[0].clone()))
    finally:
        assert native.find_layout(own, foreign)


def test_a_count_needs_a_tensor() -> None:
    with pytest.raises(TypeError, match=r"^expected a tensor, got list$"):
        native.holders([1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^expected a tensor, got list$"):
        native.writes([1])  # type: ignore[arg-type]


WORKSPACES: dict[str, Callable[[torch.Tensor], Any]] = {
    **{name: hold for name, hold in HOLDERS.items() if name != "nobody"},
    **BESIDE,
    "itself": lambda x: x,
}
BYTES = 24


class Double(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def bytes_copied(
    keep_result: Callable[[torch.Tensor], Any], keep_gradient: Callable[[torch.Tensor], Any]
) -> int:
    """Bytes that the second step of a Function copies; the arguments keep its result and its gradient.

    Both are passed to other Functions of a chain. In the first step the Function gets copies, as its use of
    the tensors is not known yet.
    """
    kept: list[Any] = []

    class Keeps(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            made = x * 2
            ctx.save_for_backward(made)
            kept.append(keep_result(made))
            return made

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            made = gradient * 2
            kept.append(keep_gradient(made))
            return made

    x = torch.ones(6, requires_grad=True)
    first, site, last = make_site(Double, x), make_site(Keeps, x), make_site(Double, x)
    chain = native.Chain(key="keeps", sites=(first, site, last), links=(-1, 0, 0))
    copied = 0
    for _ in range(2):
        copied = site.copied_bytes
        with InRun():
            (result,) = run_forward(chain, torch.ones(6))
            (gradient,) = run_backward(chain, torch.ones(6))
        torch.testing.assert_close(result, torch.full((6,), 8.0))
        torch.testing.assert_close(gradient, torch.full((6,), 8.0))
    return site.copied_bytes - copied


def nothing(tensor: torch.Tensor) -> None:
    """Keep nothing."""


def weakly(tensor: torch.Tensor) -> StorageWeakRef:
    """Take a weak reference to the storage, whose handle torch continues to count; keep nothing alive."""
    return StorageWeakRef(tensor.untyped_storage())


@pytest.mark.parametrize("hold", [nothing, weakly])
def test_what_nobody_else_holds_is_not_copied(
    holders_known_by: str, hold: Callable[[torch.Tensor], Any]
) -> None:
    assert bytes_copied(hold, hold) == 0


@pytest.mark.parametrize("hold", WORKSPACES.values(), ids=WORKSPACES)
def test_a_result_that_somebody_holds_is_copied(
    holders_known_by: str, hold: Callable[[torch.Tensor], Any]
) -> None:
    assert bytes_copied(hold, nothing) == BYTES


@pytest.mark.parametrize("hold", WORKSPACES.values(), ids=WORKSPACES)
def test_a_gradient_that_somebody_holds_is_copied(
    holders_known_by: str, hold: Callable[[torch.Tensor], Any]
) -> None:
    assert bytes_copied(nothing, hold) == BYTES


def test_one_gradient_for_two_arguments_is_copied_once(holders_known_by: str) -> None:
    class Sum(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            made = gradient * 2
            return made, made

    x = torch.ones(6, requires_grad=True)
    site = make_site(Sum, x, x)
    chain = native.Chain(key="sum", sites=(make_site(Double, x), site), links=(-1, 0))
    copied = 0
    for _ in range(2):
        copied = site.copied_bytes
        with InRun():
            run_forward(chain, torch.ones(6), torch.ones(6))
            run_backward(chain, torch.ones(6))
    assert site.copied_bytes - copied == BYTES
