"""No kernel of onnxruntime-training that an ORTModule uses reads or writes beside its tensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch2ort.runtime._ort_private import has_training

HERE = Path(__file__).parent
CHUNK = (
    "import ctypes, torch; x = torch.zeros(16); "
    "ctypes.c_float.from_address(x.data_ptr() + OFFSET).value = 1; print('went on')"
)


@pytest.fixture(scope="module")
def fence(tmp_path_factory) -> Path:
    """The library that stops whoever leaves a block of aligned memory."""
    library = tmp_path_factory.mktemp("fence") / "fence.so"
    source = str(HERE / "fence.cpp")
    subprocess.run(["g++", "-std=c++17", "-O2", "-shared", "-fPIC", "-o", str(library), source], check=True)
    return library


def behind(fence: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python whose tensors lie behind fences."""
    environment = {**os.environ, "LD_PRELOAD": str(fence), "PYTHONPATH": str(HERE.parents[1])}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=3500,
        check=False,
    )


@pytest.mark.long
@pytest.mark.parametrize("offset", [64, 4096, -4, -64])
def test_a_write_beside_a_tensor_is_stopped(fence, offset):
    done = behind(fence, "-c", CHUNK.replace("OFFSET", str(offset)) + "; del x")
    assert done.returncode < 0
    assert "fence: " in done.stderr


@pytest.mark.long
def test_a_write_into_a_tensor_is_not(fence):
    assert behind(fence, "-c", CHUNK.replace("OFFSET", "60") + "; del x").stdout == "went on\n"


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not has_training(), reason="the installed onnxruntime does not train")
def test_no_kernel_leaves_its_tensors(fence):
    done = behind(fence, str(HERE / "kernels.py"))
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    assert {name: state for name, state in found.items() if state not in ("equal", "refused")} == {}
