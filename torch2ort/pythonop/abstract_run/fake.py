"""The abstract run: what a site's ``forward`` gives, found without the runs of a graph.

A registered shape inferer has the first word on sizes. Without one, ``forward`` is run on fake tensors,
whose symbolic sizes come out as expressions of the inputs' sizes. If that is impossible, as for a forward
that branches on values, it is run once on real tensors: those that the call gets when the model runs on the
sample, or made-up ones where nobody knows them. That tells rank and dtype; every size is a fresh symbol.
If the model's code cannot be traced with such symbols, it is traced with the sizes of that run, which each
run of the graph then checks (:mod:`torch2ort.pythonop.unobserved`).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torch2ort.errors import Torch2OrtError
from torch2ort.log import logger
from torch2ort.pythonop import _torch_private as private
from torch2ort.pythonop.abstract_run.backward import gradients_of, refuse_gradient_layout
from torch2ort.pythonop.abstract_run.inferred import inferred_outputs
from torch2ort.pythonop.abstract_run.observe import (
    Observation,
    UserError,
    fresh_like,
    is_contiguous,
    real_like,
)
from torch2ort.pythonop.abstract_run.questions import refuse_history, refuse_layout
from torch2ort.pythonop.abstract_run.sample import sample_of, sizes_needed
from torch2ort.pythonop.abstract_run.traces import observed, results
from torch2ort.pythonop.inplace import with_inplace_map
from torch2ort.pythonop.registry import inferer_of
from torch2ort.pythonop.site import Site, Size
from torch2ort.sizes.symbols import environment_of, has_hint, size_hint


@dataclass(frozen=True, slots=True)
class _Run:
    """What one abstract run showed.

    Attributes:
        observation: what the graph must know.
        sizes: of each tensor output; ``None`` for a size that depends on values, a pair for that of an
            argument's dimension.
        inputs: what the sizes are expressed in; ``None`` if in nothing.
    """

    observation: Observation
    sizes: tuple[tuple[Size | torch.SymInt, ...], ...]
    inputs: Any


# A program is traced several times; a Function that writes to Python objects must run for that once.
_runs: weakref.WeakKeyDictionary[Site, _Run] = weakref.WeakKeyDictionary()


def fake_outputs(site: Site, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensor outputs of ``site`` as fake tensors; fills ``site.result`` and ``site.shapes``.

    Args:
        site: the call.
        inputs: its tensor arguments in call order, fake.

    Raises:
        UserError: ``forward`` raised also on real tensors, or an inferer raised.
        ExportError: ``forward`` returns something that a graph cannot hold.
        ShapeInferenceError: the Function's inferer is wrong.
        InplaceMapError: the Function's in-place map is wrong.
    """
    inferer = inferer_of(site.func_name, site.function)
    outputs = _outputs(site, inputs) if inferer is None else inferred_outputs(site, inputs, inferer)
    site.shapes = tuple(tuple(t.shape) for t in outputs)
    return outputs


def gives_size_of_one(site: Site) -> bool:
    """Whether ``site`` runs on real tensors only, and gave one there that may be broadcast."""
    run = _runs.get(site)
    return run is not None and run.inputs is None and any(1 in t.shape for t in run.observation.outputs)


