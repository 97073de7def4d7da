"""Tampered files, and the outcome of each; run as a program, as a file may end the process.

``python -m tests.stock.tampered_files KIND saved.onnx N`` prints lines of JSON of every Nth file: its name,
and whether it was ``refused`` by name, ``ran``, was ``stopped`` in a run, or ``raised`` another error.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import itertools
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper

import torch2ort
from tests.stock.models import plain_options
from tests.support.functions import Constants, Square
from torch2ort.__main__ import main as command

BIG = 2**62
INTEGERS: list[list[int]] = [
    [], [-1], [0], [99], [-5], [BIG], [-BIG], [0, 0], [0, 99], [-1, -1], [-1, 99], [-1, BIG], [1] * 3,
    [10**9] * 50,
]  # fmt: skip
TEXTS = ["", "d", "cc", "ddddd", "x", "\x00", "d" * 10_000]
HOSTILE_JSON: list[Any] = [
    None, True, -1, 99, BIG, 10**40, 1.5, "", "tensor", "load", {}, [], [-1], [99], [BIG], [10**40],
    [[0, 99]], [[-1, 0]], [[0]], [[0, 0, 0]], [None], [[None, None]], ["tensor"] * 3, [["float32", BIG]],
    [["float32", -1]], [["load", 2]], [["float32"]], [["float8_e4m3fn", 2]], [["float32", True]],
    [{"complex": ["0x0p+0"]}], [{"float": "0x1p+99999"}], [{"device": "nowhere"}],
    [{"device": "cuda:" + "9" * 30}], [{"torch": "load"}], [{"size": [10**40]}], [{"size": ["tensor"]}],
    [{"set": [{"list": []}]}], [{"bytes": "zz"}], [{"dict": [[1]]}], [{"slice": []}], [{"object": []}],
    [{"tuple": 5}], {"a": {"b": 1}},
]  # fmt: skip


class Into(torch.autograd.Function):
    """Its output is its argument's memory, which it overwrites."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Mixed(torch.nn.Module):
    """A Function with a map, one with constants, and an operator that PyTorch's kernel runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x, scale=2.0):
        y = Into.apply(self.linear(x) * scale)
        return Square.apply(torch.cummax(Constants.apply(y, *Constants.EXPECTED), 1)[0])


def save(path: Path) -> None:
    """Save the file that is tampered with."""
    torch.manual_seed(1)
    torch2ort.register_inplace_map(Into, forward={0: 0}, backward={0: 0})
    torch2ort.export(Mixed().eval(), torch.ones(2, 4)).save(path)


def set_attribute(node: onnx.NodeProto, name: str, value: Any) -> None:
    """Replace one attribute; ``None`` removes it."""
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend(kept)
    if value is None:
        return
    if value == []:
        node.attribute.add(name=name, type=onnx.AttributeProto.INTS)
    else:
        node.attribute.append(helper.make_attribute(name, value))


def mutations(model: onnx.ModelProto) -> Iterator[tuple[str, onnx.ModelProto]]:
    """The tampered models, each with a name."""
    for index, node in enumerate(model.graph.node):
        if any(a.name == "site" for a in node.attribute):
            yield from _of_attributes(model, index)
            yield from _of_sites(model, index)
    yield from _of_metadata(model)
    yield from _of_the_graph(model)


def _of_attributes(model: onnx.ModelProto, index: int) -> Iterator[tuple[str, onnx.ModelProto]]:
    present = {a.name: a for a in model.graph.node[index].attribute}
    names = {
        *present,
        "tensor_reuse_map",
        "bw_tensor_reuse_map",
        "input_pointer_scalars",
        "input_int_scalars",
    }
    names |= {"input_float_tuple_begins", "input_pointer_scalar_positions", "site_key"}
    for name in sorted(names):
        for value in (None, 0, -1, BIG, 1.5, [1.5], *TEXTS, *INTEGERS):
            changed = copy.deepcopy(model)
            set_attribute(changed.graph.node[index], name, value)
            yield f"node {index}, {name} = {str(value)[:40]}", changed


def _of_sites(model: onnx.ModelProto, index: int) -> Iterator[tuple[str, onnx.ModelProto]]:
    (text,) = (a.s for a in model.graph.node[index].attribute if a.name == "site")
    site = json.loads(text)
    deep = "[" * 100_000 + "]" * 100_000
    for field in site:
        for value in (*HOSTILE_JSON, deep):
            changed = copy.deepcopy(model)
            written = json.dumps({**site, field: "DEEP" if value is deep else value}).replace('"DEEP"', deep)
            set_attribute(changed.graph.node[index], "site", written)
            yield f"node {index}, site {field} = {str(value)[:60]}", changed


def _of_metadata(model: onnx.ModelProto) -> Iterator[tuple[str, onnx.ModelProto]]:
    (entry,) = (p for p in model.metadata_props if p.key == "torch2ort")
    data = json.loads(entry.value)
    more = ["9**9**9 > size(0,0)", "size(9,9) > 0", "(" * 9999, "-" * 99999 + "1", "1/0 > 0", "x"]
    for field in data:
        for value in (*HOSTILE_JSON, *([text] for text in more), ["y", "y"], [["y", "input", "z"]]):
            changed = copy.deepcopy(model)
            (entry,) = (p for p in changed.metadata_props if p.key == "torch2ort")
            entry.value = json.dumps({**data, field: value})
            yield f"metadata {field} = {str(value)[:60]}", changed
    for field in ("inputs", "outputs", "signature"):
        yield from _of_nested(model, data, field)


def _of_nested(
    model: onnx.ModelProto, data: dict[str, Any], field: str
) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Yield files with one hostile value at a time in each place of a schema's JSON."""
    document = json.loads(data[field])
    for place in _places(document):
        for value in (None, -1, BIG, 10**40, "", "load", [], {}, [BIG], {"int": "9" * 5000}):
            changed = copy.deepcopy(model)
            (entry,) = (p for p in changed.metadata_props if p.key == "torch2ort")
            entry.value = json.dumps({**data, field: json.dumps(_with(document, place, value))})
            yield f"metadata {field} at {place} = {str(value)[:40]}", changed


