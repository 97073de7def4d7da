"""Imported first by every Python that `make sanitize` starts: finds the extension with the sanitizers."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

_EXTENSION = "torch2ort._native"
_FILE = Path(__file__).parents[2] / "build" / "sanitize" / "root" / "torch2ort" / "_native.abi3.so"


class _Sanitized:
    """Finds the extension where `make sanitize` built it, in front of the finder of the installed one."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _EXTENSION:
            return None
        return importlib.util.spec_from_file_location(name, _FILE)


# A process that only collects tests imports this, too.
if "libasan" in os.environ.get("LD_PRELOAD", ""):
    sys.meta_path.insert(0, _Sanitized)
