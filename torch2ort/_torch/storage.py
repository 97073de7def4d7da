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

# The public one is a class that does this and more; the difference is a tenth of what a small Function costs.
set_grad_enabled = getattr(torch._C, "_set_grad_enabled", torch.set_grad_enabled)

# Of a capsule. The public one is Python code that asks what it is given first.
from_capsule = getattr(torch._C, "_from_dlpack", dlpack.from_dlpack)


def memory_of(value: object) -> int | None:
    """The memory of a tensor, one without data too, while the tensor lives; ``None`` of what is no tensor."""
    return int(value.untyped_storage()._cdata) if isinstance(value, torch.Tensor) else None


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """How many tensors and handles share the storage; 0 if this torch cannot tell."""
    return 0 if _use_count is None else int(_use_count(storage._cdata))
