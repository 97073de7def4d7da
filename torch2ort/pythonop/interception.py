"""Interception of ``Function.apply`` during an export.

While :class:`Capture` is entered, every call of a user's Function on this thread becomes one call of
the opaque operator ``torch2ort::python_op(Tensor[] inputs, str site) -> Tensor[]``, which torch.export
records as it is. Calls on other threads, and calls of torch's own Functions, are not intercepted.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import operator
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch

from torch2ort._torch import autograd_functions as private
from torch2ort.errors import ExportError
from torch2ort.pythonop.abstract_run.fake_run import fake_outputs
from torch2ort.pythonop.abstract_run.forward_probe import UserError, holds_tensor
from torch2ort.pythonop.abstract_run.module_proxies import without_proxies
from torch2ort.pythonop.abstract_run.nested_fake_tensors import find_unseen
from torch2ort.pythonop.abstract_run.object_rollback import FunctionWrites, Unknown, set_function_writes
from torch2ort.pythonop.abstract_run.object_snapshot import compares_objects, names_attribute
from torch2ort.pythonop.abstract_run.original_tensors import Originals
from torch2ort.pythonop.abstract_run.per_call_arguments import find_per_call_arguments
from torch2ort.pythonop.abstract_run.sample_tensors import Sample, place
from torch2ort.pythonop.autocast import Autocast
from torch2ort.pythonop.caught_exceptions import ExceptClause, handlers_around, places_above, refuse_caught
from torch2ort.pythonop.site import TENSOR, UNSAVABLE, Site, qualified_name, site_by_key
from torch2ort.support.versions import installed, remedy

_library = torch.library.Library("torch2ort", "DEF")
_library.define("python_op(Tensor[] inputs, str site) -> Tensor[]")
# Eager PyTorch runs every call, also one whose result is unused.
torch.fx.node.has_side_effect(torch.ops.torch2ort.python_op.default)


@torch.library.register_fake("torch2ort::python_op", lib=_library)
def _fake_python_op(inputs: Sequence[torch.Tensor], site: str) -> list[torch.Tensor]:
    # Calls inside of a Function's forward, also of other Functions, are not intercepted.
    with _interceptor.suspend():
        return fake_outputs(site_by_key(site), inputs)


class Capture:
    """Context manager that collects the sites of one export.

    Writes of the sites' abstract runs to Python objects are undone at exit.

    Args:
        training: the mode of the export.
        model: the model, whose Functions may reach its tensors.
        sample: the real tensors of Functions that must run on real tensors; ``None`` if they are unknown.
        originals: the tensors that runs pass to Functions as the very same objects; none by default.
        handlers: ``except`` clauses around the calls that the stack does not show.
        operator: returns the results of a call from its tensors and the site's key.

    Attributes:
        sites: every site by its key, in the order of the calls.
    """

    def __init__(
        self,
        *,
        training: bool,
        model: torch.nn.Module | None = None,
        sample: Sample | None = None,
        originals: Originals | None = None,
        handlers: tuple[ExceptClause, ...] = (),
        operator: Callable[[list[torch.Tensor], str], Sequence[torch.Tensor]] | None = None,
    ) -> None:
        self._operator = operator or torch.ops.torch2ort.python_op
        self.sites: dict[str, Site] = {}
        self._training = training
        self._sample = sample
        self._handlers = handlers
        self._raised: tuple[str, BaseException] | None = None
        self._function_writes = FunctionWrites(model, originals)
        self._calls: collections.Counter[type] = collections.Counter()
        self._classes: defaultdict[str, list[type]] = defaultdict(list)

    def __enter__(self) -> Capture:
        _interceptor.enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _interceptor.leave()
        self._function_writes.remove()
        if error is None and self._raised is not None:
            raise refuse_caught(*self._raised) from self._raised[1]
        if error is None:
            self._function_writes.refuse_kept_tensors()
            find_per_call_arguments(self.sites.values(), self._function_writes)

    def restart(self, tensors: Sequence[torch.Tensor]) -> None:
        """Reset the capture, as the model's forward begins, perhaps again.

        Args:
            tensors: the tensors that replace the inputs of forward.
        """
        self._calls.clear()
        self._raised = None
        self._function_writes.originals.are_traced_as(tensors)

    def call(self, function: type[torch.autograd.Function], arguments: tuple[Any, ...]) -> Any:
        """Replace ``function.apply(*arguments)`` in the traced program by a call of the opaque operator."""
        values = tuple(_concrete(function, i, a) for i, a in enumerate(arguments))
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        required = tuple(isinstance(v, torch.Tensor) and v.requires_grad for v in values)
        _refuse_record_in_inference_mode(function, required)
        site = Site(
            func_name=self._name(function),
            function=function,
            arguments=tuple(TENSOR if isinstance(v, torch.Tensor) else v for v in values),
            needs_input_grad=required,
            training=self._training,
            caught=handlers_around(places_above(sys._getframe(1))) + self._handlers,
            autocast=Autocast.of_call(),
        )
        self.sites[site.key] = site
        set_function_writes(site, self._function_writes)
        self._function_writes.originals.find(site, values)
        _refuse_attributes(site, values)
        _refuse_comparison(site, values)
        if any(required) and torch.is_grad_enabled():
            self._function_writes.will_train(site)
        if self._sample is not None:
            place(site, self._sample, self._calls[function])
        self._calls[function] += 1
        try:
            outputs = self._operator(tensors, site.key)
        except UserError as carrier:
            del self.sites[site.key]
            self._raised = site.func_name, carrier.error
            raise carrier.error from None
        _refuse_shared_writes(site, values)
        if any(required) and torch.is_grad_enabled():
            _refuse_saved(values[p] for p in site.known_result.saved)
        return _returned(site, values, outputs)

    def _name(self, function: type) -> str:
        name = qualified_name(function)
        classes = self._classes[name]
        if function not in classes:
            classes.append(function)
        number = classes.index(function) + 1
        return name if number == 1 else f"{name}#{number}"


class ArgumentRecorder:
    """Context manager that records the arguments of Functions while the model runs eagerly.

    Args:
        sample: receives the tensors.
    """

    def __init__(self, sample: Sample) -> None:
        self._sample = sample

    def __enter__(self) -> None:
        _interceptor.enter(self)

    def __exit__(self, *error: object) -> None:
        _interceptor.leave()

    def call(self, function: type[torch.autograd.Function], arguments: tuple[Any, ...]) -> Any:
        """Record ``function.apply(*arguments)``, and call it."""
        self._sample.record(function, arguments)
        with _interceptor.suspend():
            return function.apply(*arguments)


def internal_site(
    function: type[torch.autograd.Function],
    arguments: Sequence[Any],
    needs_input_grad: Sequence[bool],
    *,
    training: bool,
    autocast: Autocast | None = None,
) -> Site:
    """Return a site of torch2ort's own, by which an operator runs in PyTorch's kernel.

    Args:
        function: a Function of torch2ort (its module starts with ``torch2ort.``).
        arguments: :data:`TENSOR` or the Python value of each argument of ``apply``.
        needs_input_grad: one entry per argument.
        training: the mode of the export.
        autocast: settings of autocast while the operator runs; ``None`` if autocast is off.

    Returns:
        The site. The caller keeps it alive, and refers to it in
        ``torch.ops.torch2ort.python_op(tensors, site.key)``.
    """
    return Site(
        func_name=qualified_name(function),
        function=function,
        arguments=tuple(arguments),
        needs_input_grad=tuple(needs_input_grad),
        training=training,
        internal=True,
        autocast=autocast,
    )


def _refuse_record_in_inference_mode(function: type, required: Sequence[bool]) -> None:
    """Refuse a Function in inference mode with gradients on, where autograd records only Functions."""
    if any(required) and torch.is_inference_mode_enabled() and torch.is_grad_enabled():
        raise ExportError(
            f"{qualified_name(function)}: called inside of torch.inference_mode() with gradients switched "
            f"on, where eager PyTorch records it alone, and refuses it if it saves what inference mode made. "
            f"Call the model under torch.no_grad() instead, or the Function without torch.enable_grad()"
        )


def _refuse_shared_writes(site: Site, values: Sequence[Any]) -> None:
    """Refuse a forward that writes to an argument that is also another one: eager shows the write in both."""
    for written in site.known_result.mutated:
        for position in site.tensor_positions:
            if position != written and values[position] is values[written]:
                raise ExportError(
                    f"{site.func_name}: forward writes to argument {written}, which is argument {position}, "
                    f"too, and a graph gives it two tensors. Pass a clone() as one of them"
                )


def _refuse_attributes(site: Site, values: Sequence[Any]) -> None:
    """Refuse a Function whose code names an attribute that the model set on a computed tensor."""
    for position, value in enumerate(values):
        if not isinstance(value, torch.Tensor) or position in site.originals:
            continue
        for name in private.users_attributes(value):
            if names_attribute(site.function, name):
                raise ExportError(
                    f"{site.func_name}: argument {position} was computed and has the attribute {name}, which "
                    f"a graph does not pass on. Pass its value as an argument of its own"
                )


def _refuse_comparison(site: Site, values: Sequence[Any]) -> None:
    """Refuse a Function that compares objects by identity, if two arguments are one tensor."""
    positions = site.tensor_positions
    for i, one in enumerate(positions):
        for other in positions[i + 1 :]:
            if values[one] is values[other] and compares_objects(site.function):
                raise ExportError(
                    f"{site.func_name}: arguments {one} and {other} are the same tensor, for which a graph "
                    f"passes two, and its code compares objects by `is` or id(). Pass a clone() of one of "
                    f"them"
                )


def _refuse_saved(tensors: Iterable[torch.Tensor]) -> None:
    """Refuse tensors that eager PyTorch refuses to save for backward."""
    if any(tensor.is_inference() for tensor in tensors):
        raise RuntimeError(UNSAVABLE)


def _concrete(function: type, position: int, value: Any) -> Any:
    """Return ``value`` as a site stores it; refuse values that a node cannot store."""
    if isinstance(value, Unknown):
        value.refuse()
    value = without_proxies(value)
    if isinstance(value, torch.Tensor):
        if private.is_functorch_wrapped(value):
            raise ExportError(
                f"{qualified_name(function)}: argument {position} is inside a torch.func transform (vmap, "
                f"grad, ...), "
                f"which an opaque call cannot be part of. Call the Function outside of the transform"
            )
        return value
    if isinstance(value, torch.SymInt):
        return int(value)  # torch.export specializes this size, and reports it if the size was to vary
    if isinstance(value, torch.SymBool):
        return bool(value)
    if isinstance(value, torch.SymFloat):
        return float(value)
    if isinstance(value, (list, tuple, dict, set, frozenset)) and holds_tensor(value):
        raise ExportError(
            f"{qualified_name(function)}: argument {position} is a {type(value).__name__} with tensors in "
            f"it; autograd does "
            f"not see those, and neither can a graph. Pass the tensors as arguments of their own"
        )
    if isinstance(value, (list, tuple, dict)):
        values = list(value.values() if isinstance(value, dict) else value)
        # A Function may write a value into a dictionary, and another may get it from there.
        passed = isinstance(value, dict)
        made = [v if passed and isinstance(v, Unknown) else _concrete(function, position, v) for v in values]
        # The object itself is kept if nothing in it belongs to the trace, because forward may write to it.
        return value if all(map(operator.is_, made, values)) else _rebuilt(function, position, value, made)
    place = find_unseen(f"argument {position}", value)
    if place is not None:
        raise ExportError(
            f"{qualified_name(function)}: {place} that the model computes with; autograd does "
            f"not see it there, and neither can a graph. Pass it as an argument of its own"
        )
    return value


def _rebuilt(function: type, position: int, container: Any, values: list[Any]) -> Any:
    """Return a container of the same kind with ``values``."""
    kind = type(container)
    if kind in (list, tuple, torch.Size):
        return kind(values)
    if kind in (dict, collections.OrderedDict):
        return kind(zip(container, values, strict=True))
    if hasattr(container, "_fields"):
        return kind(*values)
    raise ExportError(
        f"{qualified_name(function)}: argument {position} is a {kind.__name__} with sizes of tensors in it, "
        f"which a graph does not put into one. Pass the sizes as arguments of their own"
    )


def _returned(site: Site, arguments: tuple[Any, ...], outputs: Sequence[torch.Tensor]) -> Any:
    """Return the result of ``apply``, and replay the writes of a mutating Function on the trace."""
    result = site.known_result
    supply = itertools.count()
    returned_inputs = dict(result.returned_inputs)
    values: list[Any] = []
    for i, constant in enumerate(result.outputs):
        if constant is not TENSOR:
            values.append(constant)
            continue
        index = next(supply)
        output = outputs[index].detach() if index in result.non_differentiable else outputs[index]
        if i in returned_inputs:
            argument = arguments[returned_inputs[i]]
            argument.copy_(output)
            output = argument
        values.append(output)
    for i, name in result.attributes:
        setattr(values[i], name, Unknown(f"the attribute {name} of output {i}", site.func_name))
    for i, last in result.repeated:
        values[i] = values[last]
    for position, output in zip(result.hidden, outputs[next(supply) :], strict=True):
        arguments[position].detach().copy_(output)
    return tuple(values) if result.returns_tuple else values[0]


def is_user_function(function: type) -> bool:
    """Return True unless a Function is torch's own; that of checkpoints counts, as it calls user code."""
    module = function.__module__
    if module == "torch.utils.checkpoint":
        return True
    return not (module == "torch" or module.startswith("torch."))


