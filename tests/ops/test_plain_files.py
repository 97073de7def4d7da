"""A file is plain wherever torch.onnx writes ONNX operators with eager PyTorch's results."""

from __future__ import annotations

import pytest
import torch

from tests.ops import plain_files


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", plain_files.DTYPES, ids=str)
def test_no_sample_is_plain_and_right_by_torch_onnx_alone(dtype: torch.dtype) -> None:
    found = {name for name, _, other in plain_files.outcomes(dtype) if other == "plain"}
    assert found == plain_files.KNOWN[str(dtype).removeprefix("torch.")]
