"""The outputs of a site that has a shape inferer.

The inferer returns the sizes. Everything else that the graph depends on (what ``forward`` writes to, keeps,
marks, and returns beside tensors) is observed in a run of ``forward`` at the sample's sizes, which also
checks the inferer's result. That run has no symbols, so it cannot specialize the trace to a size.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch2ort._torch import autograd_functions as private
from torch2ort.errors import ShapeInferenceError, Torch2OrtError
from torch2ort.log import logger
from torch2ort.pythonop.abstract_run.forward_probe import Observation, UserError, real_like
from torch2ort.pythonop.abstract_run.inferer_validation import Dim, InferredTensor, infer_outputs
from torch2ort.pythonop.abstract_run.object_rollback import observe_and_roll_back
from torch2ort.pythonop.abstract_run.sample_tensors import sample_of
from torch2ort.pythonop.inplace_validation import with_inplace_map
from torch2ort.pythonop.registry import Inferer
from torch2ort.pythonop.site import TENSOR, PythonOpSite, Result, Site, TensorType
from torch2ort.sizes import expressions as sizes
from torch2ort.sizes.symbols import SizeSpace, size_hint


@dataclass(frozen=True, slots=True)
class _Seen:
    """Record of a run of ``forward`` at the sample's sizes; ``shapes`` has one entry per tensor output."""

    inputs: tuple[tuple[int, ...], ...]
    observation: Observation
    shapes: tuple[tuple[int, ...], ...]


# A program is traced several times, but its Functions need to run only once for this.
_seen: weakref.WeakKeyDictionary[Site, _Seen | None] = weakref.WeakKeyDictionary()


def inferred_outputs(site: Site, inputs: Sequence[torch.Tensor], inferer: Inferer) -> list[torch.Tensor]:
    """Return the tensor outputs of ``site`` as fake tensors of the sizes that ``inferer`` returns.

    Args:
        site: the call; its ``result`` is filled.
        inputs: its tensor arguments in call order, fake.
        inferer: the inferer of the Function.

    Raises:
        ShapeInferenceError: the inferer's result is malformed, or a run of ``forward`` contradicts it.
        UserError: the inferer raised.
    """
    context = torch.library.get_ctx()
    space = SizeSpace(inputs, site.key, context.new_dynamic_size)
    node = PythonOpSite(site.func_name, site.function, "", site.constants)
    shapes = [[space.expression(d) for d in t.shape] for t in inputs]
    try:
        inferred = infer_outputs(inferer, node, shapes, [t.dtype for t in inputs])
    except Torch2OrtError:
        raise
    except Exception as error:
        raise UserError(error) from error
    if site not in _seen:
        _seen[site] = _run_once(site, inputs)
    seen = _seen[site]
    if seen is None:
        site.result = with_inplace_map(site, _cautious_result(site, inputs, inferred), None)
        dims = [_known_rank(site, i, tensor) for i, tensor in enumerate(inferred)]
    else:
        _check(site, space, inferred, seen)
        site.result = with_inplace_map(site, seen.observation.result, seen.observation)
        dims = [
            tensor.shape if tensor.shape is not None else (None,) * len(shape)
            for tensor, shape in zip(inferred, seen.shapes, strict=False)
        ]
    device = inputs[0].device if inputs else torch.device("cpu")
    outputs = [
        torch.empty([space.size(d) for d in shape], dtype=tensor.dtype, device=device)
        for tensor, shape in zip(inferred, dims, strict=True)
    ]
    by_position = dict(zip(site.tensor_positions, inputs, strict=True))
    return outputs + [torch.empty_like(by_position[p]) for p in site.known_result.hidden]


