"""A portable file in three sessions: by the body, by a compiled kernel, and by the class in Python.

The file needs neither Python nor torch2ort: any runtime runs the body of a node ``swish::Swish``. A session
with a kernel of that name calls the kernel (compiled by ``c++`` or ``$CXX``), ``torch2ort.load`` the class.
Run it with ``python examples/portable_kernel/serve.py``. It prints:

    body, any runtime: 222 us, differs by 6.7e-08 from eager PyTorch
    compiled kernel: 218 us, differs by 6.0e-08 from eager PyTorch
    class, in Python: 392 us, differs by 0.0e+00 from eager PyTorch
    the kernel ran 303 times
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import tempfile
import timeit
from pathlib import Path

import onnxruntime
import torch
from swish import Swish
from torch import Tensor, nn

import torch2ort

HERE = Path(__file__).parent


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Swish.apply(layer(x), 1.5)
        return x


def compiled(folder: Path) -> Path:
    """Compile the kernel into a library."""
    library = folder / "libswish.so"
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O3", "-march=native", "-ffast-math", "-shared"]
    include = f"-I{HERE.parents[1] / 'runtime_ext'}"
    subprocess.run([*command, "-fPIC", include, HERE / "swish_kernel.cpp", "-o", library], check=True)
    return library


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, x = Net().eval(), torch.randn(64, 256)
    expected = model(x).detach().numpy()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "net.onnx"
        torch2ort.export(model, x, dynamic_shapes={"x": {0: "batch"}}, portable=True).save(path)
        library, options = compiled(path.parent), onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        body = onnxruntime.InferenceSession(path, options)
        options.register_custom_ops_library(str(library))
        kernel = onnxruntime.InferenceSession(path, options)
        loaded = torch2ort.load(path, functions=[Swish])
        runs = {
            "body, any runtime": lambda: body.run(None, {"x": x.numpy()})[0],
            "compiled kernel": lambda: kernel.run(None, {"x": x.numpy()})[0],
            "class, in Python": lambda: loaded(x).numpy(),
        }
        for way, run in runs.items():
            difference = abs(run() - expected).max()
            assert difference < 1e-4, f"{way}: {difference}"
            microseconds = 1e6 * statistics.median(timeit.repeat(run, number=1, repeat=100))
            print(f"{way}: {microseconds:.0f} us, differs by {difference:.1e} from eager PyTorch")
        count = ctypes.CDLL(str(library)).CountRuns
        count.restype = ctypes.c_longlong
        print(f"the kernel ran {count()} times")
