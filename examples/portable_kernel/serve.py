"""A portable file in three sessions: by the body, by a compiled kernel, and by the class in Python.

The file needs neither Python nor torch2ort: any runtime runs the body of a node ``swish::Swish``. A session
with a kernel of that name calls the kernel, and ``torch2ort.load(path, functions=[Swish])`` the class.

Run it with ``python examples/portable_kernel/serve.py``. It compiles the kernel, with ``c++`` or ``$CXX``.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from swish import Swish
from torch import Tensor, nn

import torch2ort

HERE = Path(__file__).parent
WIDTH = 256


class Net(nn.Module):
    """Three layers, a Swish behind each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Swish.apply(layer(x), 1.5)
        return x


def compiled(folder: Path) -> Path:
    """Compile the kernel into a library."""
    library = folder / "libswish.so"
    include = HERE.parent.parent / "runtime_ext"
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O3", "-march=native", "-ffast-math", "-shared"]
    source = HERE / "swish_kernel.cpp"
    subprocess.run([*command, "-fPIC", f"-I{include}", source, "-o", library], check=True)
    return library


def session(path: Path, library: Path | None = None) -> onnxruntime.InferenceSession:
    """Return a plain session, optionally with a library of operators."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if library is not None:
        options.register_custom_ops_library(str(library))
    return onnxruntime.InferenceSession(path, options)


def microseconds(run: Callable[[], object]) -> float:
    """Return the median of a hundred runs."""
    times = []
    for _ in range(100):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(times)


def main() -> None:
    """Export, run in each session, and compare with eager PyTorch."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, x = Net().eval(), torch.randn(64, WIDTH)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "net.onnx"
        torch2ort.export(model, x, dynamic_shapes={"x": {0: "batch"}}, portable=True).save(path)
        library = compiled(folder)
        body, kernel = session(path), session(path, library)
        loaded = torch2ort.load(path, functions=[Swish])

        feeds = {"x": x.numpy()}
        runs: dict[str, Callable[[], np.ndarray]] = {
            "body, any runtime": lambda: body.run(None, feeds)[0],
            "compiled kernel": lambda: kernel.run(None, feeds)[0],
            "class, in Python": lambda: loaded(x).numpy(),
        }
        with torch.no_grad():
            expected = model(x).numpy()
        for way, run in runs.items():
            difference = float(np.abs(run() - expected).max())
            assert difference < 1e-4, f"{way}: {difference}"
            print(f"{way}: {microseconds(run):.0f} us, differs by {difference:.1e} from eager PyTorch")
        count = ctypes.CDLL(str(library)).CountRuns
        count.restype = ctypes.c_longlong
        assert count() == 3 * 101, f"the kernel ran {count()} times"
        print(f"the kernel ran {count()} times")


if __name__ == "__main__":
    main()
