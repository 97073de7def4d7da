"""Channels-last: images in convolutions and in the operators between them have their channels innermost.

PyTorch's convolution kernels accept this layout directly, and copy others first. Every value of an ONNX graph
is contiguous: a channels-last image is a value with permuted dimensions, and the kernels read and return it
as a view.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable
from typing import cast

import torch

from torch2ort._torch.dispatch import OpOverload
from torch2ort.autotune.alternatives import Rewriting
from torch2ort.differentiate.op_signature import is_fixed
from torch2ort.differentiate.split import Half
from torch2ort.program.dim_order import order_of, order_of_memory, permuted, unpermuted
from torch2ort.program.kernel_sites import arguments_of

aten = torch.ops.aten
# The channels-last order of dimensions in memory, and its inverse.
_LYING, _STANDING = [0, 2, 3, 1], [0, 3, 1, 2]
# Operators whose first result is an image -> positions of their image arguments; the last of these determines
# the layout of the results.
_IMAGES: dict[OpOverload, tuple[int, ...]] = {
    aten.convolution.default: (0,),
    aten.convolution_backward.default: (0, 1),
    aten._native_batch_norm_legit_functional.default: (0,),
    aten._native_batch_norm_legit.no_stats: (0,),
    aten.native_batch_norm_backward.default: (0, 1),
    aten.max_pool2d_with_indices.default: (0,),
    aten.max_pool2d_with_indices_backward.default: (0, 7, 1),
}
_CONVOLUTIONS = frozenset({aten.convolution.default, aten.convolution_backward.default})
# Operators over images of one shape.
_POINTWISE = frozenset(
    {
        *(aten.add.Tensor, aten.alias.default, aten.clone.default, aten.detach.default, aten.gelu.default),
        *(aten.gelu_backward.default, aten.mul.Tensor, aten.relu.default, aten.sigmoid.default),
        *(aten.sigmoid_backward.default, aten.silu.default, aten.silu_backward.default, aten.sub.Tensor),
        *(aten.tanh.default, aten.tanh_backward.default, aten.threshold_backward.default),
    }
)


def image_results(graph: torch.fx.Graph) -> dict[torch.fx.Node, torch.fx.Node]:
    """Map convolutions, and the operators that read their images, to the image that each computes.

    Args:
        graph: a functional graph.
    """
    found: dict[torch.fx.Node, torch.fx.Node] = {}
    images: set[torch.fx.Node] = set()
    for node in graph.nodes:
        image = _image_of(node)
        given = () if image is None else _given(node)
        if image is not None and (
            node.target in _CONVOLUTIONS or any(n in images or _lies(n) for n in given)
        ):
            found[node] = image
            images.add(image)
    return found


def set_channels_last(graph: torch.fx.Graph) -> None:
    """Make convolutions compute channels-last images, and the operators that read these images, too.

    Only the strides of values are changed, as if the model had been traced in that layout.

    Args:
        graph: a functional graph.
    """
    for node, image in image_results(graph).items():
        results = [image]
        if image is not node:
            results = [user for user in node.users if user.target is operator.getitem and _is_image(user)]
        for result in results:
            result.meta["val"] = result.meta["val"].contiguous(memory_format=torch.channels_last)
        if image is not node:
            lying = {result.args[1]: result.meta["val"] for result in results}
            node.meta["val"] = tuple(lying.get(i, value) for i, value in enumerate(node.meta["val"]))


def region(graph: torch.fx.Graph) -> tuple[Half, str] | None:
    """Return a copy of the operators that :func:`set_channels_last` would change, and a text that names them.

    Args:
        graph: the joint graph, which is functional.

    Returns:
        ``None`` if there are none.
    """
    found = image_results(graph)
    chosen = [n for n in graph.nodes if n in found or (n.target is operator.getitem and n.args[0] in found)]
    if not chosen:
        return None
    inside = set(chosen)
    inputs = tuple(dict.fromkeys(n for node in chosen for n in node.all_input_nodes if n not in inside))
    copied, values, words = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node](), []
    for node in inputs:
        values[node] = copied.placeholder(f"value_{len(values)}")
        words.append(repr((node.meta["val"].dtype, node.meta["val"].shape, node.meta["val"].stride())))
    for node in chosen:
        made = values[node] = copied.node_copy(node, values.__getitem__)
        made.name = f"value_{len(values) - 1}"
        words.append(repr((str(made.target), made.args, made.kwargs)))
    for node, made in values.items():
        made.meta = {"val": node.meta["val"]}
    read = [n for n in chosen if isinstance(n.meta["val"], torch.Tensor) and not inside.issuperset(n.users)]
    copied.output(tuple(values[n] for n in read))
    half = Half(torch.fx.GraphModule(torch.nn.Module(), copied), inputs, tuple(read))
    return half, hashlib.sha256("\n".join([*words, repr(copied.output_node().args)]).encode()).hexdigest()


def compute_channels_last(rewriting: Rewriting, graph: torch.fx.Graph) -> None:
    """Compute images in their memory layout.

    Args:
        rewriting: the rewriting of the graph.
        graph: the graph of a half; changed in place.
    """
    lying: dict[torch.fx.Node, torch.fx.Node] = {}
    kernels = []
    for node in list(graph.nodes):
        image = _image_of(node)
        if image is None or not _lies(image):
            continue
        if node.target in _IMAGES:
            for position in _IMAGES[cast(OpOverload, node.target)]:
                given = cast(torch.fx.Node, node.args[position])
                with graph.inserting_before(node):
                    node.update_arg(position, permuted(_as_it_lies(given, lying), _STANDING))
            for result in [image] if image is node else [u for u in node.users if _lies(u)]:
                with graph.inserting_after(result):
                    lying[result] = permuted(result, _LYING)
            kernels.append(node)
        else:
            _compute_lying(node, lying)
    for node in kernels:
        rewriting.to_kernel(node, any_order=True)


def _compute_lying(node: torch.fx.Node, lying: dict[torch.fx.Node, torch.fx.Node]) -> None:
    graph = node.graph
    with graph.inserting_before(node):

        def given(read: torch.fx.Node) -> torch.fx.Node:
            return _as_it_lies(read, lying) if read.meta["val"].dim() == 4 else read

        made = graph.call_function(
            cast(OpOverload, node.target),
            torch.fx.node.map_arg(node.args, given),
            torch.fx.node.map_arg(node.kwargs, given),
        )
        made.meta = {**node.meta, "val": node.meta["val"].permute(_LYING)}
        back = permuted(made, _STANDING)
    for user in [user for user in node.users if order_of(user) == _LYING]:
        user.replace_all_uses_with(made)
        graph.erase_node(user)
    node.replace_all_uses_with(back)
    graph.erase_node(node)


def _as_it_lies(node: torch.fx.Node, lying: dict[torch.fx.Node, torch.fx.Node]) -> torch.fx.Node:
    """Return an image with its channels innermost; a copy where it has another layout."""
    if node in lying:
        return lying[node]
    source, order = unpermuted(node)
    if order == _STANDING:
        return source
    turned = permuted(node, _LYING)
    # A search for the source of a permutation must find the copy, not the tensor that was copied.
    copy = node.graph.call_function(aten.clone.default, (turned,))
    copy.meta = {**turned.meta, "val": turned.meta["val"].contiguous()}
    lying[node] = copy
    return copy


def _given(node: torch.fx.Node) -> Iterable[torch.fx.Node]:
    """Return the images that determine the layout of an operator's result."""
    if node.target in _IMAGES:
        # For a derivative, this is forward's argument, not the gradient.
        return (cast(torch.fx.Node, node.args[_IMAGES[cast(OpOverload, node.target)][-1]]),)
    return node.all_input_nodes


