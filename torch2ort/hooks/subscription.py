"""Subscription of subscribers to a model by hooks of its modules."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from typing_extensions import Self

from torch2ort.errors import OptionError
from torch2ort.hooks.subscriber import RunContext, SubscriberBase, steps


class Subscription:
    """A subscription to a model, until :meth:`remove`; as a context manager, until the end of the block.

    Attributes:
        step: number of the model's last call, from 0; -1 before the first, and after the end.
    """

    def __init__(self, model: str, subscribers: Sequence[SubscriberBase], handles: list[Any]) -> None:
        self._model = model
        self._subscribers = subscribers
        self._handles = handles

    @property
    def step(self) -> int:
        """Number of the model's last call, from 0; -1 before the first, and after the end."""
        return steps.get(self._model, -1)

    def remove(self) -> None:
        """Remove the hooks from the model."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        if handles:
            del steps[self._model]
            for subscriber in self._subscribers:
                subscriber.detached()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def subscribe(model: torch.nn.Module, subscribers: Sequence[SubscriberBase]) -> Subscription:
    """Call subscribers for each module of a model.

    Subscribers are called by hooks of the modules, so an :class:`ORTModule` of the model exports again, with
    the hooks. A model without a subscription has no hooks.

    Args:
        model: a module, or an :class:`ORTModule`.
        subscribers: called in this order.

    Returns:
        The subscription; its :meth:`~Subscription.remove` ends it.

    Raises:
        OptionError: there is no subscriber, or an object is not a subscriber.
    """
    if not isinstance(subscribers, Iterable):
        raise OptionError(
            f"subscribe: the subscribers are a {type(subscribers).__name__}; expected a list of objects of "
            f"subclasses of torch2ort.hooks.SubscriberBase."
        )
    subscribers = tuple(subscribers)
    if not isinstance(model, torch.nn.Module):
        raise OptionError(f"subscribe: the model is a {type(model).__name__}; expected a torch.nn.Module.")
    wrong = [s for s in subscribers if not isinstance(s, SubscriberBase)]
    if wrong or not subscribers:
        given = f"a {type(wrong[0]).__name__} among the subscribers" if wrong else "no subscriber"
        raise OptionError(
            f"subscribe: there is {given}; expected a list of objects of subclasses of "
            f"torch2ort.hooks.SubscriberBase."
        )
    number = f"{type(model).__name__}#{next(_numbers)}"
    for subscriber in subscribers:
        subscriber.attached(number)
    steps[number] = -1
    # The counting hook runs before those of the model itself, so they see the new number.
    handles = [model.register_forward_pre_hook(_Count(number), prepend=True)]
    for name, module in model.named_modules():
        depth = len(name.split(".")) if name else 0
        called = tuple(s for s in subscribers if s.depth is None or depth <= s.depth)
        if called:
            context = RunContext(name, depth, number)
            handles.append(module.register_forward_pre_hook(_Before(context, called), with_kwargs=True))
            handles.append(module.register_forward_hook(_After(context, called), with_kwargs=True))
    return Subscription(number, subscribers, handles)


class _Count:
    """A hook that counts the calls of a model."""

    def __init__(self, model: str) -> None:
        self._model = model

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        if not torch.compiler.is_exporting():
            steps[self._model] += 1


_numbers = itertools.count()


class _Before:
    """A hook that calls subscribers with a module's arguments."""

    def __init__(self, context: RunContext, subscribers: Sequence[SubscriberBase]) -> None:
        self._context = context
        self._subscribers = subscribers

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        context = self._context
        for subscriber in self._subscribers:
            if _overrides(subscriber, "pre_forward_module_apply_impl"):
                args, kwargs = subscriber.pre_forward_module_apply_impl(context, module, args, kwargs)
            if _overrides(subscriber, "pre_forward_tensor_apply_impl"):
                apply = _numbered(subscriber.pre_forward_tensor_apply_impl, context, module)
                args, kwargs = _mapped((args, kwargs), apply)
        return args, kwargs


class _After:
    """A hook that calls subscribers with a module's outputs."""

    def __init__(self, context: RunContext, subscribers: Sequence[SubscriberBase]) -> None:
        self._context = context
        self._subscribers = subscribers

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> Any:
        context = self._context
        given = {id(tensor) for tensor in _tensors((args, kwargs))}
        for subscriber in self._subscribers:
            if _overrides(subscriber, "post_forward_module_apply_impl"):
                _, outputs = subscriber.post_forward_module_apply_impl(context, module, args, outputs)
            if _overrides(subscriber, "post_forward_tensor_apply_impl"):
                back = given if subscriber.only_watches else None
                apply = _numbered(subscriber.post_forward_tensor_apply_impl, context, module, back)
                outputs = _mapped(outputs, apply)
            if not context.depth and not torch.compiler.is_exporting():
                _, outputs = subscriber.post_forward_outmost_module_apply_impl(context, module, args, outputs)
        return outputs


def _overrides(subscriber: SubscriberBase, method: str) -> bool:
    return getattr(type(subscriber), method) is not getattr(SubscriberBase, method)


def _numbered(
    apply: Callable[..., Any], context: RunContext, module: torch.nn.Module, given: set[int] | None = None
) -> Callable[[torch.Tensor], Any]:
    """Return `apply` with the index of each tensor; tensors whose `id` is in `given` stay unchanged."""
    count = 0

    def numbered(tensor: torch.Tensor) -> Any:
        nonlocal count
        count += 1
        result = apply(context, module, count - 1, tensor)
        return tensor if given is not None and id(tensor) in given else result

    return numbered


def _mapped(data: Any, apply: Callable[[torch.Tensor], Any]) -> Any:
    """Return `data` with `apply` of each tensor in its place; objects other than containers stay the same."""
    if isinstance(data, torch.Tensor):
        return apply(data)
    if isinstance(data, Mapping):
        new = {key: _mapped(value, apply) for key, value in data.items()}
        changed = {key: value for key, value in new.items() if value is not data[key]}
        if not changed or type(data) is dict:
            return new if changed else data
        result: Any = copy.copy(data)
        for key, value in changed.items():
            result[key] = value
        return result
    if isinstance(data, (tuple, list)):
        items = [_mapped(value, apply) for value in data]
        if all(a is b for a, b in zip(items, data, strict=True)):
            return data
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        values = {f.name: getattr(data, f.name) for f in dataclasses.fields(data)}
        changed = {k: v for k, v in ((k, _mapped(v, apply)) for k, v in values.items()) if v is not values[k]}
        return dataclasses.replace(data, **changed) if changed else data
    return data


def _tensors(data: Any) -> Iterator[torch.Tensor]:
    """Return an iterator over every tensor that :func:`_mapped` finds."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _mapped(data, note)
    return iter(found)
