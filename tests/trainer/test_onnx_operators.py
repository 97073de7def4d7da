"""ONNX operators against ONNX's own tests of them."""

from __future__ import annotations

import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.backend.test.loader
import onnx.numpy_helper
import pytest
import torch

from torch2ort.errors import UnsupportedOperatorError
from torch2ort.trainer.onnx_model.onnx_to_torch import build, current
from torch2ort.trainer.onnx_model.operators import OPERATORS
from torch2ort.trainer.onnx_model.operators.dtypes import DTYPES
from torch2ort.trainer.onnx_model.operators.host_scalars import tensor
from torch2ort.trainer.onnx_model.weights import Weights

Cases = dict[str, list[Any]]

# ONNX has no tests of these, which are ONNX Runtime's own.
# Names of inputs that are data in models as well.
DATA = {"x", "X", "data"}
NAMES = sorted(name for name in (*OPERATORS, "Dropout") if "." not in name)


# Cases of random masks; of NumPy's results for no elements; of numbers where models have tensors.
UNLIKE = {
    "test_training_dropout_default", "test_training_dropout", "test_reduce_max_empty_set",
    "test_reduce_max_empty_set_bool", "test_reduce_min_empty_set", "test_top_k_uint64",
}  # fmt: skip


@pytest.fixture(scope="module")
def cases() -> Cases:
    """ONNX's tests of single operators, by operator."""
    found = defaultdict(list)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        loaded = onnx.backend.test.loader.load_model_tests(kind="node")
    for case in loaded:
        if case.model is not None and len(case.model.graph.node) == 1 and not case.model.graph.node[0].domain:
            found[case.model.graph.node[0].op_type].append(case)
    return found


def run(case: Any) -> str:
    """Return ``equal``, or why the case is refused; raise an error where results differ."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    infos = [*model.graph.input, *model.graph.output]
    if any(info.type.WhichOneof("value") != "tensor_type" for info in infos):
        return "type"
    if not {info.type.tensor_type.elem_type for info in infos} <= DTYPES.keys():
        return "type"
    inputs, expected = ([_array(one) for one in part] for part in case.data_sets[0])
    if case.name in UNLIKE or any(np.asarray(one).dtype.name == "bfloat16" for one in (*inputs, *expected)):
        return "left out"
    feeds = []
    # Numbers that an operator reads are constants in models; here they are inputs.
    for info, value in zip(list(model.graph.input), map(np.asarray, inputs), strict=True):
        numbers = (
            value.dtype == np.int64
            and value.ndim <= 1
            and (info.name not in DATA or model.graph.node[0].op_type == "ConstantOfShape")
        )
        if numbers or value.ndim == 0:
            model.graph.input.remove(info)
            model.graph.node.insert(
                0,
                onnx.helper.make_node(
                    "Constant", [], [info.name], value=onnx.numpy_helper.from_array(value, info.name)
                ),
            )
        else:
            feeds.append(torch.from_numpy(value.copy()))
    try:
        model = current(model)
        module = build(model, Weights(model), [v.name for v in model.graph.output]).eval()
        found = module(*feeds)
    except UnsupportedOperatorError:
        return "refused"
    for one, other in zip(found, map(np.asarray, expected), strict=True):
        one = tensor(one)
        np.testing.assert_allclose(
            one.detach().float().numpy(), other.astype(np.float32), rtol=1e-3, atol=1e-5, err_msg=case.name
        )
        assert DTYPES[onnx.helper.np_dtype_to_tensor_dtype(other.dtype)] == one.dtype, case.name
    return "equal"


def _array(value: Any) -> np.ndarray:
    return np.asarray(onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value)


@pytest.mark.parametrize("operator", NAMES)
def test_an_operator_computes_what_onnx_s_own_tests_expect(operator: str, cases: Cases) -> None:
    assert "equal" in [run(case) for case in cases[operator]]


def test_the_documentation_names_each_operator() -> None:
    page = (Path(__file__).parents[2] / "docs" / "orttrainer.md").read_text()
    listed = page.partition("<summary>Operators</summary>")[2].partition("Dropout drops")[0]
    names = [name.strip(" .\n") for name in listed.replace("\n", " ").split(",")]
    assert names == sorted([*OPERATORS, "Constant", "Dropout"])
