"""Tests a wheel: its files, and its use in an empty environment. ``check.py WHEEL CONSTRAINTS``."""

from __future__ import annotations

import fnmatch
import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

NEEDED = (
    "torch2ort/__init__.py",
    "torch2ort/__main__.py",
    "torch2ort/_native.abi3.so",
    "torch2ort/_native.pyi",
    "torch2ort/py.typed",
    "torch2ort-*.dist-info/licenses/LICENSE",
)


def check_files(wheel: Path) -> None:
    """Exit with a message if a file is missing, or the wheel contains one that is of no use to users."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    missing = [pattern for pattern in NEEDED if not fnmatch.filter(names, pattern)]
    foreign = [name for name in names if not name.startswith(("torch2ort/", "torch2ort-"))]
    foreign += (
        fnmatch.filter(names, "*.cpp") + fnmatch.filter(names, "*test_*") + fnmatch.filter(names, "*.pyc")
    )
    if missing or foreign:
        sys.exit(f"{wheel}: misses {missing}, and should not hold {foreign}")


def check_use(wheel: Path, constraints: Path) -> None:
    """Install the wheel and an onnxruntime into a new environment, and run smoke.py in an empty folder."""
    smoke = Path(__file__).with_name("smoke.py").resolve()
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder, "empty")
        empty.mkdir()
        venv.create(Path(folder, "venv"), with_pip=True)
        python = Path(folder, "venv", "bin", "python")
        install = [python, "-m", "pip", "install", "--quiet", "--constraint", constraints.resolve()]
        subprocess.run([*install, wheel.resolve(), "onnxruntime"], check=True)
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TORCH2ORT_"))}
        subprocess.run([python, smoke], cwd=empty, env=environment, check=True)


def main() -> None:
    """Check one wheel."""
    wheel, constraints = map(Path, sys.argv[1:])
    check_files(wheel)
    check_use(wheel, constraints)


if __name__ == "__main__":
    main()
