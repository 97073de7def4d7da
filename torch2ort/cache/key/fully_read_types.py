"""Which objects count with all that they hold, whatever names the code that is looked through reads.

Of packages of which a version stands for the code, nobody looks through it: what it reads of an object counts
for nothing then, unless all attributes do.
"""

from __future__ import annotations

import functools
import threading

from torch2ort.cache.key.guards import HEAP_TYPE
from torch2ort.cache.key.packages import package_of_module

# Modules whose classes have methods that give values which a model computes with.
_MODULES = frozenset(
    (
        "collections", "configparser", "multiprocessing.sharedctypes", "multiprocessing.synchronize", "os",
        "queue", "string", "threading", "torch.amp.grad_scaler", "torch.optim.lr_scheduler",
    )
)  # fmt: skip
_PACKAGES = ("numpy.", "torch.distributions.")
# Classes of these modules whose attributes are no values.
_OTHERS = (threading.Thread, threading.local)


@functools.lru_cache(maxsize=4096)
def is_read_whole(kind: type) -> bool:
    """Whether all attributes of an instance count."""
    return not issubclass(kind, _OTHERS) and any(
        # Cython's functions have a descriptor there.
        isinstance(cls.__module__, str)
        and (cls.__module__ in _MODULES or cls.__module__.startswith(_PACKAGES))
        # What is written in C reads no attributes.
        and cls.__flags__ & HEAP_TYPE
        and package_of_module(cls.__module__) is not None
        for cls in kind.__mro__
    )
