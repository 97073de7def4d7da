"""Nested data and flat tensors: arguments and results of a model, and those of a graph.

``flatten`` returns the tensors of nested data and a ``Schema`` of everything else; ``unflatten`` puts tensors
back into place. A ``Schema`` is hashable and comparable, has a JSON form, and describes in a sentence where
another one differs. A ``Signature`` maps the arguments of a call to their names.
"""

from __future__ import annotations

from torch2ort.io_schema._flatten import constants_to_tensors, flatten
from torch2ort.io_schema._returned_kv_caches import GivenCaches, Returned, unflatten_into
from torch2ort.io_schema._schema import Schema, TensorSpec, unflatten
from torch2ort.io_schema._signature import CallForm, Signature

__all__ = [
    "CallForm",
    "GivenCaches",
    "Returned",
    "Schema",
    "Signature",
    "TensorSpec",
    "constants_to_tensors",
    "flatten",
    "unflatten",
    "unflatten_into",
]
