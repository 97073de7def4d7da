"""Rollback of the writes of an export's abstract runs to Python objects.

A Function may write to its arguments, to its class, to objects in its closure or a global: a counter, an
observer's range, a table. An export runs it on fake or sample data. The Functions that run afterwards see the
writes of such a run, as in eager PyTorch. The model's code sees :class:`Unknown` instead, because a value
that it read there would become a constant of the graph. When the export ends, the previous state is restored.
"""

from __future__ import annotations

import contextlib
import gc
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import torch

from torch2ort._torch import autograd_functions as private
from torch2ort.errors import ExportError
from torch2ort.pythonop.abstract_run.backward_probe import like_gradient, refuse_backward
from torch2ort.pythonop.abstract_run.forward_probe import Observation, observe, results_of
from torch2ort.pythonop.abstract_run.object_snapshot import Holder, Items, Named, Snapshot
from torch2ort.pythonop.abstract_run.original_tensors import Originals
from torch2ort.pythonop.abstract_run.tensor_rollback import TensorRollback, places
from torch2ort.pythonop.site import TENSOR, Site


class Unknown:
    """Placeholder where a Function wrote, until the export ends: a value that only a run of the graph has."""

    def __init__(self, what: str, writer: str) -> None:
        self.__dict__.update(_what=what, _writer=writer)

    def refuse(self) -> NoReturn:
        """Refuse a read of this value by the model.

        Raises:
            ExportError: always.
        """
        raise ExportError(
            f"the model reads {self.__dict__['_what']} after {self.__dict__['_writer']}.forward wrote to it; "
            f"a graph does not hold what a Function leaves in Python objects. Return it from forward, as a "
            f"tensor where it varies"
        )

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.refuse()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse a call of torch that gets such a value as an argument."""
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, cls):
                value.refuse()
        raise ExportError("the model reads a value that a Function wrote; return it from forward")

    def __getattr__(self, name: str) -> NoReturn:
        """See :meth:`refuse`."""
        self.refuse()


_OPERATIONS = (
    "abs", "add", "and", "bool", "call", "contains", "delitem", "divmod", "enter", "eq", "exit",
    "float", "floordiv", "format", "ge", "getitem", "gt", "hash", "index", "int", "invert", "iter",
    "le", "len", "lshift", "lt", "matmul", "mod", "mul", "ne", "neg", "next", "or", "pos", "pow",
    "radd", "rand", "reduce_ex", "rfloordiv", "rlshift", "rmatmul", "rmod", "rmul", "ror", "round",
    "rpow", "rrshift", "rshift", "rsub", "rtruediv", "rxor", "setattr", "setitem", "str", "sub",
    "truediv", "xor",
)  # fmt: skip
for _operation in _OPERATIONS:
    setattr(Unknown, f"__{_operation}__", Unknown._refuse)


@dataclass(slots=True)
class _Shadow:
    """A place that abstract runs wrote to: its content before, for Functions, and for the model."""

    holder: Holder[Any]
    before: Any
    written: Any
    shown: Any


class Generators:
    """The present states of the random generators of Python and NumPy."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()

    def restore(self) -> list[str]:
        """Restore the states, and return the names of the generators that had changed."""
        changed = []
        if random.getstate() != self._python:
            changed.append("Python's random generator")
            random.setstate(self._python)
        if any(not np.array_equal(a, b) for a, b in zip(np.random.get_state(), self._numpy, strict=True)):
            changed.append("numpy's random generator")
            np.random.set_state(self._numpy)
        return changed


