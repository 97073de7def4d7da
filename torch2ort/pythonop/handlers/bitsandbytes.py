"""bitsandbytes: products with weights of 4 bits.

They become ``com.microsoft::MatMulBnb4``, which reads bitsandbytes' own packing. onnxruntime has a kernel for
the operator on the CPU in float32 (seen in 1.19.2 for training, in 1.20.1 and 1.31.1), and no gradient, so
training keeps the PythonOp.
"""

from __future__ import annotations

import math
from typing import Any

import onnx
import torch

from torch2ort.pythonop.registry import register_exporter, register_symbolic

_KINDS = {"fp4": 0, "nf4": 1}


@register_exporter("bitsandbytes.autograd._functions.MatMul4Bit")
def _matmul_4bit(g: Any, a: Any, b: Any, out: Any = None, bias: Any = None, state: Any = None) -> Any:
    if g.training or out is not None or state is None:
        return None
    absmax = state.absmax
    if state.nested:
        from bitsandbytes.functional import dequantize_blockwise  # installed, because the model uses it

        absmax = dequantize_blockwise(state.absmax, state.state2) + state.offset
    return _product(g, a, b, state.shape, absmax.float(), state.blocksize, state.quant_type, bias)


@register_symbolic("bitsandbytes::gemm_4bit")
def _gemm_4bit(
    g: Any,
    a: Any,
    b: Any,
    shape: Any,
    absmax: Any,
    blocksize: int,
    quant_type: str,
    bias: Any = None,
    absmax_8bit: Any = None,
    absmax_code: Any = None,
    absmax_offset: Any = None,
) -> Any:
    """Translate the operator that bitsandbytes calls without gradients; the graph unpacks 8-bit scales."""
    if absmax_8bit is not None:
        count = math.prod(shape) // blocksize
        blocks = g.constant(torch.arange(count) // 256)
        codes = g.op("Gather", absmax_code, g.op("Cast", absmax_8bit, to=torch.int64))
        scaled = g.op("Mul", g.op("Reshape", codes, g.constant([-1])), g.op("Gather", absmax, blocks))
        absmax = g.op("Add", scaled, absmax_offset)
    return _product(g, a, b, shape, absmax, blocksize, quant_type, bias)


def _product(
    g: Any, a: Any, b: Any, shape: Any, absmax: Any, blocksize: int, quant_type: str, bias: Any
) -> Any:
    if a.dtype != torch.float32 or quant_type not in _KINDS or not _has_kernel(g):
        return None
    rows, columns = shape
    product = g.op(
        "com.microsoft::MatMulBnb4",
        a,
        g.op("Reshape", b, g.constant([-1])),
        absmax,
        K=columns,
        N=rows,
        block_size=blocksize,
        quant_type=_KINDS[quant_type],
    )
    return product if bias is None else g.op("Add", product, bias)


def _has_kernel(g: Any) -> bool:
    """Return True if the installed onnxruntime can run the operator."""
    node = onnx.helper.make_node(
        "MatMulBnb4",
        ["a", "b", "absmax"],
        ["y"],
        domain="com.microsoft",
        K=16,
        N=1,
        block_size=16,
        quant_type=1,
    )
    kinds = {"a": onnx.TensorProto.FLOAT, "b": onnx.TensorProto.UINT8, "absmax": onnx.TensorProto.FLOAT}
    return bool(g.can_run(node, kinds, {"y": onnx.TensorProto.FLOAT}))