def _places(document: Any) -> Iterator[tuple[Any, ...]]:
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in items:
        yield (key,)
        if isinstance(value, (dict, list)):
            yield from ((key, *rest) for rest in _places(value))


def _with(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(document)
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return changed


def _of_the_graph(model: onnx.ModelProto) -> Iterator[tuple[str, onnx.ModelProto]]:
    def changed(name: str, edit: Any) -> tuple[str, onnx.ModelProto]:
        other = copy.deepcopy(model)
        edit(other, next(n for n in other.graph.node if n.op_type == "PythonOp"), other.graph.initializer[0])
        return name, other

    for dims in ([-1], [BIG], [BIG, BIG], [2**32, 2**32], [0], [-4, -4], [4, 4, -1], [10**9] * 50):
        yield changed(
            f"weight's dims = {dims[:3]}", lambda m, n, w, dims=dims: w.dims.__setitem__(slice(None), dims)
        )
    for number in (0, -1, 99, 2**31 - 1):
        yield changed(f"weight's type = {number}", lambda m, n, w, v=number: setattr(w, "data_type", v))
    yield changed("3 bytes", lambda m, n, w: setattr(w, "raw_data", b"abc"))
    for entries in (
        {"location": "../x"}, {"location": "/dev/zero", "length": str(BIG)}, {"location": "x"},
        {"location": ""}, {"location": "model.onnx", "length": str(BIG)}, {"location": "."},
        {"location": "model.onnx", "offset": str(BIG)}, {"location": "model.onnx", "length": "-1"},
    ):  # fmt: skip
        yield changed(f"weight outside: {entries}", lambda m, n, w, e=entries: _outside(w, e))
    yield changed("a call that reads itself", lambda m, n, w: n.input.__setitem__(0, n.output[1]))
    yield changed("a call that stands twice", lambda m, n, w: m.graph.node.append(copy.deepcopy(n)))
    yield changed("a call of a gradient", lambda m, n, w: setattr(n, "op_type", "PythonOpGrad"))
    yield changed("a call in no domain", lambda m, n, w: setattr(n, "domain", ""))
    yield changed("a call with no outputs", lambda m, n, w: n.output.__delitem__(slice(None)))
    yield changed("a call with empty inputs", lambda m, n, w: n.input.extend(["", ""]))
    yield changed("a call with many outputs", lambda m, n, w: n.output.extend(map(str, range(500))))
    yield changed("a call in a function", _into_function)
    yield changed("a call in a body", _into_body)


def _outside(tensor: onnx.TensorProto, entries: dict[str, str]) -> None:
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)