class _Interceptor:
    """Interception of ``apply`` while at least one thread captures."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._local = threading.local()
        self._captures = 0

    @property
    def _stack(self) -> list[Capture | ArgumentRecorder | None]:
        stack: list[Capture | ArgumentRecorder | None] = self._local.__dict__.setdefault("stack", [])
        return stack

    def current(self) -> Capture | ArgumentRecorder | None:
        """Return the capture of this thread; ``None`` if none is entered or it is suspended."""
        stack = self._stack
        return stack[-1] if stack else None

    def enter(self, capture: Capture | ArgumentRecorder) -> None:
        with self._lock:
            if self._captures == 0:
                _intercept()
            self._captures += 1
        self._stack.append(capture)

    def leave(self) -> None:
        self._stack.pop()
        with self._lock:
            self._captures -= 1
            if self._captures == 0:
                private.end_interception()

    @contextlib.contextmanager
    def suspend(self) -> Iterator[None]:
        """Pass calls of this thread on to PyTorch."""
        self._stack.append(None)
        try:
            yield
        finally:
            self._stack.pop()


def _intercept() -> None:
    try:
        private.intercept_apply(_stand_in)
    except RuntimeError as error:
        raise ExportError(
            f"torch2ort cannot see the calls of autograd Functions in torch {installed('torch')}: "
            f"`apply` cannot be intercepted, {error}. {remedy('torch')}"
        ) from error


def _stand_in(
    function: type[torch.autograd.Function], args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> Any:
    capture = _interceptor.current()
    if capture is None or not is_user_function(function):
        return NotImplemented
    return capture.call(function, private.positional(function, args, kwargs))


_interceptor = _Interceptor()


def suspended() -> contextlib.AbstractContextManager[None]:
    """Pass calls of this thread on to PyTorch inside of the context."""
    return _interceptor.suspend()
