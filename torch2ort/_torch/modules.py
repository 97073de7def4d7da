"""Private names of torch.nn.Module, and the versions tried.

| name | tried on |
| --- | --- |
| torch.nn.Module._compiled_call_impl, which Module.__call__ calls if it is set | 2.13.0, 2.15.0 |
"""

from __future__ import annotations

import torch

from torch2ort.support.versions import need, private_names

with private_names("torch"):
    need(torch.nn.Module, "_compiled_call_impl")


class NeverCompiled:
    """A module whose calls run its own ``forward``, whatever ``Module.compile`` left in its dictionary."""

    # Module.__call__ reads this attribute. A data descriptor takes precedence over the instance's dictionary.
    _compiled_call_impl = property(lambda self: None, lambda self, value: None)
