"""The abstract run: what a site's ``forward`` gives, found without the model's real data.

A registered shape inferer has the first word on sizes. Without one, ``forward`` is run on fake tensors,
whose symbolic sizes come out as expressions of the inputs' sizes; if that is impossible, once on small
real tensors, which tells rank and dtype and leaves every size a fresh symbol.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch2ort.errors import Torch2OrtError
from torch2ort.log import logger
from torch2ort.pythonop import _torch_private as private
from torch2ort.pythonop.inferred import inferred_outputs
from torch2ort.pythonop.inplace import with_inplace_map
from torch2ort.pythonop.observe import Observation, UserError, fresh_like, observe, real_like
from torch2ort.pythonop.registry import inferer_of
from torch2ort.pythonop.site import Site


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


def _outputs(site: Site, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    try:
        seen = observe(site, [fresh_like(t) for t in inputs])
    except Torch2OrtError:
        raise
    except Exception as error:
        logger.debug(
            "%s: forward does not run on fake tensors (%s); running it once on real ones",
            site.func_name,
            error,
        )
        return _outputs_of_real_run(site, inputs)
    site.result = with_inplace_map(site, seen.result, seen)
    return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in seen.outputs]


def _outputs_of_real_run(site: Site, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Rank and dtype from one real run; every size becomes a fresh symbol."""
    with private.without_fake_mode():
        seen = _real_run(site, inputs)
        types = [(t.dim(), t.dtype, t.device) for t in seen.outputs]
    site.result = with_inplace_map(site, seen.result, seen)
    context = torch.library.get_ctx()
    return [
        torch.empty([context.new_dynamic_size() for _ in range(rank)], dtype=dtype, device=device)
        for rank, dtype, device in types
    ]


def _real_run(site: Site, inputs: Sequence[torch.Tensor]) -> Observation:
    with torch.random.fork_rng(devices=[]):
        sample = [real_like(t) for t in inputs]
        try:
            return observe(site, sample)
        except Torch2OrtError:
            raise
        except Exception as error:
            raise UserError(error) from error
