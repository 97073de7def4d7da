"""Classes whose instances count with all their attributes, whatever names the inspected code reads.

The code of a package that its version represents is not inspected. The attributes that such code reads of an
object would not count, so all attributes count.
"""

from __future__ import annotations

import functools
import threading

from torch2ort.cache.key.guards import HEAP_TYPE
from torch2ort.cache.key.packages import package_of_module

# Modules whose classes have methods that return values which a model computes with.
_MODULES = frozenset(
    (
        "collections", "configparser", "multiprocessing.sharedctypes", "multiprocessing.synchronize", "os",
        "queue", "string", "threading", "torch.amp.grad_scaler", "torch.optim.lr_scheduler",
    )
)  # fmt: skip
_PACKAGES = ("numpy.", "torch.distributions.")
# Classes of these modules whose attributes are not such values.
_OTHERS = (threading.Thread, threading.local)


@functools.lru_cache(maxsize=4096)
def is_read_whole(kind: type) -> bool:
    """Return True if all attributes of an instance count."""
    return not issubclass(kind, _OTHERS) and any(
        # Cython's functions have a descriptor there.
        isinstance(cls.__module__, str)
        and (cls.__module__ in _MODULES or cls.__module__.startswith(_PACKAGES))
        # A class written in C reads no attributes.
        and cls.__flags__ & HEAP_TYPE
        and package_of_module(cls.__module__) is not None
        for cls in kind.__mro__
    )
