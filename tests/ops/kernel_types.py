"""Finds the element types that onnxruntime's CPU kernels support, for the package's table.

    python -m tests.ops.kernel_types > oldest.json
    python -m tests.ops.kernel_types oldest.json

The first, in an environment with the oldest onnxruntime, prints the kernels of that version; the second, in
one with the newest, prints the lines of the table, which has the kernels of both.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx
import onnx.defs
import onnxruntime
from onnx import TensorProto, helper

OPSETS = (18, 20, 21)
CODES = {
    "f4": TensorProto.FLOAT,
    "f8": TensorProto.DOUBLE,
    "i8": TensorProto.INT64,
    "i4": TensorProto.INT32,
    "b1": TensorProto.BOOL,
    "f2": TensorProto.FLOAT16,
    "bf": TensorProto.BFLOAT16,
    "i1": TensorProto.INT8,
    "i2": TensorProto.INT16,
    "u1": TensorProto.UINT8,
    "u2": TensorProto.UINT16,
    "u4": TensorProto.UINT32,
    "u8": TensorProto.UINT64,
}
_NAMES = {
    f"tensor({name})": code
    for name, code in {
        "float": "f4", "double": "f8", "int64": "i8", "int32": "i4", "bool": "b1", "float16": "f2",
        "bfloat16": "bf", "int8": "i1", "int16": "i2", "uint8": "u1", "uint16": "u2", "uint32": "u4",
        "uint64": "u8",
    }.items()
}  # fmt: skip
# Only users write quantised operators; the others have subgraphs, sequences or text, or have no kernel.
_LEFT_OUT = frozenset(
    (
        "ConcatFromSequence", "Constant", "ConvInteger", "DeformConv", "DequantizeLinear",
        "DynamicQuantizeLinear", "If", "Loop", "MatMulInteger", "MaxRoiPool", "NonMaxSuppression",
        "OneHot", "OptionalGetElement", "OptionalHasElement", "QLinearConv", "QLinearMatMul",
        "QuantizeLinear", "RegexFullMatch", "Scan", "Scatter", "StringConcat", "StringNormalizer",
        "StringSplit", "TfIdfVectorizer", "Upsample",
    )
)  # fmt: skip
# All type variables of these are of one type in every kernel.
_OF_ONE_TYPE = frozenset({"BatchNormalization", "GridSample"})
_ATTRIBUTES: dict[str, dict[str, Any]] = {
    "BitShift": {"direction": "LEFT"},
    "Cast": {"to": TensorProto.FLOAT},
    "DepthToSpace": {"blocksize": 1},
    "Einsum": {"equation": "ij,jk->ik"},
    "Gelu": {"approximate": "none"},
    "GRU": {"hidden_size": 1},
    "LSTM": {"hidden_size": 1},
    "RNN": {"hidden_size": 1},
    "Resize": {"mode": "nearest"},
    "SpaceToDepth": {"blocksize": 1},
    "Split": {"num_outputs": 1},
}
_GIVEN: dict[str, Any] = {
    "INT": 1, "INTS": [1], "FLOAT": 1.0, "FLOATS": [1.0], "STRING": "", "STRINGS": [""],
}  # fmt: skip
# onnxruntime's own operators that exports use: all of their tensors are of one type.
CONTRIBUTED = ("BiasGelu", "FastGelu", "Gelu", "QuickGelu")


def runs(node: onnx.NodeProto, inputs: Mapping[str, int], opset: int) -> bool:
    """Return True if the installed onnxruntime has a kernel for ``node``.

    Args:
        node: a node with all the attributes that it needs.
        inputs: element type of each input.
        opset: version of ONNX's own operators.
    """
    values = [helper.make_tensor_value_info(name, kind, None) for name, kind in inputs.items()]
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output]
    graph = helper.make_graph([node], "one", values, outputs)
    domains = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        model = helper.make_model(graph, opset_imports=domains, ir_version=8).SerializeToString()
        onnxruntime.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions have no common class
        # A kernel that refuses its attributes exists.
        return "Exception during initialization" in str(error)
    return True


def has_kernel(operator: str, opset: int, types: Mapping[str, str]) -> bool:
    """Return True if an operator has a kernel for these element types, by its schema's type variables."""
    if operator.startswith("com.microsoft::"):
        count = 2 if operator.endswith("BiasGelu") else 1
        names = ["x", "y"][:count]
        node = helper.make_node(operator.partition("::")[2], names, ["z"], domain="com.microsoft")
        return runs(node, dict.fromkeys(names, CODES[types["T"]]), opset)
    schema = onnx.defs.get_schema(operator, opset)
    attributes = {
        name: _GIVEN.get(attribute.type.name)
        for name, attribute in schema.attributes.items()
        if attribute.required
    } | _ATTRIBUTES.get(operator, {})
    if operator == "ConstantOfShape":
        attributes["value"] = helper.make_tensor("value", CODES[types["T2"]], [1], [1])
    if operator == "Cast" and "T2" in types:
        attributes["to"] = CODES[types["T2"]]
    inputs = {
        formal.name: CODES[types[formal.type_str]] if formal.type_str in types else _fixed(formal.type_str)
        for formal in schema.inputs
        if formal.option.name != "Optional" or formal.type_str in types
    }
    if operator == "Resize":
        inputs = {"X": inputs["X"], "": 0, "scales": TensorProto.FLOAT}
    outputs = [formal.name for formal in schema.outputs if formal.option.name != "Optional"]
    node = helper.make_node(operator, list(inputs), outputs, **attributes)
    return runs(node, {name: kind for name, kind in inputs.items() if name}, opset)


