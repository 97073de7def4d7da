"""Every private name of torch that torch2ort.hooks touches, with the versions tried.

| name | tried on |
| --- | --- |
| torch._subclasses.fake_tensor.FakeTensor | 2.11-2.15.0 |
"""

from __future__ import annotations

from torch2ort.support.versions import private_names

with private_names("torch"):
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
