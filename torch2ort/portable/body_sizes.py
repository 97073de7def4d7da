"""The sizes that a body supports, and those that its call can have."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from torch2ort._torch.fake_tensors import is_known
from torch2ort._torch.symbolic_sample import fixes_a_size
from torch2ort.errors import ExportError
from torch2ort.graph.accepted_sizes import Sizes
from torch2ort.portable.probe import INSTEAD
from torch2ort.pythonop import Site


def settle_sizes(site: Site, sizes: Sizes, traced: Sequence[torch.Tensor]) -> None:
    """Restrict the graph of a model to the sizes that the body of a call supports.

    Args:
        site: the call.
        sizes: those that its body supports.
        traced: its tensors in the trace of the model, which records the conditions.

    Raises:
        ExportError: a size that varies in the model is fixed in the body, or the body requires two sizes to
            be equal.
    """
    for text, condition in sizes.conditions([t.shape for t in traced]):
        # `not condition` records in the trace a condition that the sample satisfies.
        if not is_known(condition) and (fixes_a_size(condition) or not condition):
            said = re.sub(r"size\((\d+), (\d+)\)", lambda m: f"{sizes.names[int(m[1])]}.shape[{m[2]}]", text)
            raise ExportError(
                f"{site.func_name} is not portable: the trace of forward is valid only where {said}, and "
                f"that size varies in the model. Export the model with that size fixed, {INSTEAD}"
            )
