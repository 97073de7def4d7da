"""One observed run of a site's ``forward``, which finds all its properties that the graph depends on."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch2ort._torch import autograd_functions as private
from torch2ort.errors import ExportError
from torch2ort.pythonop.abstract_run.layout_queries import QueryObserver
from torch2ort.pythonop.abstract_run.object_snapshot import built_in
from torch2ort.pythonop.abstract_run.tensor_rollback import memory
from torch2ort.pythonop.autocast import autocast_context
from torch2ort.pythonop.native import native
from torch2ort.pythonop.site import TENSOR, Result, Site, TensorType

# Operators whose result for a quantized tensor is not quantized; the results of all others are.
_PLAIN_AGAIN = frozenset(
    {torch.ops.aten.dequantize, torch.ops.aten.int_repr, torch.ops.aten.q_per_channel_scales}
)


class UserError(Exception):
    """Carrier that passes an exception of the user's ``forward`` through torch's dispatcher unchanged."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class LongRunError(Exception):
    """``forward`` runs more operators on fake tensors than a trace has time for."""


class EndedRun(BaseException):
    """Signal that ends a run of a Function's code. User code must not catch it."""


# An operator takes a millisecond on tensors of symbolic sizes. A data-dependent size, as each mask makes
# one, is compared with all others. These are counts, because a graph must not depend on the machine's load.
_MOST_OPERATORS = 3000
_MOST_DECIDED_SIZES = 8
# Namespaces of operators that other processes wait for.
_COLLECTIVE = frozenset({"c10d", "_c10d_functional", "symm_mem"})


class OperatorObserver(private.TorchDispatchMode):
    """Observer of operators that draw from the random generator, and of the memory that operators write to.

    A tensor's version does not show writes: they are not counted below autograd, where fake tensors run.

    Args:
        own: the memory of the tensors that ``forward`` gets.
        unbacked_sizes: counts the data-dependent sizes in the tensors' trace; ``None`` for real tensors.
        most: the largest number of operators in a run, in which operators that other processes wait for are
            not allowed; by default, real tensors have no limit, and all operators are allowed.
    """

    def __init__(
        self,
        own: Sequence[StorageWeakRef] = (),
        unbacked_sizes: Callable[[], int] | None = None,
        most: int | None = None,
    ) -> None:
        super().__init__()
        self._most = _MOST_OPERATORS if most is None and unbacked_sizes is not None else most
        self._operators = 0
        self._is_alone, self._unbacked_sizes = most is not None, unbacked_sizes
        self._unbacked_sizes_before = 0 if unbacked_sizes is None else unbacked_sizes()
        self.uses_rng = False
        self.written: set[StorageWeakRef] = set()
        self._own = set(own)
        self.found: set[StorageWeakRef] = set()
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.quantised: list[torch.Tensor] = []

    @staticmethod
    @contextlib.contextmanager
    def ending() -> Iterator[None]:
        """Raise a :class:`LongRunError` if a run inside of the context was ended."""
        try:
            yield
        except EndedRun as end:
            raise LongRunError(str(end)) from None

    def _end_beyond_bounds(self, func: Any) -> None:
        """End a run that exceeds the limits."""
        self._operators += 1
        if self._most is not None and self._operators > self._most:
            raise EndedRun(f"it runs more than {self._most} operators")
        if self._is_alone and func.namespace in _COLLECTIVE:
            raise EndedRun(f"it calls {func}")
        if (
            self._unbacked_sizes is not None
            and self._unbacked_sizes() - self._unbacked_sizes_before > _MOST_DECIDED_SIZES
        ):
            raise EndedRun(f"it makes more than {_MOST_DECIDED_SIZES} sizes that values decide")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._end_beyond_bounds(func)
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.uses_rng = True
        for value in private.written_arguments(func, args, kwargs):
            self.written.add(StorageWeakRef(value.untyped_storage()))
        self.found |= self.written - self._own
        result = func(*args, **kwargs)
        if any(given is tensor for tensor in self.quantised for given in args):
            if func.overloadpacket in _PLAIN_AGAIN:
                # A fake tensor is never quantized, so the operator may return its argument.
                result = result.clone()
            else:
                self.quantised.append(result)
        elif private.makes_quantised(func):
            self.quantised.append(result)
        self._own |= memory(result) - memory((*args, *kwargs.values()))
        for value in result if isinstance(result, (list, tuple)) else (result,):
            # A result that is an argument was written to, so it is older.
            if isinstance(value, torch.Tensor) and not any(value is given for given in args):
                self.made.append(weakref.ref(value))
        return result


