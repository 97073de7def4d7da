"""A small gradient graph on onnxruntime-training, built by hand around PythonOp nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch.utils.dlpack import from_dlpack, to_dlpack

from tests.support.memory import resident_bytes
from torch2ort.pythonop.native import native
from torch2ort.runtime import binding

onnxruntime = pytest.importorskip("onnxruntime", reason="needs an onnxruntime package")
ort = onnxruntime.capi._pybind_state
if not hasattr(ort, "TrainingAgent"):
    pytest.skip("needs onnxruntime-training, which this environment has not", allow_module_level=True)

TYPES = {"float32": TensorProto.FLOAT, "bool": TensorProto.BOOL, "int64": TensorProto.INT64}


def register(site: Any, key: str) -> None:
    binding.install_runners()
    proxy = type("Proxy", (torch.autograd.Function,), {"apply": site, "backward": site})
    ort.register_torch_autograd_function(key, proxy)


def python_op(
    key: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    input_types: Sequence[str] | None = None,
    output_types: Sequence[str] | None = None,
    training: bool = True,
) -> onnx.NodeProto:
    """A node that calls the site registered as ``key`` on matrices."""
    input_types = input_types or ["float32"] * len(inputs)
    output_types = output_types or ["float32"] * len(outputs)
    return helper.make_node(
        "PythonOp",
        list(inputs),
        [f"{key}_context", *outputs],
        name=key,
        domain="com.microsoft",
        func_name=key,
        input_convention="d" * len(inputs),
        input_requires_grads=[int(t == "float32") for t in input_types],
        input_tensor_types=[TYPES[t] for t in input_types],
        input_tensor_ranks=[2] * len(inputs),
        output_tensor_types=[TYPES[t] for t in output_types],
        output_tensor_ranks=[2] * len(outputs),
        safe_run_mode=1,
        training_mode=int(training),
    )


def model(nodes: Sequence[onnx.NodeProto], shape: tuple[int, int]) -> onnx.ModelProto:
    """Inputs ``x`` and ``w``, output ``y``, all of one shape."""
    names = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xwy"]
    graph = helper.make_graph(list(nodes), "graph", names[:2], names[2:])
    # No rule infers the type of an ATen node's output.
    untyped = [name for node in nodes if node.op_type == "ATen" for name in node.output]
    graph.value_info.extend(helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in untyped)
    domains = [("", 18), ("com.microsoft", 1), ("org.pytorch.aten", 1)]
    opsets = [helper.make_opsetid(domain, version) for domain, version in domains]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


class Trainer:
    """Forward and backward of a :func:`model`, with ``w`` to be trained."""

    def __init__(self, nodes: Sequence[onnx.NodeProto], shape: tuple[int, int] = (2, 3)) -> None:
        proto = model(nodes, shape)
        gradient = self._gradient_model(proto)
        options = onnxruntime.SessionOptions()
        options.enable_mem_pattern = options.enable_mem_reuse = False
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        serialized = gradient.SerializeToString()
        self.session = onnxruntime.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])
        device = ort.OrtDevice(ort.OrtDevice.cpu(), ort.OrtDevice.default_memory(), 0)
        self.feeds = [value.name for value in gradient.graph.input]
        fetches = [value.name for value in gradient.graph.output]
        session = self.session._sess
        self.agent = ort.TrainingAgent(session, self.feeds, [device], fetches, [device] * len(fetches), 0)
        self.run = native.Run()

    def _gradient_model(self, proto: onnx.ModelProto) -> onnx.ModelProto:
        configuration = ort.OrtModuleGraphBuilderConfiguration()
        configuration.initializer_names = configuration.initializer_names_to_train = ["w"]
        configuration.build_gradient_graph = True
        configuration.loglevel = ort.Severity.FATAL
        builder = ort.OrtModuleGraphBuilder()
        builder.initialize(proto.SerializeToString(), configuration)
        transformers = ort.TrainingGraphTransformerConfiguration()
        transformers.propagate_cast_ops_config = ort.PropagateCastOpsConfiguration()
        builder.build(transformers)
        gradient = onnx.load_from_string(builder.get_gradient_model())
        gradient.graph.value_info.extend(proto.graph.output)
        return gradient

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        values, fetched = ort.OrtValueVector(), ort.OrtValueVector()
        for name in self.feeds:
            values.push_back(to_dlpack({"x": x, "w": w}[name]), False)
        self.state = ort.PartialGraphExecutionState()
        self.run = native.Run()
        self._call(self.agent.run_forward, values, fetched, self.state, None)
        return fetched.to_dlpacks(from_dlpack)[0]

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        values, fetched = ort.OrtValueVector(), ort.OrtValueVector()
        values.push_back(to_dlpack(gradient), False)
        self._call(self.agent.run_backward, values, fetched, self.state)
        self.run.clear()
        return fetched.to_dlpacks(from_dlpack)[0]

    def _call(self, call: Any, *args: Any) -> None:
        before = native.begin(self.run)
        try:
            with torch.no_grad():
                call(*args)
        except Exception as error:
            raise native.take_error() or error from None
        finally:
            native.begin(before)


LARGE = (128, 256)


def assert_leaves_no_memory_behind(trainer: Trainer, *, backward: bool) -> None:
    """Run many steps on tensors of the shape :data:`LARGE`; Linux only."""
    x = torch.ones(LARGE)

    def steps(count: int) -> None:
        for _ in range(count):
            trainer.forward(x, x)
            if backward:
                trainer.backward(x)

    steps(50)
    before = resident_bytes()
    steps(400)
    assert resident_bytes() - before < 20 * x.nbytes
