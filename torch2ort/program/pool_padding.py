"""Padding that makes windows of a pool fit, as ``ceil_mode`` asks for.

ONNX Runtime counts the cells beyond the input that its ``ceil_mode`` adds, and keeps a last window that
begins behind the input, which PyTorch drops. Of sizes that do not vary, the windows of PyTorch are those of a
pool without ``ceil_mode`` whose input is padded at its end.
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
    """How much each dimension is padded at its end, for ``ceil_mode``.

    Args:
        sizes: of the input's last dimensions.
        kernel: of the windows.
        stride: from one window to the next; empty for the kernel's sizes.
        padding: at both ends.
        dilation: from one cell of a window to the next.

    Returns:
        ``None`` where a size varies, or is more than ONNX Runtime pads.
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
    """A number for each of ``rank`` dimensions, where one may be given for all."""
    return list(values) * rank if len(values) == 1 else list(values)
