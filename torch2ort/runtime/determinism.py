"""Warnings about operators without a deterministic kernel, where deterministic results were requested."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx
import torch

from torch2ort.graph.graph_traversal import ancestors
from torch2ort.graph.node_provenance import Origin, kernel_name
from torch2ort.options import Options
from torch2ort.providers import name_of
from torch2ort.pythonop import Site
from torch2ort.support.user_warnings import warn

# Operators in PyTorch's kernels that torch.use_deterministic_algorithms refuses, by device, according to its
# documentation (2.13; the CPU's were tested, CUDA's were not). Where two indices are equal, the result is one
# of two values, or their sum in any order.
_KERNELS: Mapping[str, frozenset[str]] = {
    "cpu": frozenset({"put", "put_", "max_unpool2d", "max_unpool3d"}),
    "cuda": frozenset(
        {
            *("put", "put_", "histc", "bincount", "cumsum", "kthvalue", "median", "scatter_reduce"),
            *("ctc_loss", "_ctc_loss_backward", "nll_loss2d", "nll_loss2d_forward", "max_unpool2d"),
            *("adaptive_avg_pool2d_backward", "adaptive_avg_pool3d_backward", "adaptive_max_pool2d_backward"),
            *("avg_pool3d_backward", "max_unpool3d", "_embedding_bag_dense_backward"),
            *("fractional_max_pool2d_backward", "fractional_max_pool3d_backward"),
            *("upsample_linear1d_backward", "upsample_bilinear2d_backward", "upsample_bicubic2d_backward"),
            *("upsample_trilinear3d_backward", "grid_sampler_2d_backward", "grid_sampler_3d_backward"),
            *("reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward"),
        }
    ),
}
# Operators that only torch.use_deterministic_algorithms makes deterministic.
_WITH_FLAG: Mapping[str, frozenset[str]] = {
    "cpu": frozenset({"index_put", "index_copy"}),
    "cuda": frozenset(
        {
            *("index_put", "index_copy", "index_add", "scatter", "scatter_add", "convolution"),
            *("convolution_backward", "replication_pad1d_backward", "replication_pad2d_backward"),
            "replication_pad3d_backward",
        }
    ),
}
# ONNX Runtime's operators that are not deterministic in any setting, according to its sources; CUDA's were
# not tested. The CPU's split the indices of a ScatterND among threads, which race.
_OPERATORS: Mapping[str, frozenset[str]] = {
    "cpu": frozenset({"ScatterND"}),
    "cuda": frozenset({"GroupNorm", "ScatterElements", "ScatterND", "SkipGroupNorm", "TopK"}),
}
# Operators that are deterministic unless an index occurs twice in their second input.
_BY_INDICES = ("ScatterND",)
# Operators that compute distinct indices, whose values do not depend on those of a tensor.
_DIFFERENT = ("NonZero", "Shape", "Size")
_PREFIX = "torch.ops.aten."
_named: set[str] = set()


def name_undeterministic(graph: onnx.GraphProto, sites: Mapping[str, Site], options: Options) -> None:
    """Warn of each operator of a graph that may return different results in another run, if that matters.

    Args:
        graph: the session's graph.
        sites: the sites that its nodes call, by node name.
        options: the session's options.
    """
    if not options.deterministic:
        return
    inputs = {value.name for value in graph.input}
    devices = _devices(options)
    for node in graph.node:
        site = sites.get(node.name)
        name = node.op_type if site is None else kernel_name(site)
        if name in _named:
            continue
        instead = _instead(name, devices) if site else _instead_of_operator(name, devices, options)
        if not instead:
            continue
        if node.op_type in _BY_INDICES and not inputs & ancestors(graph, [node.input[1]], _DIFFERENT):
            continue
        _named.add(name)
        line = Origin.of(node).line
        warn(
            f"Deterministic results were asked for, and {name}{f' ({line})' if line else ''} has no "
            f"deterministic kernel: it may give another result in another run. {instead}"
        )


def _devices(options: Options) -> tuple[str, ...]:
    """Return the device types of a session; operators without a CUDA kernel run on the CPU."""
    names = [name_of(one) for one in options.providers or ()]
    return ("cpu", "cuda") if "CUDAExecutionProvider" in names else ("cpu",)


def _instead(kernel: str, devices: Collection[str]) -> str:
    """Return advice about a kernel of PyTorch's; an empty text where it is deterministic."""
    operator = kernel.removeprefix(_PREFIX).partition(".")[0]
    if any(operator in _KERNELS[device] for device in devices):
        return "Use another operator there"
    needs_flag = any(operator in _WITH_FLAG[device] for device in devices)
    if needs_flag and not torch.are_deterministic_algorithms_enabled():
        return "Call torch.use_deterministic_algorithms(True), which gives it one"
    return ""


def _instead_of_operator(name: str, devices: Collection[str], options: Options) -> str:
    """Return advice about an operator of ONNX Runtime's; an empty text where it is deterministic."""
    if "cuda" in devices and name in _OPERATORS["cuda"]:
        return "Use another operator there"
    alone = (options.intra_op_threads or torch.get_num_threads()) == 1
    if name in _OPERATORS["cpu"] and not alone:
        return "Use another operator there, or Options(intra_op_threads=1)"
    return ""
