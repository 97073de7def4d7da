"""Inference on a stock onnxruntime, as ratios to eager PyTorch: a small BERT, and the cost of a Function."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable

import onnxruntime
import torch
from _models import HIDDEN, LAYERS, LENGTH, MODELS, batch
from _timing import interleaved_medians
from torch import Tensor, nn

import torch2ort

BATCH = 8
# The number of floats of the tensors in a chain of Functions, and the length of the chain.
CHAINS = ((256, 50), (1 << 20, 20))


class Tiny(torch.autograd.Function):
    """A minimal Function: its cost is that of the call."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 0.99

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad * 0.99


class Chain(nn.Module):
    """``count`` Functions in a row between two additions, or an addition in front of each, too."""

    def __init__(self, count: int, *, spaced: bool = False, empty: bool = False) -> None:
        super().__init__()
        self.count, self.spaced, self.empty = count, spaced, empty

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1.0
        for _ in range(self.count):
            if self.spaced:
                x = x + 0.5
            if not self.empty:
                x = Tiny.apply(x)
        return x + 1.0


def without_gradients(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return `call` under ``torch.no_grad``."""

    def run() -> Tensor:
        with torch.no_grad():
            return call()

    return run


def bert(threads: int) -> None:
    """Print a small BERT's ratios with `threads` threads."""
    torch.set_num_threads(threads)
    model, tokens = MODELS["BERT"]().eval(), batch("BERT", BATCH)["input_ids"]
    exported = torch2ort.export(model, {"input_ids": tokens})
    compiled = torch.compile(model)
    ways = {
        "eager": without_gradients(lambda: model(input_ids=tokens).logits),
        "ort": lambda: exported(input_ids=tokens).logits,
        "compile": without_gradients(lambda: compiled(input_ids=tokens).logits),
    }
    for way in ("ort", "compile"):
        torch.testing.assert_close(ways[way](), ways["eager"](), rtol=1e-4, atol=1e-5)
    seconds = interleaved_medians(ways, rounds=25, pause=0.05 if threads > 1 else 0.0)
    print(
        f"BERT {BATCH}x{LENGTH}, hidden {HIDDEN}, {LAYERS} layers, {threads} thread(s), ratio to eager: "
        f"ExportedModel {seconds['ort'] / seconds['eager']:.2f}, "
        f"torch.compile {seconds['compile'] / seconds['eager']:.2f}"
    )


def pyop_chain(count: int, x: Tensor) -> Callable[[], object] | None:
    """Return the chain with onnxruntime-extensions' PyOp as its Functions, if that is installed."""
    if importlib.util.find_spec("onnxruntime_extensions") is None:
        return None
    from onnx import TensorProto, helper
    from onnxruntime_extensions import PyCustomOpDef, get_library_path, onnx_op

    # PyOp's operators stay in the process for good, so each chain needs a name of its own.
    name = f"Tiny{x.numel()}"

    @onnx_op(op_type=name, inputs=[PyCustomOpDef.dt_float], outputs=[PyCustomOpDef.dt_float])
    def tiny(array):
        return (torch.from_numpy(array) * 0.99).numpy()

    names = [f"x{i}" for i in range(count + 1)]
    one = helper.make_tensor("one", TensorProto.FLOAT, [], [1.0])
    nodes = [helper.make_node("Add", ["x", "one"], ["x0"])]
    nodes += [
        helper.make_node(name, [a], [b], domain="ai.onnx.contrib") for a, b in itertools.pairwise(names)
    ]
    nodes.append(helper.make_node("Add", [names[-1], "one"], ["y"]))
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, list(x.shape)) for n in ("x", "y")]
    graph = helper.make_graph(nodes, "chain", values[:1], values[1:], [one])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.contrib", 1)]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.register_custom_ops_library(get_library_path())
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    feed = {"x": x.numpy()}
    return lambda: session.run(None, feed)[0]


def functions(size: int, count: int, *, spaced: bool) -> None:
    """Print the cost of one Function on tensors of `size` floats, with one thread."""
    torch.set_num_threads(1)
    x = torch.randn(size)
    chain, empty = (Chain(count, spaced=spaced, empty=empty).eval() for empty in (False, True))
    exported, exported_empty = torch2ort.export(chain, x), torch2ort.export(empty, x)
    ways: dict[str, Callable[[], object]] = {
        "eager": without_gradients(lambda: chain(x)),
        "eager_empty": without_gradients(lambda: empty(x)),
        "ort": lambda: exported(x),
        "ort_empty": lambda: exported_empty(x),
    }
    torch.testing.assert_close(ways["ort"](), ways["eager"]())
    pyop = None if spaced else pyop_chain(count, x)
    if pyop is not None:
        torch.testing.assert_close(torch.from_numpy(pyop()), ways["eager"]())
        ways["pyop"] = pyop
    seconds = interleaved_medians(ways, rounds=40, calls=10 if size < 1000 else 2)
    eager = seconds["eager"] - seconds["eager_empty"]
    line = (
        f"One Function on {size} floats{', an addition between them' if spaced else ''}, 1 thread, ratio to "
        f"eager's apply: PythonOp {(seconds['ort'] - seconds['ort_empty']) / eager:.2f}"
    )
    if pyop is not None:
        line += f", onnxruntime-extensions' PyOp {(seconds['pyop'] - seconds['ort_empty']) / eager:.2f}"
    print(line)


def main() -> None:
    """Print one line per comparison, after a check that the engines agree."""
    print(f"onnxruntime {onnxruntime.__version__}")
    for threads in (1, 2):
        bert(threads)
    for size, count in CHAINS:
        for spaced in (False, True):
            functions(size, count, spaced=spaced)


if __name__ == "__main__":
    main()
