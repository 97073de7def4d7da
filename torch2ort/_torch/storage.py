"""Private names of storages and DLPack, and the versions tried.

| name | tried on |
| --- | --- |
| torch._C._storage_Use_Count, UntypedStorage._cdata | 2.11-2.15.0 |
| torch._C._set_grad_enabled | 2.11-2.15.0 |
| torch._C._from_dlpack | 2.11-2.15.0 |
"""

from __future__ import annotations

import torch
from torch.utils import dlpack

from torch2ort.support.versions import need, private_names

with private_names("torch"):
    need(torch.UntypedStorage, "_cdata")

_use_count = getattr(torch._C, "_storage_Use_Count", None)

# The public one is a class that does more; the difference is a tenth of the time of a small Function's call.
set_grad_enabled = getattr(torch._C, "_set_grad_enabled", torch.set_grad_enabled)

# Converts a capsule. The public function is Python code that checks the type of its argument first.
from_capsule = getattr(torch._C, "_from_dlpack", dlpack.from_dlpack)


def memory_of(value: object) -> int | None:
    """Return the id of a tensor's storage, valid while the tensor lives; ``None`` if it is no tensor.

    A fake tensor has such an id, too.
    """
    return int(value.untyped_storage()._cdata) if isinstance(value, torch.Tensor) else None


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Return the number of tensors and handles that share the storage; 0 if this torch does not report it."""
    return 0 if _use_count is None else int(_use_count(storage._cdata))