def _image_of(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the image that an operator computes; ``None`` if it does not support both layouts."""
    if not (_takes_images(node) or (node.target in _POINTWISE and is_fixed(node) and _is_of_one_shape(node))):
        return None
    if isinstance(node.meta["val"], torch.Tensor):
        return node
    parts = [u for u in node.users if u.target is operator.getitem and u.args[1] == 0]
    return parts[0] if len(parts) == 1 else None


def _takes_images(node: torch.fx.Node) -> bool:
    """Return True if an operator's kernel supports images in both layouts."""
    if node.target not in _IMAGES or not is_fixed(node):
        return False
    given = [node.args[position] for position in _IMAGES[cast(OpOverload, node.target)]]
    is_transposed = arguments_of(node).get("transposed", False)
    return not is_transposed and all(_is_image(n) for n in cast("list[torch.fx.Node]", given))


def _is_of_one_shape(node: torch.fx.Node) -> bool:
    value = node.meta["val"]
    shapes = [n.meta["val"].shape for n in node.all_input_nodes]
    return _is_image(node) and all(shape == value.shape or not shape for shape in shapes)


def _is_image(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    # With one channel, or one position, both layouts are the same.
    if not isinstance(value, torch.Tensor) or value.dim() != 4:
        return False
    return value.shape[1] > 1 and value.shape[2:].numel() > 1


def _lies(node: torch.fx.Node) -> bool:
    return _is_image(node) and order_of_memory(node.meta["val"]) == _LYING