def _run_once(site: Site, inputs: Sequence[torch.Tensor]) -> _Seen | None:
    """Run ``forward`` without symbols; return ``None`` if it runs neither on fake nor on real tensors."""
    shapes = tuple(tuple(size_hint(d) for d in t.shape) for t in inputs)
    with private.without_fake_mode():
        try:
            with private.fake_mode():
                fakes = [
                    torch.empty(s, dtype=t.dtype, device=t.device)
                    for s, t in zip(shapes, inputs, strict=True)
                ]
                observation = observe_and_roll_back(site, fakes)
        except Torch2OrtError:
            raise
        except Exception as error:
            logger.debug("%s: forward does not run on fake tensors (%s)", site.func_name, str(error))
            try:
                with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
                    sample = sample_of(site, inputs) or [real_like(t, size_hint) for t in inputs]
                    observation = observe_and_roll_back(site, sample)
            except Torch2OrtError:
                raise
            except Exception as other:
                logger.debug("%s: forward does not run on real ones either (%s)", site.func_name, str(other))
                return None
        return _Seen(shapes, observation, tuple(tuple(t.shape) for t in observation.outputs))


def _cautious_result(
    site: Site, inputs: Sequence[torch.Tensor], inferred: Sequence[InferredTensor]
) -> Result:
    """Return the assumed result of a ``forward`` that does not run: tensors, every input kept, random.

    A declared in-place map is trusted. The rest is checked in each run, see :mod:`runtime_checks`.
    """
    ranks = [len(_known_rank(site, i, tensor)) for i, tensor in enumerate(inferred)]
    types = tuple(TensorType(t.dtype, rank) for t, rank in zip(inferred, ranks, strict=True))
    return Result(
        inputs=tuple(TensorType(t.dtype, t.dim()) for t in inputs),
        outputs=(TENSOR,) * len(types),
        tensors=types,
        returns_tuple=len(types) != 1,
        non_differentiable=tuple(
            i for i, t in enumerate(types) if not (t.dtype.is_floating_point or t.dtype.is_complex)
        ),
        kept=site.tensor_positions,
        uses_rng=True,
        observed=False,
    )


def _known_rank(site: Site, output: int, tensor: InferredTensor) -> tuple[Dim, ...]:
    if tensor.shape is None:
        raise ShapeInferenceError(
            f"{site.func_name}: the shape inferer returned None, an unknown rank, for output {output}, and "
            f"forward "
            f"runs neither on fake tensors nor on made-up data to find it; return a list with None for each "
            f"dimension"
        )
    return tensor.shape


def _check(site: Site, space: SizeSpace, inferred: Sequence[InferredTensor], seen: _Seen) -> None:
    """Raise :class:`ShapeInferenceError` if the inferer and the run contradict each other."""
    returned = len(seen.observation.result.tensors) - len(seen.observation.result.hidden)
    if len(inferred) != returned:
        raise ShapeInferenceError(
            f"{site.func_name}: the shape inferer returned {len(inferred)} shapes, but forward returns "
            f"{returned} tensors; expected one shape and one dtype per tensor output"
        )
    for i, (tensor, kind, shape) in enumerate(
        zip(inferred, seen.observation.result.tensors, seen.shapes, strict=False)
    ):
        says = f"{site.func_name}: the shape inferer says that output {i} has"
        if tensor.dtype != kind.dtype:
            raise ShapeInferenceError(f"{says} dtype {tensor.dtype}, but forward returned {kind.dtype}")
        if tensor.shape is None:
            continue
        if len(tensor.shape) != len(shape):
            raise ShapeInferenceError(
                f"{says} {len(tensor.shape)} dimensions, [{', '.join(map(_text, tensor.shape))}], but "
                f"forward returned {len(shape)}, {list(shape)}, for inputs of {_shapes(seen)}"
            )
        for axis, (dim, size) in enumerate(zip(tensor.shape, shape, strict=True)):
            number = dim if dim is None or isinstance(dim, int) else space.hint(dim)
            if number is not None and number != size:
                raise ShapeInferenceError(
                    f"{says} size {_text(dim)}{'' if dim == number else f' = {number}'} in dimension "
                    f"{axis}, but forward returned {size}, for inputs of {_shapes(seen)}"
                )


def _text(dim: Dim) -> str:
    return "None" if dim is None else sizes.text(dim)


def _shapes(seen: _Seen) -> str:
    return ", ".join(str(list(shape)) for shape in seen.inputs) or "no shape"
