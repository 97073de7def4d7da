"""Runtimes other than ONNX Runtime, and the models that they run.

``python -m tests.elsewhere.runtimes`` prints the table of docs/files.md.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn

import torch2ort

_ROOT = Path(__file__).parents[2]


def _module(path: str) -> Any:
    """Import a file of the benchmarks or examples, whose folders are not packages."""
    name = path.rpartition("/")[2]
    spec = importlib.util.spec_from_file_location(name, _ROOT / f"{path}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # torch2ort resolves a class by the name of its module.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


_file_models, _portable_models = map(_module, ("benchmarks/_file_models", "benchmarks/_portable_models"))

Array = np.ndarray[Any, Any]

# onnx 1.23's evaluator assumes equal sizes in GatherElements; it fails on torch.onnx's files, too.
EVALUATOR_FAILS = frozenset({"ALBERT", "BERT", "ELECTRA", "RoBERTa", "examples/sparse_attention.py"})


def openvino(model: onnx.ModelProto, x: torch.Tensor) -> Array:
    """The first output in OpenVINO, in float32; OpenVINO does not support local functions."""
    import openvino

    core = openvino.Core()
    plain = onnx.inliner.inline_local_functions(model)
    compiled = core.compile_model(
        core.read_model(plain.SerializeToString()), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    result: Array = compiled([x.numpy()])[0]
    return result


def evaluator(model: onnx.ModelProto, x: torch.Tensor) -> Array:
    """The first output in onnx's reference evaluator."""
    result: Array = ReferenceEvaluator(model).run(None, {model.graph.input[0].name: x.numpy()})[0]
    return result


RUNTIMES: dict[str, Callable[[onnx.ModelProto, torch.Tensor], Array]] = {
    "OpenVINO": openvino,
    "onnx's evaluator": evaluator,
}


def _portable(name: str) -> tuple[nn.Module, torch.Tensor]:
    make, sizes = _portable_models.MODELS[name]
    return make(_portable_models.as_functions), torch.randn(sizes)


def _file_model(name: str) -> tuple[nn.Module, torch.Tensor]:
    make, sample = _file_models.MODELS[name]
    return make(), sample()


def _example(name: str) -> tuple[nn.Module, torch.Tensor]:
    module = _module(f"examples/{name}")
    if name == "sparse_attention":
        return module.Attention(16), torch.randn(8, 12, 16)
    if name == "surrogate_gradients":
        return module.SpikingNet(6, 32, 2), torch.rand(32, 8, 6)
    if name == "lora":
        return module.Adapted(nn.Linear(16, 8), 4), torch.randn(5, 16)
    if name == "reversible_layers":
        return module.ReversibleNet(width=16, layers=6), torch.randn(32, 4)
    return nn.Sequential(
        module.QuantisedLinear(8, 32), nn.ReLU(), module.QuantisedLinear(32, 2)
    ), torch.randn(4, 8)


_EXAMPLES = ("quantisation", "sparse_attention", "surrogate_gradients", "lora", "reversible_layers")
MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    **{f"{name}, with Functions": lambda name=name: _portable(name) for name in _portable_models.MODELS},
    **{f"examples/{name}.py": lambda name=name: _example(name) for name in _EXAMPLES},
    **{name: lambda name=name: _file_model(name) for name in _file_models.MODELS},
}


def difference(model: str, runtime: str) -> float:
    """The largest difference from eager PyTorch, relative to the largest number of its result."""
    torch.manual_seed(1)
    made, x = MODELS[model]()
    made.eval()
    proto = torch2ort.export(made, x, portable=True, cache_dir=False).proto
    with torch.no_grad():
        found = made(x)
        expected = (found[0] if isinstance(found, tuple) else found).numpy()
    actual = RUNTIMES[runtime](proto, x)
    assert actual.shape == expected.shape
    return float(np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-30))


def rows() -> Iterator[str]:
    """The table of docs/files.md."""
    yield f"| model | {' | '.join(RUNTIMES)} |"
    yield "| --- |" + " --- |" * len(RUNTIMES)
    for model in MODELS:
        cells = []
        for runtime in RUNTIMES:
            fails = runtime == "onnx's evaluator" and model in EVALUATOR_FAILS
            cells.append("fails" if fails else f"{difference(model, runtime):.0e}")
        yield f"| {model} | {' | '.join(cells)} |"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for row in rows():
        print(row, flush=True)