def results_of(site: Site, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of the tensors that ``forward`` returns for ``tensors``."""
    returned = run_forward(site, native.Context(site.needs_input_grad), site.call_arguments(tensors))
    values = returned if isinstance(returned, tuple) else (returned,)
    return [v.detach().clone() for v in values if isinstance(v, torch.Tensor)]


def run_forward(site: Site, context: native.Context, arguments: Sequence[Any]) -> Any:
    """Call ``forward`` of the site's Function on ``arguments``, in either of its two styles."""
    function = site.function
    if function is None:
        raise ExportError(f"{site.func_name}: this Function is not resolved to a class, so it cannot run")
    with private.with_autograd(), torch.no_grad(), autocast_context(site.autocast):
        if private.uses_setup_context(function):
            outputs = function.forward(*arguments)
            function.setup_context(context, tuple(arguments), outputs)
            return outputs
        return function.forward(context, *arguments)


def fresh_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape, strides and type with memory of its own."""
    # With its own storage, the tensor shows whether the Function keeps it beyond the call.
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def real_like(tensor: torch.Tensor, number: Callable[[int | torch.SymInt], int]) -> torch.Tensor:
    """Return made-up data with the sizes, strides and offset that ``tensor`` has in a sample.

    Args:
        tensor: a fake tensor.
        number: returns the number of a size in the sample.
    """
    shape = [number(s) for s in tensor.shape]
    strides, begin = [number(s) for s in tensor.stride()], number(tensor.storage_offset())
    # Code that depends on the memory order, as `view` does, behaves as in eager PyTorch.
    size = 1 + sum((s - 1) * stride for s, stride in zip(shape, strides, strict=True)) if all(shape) else 0
    size += begin
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        made = torch.rand(size, device=tensor.device).to(tensor.dtype)
    else:
        made = torch.zeros(size, dtype=tensor.dtype, device=tensor.device)
    return made.as_strided(shape, strides, begin)


@dataclass(frozen=True, slots=True)
class Observation:
    """Observation of one run of ``forward``.

    Attributes:
        result: the properties that the graph depends on.
        outputs: a tensor of the shape, strides and type of each tensor output.
        aliases: pairs of an output's position and the position of the argument whose memory it shares.
        contiguous: positions of the tensor arguments that were contiguous, as they are in a runtime.
        storages: the memory of each tensor output of the run.
        made: the tensors of the run; one that is still alive is kept by some code.
        found: memory that existed before the run and that it wrote to.
        asked: properties of tensors beside their values that forward read.
        backward: two values for a backward that was run: True if as much of it was observed as ever is, and
            True if it read the memory layout of tensors.
    """

    result: Result
    outputs: list[torch.Tensor]
    aliases: frozenset[tuple[int, int]]
    contiguous: frozenset[int]
    storages: tuple[StorageWeakRef, ...]
    made: tuple[weakref.ref[torch.Tensor], ...]
    found: tuple[StorageWeakRef, ...]
    asked: QueryObserver
    backward: tuple[bool, bool] = (True, False)


@dataclass(frozen=True, slots=True)
class BackwardInputs:
    """Context and tensors that ``forward`` left for ``backward``.

    Attributes:
        context: context of the call.
        arguments: the tensor arguments by position, if they are still alive.
        outputs: the returned tensors, if they are still alive.
    """

    context: native.Context
    arguments: Mapping[int, weakref.ref[torch.Tensor]]
    outputs: Sequence[weakref.ref[torch.Tensor]]


def observe(
    site: Site, tensors: list[torch.Tensor], around: AbstractContextManager[Any] | None = None
) -> tuple[Observation, BackwardInputs]:
    """Run ``forward`` on ``tensors`` (a list that this empties), and observe all that the graph depends on.

    Args:
        site: the call.
        tensors: one per tensor argument.
        around: context in which forward runs.

    Raises:
        ExportError: ``forward`` returned tensors inside a container.
        LongRunError: ``forward`` runs too many operators on fake tensors.
        Exception: any exception that ``forward`` raises.
    """
    positions = site.tensor_positions
    _require_gradients(site, tensors)
    storages = [StorageWeakRef(t.untyped_storage()) for t in tensors]
    context = native.Context(site.needs_input_grad)
    references = {p: weakref.ref(t) for p, t in zip(positions, tensors, strict=True)}
    observation, outputs = _describe(site, context, tensors, storages, around or contextlib.nullcontext())
    # From here on, only the Function itself (through ctx, an attribute, a global) may hold the inputs.
    tensors.clear()
    kept = tuple(p for p, storage in zip(positions, storages, strict=True) if not storage.expired())
    held = tuple(i for i, storage in enumerate(observation.storages) if not storage.expired())
    result = replace(observation.result, kept=kept, kept_results=held)
    return replace(observation, result=result), BackwardInputs(context, references, outputs)


def _require_gradients(site: Site, tensors: list[torch.Tensor]) -> None:
    for position, tensor in zip(site.tensor_positions, tensors, strict=True):
        if site.needs_input_grad[position] and tensor.dtype.is_floating_point:
            tensor.requires_grad_(True)


def _describe(
    site: Site,
    context: native.Context,
    tensors: list[torch.Tensor],
    storages: list[StorageWeakRef],
    around: AbstractContextManager[Any],
) -> tuple[Observation, list[weakref.ref[torch.Tensor]]]:
    """Run ``forward`` and describe the run, of which only ``context`` is kept afterwards."""
    from torch2ort.sizes.symbols import is_value, unbacked_size_counter  # sympy is slow to import

    positions = site.tensor_positions
    versions = [private.version_of(t) for t in tensors]
    by_position = dict(zip(positions, tensors, strict=True))
    watch, asked = OperatorObserver(storages, unbacked_size_counter(tensors)), QueryObserver(by_position)
    with watch.ending(), watch, asked, around:
        returned = run_forward(site, context, site.call_arguments(tensors))
    values = returned if isinstance(returned, tuple) else (returned,)
    if any(is_value(v, ()) for v in values):
        raise TypeError("forward returns a number that depends on values")
    refuse_backpropagation(site, by_position, "forward")
    _refuse_nested_tensors(site, values)
    _refuse_quantised_tensors(site, values, watch.quantised)
    watch.quantised.clear()
    dirty = {id(t) for t in context.dirty_tensors or ()}
    mutated = tuple(
        p
        for p, t, version, storage in zip(positions, tensors, versions, storages, strict=True)
        if id(t) in dirty or storage in watch.written or private.version_of(t) != version
    )
    saved = {StorageWeakRef(t.untyped_storage()) for t in context.to_save or () if t is not None}
    where = {id(t): p for p, t in zip(positions, tensors, strict=True)}
    returned_inputs = {i: where[id(v)] for i, v in enumerate(values) if where.get(id(v)) in mutated}
    hidden = tuple(p for p in mutated if p not in returned_inputs.values())
    outputs = [v for v in values if isinstance(v, torch.Tensor)]
    all_outputs = [*outputs, *(tensors[positions.index(p)] for p in hidden)]
    result = Result(
        inputs=tuple(TensorType(t.dtype, t.dim()) for t in tensors),
        outputs=tuple(TENSOR if isinstance(v, torch.Tensor) else v for v in values),
        tensors=tuple(TensorType(t.dtype, t.dim()) for t in all_outputs),
        returns_tuple=isinstance(returned, tuple),
        non_differentiable=_without_gradient(context, outputs),
        mutated=mutated,
        returned_inputs=tuple(sorted(returned_inputs.items())),
        hidden=hidden,
        saved=tuple(p for p, storage in zip(positions, storages, strict=True) if storage in saved),
        uses_rng=watch.uses_rng,
        attributes=_attributes(values, where),
        repeated=_repeated(values, where),
    )
    aliases = _aliases(values, dict(zip(positions, storages, strict=True)))
    contiguous = frozenset(p for p, t in zip(positions, tensors, strict=True) if is_contiguous(t))
    storages_out = tuple(StorageWeakRef(t.untyped_storage()) for t in all_outputs)
    made = (*watch.made, *map(weakref.ref, tensors))
    copies = [fresh_like(t.detach()) for t in all_outputs]
    seen = Observation(result, copies, aliases, contiguous, storages_out, made, tuple(watch.found), asked)
    return seen, [weakref.ref(t) for t in outputs]


def _without_gradient(context: native.Context, outputs: list[torch.Tensor]) -> tuple[int, ...]:
    """Return the positions of outputs that were marked non-differentiable or whose dtype has no gradient."""
    marked = {id(t) for t in context.non_differentiable or ()}
    return tuple(
        i
        for i, t in enumerate(outputs)
        if id(t) in marked or not (t.dtype.is_floating_point or t.dtype.is_complex)
    )


def refuse_backpropagation(site: Site, tensors: Mapping[int, torch.Tensor], method: str) -> None:
    """Refuse a method that backpropagated into arguments that a graph computes; ``tensors``: by position.

    Raises:
        ExportError: the method did.
    """
    for position, tensor in tensors.items():
        if position not in site.originals and tensor.is_leaf and tensor.grad is not None:
            raise ExportError(
                f"{site.func_name}: {method} calls backward() through argument {position}, which in "
                f"eager PyTorch continues to the operators that computed it, and in a graph ends there. Call "
                f"it on a detach() of the argument, or use torch.autograd.grad"
            )


def _attributes(values: Sequence[Any], arguments: Container[int]) -> tuple[tuple[int, str], ...]:
    """Return position of a new tensor and name of an attribute that was set on it; ``arguments``: ids."""
    return tuple(
        (i, name)
        for i, v in enumerate(values)
        if isinstance(v, torch.Tensor) and id(v) not in arguments
        for name in private.users_attributes(v)
    )


def _aliases(values: Sequence[Any], storages: Mapping[int, StorageWeakRef]) -> frozenset[tuple[int, int]]:
    """Return the position of each output that begins where an argument does, and of that argument."""
    return frozenset(
        (i, p)
        for i, v in enumerate(values)
        for p, storage in storages.items()
        if isinstance(v, torch.Tensor) and _begins(v, storage)
    )


def _repeated(values: Sequence[Any], arguments: Container[int]) -> tuple[tuple[int, int], ...]:
    """Return position of each repeated tensor -> its last one; ``arguments``: ids, returned as views."""
    last = {id(v): i for i, v in enumerate(values) if isinstance(v, torch.Tensor) and id(v) not in arguments}
    return tuple((i, last[id(v)]) for i, v in enumerate(values) if last.get(id(v), i) != i)


def _begins(tensor: torch.Tensor, storage: StorageWeakRef) -> bool:
    """Return True if ``tensor`` is at the start of ``storage``; no condition on symbols is added."""
    offset = tensor.storage_offset()
    return isinstance(offset, int) and offset == 0 and StorageWeakRef(tensor.untyped_storage()) == storage


def is_contiguous(tensor: torch.Tensor) -> bool:
    """Return True if ``tensor`` is contiguous; no condition on symbols is added."""
    expected: int | torch.SymInt = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if str(stride) != str(expected):
            return False
        expected = expected * size
    return True


def _refuse_nested_tensors(site: Site, values: tuple[Any, ...]) -> None:
    for i, value in enumerate(values):
        if isinstance(value, (list, tuple, dict)) and holds_tensor(value):
            raise ExportError(
                f"{site.func_name}: forward returned a {type(value).__name__} with tensors in it as output "
                f"{i}; expected a tensor or a tuple of tensors and constants. Return the tensors themselves"
            )


def _refuse_quantised_tensors(site: Site, values: tuple[Any, ...], quantised: list[torch.Tensor]) -> None:
    for i, value in enumerate(values):
        if any(value is tensor for tensor in quantised):
            raise ExportError(
                f"{site.func_name}: forward returned a quantised tensor as output {i}, which cannot go from "
                f"one node of an ONNX graph to another. Return x.dequantize() and quantise it again after "
                f"the call"
            )


def holds_tensor(value: Any) -> bool:
    """Return True if there is a tensor anywhere inside ``value``."""
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(holds_tensor(v) for v in built_in(value).__iter__(value))
    if isinstance(value, dict):
        return any(holds_tensor(v) for v in built_in(value).values(value))
    return False
