"""The export cache: everything that a graph depends on (``key``), and the stored graphs (``store``)."""

from torch2ort._torch.global_state import global_hook_tables
from torch2ort.cache.key.constant_bytes import words
from torch2ort.cache.key.guards import ActiveGuards, Change, FunctionWrittenPlaces
from torch2ort.cache.key.key import (
    Dependencies,
    Key,
    Unkeyable,
    dependencies,
    named_tensors,
    tensor_of,
)
from torch2ort.cache.key.packages import package_of_module
from torch2ort.cache.key.write_only_state import NOTHING, WriteOnlyState
from torch2ort.cache.store.graph_entries import EntryContent, GraphEntries, store_entry
from torch2ort.cache.store.store import RefusedError, Store

__all__ = [
    "NOTHING",
    "ActiveGuards",
    "Change",
    "Dependencies",
    "EntryContent",
    "FunctionWrittenPlaces",
    "GraphEntries",
    "Key",
    "RefusedError",
    "Store",
    "Unkeyable",
    "WriteOnlyState",
    "dependencies",
    "global_hook_tables",
    "named_tensors",
    "package_of_module",
    "store_entry",
    "tensor_of",
    "words",
]
