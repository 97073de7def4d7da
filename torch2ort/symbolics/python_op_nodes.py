"""Translation of a program's opaque operator to ONNX nodes: a PythonOp, or the nodes of an exporter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir
import sympy

from torch2ort.errors import ExportError
from torch2ort.graph.random_nodes import DRAWN_META, described_draw
from torch2ort.kernels.functions import Bernoulli, Dropout
from torch2ort.program.target import Target
from torch2ort.pythonop import (
    ONNX_TYPES,
    SITE_ATTRIBUTE,
    SITE_META,
    Site,
    node_attributes,
    site_by_key,
)
from torch2ort.pythonop.registry import exporter_of
from torch2ort.pythonop.site import needed_inputs
from torch2ort.symbolics.graph_builder import constant, op, ops
from torch2ort.symbolics.registered import map_site


@contextlib.contextmanager
def shown_sites(graph: ir.Graph, sites: Mapping[str, Site]) -> Iterator[None]:
    """Store the sites in the metadata of the nodes of calls, during the inference of shapes.

    They are removed afterwards, as onnxscript's rules keep the last node that they looked at, and so its
    graph, until the next export; a site holds the arguments of its call, which may be modules.
    """
    calls = [node for node in graph if node.name in sites]
    for node in calls:
        node.meta[SITE_META] = sites[node.name or ""]
    try:
        yield
    finally:
        for node in calls:
            del node.meta[SITE_META]


class SiteNodes:
    """Translation of every call of a Function in one program.

    Args:
        names: torch's symbols -> their names in the graph.
        target: the runtime of the graph.
    """

    def __init__(self, names: Mapping[str, sympy.Expr], target: Target) -> None:
        self._names = names
        self._target = target

    def translate(self, inputs: list[ir.Value], key: str) -> list[ir.Value]:
        """Return the outputs of the site with the key ``key``.

        Raises:
            ExportError: the site's exporter is at fault.
        """
        site = site_by_key(key)
        # In a half of a step the site has a backward, which reads tensors that forward saved.
        drawn = _drawn_node(site, inputs)
        if drawn:
            node = drawn[0].producer()
            assert node is not None
            node.metadata_props[SITE_META] = site.key
            return list(drawn)
        own = site.internal or (self._target.is_half and any(site.needs_input_grad))
        exporter = None if own else exporter_of(site)
        if exporter is None:
            return self._python_op(site, inputs)
        mapped = map_site(exporter, site, inputs, self._names, self._target)
        return self._python_op(site, inputs) if mapped is None else mapped

    def translate_backward(
        self, token: None, grads: Sequence[ir.Value | None], key: str, sizes: object
    ) -> list[ir.Value]:
        """Return the gradients of the site with the key ``key``, by a node for this process alone."""
        site = site_by_key(key)
        kinds = [site.known_result.inputs[i] for i in needed_inputs(site)]
        types = [ir.DataType.INT64, *(ir.DataType(ONNX_TYPES[kind.dtype]) for kind in kinds)]
        outputs = ops(
            "com.microsoft::PythonOpGrad",
            *(grad for grad in grads if grad is not None),
            dtypes=types,
            site_key=key,
            func_name=site.func_name,
            gradients=[i for i, grad in enumerate(grads) if grad is not None],
            output_tensor_types=[int(t) for t in types[1:]],
            output_tensor_ranks=[kind.rank for kind in kinds],
        )
        return list(outputs[1:])

    def name_backward(self, graph: ir.Graph) -> dict[str, Site]:
        """Name the graph's PythonOpGrad nodes by their order."""
        sites: dict[str, Site] = {}
        for node in graph:
            if node.op_type == "PythonOpGrad":
                node.name = f"PythonOpGrad_{len(sites)}"
                sites[node.name] = site_by_key(node.attributes.pop("site_key").as_string())
        return sites

    def name(self, graph: ir.Graph) -> dict[str, Site]:
        """Name the graph's PythonOp nodes by their order, which is the same in every process.

        Nodes of ONNX that draw in place of a call are named in the same way, and get its description.
        """
        sites: dict[str, Site] = {}
        drawn = 0
        for node in graph:
            if SITE_ATTRIBUTE in node.attributes:
                node.name = f"PythonOp_{len(sites)}"
                sites[node.name] = site_by_key(node.metadata_props.pop(SITE_META))
            elif SITE_META in node.metadata_props:
                node.name, drawn = f"Drawn_{drawn}", drawn + 1
                site = site_by_key(node.metadata_props.pop(SITE_META))
                node.metadata_props[DRAWN_META] = described_draw(site)
        return sites

    def _python_op(self, site: Site, inputs: list[ir.Value]) -> list[ir.Value]:
        if not inputs:
            # ONNX Runtime treats a node without inputs as a constant, and computes it once.
            raise ExportError(
                f"{site.func_name} was called without a tensor, but a PythonOp node needs at least one as "
                f"input. Pass it a tensor of the model, such as the one whose sizes it uses"
            )
        types = [ir.DataType.INT64, *(ir.DataType(ONNX_TYPES[t.dtype]) for t in site.known_result.tensors)]
        operator = "org.pytorch.aten::ATen" if site.internal else "com.microsoft::PythonOp"
        outputs = ops(operator, *inputs, dtypes=types, **node_attributes(site))
        node = outputs[0].producer()
        assert node is not None
        node.metadata_props[SITE_META] = site.key
        return list(outputs[1:])


def _drawn_node(site: Site, inputs: Sequence[ir.Value]) -> Sequence[ir.Value]:
    """Return the results of ONNX's operator that draws like ``site`` with its own numbers, if there is one.

    Its first inputs are the tensor arguments of the call.
    """
    if site.function is Dropout:
        ratio = constant(np.array(site.arguments[0], np.float32))
        kinds = (inputs[0].dtype, ir.DataType.BOOL)
        return ops("Dropout", inputs[0], ratio, constant(True), dtypes=kinds)
    if site.function is Bernoulli:
        p = constant(site.arguments[0], inputs[0].dtype)
        return [op("Bernoulli", op("Expand", p, op("Shape", inputs[0])))]
    return ()
