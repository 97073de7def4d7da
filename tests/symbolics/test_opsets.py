"""Opsets that graphs support."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import torch2ort
from torch2ort.runtime.kernel_support import _highest_opset
from torch2ort.symbolics.onnx_translation import _CONVERTED_OPSET


def interface(schema: onnx.defs.OpSchema) -> tuple[list[str], list[str]]:
    """Inputs and outputs, and whether they are optional."""
    return [f"{i.name} {i.option}" for i in schema.inputs], [f"{o.name} {o.option}" for o in schema.outputs]


def test_above_the_opset_that_is_converted_to_operators_have_got_types_and_attributes_alone() -> None:
    schemas: dict[str, dict[int, onnx.defs.OpSchema]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if not schema.domain:
            schemas.setdefault(schema.name, {})[schema.since_version] = schema
    for versions in schemas.values():
        known = [version for version in versions if version <= _CONVERTED_OPSET]
        for later in [version for version in versions if version > _CONVERTED_OPSET and known]:
            before, after = versions[max(known)], versions[later]
            assert interface(before) == interface(after)
            new = after.attributes.keys() - before.attributes.keys()
            assert not any(after.attributes[name].required for name in new)
            kept = {name: after.attributes[name].default_value for name in before.attributes}
            assert kept == {name: a.default_value for name, a in before.attributes.items()}


class Net(nn.Module):
    """Operators with several versions: layouts, reductions, resizing, pools, normalizations, casts."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)
        self.group, self.batch = nn.GroupNorm(4, 8), nn.BatchNorm2d(8)
        self.recurrent, self.head = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        h = nn.functional.gelu(self.batch(self.group(self.convolution(x))))
        h = nn.functional.interpolate(nn.functional.max_pool2d(h, 2), scale_factor=2, mode="bilinear")
        h, _ = self.recurrent(h.mean(-1).transpose(1, 2))
        h = torch.where(h > 0, h, h.cumsum(1))[:, index]
        return torch.cat([self.head(h).softmax(-1), h.double().abs().sum(-1, keepdim=True).float()], -1)


@pytest.mark.parametrize("opset", range(18, _highest_opset() + 1))
def test_a_graph_of_each_opset_computes_as_eager_in_both_sessions(opset: int) -> None:
    torch.manual_seed(0)
    model, x, index = Net().eval(), torch.randn(2, 3, 8, 8), torch.tensor([0, 5, 2])
    exported = torch2ort.export(model, (x, index), opset=opset)
    assert [(entry.domain, entry.version) for entry in exported.proto.opset_import] == [("", opset)]
    onnx.checker.check_model(exported.proto, full_check=True)
    session = onnxruntime.InferenceSession(exported.proto.SerializeToString())
    (result,) = session.run(None, {"x": x.numpy(), "index": index.numpy()})
    expected = model(x, index).detach()
    np.testing.assert_allclose(result, expected.numpy(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(exported(x, index), expected, rtol=1e-4, atol=1e-5)


def test_an_opset_that_the_runtime_lacks_is_refused() -> None:
    highest = _highest_opset()
    with pytest.raises(torch2ort.OptionError) as caught:
        torch2ort.export(nn.Linear(2, 2).eval(), torch.randn(1, 2), opset=highest + 1)
    assert str(caught.value) == (
        f"Option 'opset' is {highest + 1}; onnx {onnx.__version__} and onnxruntime "
        f"{onnxruntime.__version__} both take 18 to {highest}. Export with one of these, or install newer "
        f"ones."
    )
