"""Translations of pools; the rest run in PyTorch's kernels (program/aten_fallback_policy.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from torch2ort._torch import onnx_exporter as private
from torch2ort.program.pool_padding import of_each, padding_at_the_end
from torch2ort.symbolics.graph_builder import constant, op
from torch2ort.symbolics.translations.registry import translates

aten = torch.ops.aten


def _max_pool(rank: int) -> Callable[..., ir.Value]:
    def translate(
        self: ir.Value,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        dilation: Sequence[int] = (1,),
        ceil_mode: bool = False,
    ) -> ir.Value:
        assert self.shape is not None
        kernel, pads, gaps = (of_each(values, rank) for values in (kernel_size, padding, dilation))
        strides = of_each(stride, rank) or kernel
        end = _end(self.shape[-rank:], kernel, strides, pads, gaps) if ceil_mode else pads
        return _pooled(
            "MaxPool", self, rank, kernel_shape=kernel, strides=strides, pads=[*pads, *end], dilations=gaps
        )

    return translate


def _max_pool_with_indices(operator: Any, rank: int) -> Callable[..., Any]:
    def translate(*arguments: Any) -> Any:
        if not (len(arguments) > 5 and arguments[5]):
            others = private.torchlib_translation(operator)
            assert others is not None
            return others(*arguments)
        # These indices are unused.
        result = _max_pool(rank)(*arguments)
        return result, result

    return translate


def _average_pool(rank: int) -> Callable[..., ir.Value]:
    def translate(
        self: ir.Value,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> ir.Value:
        assert self.shape is not None
        kernel, pads = (of_each(values, rank) for values in (kernel_size, padding))
        strides = of_each(stride, rank) or kernel
        end = _end(self.shape[-rank:], kernel, strides, pads, [1]) if ceil_mode else pads
        # Eager counts the cells of padding, but not those beyond the padding.
        beyond = [last - pad for last, pad in zip(end, pads, strict=True)]
        if count_include_pad and any(beyond) and any(pads):
            left_alone = [0] * (len(self.shape) - rank)
            both = np.array([*left_alone, *pads, *left_alone, *pads], np.int64)
            self, pads, end = op("Pad", self, constant(both)), [0] * rank, beyond
        return _pooled(
            "AveragePool",
            self,
            rank,
            kernel_shape=kernel,
            strides=strides,
            pads=[*pads, *end],
            count_include_pad=int(count_include_pad and not any(beyond)),
        )

    return translate


def _end(sizes: Sequence[object], *settings: Sequence[int]) -> list[int]:
    found = padding_at_the_end(sizes, *settings)
    assert found is not None
    return found


def _pooled(operator: str, self: ir.Value, rank: int, **attributes: Any) -> ir.Value:
    assert self.shape is not None
    is_one = len(self.shape) == rank + 1
    result = op(operator, op("Unsqueeze", self, constant([0])) if is_one else self, **attributes)
    return op("Squeeze", result, constant([0])) if is_one else result


for _rank in (1, 2, 3):
    translates(getattr(aten, f"max_pool{_rank}d").default)(_max_pool(_rank))
    translates(getattr(aten, f"avg_pool{_rank}d").default)(_average_pool(_rank))
for _rank in (2, 3):
    _with_indices = getattr(aten, f"max_pool{_rank}d_with_indices").default
    translates(_with_indices)(_max_pool_with_indices(_with_indices, _rank))
