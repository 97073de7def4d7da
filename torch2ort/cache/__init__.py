"""The export cache: what could change a graph (``key``), and where graphs are kept (``store``)."""

from torch2ort.cache._guards import Armed, Change, Written
from torch2ort.cache.key import (
    Dependencies,
    Key,
    Unkeyable,
    dependencies,
    model_key,
    named_tensors,
    tensor_of,
)
from torch2ort.cache.shelf import Kept, Shelf, keep
from torch2ort.cache.store import RefusedError, Store

__all__ = [
    "Armed",
    "Change",
    "Dependencies",
    "Kept",
    "Key",
    "RefusedError",
    "Shelf",
    "Store",
    "Unkeyable",
    "Written",
    "dependencies",
    "keep",
    "model_key",
    "named_tensors",
    "tensor_of",
]
