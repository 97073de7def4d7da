"""The abstract run, which finds the outputs of a site's ``forward`` without a run of a graph.

A registered shape inferer determines the sizes. Without one, ``forward`` is run on fake tensors, and the
sizes of its outputs are expressions of the inputs' symbolic sizes. If that is impossible, as for a forward
that branches on values or has long loops, it is run once on real tensors: those that the call gets when the
model runs on the sample, or made-up ones if these are unknown. That run determines rank and dtype, and every
size is a new symbol. A run on fake tensors that ended early, or that specialized a varying size to a number,
would leave conditions on sizes; then the model is traced again, without such runs of the Function. If the
model's code cannot be traced with new symbols, it is traced with the sizes of the real run, which each run of
the graph then checks (:mod:`torch2ort.pythonop.runtime_checks`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torch2ort._torch import autograd_functions as private
from torch2ort.errors import Torch2OrtError
from torch2ort.log import logger
from torch2ort.pythonop.abstract_run.backward_probe import gradients_of, refuse_gradient_layout
from torch2ort.pythonop.abstract_run.forward_probe import (
    LongRunError,
    Observation,
    UserError,
    fresh_like,
    is_contiguous,
    real_like,
)
from torch2ort.pythonop.abstract_run.inferred_outputs import inferred_outputs
from torch2ort.pythonop.abstract_run.layout_queries import refuse_history, refuse_layout
from torch2ort.pythonop.abstract_run.object_rollback import observe_and_roll_back, run_isolated
from torch2ort.pythonop.abstract_run.sample_tensors import (
    known_arguments,
    leave_out_fake_runs,
    runs_on_fake_tensors,
    sample_of,
    sizes_needed,
)
from torch2ort.pythonop.inplace_validation import with_inplace_map
from torch2ort.pythonop.registry import inferer_of
from torch2ort.pythonop.site import Site, Size
from torch2ort.sizes.symbols import (
    environment_of,
    guards_of,
    has_hint,
    is_constant,
    is_value,
    other_numbers,
    size_hint,
    symbols_of,
)

_Numbers = Callable[["int | torch.SymInt"], int]


@dataclass(frozen=True, slots=True)
class _Run:
    """Record of one abstract run.

    Attributes:
        observation: the observation of ``forward``.
        sizes: the sizes of each tensor output; ``None`` for a data-dependent size, a pair for the size of an
            argument's dimension.
        inputs: description of the inputs in whose sizes the sizes are expressed; ``None`` if they are not.
    """

    observation: Observation
    sizes: tuple[tuple[Size | torch.SymInt, ...], ...]
    inputs: Any


# A program is traced several times, but a Function that writes to Python objects must run only once for that.
_runs: weakref.WeakKeyDictionary[Site, _Run] = weakref.WeakKeyDictionary()


def fake_outputs(site: Site, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensor outputs of ``site`` as fake tensors, and fill ``site.result`` and ``site.shapes``.

    Args:
        site: the call.
        inputs: its tensor arguments in call order, fake.

    Raises:
        UserError: ``forward`` raised also on real tensors, or an inferer raised.
        ExportError: ``forward`` returns a value that a graph cannot contain.
        ShapeInferenceError: the Function's inferer is wrong.
        InplaceMapError: the Function's in-place map is wrong.
    """
    inferer = inferer_of(site.func_name, site.function)
    outputs = _outputs(site, inputs) if inferer is None else inferred_outputs(site, inputs, inferer)
    site.shapes = tuple(tuple(t.shape) for t in outputs)
    return outputs


def copy_abstract_run(like: Site, site: Site) -> None:
    """Make an internal site share the abstract run of ``like``, a site with the same arguments."""
    run = _runs.get(like)
    if run is not None and run.inputs is not None:
        _runs[site] = run


def has_output_of_size_one(site: Site) -> bool:
    """Return True if ``site`` runs on real tensors only, and an output there has a broadcastable size 1."""
    run = _runs.get(site)
    return run is not None and run.inputs is None and any(1 in t.shape for t in run.observation.outputs)