class FunctionWrites:
    """Writes of the abstract runs of one export, until :meth:`remove`.

    Args:
        model: the model, before it is traced.
        originals: the tensors that runs pass to Functions as the very same objects; none by default.

    Attributes:
        written: paths of the places that each site's forward wrote to, by the site's key.
        originals: see above.
    """

    def __init__(self, model: torch.nn.Module | None = None, originals: Originals | None = None) -> None:
        self.written: dict[str, list[str]] = {}
        self.originals = originals or Originals(model)
        self._trained: weakref.WeakSet[Site] = weakref.WeakSet()
        self._shadows: dict[Any, _Shadow] = {}
        self._made: list[tuple[str, weakref.ref[torch.Tensor]]] = []
        self._over = False

    @contextlib.contextmanager
    def running(self, site: Site) -> Iterator[tuple[list[str], Snapshot]]:
        """Record the writes of ``site``'s forward, which runs inside of the context.

        Yields:
            A list that receives the paths of the written places, and the snapshot of the state before.
        """
        written: list[str] = []
        self._show(of_functions=True)
        before = Snapshot(_roots(site))
        tensors, generators = places(before.values()), Generators()
        try:
            yield written, before
            for holder, contents in before.changes():
                written.append(change(holder, contents))
                self._note(site, holder, contents)
            if self._over:
                self.remove()
        except BaseException:
            before.restore()
            raise
        finally:
            written += generators.restore()
            written += [path for path, place in tensors if place.restore()]
            self.written.setdefault(site.key, []).extend(written)
            self._show(of_functions=False)

    def is_trained(self, site: Site) -> bool:
        """Return True if ``site``'s backward will run in training steps of this model."""
        return site in self._trained

    def will_train(self, site: Site) -> None:
        """Note that ``site``'s backward will run, if :attr:`Originals.are_trained`."""
        if self.originals.are_trained:
            self._trained.add(site)

    def note_tensors(self, site: Site, made: Iterable[weakref.ref[torch.Tensor]]) -> None:
        """Record the tensors of a run, for :meth:`refuse_kept_tensors`."""
        self._made.extend((site.func_name, tensor) for tensor in made)

    def remove(self) -> None:
        """Undo the writes of all runs, and from now on those of later runs when they end."""
        self._over = True
        for shadow in self._shadows.values():
            now = shadow.holder.read()
            if isinstance(shadow.holder, Named):
                # The model itself wrote the other values.
                kept = {k: v for k, v in now.items() if not isinstance(v, Unknown)}
                lost = {k: v for k, v in shadow.before.items() if k not in kept}
                shadow.holder.write({**kept, **lost})
            else:
                shadow.holder.write(shadow.before)
        self._shadows.clear()

    def refuse_kept_tensors(self) -> None:
        """Check that no code keeps a tensor of a run alive.

        Raises:
            ExportError: some code does.
        """
        for generation in range(3):
            # Most reference cycles of a run are young; all generations of a large process take a second.
            if all(tensor() is None for _, tensor in self._made):
                break
            gc.collect(generation)
        name = next((name for name, tensor in self._made if tensor() is not None), None)
        self._made.clear()
        if name is not None:
            raise ExportError(
                f"{name}: forward keeps a tensor where an export cannot remove it, and it is not the tensor "
                f"of a run: export runs forward once to learn its outputs. Keep tensors in an attribute of "
                f"the Function, of an argument or of the model, in a global or a closure"
            )

    def _note(self, site: Site, holder: Holder[Any], contents: Any) -> None:
        shadow = self._shadows.get(holder.key)
        if shadow is None:
            shadow = self._shadows[holder.key] = _Shadow(holder, holder.before, contents, None)
        shadow.written = contents
        if isinstance(holder, Named):
            shadow.shown = {
                key: value if _same(shadow.before, key, value) else Unknown(holder.label(key), site.func_name)
                for key, value in contents.items()
            }
        elif isinstance(holder, Items):
            shadow.shown = [Unknown(holder.path, site.func_name)] * len(contents)
        else:
            shadow.shown = shadow.before

    def _show(self, *, of_functions: bool) -> None:
        for shadow in self._shadows.values():
            if not of_functions:
                shadow.holder.write(shadow.shown)
                continue
            if isinstance(shadow.holder, Named):
                # Functions see the values that the model wrote meanwhile.
                now = shadow.holder.read()
                shadow.written = {
                    k: shadow.written.get(k) if isinstance(v, Unknown) else v for k, v in now.items()
                }
            shadow.holder.write(shadow.written)


