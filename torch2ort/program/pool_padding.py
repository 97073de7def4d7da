"""Padding that makes the windows of a pool fit, as ``ceil_mode`` requires.

ONNX Runtime counts the cells beyond the input that its ``ceil_mode`` adds, and keeps a last window that
begins behind the input, which PyTorch drops. For fixed sizes, PyTorch's windows are those of a pool without
``ceil_mode`` whose input is padded at its end.
"""

from __future__ import annotations

from collections.abc import Sequence


def padding_at_the_end(
    sizes: Sequence[object],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int] | None:
    """Compute the padding at the end of each dimension for ``ceil_mode``.

    Args:
        sizes: sizes of the input's last dimensions.
        kernel: sizes of the windows.
        stride: distance from one window to the next; empty for the kernel's sizes.
        padding: padding at both ends.
        dilation: distance from one cell of a window to the next.

    Returns:
        ``None`` where a size varies, or the padding is more than ONNX Runtime supports.
    """
    found = []
    rank = len(sizes)
    strides = of_each(stride, rank) or of_each(kernel, rank)
    all_of = (of_each(kernel, rank), strides, of_each(padding, rank), of_each(dilation, rank))
    for size, window, step, pad, gap in zip(sizes, *all_of, strict=True):
        if type(size) is not int:
            return None
        length = gap * (window - 1) + 1
        count = -((length - size - 2 * pad) // step) + 1
        if (count - 1) * step >= size + pad:
            count -= 1
        end = max(pad, (count - 1) * step + length - size - pad)
        if end >= window:
            return None
        found.append(end)
    return found


def of_each(values: Sequence[int], rank: int) -> list[int]:
    """Return a number for each of ``rank`` dimensions, where one number may be given for all."""
    return list(values) * rank if len(values) == 1 else list(values)
