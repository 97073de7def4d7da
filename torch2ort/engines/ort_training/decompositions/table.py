"""The table that the modules beside this one fill."""

from __future__ import annotations

import functools

from torch2ort.symbolics.decompositions.registry import Table
from torch2ort.symbolics.decompositions.registry import decomposes as decomposes_in

# They go before those of every graph.
FOR_GRADIENTS: Table = {}

decomposes = functools.partial(decomposes_in, table=FOR_GRADIENTS)