def observe_and_roll_back(site: Site, tensors: list[torch.Tensor]) -> Observation:
    """Call :func:`~torch2ort.pythonop.abstract_run.forward_probe.observe`, and undo its side effects."""
    if site.internal:
        return observe(site, tensors)[0]
    from torch2ort.sizes.symbols import environment_of, unbound_values  # sympy is slow to import

    function_writes = _function_writes_of.get(site)
    if function_writes is None:
        function_writes = FunctionWrites()
        function_writes.remove()
    fake = any(private.is_fake(t) for t in tensors)
    given = function_writes.originals.stand_ins(site, tensors)
    tensors.clear()
    with (
        unbound_values(next((environment_of(t) for t in given), None)),
        private.untraced_modules(),
        contextlib.nullcontext() if fake else function_writes.originals.put_back(),
        function_writes.running(site) as (written, state),
        TensorRollback(given) as undone,
    ):
        held = function_writes.originals.place_stand_ins(site, given)
        seen, left = observe(site, given, held)
        function_writes.note_tensors(site, seen.made)
        written += ["a tensor"] * undone.has_writes()
        # NumPy does not report new memory, but new memory is freed when the run ends.
        written += ["a tensor" for memory in seen.found if not memory.expired()]
        if function_writes.is_trained(site):
            with _as_before(state), function_writes.originals.same_gradients():
                gradients = [like_gradient(t) for t in seen.outputs]
                ended, layout = refuse_backward(site, left, seen.result, gradients)
            seen = replace(seen, backward=(ended or not fake, layout))
        del left
    return replace(seen, result=replace(seen.result, effects=bool(written)))


@contextlib.contextmanager
def _as_before(state: Snapshot) -> Iterator[None]:
    """Undo all writes of the code inside of the context, which is no part of ``forward``."""
    tensors = places(state.values())
    try:
        with state.restore_at_end(), _same_generators():
            yield
    finally:
        for _, place in tensors:
            place.restore()


@contextlib.contextmanager
def _same_generators() -> Iterator[None]:
    generators = Generators()
    try:
        yield
    finally:
        generators.restore()


def run_isolated(
    site: Site,
    tensors: list[torch.Tensor],
    run: Callable[[Site, list[torch.Tensor]], list[torch.Tensor]] = results_of,
) -> list[torch.Tensor]:
    """Return the result of ``run`` for real tensors; each call has the same state and random numbers."""
    function_writes = _function_writes_of.get(site) or FunctionWrites()
    with (
        _same_generators(),
        private.without_fake_mode(),
        private.untraced_modules(),
        torch.random.fork_rng(devices=range(torch.cuda.device_count())),
        function_writes.originals.put_back(),
        function_writes.originals.same_gradients(),
        restoring_state(site.func_name, tuple(value for _, value in _roots(site)), code=True),
        TensorRollback(tensors),
    ):
        torch.manual_seed(0)
        return run(site, function_writes.originals.stand_ins(site, tensors))


@contextlib.contextmanager
def restoring_state(path: str, value: Any, *, code: bool) -> Iterator[None]:
    """Restore everything that is reachable from ``value`` when the context ends.

    Args:
        path: path of ``value``, for messages.
        value: the root.
        code: whether objects that its functions and classes reach count, too.
    """
    before = Snapshot([(path, value)], code=code)
    tensors = places(before.values())
    try:
        yield
    finally:
        before.restore()
        for _, place in tensors:
            place.restore()


_function_writes_of: weakref.WeakKeyDictionary[Site, FunctionWrites] = weakref.WeakKeyDictionary()


def set_function_writes(site: Site, function_writes: FunctionWrites) -> None:
    """Set the writes of the export in which ``site`` is being traced."""
    _function_writes_of[site] = function_writes


def _roots(site: Site) -> Iterator[tuple[str, Any]]:
    yield site.func_name.rpartition(".")[2], site.function
    for position, value in enumerate(site.arguments):
        if value is not TENSOR:
            yield f"argument {position}", value


def change(holder: Holder[Any], contents: Any) -> str:
    """Return the path of the first value in a place that was replaced."""
    if isinstance(holder, Named):
        keys = [*contents, *holder.before]
        key = next(k for k in keys if not (k in contents and _same(holder.before, k, contents[k])))
        return holder.label(key)
    return holder.path


def _same(before: dict[Any, Any], key: Any, value: Any) -> bool:
    return key in before and before[key] is value
