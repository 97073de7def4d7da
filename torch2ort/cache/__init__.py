"""The export cache: what could change a graph (``key``), and where graphs are kept (``store``)."""

from torch2ort.cache.key import Key, Unkeyable, model_key, named_tensors
from torch2ort.cache.shelf import Kept, Shelf, keep
from torch2ort.cache.store import RefusedError, Store

__all__ = ["Kept", "Key", "RefusedError", "Shelf", "Store", "Unkeyable", "keep", "model_key", "named_tensors"]
