"""The plan of a step: two graphs and tables, as plain data that another process can use.

``plan_builder.py`` builds a plan, ``engine.py`` runs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
import torch

from torch2ort.cache.key.key import Key, Unkeyable
from torch2ort.cache.store.graph_entries import EntryContent
from torch2ort.differentiate.grad_reachability import Reach
from torch2ort.exports.function_lookup import bind_places, places_of
from torch2ort.graph.graph_traversal import load_sites
from torch2ort.graph.lowered_graph import Lowered
from torch2ort.program.traced_program import Constant
from torch2ort.pythonop import Site
from torch2ort.pythonop.attributes import dump_constant, load_constant

_FORWARD, _BACKWARD = "forward.onnx", "backward.onnx"


@dataclass(frozen=True)
class ForwardPlan:
    """The forward half, and the tables that the step around it needs.

    Positions of feeds and outputs are those of the exported graph.

    Attributes:
        lowered: the graph.
        sources: for each of its inputs, the feed's position, or a constant.
        fetched: the fetched outputs, by position among those of the half.
        kept: the values that backward reads: ``i`` for output ``i`` of the half, ``~i`` for its input ``i``.
        donated: positions among ``kept`` of large values that only backward reads: the memory of each is free
            after its last use there.
        tangents: positions of the outputs that may have a gradient, in the order of the backward half.
        reach: the feeds that get a gradient from each output.
        needed: feeds whose memory eager PyTorch's backward would read.
        written: feeds that forward writes to.
        read_outputs: outputs whose memory eager PyTorch's backward would read.
        conditions: conditions on sizes, over ``size(input, dimension)``, that the derivative adds to those of
            the exported graph -> the line of the model of each; empty if it is not known.
    """

    lowered: Lowered
    sources: tuple[int | Constant, ...]
    fetched: tuple[int, ...]
    kept: tuple[int, ...]
    donated: tuple[int, ...]
    tangents: tuple[int, ...]
    reach: Reach
    needed: tuple[int, ...]
    written: tuple[int, ...]
    read_outputs: tuple[int, ...]
    conditions: Mapping[str, str] = field(default_factory=dict)

    def to_entry(self, key: Key) -> EntryContent:
        """Return the plan in the cache's form.

        Args:
            key: of the exported graph.

        Raises:
            Unkeyable: another process could not use the plan.
        """
        constants = [s for s in self.sources if isinstance(s, Constant)]
        for constant in constants:
            if constant.owner:
                raise Unkeyable(f"the model's tensor {constant.owner} is no input of the graph")
        numbers = iter(range(len(constants)))
        data = {
            "sources": [s if isinstance(s, int) else {"constant": next(numbers)} for s in self.sources],
            "constants": [[dump_constant(c.value.dtype), list(c.value.shape)] for c in constants],
            "fetched": list(self.fetched),
            "kept": list(self.kept),
            "donated": list(self.donated),
            "tangents": list(self.tangents),
            "reach": self.reach.description(),
            "needed": list(self.needed),
            "written": list(self.written),
            "read_outputs": list(self.read_outputs),
            "conditions": dict(self.conditions),
            "functions": places_of(self.lowered.calls, key),
        }
        files = {f"constant_{i}": _bytes(constant.value) for i, constant in enumerate(constants)}
        return EntryContent(data, {_FORWARD: self.lowered.proto.SerializeToString(), **files})

    @classmethod
    def from_entry(cls, kept: EntryContent, key: Key) -> ForwardPlan:
        """Load the result of :meth:`to_entry`.

        Raises:
            Torch2OrtError: a Function that the plan calls does not exist in this process.
            Unkeyable: the same.
        """
        data = kept.data
        constants = [
            Constant(_tensor(kept.files[f"constant_{i}"], load_constant(dtype), shape))
            for i, (dtype, shape) in enumerate(data["constants"])
        ]
        proto = onnx.load_from_string(kept.files[_FORWARD])
        calls = load_sites(proto.graph)
        bind_places(calls, data["functions"], key)
        return cls(
            lowered=Lowered(proto, calls, {}),
            sources=tuple(s if isinstance(s, int) else constants[s["constant"]] for s in data["sources"]),
            fetched=tuple(data["fetched"]),
            kept=tuple(data["kept"]),
            donated=tuple(data["donated"]),
            tangents=tuple(data["tangents"]),
            reach=Reach.of(data["reach"], arguments_of(calls)),
            needed=tuple(data["needed"]),
            written=tuple(data["written"]),
            read_outputs=tuple(data["read_outputs"]),
            conditions=data["conditions"],
        )


@dataclass(frozen=True)
class BackwardPlan:
    """The backward half for one set of outputs that have a gradient.

    Attributes:
        lowered: the graph, whose inputs are the saved values, then the gradients; ``None`` if it computes
            nothing.
        given: positions of the outputs whose gradients it reads.
        gradients: position of a feed -> position among the half's outputs.
    """

    lowered: Lowered | None
    given: tuple[int, ...]
    gradients: dict[int, int]

    def to_entry(self, forward: ForwardPlan, key: Key) -> EntryContent:
        """Return the plan in the cache's form.

        Args:
            forward: the plan of the step's other half.
            key: of the exported graph.

        Raises:
            Unkeyable: another process could not use the plan.
        """
        data: dict[str, Any] = {
            "given": list(self.given),
            "gradients": [list(pair) for pair in self.gradients.items()],
            "derivatives": {},
            "functions": {},
        }
        if self.lowered is None:
            return EntryContent(data, {})
        names = {site.key: name for name, site in forward.lowered.calls.items()}
        data["derivatives"] = {node: names[site.key] for node, site in self.lowered.derivatives.items()}
        data["functions"] = places_of(self.lowered.calls, key)
        return EntryContent(data, {_BACKWARD: self.lowered.proto.SerializeToString()})

    @classmethod
    def from_entry(cls, kept: EntryContent, forward: ForwardPlan, key: Key) -> BackwardPlan:
        """Load the result of :meth:`to_entry`.

        Raises:
            Torch2OrtError: a Function that the plan calls does not exist in this process.
            Unkeyable: the same.
        """
        data = kept.data
        half = None
        if kept.files:
            proto = onnx.load_from_string(kept.files[_BACKWARD])
            calls = load_sites(proto.graph)
            bind_places(calls, data["functions"], key)
            derivatives = {node: forward.lowered.calls[name] for node, name in data["derivatives"].items()}
            half = Lowered(proto, calls, derivatives)
        return cls(half, tuple(data["given"]), dict(data["gradients"]))


def arguments_of(calls: Mapping[str, Site]) -> dict[str, tuple[int, ...]]:
    """Map each call that has a backward to the positions of its tensor arguments."""
    return {name: site.tensor_positions for name, site in calls.items() if any(site.needs_input_grad)}


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _tensor(content: bytes, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)