def _outputs(site: Site, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    run = _runs.get(site)
    if run is None:
        run = _runs[site] = _run(site, inputs, again=leave_out_fake_runs)
        # This check is made in the first trace only: later passes change memory layouts.
        _refuse_other_answers(site, inputs, run.observation)
    elif run.inputs not in (None, _described(inputs)):
        run = _runs[site] = _run(site, inputs, again=None)
    site.result = with_inplace_map(site, run.observation.result, run.observation)
    given = dict(zip(site.tensor_positions, inputs, strict=True))
    return [
        _laid_out([_size(size, given) for size in sizes], seen)
        for sizes, seen in zip(run.sizes, run.observation.outputs, strict=True)
    ]


def _refuse_other_answers(site: Site, inputs: Sequence[torch.Tensor], seen: Observation) -> None:
    """Refuse a forward whose results differ for arguments as a graph passes them."""
    if site.internal:
        return
    refuse_history(site, seen.asked)
    if seen.asked.layout and not all(map(is_contiguous, inputs)):
        with private.without_fake_mode():
            refuse_layout(
                site, [real_like(t, size_hint) for t in inputs], lambda tensors: run_isolated(site, tensors)
            )
    if seen.backward[1]:

        def gradients(tensors: list[torch.Tensor], laid_out: Any) -> list[torch.Tensor]:
            return run_isolated(site, tensors, lambda s, given: gradients_of(s, given, seen.result, laid_out))

        with private.without_fake_mode():
            refuse_gradient_layout(site, [real_like(t, size_hint) for t in inputs], gradients)


def _laid_out(sizes: Sequence[int | torch.SymInt], seen: torch.Tensor) -> torch.Tensor:
    """Return a tensor of these sizes, whose dimensions have the memory order of those of ``seen``.

    Random numbers for the tensor are drawn in this order, although every value of a graph is contiguous.
    """
    axes = range(len(sizes))
    order = list(axes)
    strides = seen.stride()
    if all(has_hint(n) for n in (*seen.shape, *strides)):
        hints = [size_hint(stride) for stride in strides]
        # PyTorch does not keep the order of memory that elements share.
        if all(hint > 0 or size_hint(seen.shape[axis]) == 1 for axis, hint in enumerate(hints)):
            order = sorted(axes, key=lambda axis: -hints[axis])
    empty = torch.empty([sizes[axis] for axis in order], dtype=seen.dtype, device=seen.device)
    return empty if order == list(axes) else empty.permute([order.index(axis) for axis in axes])


def _size(size: Size | torch.SymInt, given: Mapping[int, torch.Tensor]) -> int | torch.SymInt:
    if size is None:
        fresh: torch.SymInt = torch.library.get_ctx().new_dynamic_size()
        return fresh
    return given[size[0]].shape[size[1]] if isinstance(size, tuple) else size


def _described(inputs: Sequence[torch.Tensor]) -> Any:
    """Return everything that the sizes of the outputs depend on."""
    environments = {id(environment_of(t)) for t in inputs}
    return environments, [(t.dtype, str(t.device), str(t.shape), str(t.stride())) for t in inputs]


def _run(site: Site, inputs: Sequence[torch.Tensor], again: Callable[[Site], None] | None) -> _Run:
    """Run ``site``.

    Args:
        site: the call.
        inputs: its tensor arguments.
        again: restarts the trace without runs on fake tensors, if possible; ``None`` in later traces.
    """
    seen = _fake_run(site, inputs, again) if runs_on_fake_tensors(site) else None
    if seen is not None:
        known = symbols_of(size for t in inputs for size in t.shape)
        sizes = tuple(
            tuple(None if is_value(size, known) else size for size in t.shape) for t in seen.outputs
        )
        return _Run(seen, sizes, _described(inputs))
    seen = _real_run(site, inputs)
    if not sizes_needed(site):
        return _Run(seen, tuple((None,) * t.dim() for t in seen.outputs), None)
    sizes_of_run = _sizes_of_run(site, inputs, seen)
    return _Run(replace(seen, result=replace(seen.result, sizes=sizes_of_run)), sizes_of_run, None)


def _fake_run(
    site: Site, inputs: Sequence[torch.Tensor], again: Callable[[Site], None] | None
) -> Observation | None:
    """Return the observation of a run on fake tensors; ``None`` if ``forward`` does not run on them."""
    varying, known = _varying(inputs), _conditions(inputs)
    try:
        seen = observe_and_roll_back(site, [fresh_like(t) for t in inputs])
    except Torch2OrtError:
        raise
    except Exception as error:
        # Logged as text: a log record with the error would hold the frames, and the tensors in them.
        logger.debug(
            "%s: forward does not run on fake tensors (%s); running it once on real ones",
            site.func_name,
            str(error),
        )
        is_left = isinstance(error, LongRunError) or _conditions(inputs) != known
        seen = None
    else:
        is_left = _varying(inputs) != varying
    if is_left and again is not None:
        again(site)
    return seen


def _varying(inputs: Sequence[torch.Tensor]) -> int:
    """Return the number of sizes of some tensors that vary."""
    return sum(not is_constant(size) for t in inputs for size in t.shape)


def _conditions(inputs: Sequence[torch.Tensor]) -> int:
    """Return the number of conditions on sizes of inputs that their trace currently relies on."""
    environment = next((environment_of(t) for t in inputs), None)
    return 0 if environment is None else len(guards_of(environment))


def _sizes_of_run(
    site: Site, inputs: Sequence[torch.Tensor], seen: Observation
) -> tuple[tuple[Size, ...], ...]:
    """Return the sizes of a run on the sample's tensors, explained by a second run on made-up tensors.

    The values differ between the runs: a size that differs although no argument's size does is ``None``. The
    arguments' sizes differ, too, which distinguishes a size that equals that of an argument from one that
    is the same number by chance.
    """
    given = dict(zip(site.tensor_positions, inputs, strict=True))
    number = other_numbers(inputs)
    other = None if number is None else _made_up_run(site, inputs, number)
    if number is None or other is None or other.result != seen.result:
        number, other = size_hint, _made_up_run(site, inputs, size_hint)
    again = seen if other is None or other.result != seen.result else other
    return tuple(
        tuple(
            _like(size, now, axis, given, number)
            for axis, (size, now) in enumerate(zip(one.shape, two.shape, strict=True))
        )
        for one, two in zip(seen.outputs, again.outputs, strict=True)
    )


def _like(size: int, now: int, axis: int, given: Mapping[int, torch.Tensor], number: _Numbers) -> Size:
    """Return a size as that of an argument's varying dimension, preferably the same one, or as a number.

    The result is ``None`` for a number that is not the size of an argument, if sizes of arguments vary and
    were the same in both runs: the number may vary with them.

    Args:
        size: the size in the run on the sample.
        now: the size in the run on made-up tensors.
        axis: the dimension.
        given: position of a tensor argument -> the tensor.
        number: returns the sizes of the made-up tensors.
    """
    sizes: list[tuple[tuple[int, int], Any]] = [
        ((position, i), dim) for position, tensor in given.items() for i, dim in enumerate(tensor.shape)
    ]
    varying = [(pair, dim) for pair, dim in sizes if not is_constant(dim) and has_hint(dim)]
    like = [pair for pair, dim in varying if (size_hint(dim), number(dim)) == (size, now)]
    if like:
        return next((pair for pair in like if pair[1] == axis), like[0])
    if size != now:
        return None
    # A size of 1 must be known: torch.export does not broadcast an unknown size.
    known = size == 1 or any(int(dim) == size for _, dim in sizes if is_constant(dim))
    told = any(size_hint(dim) != number(dim) for _, dim in varying)
    return size if known or told or not varying else None


def _real_run(site: Site, inputs: Sequence[torch.Tensor]) -> Observation:
    with private.without_fake_mode(), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            return observe_and_roll_back(site, sample_of(site, inputs) or _made_up(site, inputs))
        except Torch2OrtError:
            raise
        except Exception as error:
            raise UserError(error) from error


def _made_up(site: Site, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    known = known_arguments(site)
    return [
        known[position].detach().clone() if position in known else real_like(tensor, size_hint)
        for position, tensor in zip(site.tensor_positions, inputs, strict=True)
    ]


def _made_up_run(site: Site, inputs: Sequence[torch.Tensor], number: _Numbers) -> Observation | None:
    """Run again on made-up values of the sizes that ``number`` returns; return ``None`` if that fails."""
    with private.without_fake_mode(), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            seen = observe_and_roll_back(site, [real_like(t, number) for t in inputs])
        except Exception:
            return None
    return seen
