"""Names of sizes in ``dynamic_shapes``, and the bounds that the model requires of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch2ort.capture.dim_specs import are_bound, without_names
from torch2ort.capture.sample_call import DimSpec
from torch2ort.errors import ExportError
from torch2ort.log import logger
from torch2ort.sizes.symbols import name_sizes, named_symbol, program_size_names


class NamedSizes:
    """Sizes that are to vary; torch.export finds the bounds of named ones that cannot be any size.

    Args:
        specs: for each tensor, the dimensions that vary.

    Attributes:
        dynamic: the value of ``dynamic_shapes`` for torch.export.
    """

    def __init__(self, specs: Sequence[DimSpec]) -> None:
        self._specs = specs
        self._names: list[dict[int, str]] = []
        self._error: ExportError | None = None
        self.dynamic: Any = (tuple(specs),) if any(specs) else None

    def relax_bounds(self, error: BaseException) -> bool:
        """Let torch.export find the bounds if ``error`` says that they are needed; return True if it does."""
        if self._error is not None or not isinstance(error, ExportError) or not are_bound(error):
            return False
        specs, self._names = without_names(self._specs)
        if not any(self._names):
            return False
        self.dynamic, self._error = (tuple(specs),), error
        return True

    def settle(self, model: str, program: torch.export.ExportedProgram, guards: Sequence[str]) -> None:
        """Name the sizes of a trace, and log the bounds.

        Raises:
            ExportError: a named size is a fixed number, or equals a size of another name.
        """
        if self._error is None:
            return
        values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
        if not name_sizes([values[name] for name in program.graph_signature.user_inputs], self._names):
            raise self._error
        names = program_size_names(program)
        ranges = [
            f"{bounds.lower} <= {named_symbol(symbol, names)} <= {bounds.upper}".replace(" <= int_oo", "")
            for symbol, bounds in program.range_constraints.items()
        ]
        logger.info("%s takes sizes for which %s", model, " and ".join([*ranges, *guards]))
