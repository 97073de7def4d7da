"""Element types of ONNX and of PyTorch."""

from __future__ import annotations

import onnx
import torch

# The keys are plain numbers, as attributes have them.
DTYPES: dict[int, torch.dtype] = {
    int(onnx.TensorProto.FLOAT): torch.float32,
    int(onnx.TensorProto.DOUBLE): torch.float64,
    int(onnx.TensorProto.FLOAT16): torch.float16,
    int(onnx.TensorProto.BFLOAT16): torch.bfloat16,
    int(onnx.TensorProto.INT64): torch.int64,
    int(onnx.TensorProto.INT32): torch.int32,
    int(onnx.TensorProto.INT16): torch.int16,
    int(onnx.TensorProto.INT8): torch.int8,
    int(onnx.TensorProto.UINT8): torch.uint8,
    int(onnx.TensorProto.BOOL): torch.bool,
}