def _into_function(model: onnx.ModelProto, node: onnx.NodeProto, _: Any) -> None:
    inner = copy.deepcopy(node)
    domains = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    set_attribute(inner, "tensor_reuse_map", [-1, 99])
    model.functions.append(helper.make_function("stranger", "F", node.input, node.output, [inner], domains))
    model.opset_import.append(helper.make_opsetid("stranger", 1))
    node.CopyFrom(helper.make_node("F", node.input, node.output, "call", domain="stranger"))


def _into_body(model: onnx.ModelProto, node: onnx.NodeProto, _: Any) -> None:
    inner = copy.deepcopy(node)
    inner.output[:] = ["inner_context", "inner"]
    result = helper.make_tensor_value_info("inner", onnx.TensorProto.FLOAT, None)
    bodies = [
        helper.make_graph([inner], "body", [], [result]),
        helper.make_graph([inner], "body", [], [result]),
    ]
    bodies[1].node[0].name += "_else"
    constant = helper.make_node("Constant", [], ["yes"], value=onnx.numpy_helper.from_array(np.array(True)))
    choice = helper.make_node("If", ["yes"], [node.output[1]], then_branch=bodies[0], else_branch=bodies[1])
    place = list(model.graph.node).index(node)
    nodes = list(model.graph.node)
    nodes[place : place + 1] = [constant, choice]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _loaded(path: Path) -> str:
    try:
        model = torch2ort.load(path)
    except (torch2ort.ModelLoadError, torch2ort.FunctionNotFoundError) as error:
        return f"refused: {error}"
    return _called(lambda: model(torch.ones(2, 4)))


def _plain(path: Path) -> str:
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(
            str(path), plain_options(intra_op_num_threads=1), providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        return f"refused: {error}"
    feeds = {value.name: np.ones((2, 4), np.float32) for value in session.get_inputs()}
    return _called(lambda: session.run(None, feeds))


def _called(call: Any) -> str:
    try:
        call()
    except Exception as error:
        own = isinstance(error, torch2ort.Torch2OrtError) or type(error).__module__.startswith("onnxruntime")
        return f"{'stopped' if own else 'raised'}: {type(error).__name__}: {error}"
    return "ran"


def _described(path: Path) -> str:
    return "ran" if command(["info", str(path)]) == 0 else "refused:"


def main() -> None:
    """Try the files; none may take ten seconds, or a quarter of a GiB more than the largest before it."""
    kind, saved = sys.argv[1], Path(sys.argv[2])
    faulthandler.enable()
    for function in (Constants, Square):
        torch2ort.register_function(function)
    torch2ort.register_function(Into, "tests.stock.tampered_files.Into")  # its module is __main__ here
    tampered = saved.with_name("tampered.onnx")
    attempt = {"load": _loaded, "plain": _plain, "info": _described}[kind]
    # `info` prints.
    with open(saved.with_name("output"), "w") as output, contextlib.redirect_stdout(output):
        attempt(saved)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for name, model in itertools.islice(mutations(onnx.load(saved)), 0, None, int(sys.argv[3])):
            tampered.write_bytes(model.SerializeToString())
            print(json.dumps([name, "began"]), file=sys.__stdout__, flush=True)
            outcome = _outcome(attempt, tampered, peak)
            peak = max(peak, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
            print(json.dumps([name, outcome]), file=sys.__stdout__, flush=True)


def _outcome(attempt: Callable[[Path], str], tampered: Path, peak: int) -> str:
    started = time.process_time()
    try:
        outcome = attempt(tampered)
    except Exception as error:
        outcome = f"raised: {type(error).__name__}: {error}"
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    if more > 1 << 18:
        outcome = f"took {more >> 10} MiB, and {outcome}"
    seconds = time.process_time() - started
    return f"took {seconds:.0f} s, and {outcome}" if seconds > 10 else outcome


if __name__ == "__main__":
    main()
