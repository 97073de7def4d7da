"""Built-in registrations for Functions of libraries, one file per library.

Entries are by name, so that no library is imported for them, and a user's entry precedes each.
"""

from torch2ort.pythonop.registry import builtin_entries

with builtin_entries():
    from torch2ort.pythonop.handlers import (
        bitsandbytes,
        brevitas,
        efficientnet,
        entmax,
        revgrad,
        snntorch,
    )

__all__ = ["bitsandbytes", "brevitas", "efficientnet", "entmax", "revgrad", "snntorch"]
