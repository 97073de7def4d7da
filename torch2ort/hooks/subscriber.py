"""What a subscriber is: the points at which it is called, with the names that ORTModule gave them."""

from __future__ import annotations

from typing import Any

import torch

from torch2ort.errors import OptionError

# Number of the call that runs, from 0, of each subscribed model. Hooks hold the name alone: what they hold is
# part of what a graph was made from, and must be the same in each call and in another process.
steps: dict[str, int] = {}


class RunContext:
    """Which module a subscriber is called for.

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
        """Number of the model's call that runs, from 0; -1 when the subscription has ended.

        Functions read it while they run. What reads it beside Functions reads it while a model is traced.
        """
        return steps.get(self._model, -1)


class SubscriberBase:
    """Called for each module of a model, before and after its forward; classes below override what they need.

    The methods run where hooks of modules run: in eager PyTorch in each call, in an :class:`ORTModule` while
    the model is traced. What they do with tensors is part of the graph, and what they do beside that belongs
    into a ``torch.autograd.Function``, whose forward and backward run in each step on either.

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
        start_step: first call, from 0, that :meth:`is_active` says yes to; ``None`` for 0.
        end_step: the call behind the last one; ``None`` for no end.
        depth: deepest modules to be called for: 0 the model alone, 1 its children too; ``None`` for all.

    Attributes:
        only_watches: whether what the methods return has the values that they were given. What a module was
            given and returns as it is then stays that very tensor, which an in-place operator behind the
            module writes to as well.

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
                f"end_step is the number of the step behind the last one."
            )
        self.start_step, self.end_step, self.depth = start_step or 0, end_step, depth

    def is_active(self, step: int) -> bool:
        """Whether a step is one that was asked for; to be asked in Functions, where steps are counted."""
        return self.start_step <= step and (self.end_step is None or step < self.end_step)

    def pre_forward_module_apply_impl(
        self, run_ctx: RunContext, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called with a module's arguments; returns those that forward gets."""
        return args, kwargs

    def pre_forward_tensor_apply_impl(
        self, run_ctx: RunContext, module: torch.nn.Module, tensor_index: int, tensor: torch.Tensor
    ) -> torch.Tensor:
        """Called with each tensor among them, in their order; returns the one that forward gets."""
        return tensor

    def post_forward_module_apply_impl(
        self, run_ctx: RunContext, module: torch.nn.Module, args: tuple[Any, ...], outputs: Any
    ) -> tuple[tuple[Any, ...], Any]:
        """Called with a module's positional arguments and what it returned; returns both."""
        return args, outputs

    def post_forward_tensor_apply_impl(
        self, run_ctx: RunContext, module: torch.nn.Module, tensor_index: int, tensor: torch.Tensor
    ) -> torch.Tensor:
        """Called with each tensor that a module returned; returns the one that its caller gets."""
        return tensor

    def post_forward_outmost_module_apply_impl(
        self, run_ctx: RunContext, module: torch.nn.Module, args: tuple[Any, ...], outputs: Any
    ) -> tuple[tuple[Any, ...], Any]:
        """Called at the end of the model's own forward, in each call, outside of a graph; returns both."""
        return args, outputs

    def attached(self, model: str) -> None:
        """Called when a model is subscribed to, which :data:`steps` knows by this name.

        Raises:
            OptionError: the subscriber has another model already, and takes one.
        """

    def detached(self) -> None:
        """Called when the subscription ends."""
