"""The interface of subscribers: the points at which they are called, with ORTModule's names."""

from __future__ import annotations

from typing import Any

import torch

from torch2ort.errors import OptionError

# Number of the running call, from 0, of each subscribed model. Hooks only hold the model's name: the
# attributes of hooks are guards of a graph, and must be the same in each call and in another process.
steps: dict[str, int] = {}


class RunContext:
    """The module for which a subscriber is called.

    Attributes:
        name: the module's path in the model, ``""`` for the model itself.
        depth: 0 for the model, 1 for its children.
    """

    def __init__(self, name: str, depth: int, model: str) -> None:
        self.name = name
        self.depth = depth
        self._model = model

    @property
    def step(self) -> int:
        """Number of the model's running call, from 0; -1 when the subscription has ended.

        Read it in Functions, which run in each step. Other code runs while a model is traced, and so reads
        the number of the traced call.
        """
        return steps.get(self._model, -1)


class SubscriberBase:
    """The base class of subscribers, whose methods are called before and after the forward of each module.

    Subclasses override the methods that they need. The methods run at the same time as hooks of modules: in
    eager PyTorch in each call, in an :class:`ORTModule` while the model is traced. Their operations on
    tensors become part of the graph. All other actions belong in a ``torch.autograd.Function``, whose forward
    and backward run in each step in both cases.

    >>> class Doubling(SubscriberBase):
    ...     def post_forward_tensor_apply_impl(self, run_ctx, module, tensor_index, tensor):
    ...         return tensor * 2 if run_ctx.name == "0" else tensor
    >>> import torch
    >>> from torch2ort.hooks import subscribe
    >>> model, x = torch.nn.Sequential(torch.nn.Identity()), torch.ones(2)
    >>> with subscribe(model, [Doubling()]):
    ...     model(x)
    tensor([2., 2.])
    >>> model(x)
    tensor([1., 1.])

    Args:
        start_step: first call, from 0, for which :meth:`is_active` returns True; ``None`` for 0.
        end_step: the call after the last one; ``None`` for no end.
        depth: depth of the deepest modules: 0 for the model only, 1 for its children, too; ``None`` for all.

    Attributes:
        only_watches: whether the methods return tensors of unchanged values. If so, an input that a module
            returns unchanged stays the same tensor object, so an in-place operator after the module writes to
            it as well.

    Raises:
        OptionError: a number is negative, or the range is empty.
    """

    only_watches = False

    def __init__(
        self, start_step: int | None = None, end_step: int | None = None, depth: int | None = None
    ) -> None:
        for name, value in (("start_step", start_step), ("end_step", end_step), ("depth", depth)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise OptionError(
                    f"{type(self).__name__}: {name} is {value!r}; allowed is an integer of at least 0, or "
                    f"None."
                )
        if end_step is not None and end_step <= (start_step or 0):
            raise OptionError(
                f"{type(self).__name__}: end_step is {end_step}, and the first step is {start_step or 0}; "
                f"end_step is the number of the step after the last one."
            )
        self.start_step, self.end_step, self.depth = start_step or 0, end_step, depth

    def is_active(self, step: int) -> bool:
        """Return True if a step is in the subscriber's range. Call it in Functions, which run each step."""
        return self.start_step <= step and (self.end_step is None or step < self.end_step)

    def pre_forward_module_apply_impl(
        self, run_ctx: RunContext, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Receive a module's arguments; return the arguments for forward."""
        return args, kwargs

    def pre_forward_tensor_apply_impl(
        self, run_ctx: RunContext, module: torch.nn.Module, tensor_index: int, tensor: torch.Tensor
    ) -> torch.Tensor:
        """Receive each tensor among the arguments, in their order; return the tensor for forward."""
        return tensor

    def post_forward_module_apply_impl(
        self, run_ctx: RunContext, module: torch.nn.Module, args: tuple[Any, ...], outputs: Any
    ) -> tuple[tuple[Any, ...], Any]:
        """Receive a module's positional arguments and its outputs; return both."""
        return args, outputs

    def post_forward_tensor_apply_impl(
        self, run_ctx: RunContext, module: torch.nn.Module, tensor_index: int, tensor: torch.Tensor
    ) -> torch.Tensor:
        """Receive each output tensor of a module; return the tensor for the module's caller."""
        return tensor

    def post_forward_outmost_module_apply_impl(
        self, run_ctx: RunContext, module: torch.nn.Module, args: tuple[Any, ...], outputs: Any
    ) -> tuple[tuple[Any, ...], Any]:
        """Receive the model's arguments and outputs after each call, outside of a graph; return both."""
        return args, outputs

    def attached(self, model: str) -> None:
        """Prepare for a model, whose name in :data:`steps` is ``model``; called by ``subscribe``.

        Raises:
            OptionError: the subscriber supports one model, and already has one.
        """

    def detached(self) -> None:
        """Clean up; called when the subscription ends."""