def _fixed(type_name: str) -> int:
    return CODES[_NAMES[type_name]]


def _variables(schema: Any) -> dict[str, list[str]]:
    """The types that ONNX allows for each type variable of ``schema``."""
    return {
        constraint.type_param_str: [_NAMES[t] for t in _NAMES if t in constraint.allowed_type_strs]
        for constraint in schema.type_constraints
    }


def found() -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Each operator, with the types of each of its type variables that have a kernel in every opset."""
    for operator in sorted({schema.name for schema in onnx.defs.get_all_schemas_with_history()}):
        if operator in _LEFT_OUT or not onnx.defs.has(operator, OPSETS[-1]):
            continue
        each = [_of(operator, opset) for opset in OPSETS if onnx.defs.has(operator, opset)]
        both = {v: [t for t in types if all(t in other[v] for other in each)] for v, types in each[0].items()}
        if both and all(both.values()):
            yield operator, both
    for name in CONTRIBUTED:
        operator = f"com.microsoft::{name}"
        yield operator, {"T": [t for t in CODES if has_kernel(operator, OPSETS[0], {"T": t})]}


def _of(operator: str, opset: int) -> dict[str, list[str]]:
    schema = onnx.defs.get_schema(operator, opset)
    allowed = _variables(schema)
    base = {variable: types[0] for variable, types in allowed.items() if types}
    if base.keys() != allowed.keys():
        return {}
    return {
        variable: [t for t in types if has_kernel(operator, opset, _bound(operator, base, variable, t))]
        for variable, types in allowed.items()
    }


def _bound(operator: str, base: Mapping[str, str], variable: str, code: str) -> dict[str, str]:
    return {**(dict.fromkeys(base, code) if operator in _OF_ONE_TYPE else base), variable: code}


def main() -> None:
    """Print the kernels of the installed runtime, or the table of those that it shares with another."""
    mine = dict(found())
    if len(sys.argv) == 1:
        print(json.dumps(mine))
        return
    other = json.loads(Path(sys.argv[1]).read_text())
    for operator, variables in mine.items():
        common = {v: [t for t in types if t in other[operator][v]] for v, types in variables.items()}
        texts = {
            v: "*" if len(types) == len(CODES) else " ".join(sorted(types)) for v, types in common.items()
        }
        line = ", ".join(f"{v!r}: {text!r}" for v, text in texts.items())
        print(f"    {operator!r}: {{{line}}},".replace("'", '"'))


if __name__ == "__main__":
    main()
