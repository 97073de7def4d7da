"""Refusal of dtypes that eager PyTorch refuses and tracing does not."""

from __future__ import annotations

import torch

from torch2ort.errors import DtypeError
from torch2ort.support.provenance import source_line

_OF_ONE_DTYPE = frozenset(
    {
        *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)),
        *("addbmm", "addmm", "addmv", "baddbmm", "bilinear", "bmm", "dot", "linear", "matmul", "mm", "mv"),
        *("convolution", "scaled_dot_product_attention"),
    }
)


def refuse_mixed_dtypes(program: torch.export.ExportedProgram) -> None:
    """Raise an error for mixed dtypes that eager PyTorch would refuse at run time.

    Raises:
        DtypeError: an operator gets tensors of several dtypes.
    """
    for node in program.graph_module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or schema.name.removeprefix("aten::") not in _OF_ONE_DTYPE:
            continue
        values = [n.meta.get("val") for n in node.all_input_nodes]
        dtypes = sorted(
            {str(v.dtype) for v in values if isinstance(v, torch.Tensor) and v.dtype != torch.bool}
        )
        if len(dtypes) > 1:
            raise DtypeError(
                f"{node.target} at {source_line(node)}: its tensors must have the same dtype, but got "
                f"{' and '.join(dtypes)}. Convert the model and its inputs with .to(dtype)"
            )