def _outputs(site: Site, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    run = _runs.get(site)
    if run is None:
        run = _runs[site] = _run(site, inputs)
        # Later passes lay tensors out in their own way.
        _refuse_other_answers(site, inputs, run.observation)
    elif run.inputs not in (None, _described(inputs)):
        run = _runs[site] = _run(site, inputs)
    site.result = with_inplace_map(site, run.observation.result, run.observation)
    given = dict(zip(site.tensor_positions, inputs, strict=True))
    return [
        _laid_out([_size(size, given) for size in sizes], seen)
        for sizes, seen in zip(run.sizes, run.observation.outputs, strict=True)
    ]


def _refuse_other_answers(site: Site, inputs: Sequence[torch.Tensor], seen: Observation) -> None:
    """Refuse a forward that computes something else where its arguments are what they are in a graph."""
    if site.internal:
        return
    refuse_history(site, seen.asked)
    if seen.asked.layout and not all(map(is_contiguous, inputs)):
        with private.without_fake_mode():
            refuse_layout(site, [real_like(t) for t in inputs], lambda tensors: results(site, tensors))
    if seen.backward[1]:

        def gradients(tensors: list[torch.Tensor], laid_out: Any) -> list[torch.Tensor]:
            return results(site, tensors, lambda s, given: gradients_of(s, given, seen.result, laid_out))

        with private.without_fake_mode():
            refuse_gradient_layout(site, [real_like(t) for t in inputs], gradients)


def _laid_out(sizes: Sequence[int | torch.SymInt], seen: torch.Tensor) -> torch.Tensor:
    """A tensor of these sizes, whose dimensions lie in memory in the order in which those of ``seen`` do.

    By it random numbers are drawn for the tensor and its like, although every value of a graph is contiguous.
    """
    axes = range(len(sizes))
    order = list(axes)
    strides = seen.stride()
    if all(has_hint(n) for n in (*seen.shape, *strides)):
        hints = [size_hint(stride) for stride in strides]
        # Of memory that elements share PyTorch takes no order over.
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
    """All that the sizes of the outputs come from."""
    environments = {id(environment_of(t)) for t in inputs}
    return environments, [(t.dtype, str(t.device), str(t.shape), str(t.stride())) for t in inputs]


def _run(site: Site, inputs: Sequence[torch.Tensor]) -> _Run:
    try:
        seen = observed(site, [fresh_like(t) for t in inputs])
    except Torch2OrtError:
        raise
    except Exception as error:
        # As text: a record of the log would hold the frames, and the tensors in them.
        logger.debug(
            "%s: forward does not run on fake tensors (%s); running it once on real ones",
            site.func_name,
            str(error),
        )
    else:
        known = private.symbols_of(size for t in inputs for size in t.shape)
        sizes = tuple(
            tuple(None if private.is_value(size, known) else size for size in t.shape) for t in seen.outputs
        )
        return _Run(seen, sizes, _described(inputs))
    seen = _real_run(site, inputs)
    given = dict(zip(site.tensor_positions, inputs, strict=True))
    if not sizes_needed(site):
        return _Run(seen, tuple((None,) * t.dim() for t in seen.outputs), None)
    other = _made_up_run(site, inputs)
    shapes = [t.shape for t in seen.outputs]
    again = shapes if other is None or other.result != seen.result else [t.shape for t in other.outputs]
    sizes_of_run = tuple(
        tuple(
            _like(number, axis, given) if number == same else None
            for axis, (number, same) in enumerate(zip(shape, other_shape, strict=True))
        )
        for shape, other_shape in zip(shapes, again, strict=True)
    )
    return _Run(replace(seen, result=replace(seen.result, sizes=sizes_of_run)), sizes_of_run, None)


def _like(number: int, axis: int, given: Mapping[int, torch.Tensor]) -> Size:
    """A size as that of an argument's dimension which varies, likeliest the same one; else the number.

    Nothing is said of a number that is no size of an argument, where some of them vary: it may go with them.
    """
    sizes: list[tuple[tuple[int, int], Any]] = [
        ((position, i), size) for position, tensor in given.items() for i, size in enumerate(tensor.shape)
    ]
    varying = [
        pair
        for pair, size in sizes
        if not isinstance(size, int) and has_hint(size) and size_hint(size) == number
    ]
    if varying:
        return next((pair for pair in varying if pair[1] == axis), varying[0])
    fixed = all(isinstance(size, int) for _, size in sizes)
    # A size of 1 is broadcast, which torch.export does not do with one that it does not know.
    known = number == 1 or any(size == number for _, size in sizes if isinstance(size, int))
    return number if fixed or known else None


def _real_run(site: Site, inputs: Sequence[torch.Tensor]) -> Observation:
    with private.without_fake_mode(), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            return observed(site, sample_of(site, inputs) or [real_like(t) for t in inputs])
        except Torch2OrtError:
            raise
        except Exception as error:
            raise UserError(error) from error


def _made_up_run(site: Site, inputs: Sequence[torch.Tensor]) -> Observation | None:
    """Another run, on other values of the same sizes; ``None`` if it fails."""
    with private.without_fake_mode(), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            seen = observed(site, [real_like(t) for t in inputs])
        except Exception:
            return None
    return seen
