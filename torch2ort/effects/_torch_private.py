"""Every private name of torch that torch2ort.effects touches, with the versions tried.

| name | tried on |
| --- | --- |
| torch.utils._python_dispatch.TorchDispatchMode | 2.11-2.15.0 |
"""

from __future__ import annotations

from torch2ort.versions import private_names

with private_names("torch"):
    from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]
