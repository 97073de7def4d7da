"""Names, once, what has no deterministic kernel where deterministic results were asked for."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from torch2ort.graph.origin import Origin
from torch2ort.options import Options
from torch2ort.pythonop import Site
from torch2ort.runtime.profiling import kernel_name
from torch2ort.warning import warn

# Of the operators that run in PyTorch's kernels: those of which torch.use_deterministic_algorithms says so,
# by device. Where two indices are the same, one of two values is left, or their sum in any order.
_KERNELS: Mapping[str, frozenset[str]] = {
    "cpu": frozenset({"put", "put_"}),
    "cuda": frozenset(
        {
            *("put", "put_", "histc", "kthvalue", "median", "ctc_loss", "_ctc_loss_backward", "nll_loss2d"),
            *("adaptive_avg_pool2d_backward", "adaptive_avg_pool3d_backward", "adaptive_max_pool2d_backward"),
            *("avg_pool3d_backward", "max_pool3d_with_indices_backward", "max_unpool2d", "max_unpool3d"),
            *("fractional_max_pool2d_backward", "fractional_max_pool3d_backward", "scatter_reduce"),
            *("upsample_linear1d_backward", "upsample_bilinear2d_backward", "upsample_bicubic2d_backward"),
            *("upsample_trilinear3d_backward", "grid_sampler_2d_backward", "grid_sampler_3d_backward"),
            *("reflection_pad1d_backward", "reflection_pad3d_backward", "replication_pad1d_backward"),
            *("replication_pad2d_backward", "replication_pad3d_backward", "_embedding_bag_dense_backward"),
        }
    ),
}
# Of onnxruntime's own, with any settings: on the CPU there is none.
_OPERATORS: Mapping[str, frozenset[str]] = {
    "cpu": frozenset(),
    "cuda": frozenset({"GatherElementsGrad", "GatherNDGrad", "ResizeGrad", "RoiAlign"}),
}
_PREFIX = "torch.ops.aten."
_named: set[str] = set()


def name_undeterministic(
    graph: onnx.GraphProto, sites: Mapping[str, Site], options: Options, device: str = "cpu"
) -> None:
    """Warn of each operator of a graph that may give other results in another run, if that matters.

    Args:
        graph: what a session is made of.
        sites: what its nodes call, by node name.
        options: of which ``deterministic`` is read.
        device: the kind of device that the session runs on.
    """
    if not options.deterministic:
        return
    for node in graph.node:
        site = sites.get(node.name)
        name = node.op_type if site is None else kernel_name(site)
        known = _OPERATORS if site is None else _KERNELS
        if name.removeprefix(_PREFIX) not in known.get(device, ()) or name in _named:
            continue
        _named.add(name)
        line = Origin.of(node).line
        warn(
            f"Deterministic results were asked for, and {name}{f' ({line})' if line else ''} has no "
            f"deterministic kernel: it may give another result in another run. Use another operator there"
        )
