"""The rows that a call needs, counted in its tensors before each step."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torch2ort._torch.dispatch import OpOverload
from torch2ort.cache.key.key import Unkeyable
from torch2ort.program.fx_json import dump_argument, load_argument, operator_named
from torch2ort.pythonop.attributes import UnstorableError

# The rows that a step leaves out: those that are not read, and those that attention does not read either.
LABELS, PADDING = "labels", "padding"
# Kinds of masks: all tokens of a sequence attend to each other, or each to itself and to earlier ones.
FULL, CAUSAL = "full", "causal"
# Sizes of inputs for which results that depend on them alone are kept.
_MANY_SIZES = 64


@dataclass(frozen=True)
class Needed:
    """The rows that a call needs.

    Attributes:
        read: True for a row that a loss or a selection reads, of shape (sequences, tokens).
        attended: True for those, and the rows that they depend on by attention.
        labels: the share of labels that losses do not ignore; ``None`` for a program without such a loss.
        masks: the tokens that each token attends to, for each mask of the program.
    """

    read: torch.Tensor
    attended: torch.Tensor
    labels: float | None
    masks: Sequence[torch.Tensor] = ()

    @property
    def tokens(self) -> float:
        """The share of rows that are needed."""
        return self.num_attended / self.attended.numel()

    @functools.cached_property
    def num_read(self) -> int:
        """The number of rows that are read."""
        return int(self.read.sum())

    @functools.cached_property
    def num_attended(self) -> int:
        """The number of rows that are needed."""
        return int(self.attended.sum())

    def kinds(self) -> tuple[str, ...]:
        """Return for each mask how it restricts attention among the rows that are needed.

        Returns:
            :data:`FULL`, :data:`CAUSAL`, or an empty text for another mask.
        """
        needed = self.attended.view(torch.uint8)
        pairs = needed[:, :, None] & needed[:, None, :]
        return tuple(_kind(mask, pairs) for mask in self.masks)


@dataclass(frozen=True)
class Inspection:
    """The computation of :class:`Needed`.

    Attributes:
        sized: computes of the inputs' sizes alone.
        compute: returns, of the inputs and the results of ``sized``, the tensors of an
            :class:`~torch2ort.program.sparsity.inspection_graph.InspectionGraph`.
        inputs: for each input, the position of a feed, or a tensor.
        counts: the numbers of nodes in its attributes ``reads``, ``attended`` and ``valid_labels``.
    """

    sized: torch.fx.GraphModule
    compute: torch.fx.GraphModule
    inputs: tuple[Any, ...]
    counts: tuple[int, int, int]
    _known: dict[Any, Sequence[Any]] = field(default_factory=dict)

    def __call__(self, feeds: Sequence[torch.Tensor]) -> Needed:
        """Return the rows that a call needs.

        Args:
            feeds: the tensors that the program's graph is fed with.
        """
        with torch.no_grad():
            given = [feeds[i] if isinstance(i, int) else i for i in self.inputs]
            sizes = tuple([t.shape for t in given])
            if sizes not in self._known:
                if len(self._known) >= _MANY_SIZES:
                    self._known.clear()
                self._known[sizes] = self.sized(*given)
            found = list(self.compute(*given, *self._known[sizes]))
            reads, masks = found[: self.counts[0]], found[self.counts[0] : sum(self.counts[:2])]
            read = reads[0] if len(reads) == 1 else torch.stack(reads).any(0)
            labels = found[sum(self.counts[:2]) :]
            density = min((float(valid.sum()) / valid.numel() for valid in labels), default=None)
            return Needed(read, _attended(read, masks), density, masks)

    def count(self, feeds: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Return how many numbers of each mask or tensor of labels are not zero, and how many are negative.

        Args:
            feeds: the tensors that the program's graph is fed with.
        """
        found: list[int] = []
        for place in self.inputs:
            tensor = feeds[place] if isinstance(place, int) else place
            if not tensor.is_floating_point():
                found += [int(tensor.count_nonzero()), int((tensor < 0).sum())]
        return tuple(found)

    def to_json(self) -> Any:
        """Return the computation in JSON.

        Raises:
            Unkeyable: it has an input that is no feed, or an argument without a form in JSON.
        """
        if not all(isinstance(i, int) for i in self.inputs):
            raise Unkeyable("the rows of a call depend on a constant tensor of the model")
        try:
            parts = [_to_json(self.sized), _to_json(self.compute)]
        except UnstorableError as error:
            raise Unkeyable(f"the inspection holds {error}") from error
        return {"parts": parts, "inputs": list(self.inputs), "counts": list(self.counts)}

    @classmethod
    def from_json(cls, data: Any) -> Inspection:
        """Return the computation of :meth:`to_json`."""
        sized, compute = map(_from_json, data["parts"])
        first, second, third = data["counts"]
        return cls(sized, compute, tuple(data["inputs"]), (first, second, third))


def _kind(mask: torch.Tensor, pairs: torch.Tensor) -> str:
    """Return the kind of a mask among some pairs of tokens; see :meth:`Needed.kinds`."""
    if not ((mask ^ 1) & pairs).any():
        return FULL
    causal = _causal(pairs.shape[1], pairs.device)
    return "" if ((mask ^ causal) & pairs).any() else CAUSAL


@functools.lru_cache(maxsize=16)
def _causal(tokens: int, device: torch.device) -> torch.Tensor:
    """Return a mask by which each token attends to itself and to earlier ones."""
    return torch.ones(tokens, tokens, dtype=torch.uint8, device=device).tril()


def _attended(read: torch.Tensor, masks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the rows that some rows depend on, by any number of layers."""
    needed = read.view(torch.uint8)  # kernels on bytes are faster than those on booleans
    while True:
        found = needed
        for mask in masks:
            if mask.shape[1] == 1:
                found = found | (mask[:, 0] & needed.amax(1, keepdim=True))
            else:
                found = found | (mask & needed[:, :, None]).amax(1)
        if torch.equal(found, needed):
            return needed.view(torch.bool)
        needed = found


_KINDS = ("rows", "batch", "length", "inverse", "ends")


def input_names(pads: bool, reads: bool) -> tuple[str, ...]:
    """Return the names of the additional inputs of a packed program.

    Args:
        pads: True if the rows that are needed are packed.
        reads: True if those that are read are packed separately.
    """
    of_attended = [f"attended_{kind}" for kind in _KINDS] if pads else []
    of_read = [f"read_{kind}" for kind in _KINDS] if reads else []
    return (*of_attended, *of_read, *(["read_within"] if pads and reads else []))


def index_inputs(names: Sequence[str], used: Collection[str], needed: Needed) -> list[torch.Tensor]:
    """Return the additional inputs of a packed program.

    Args:
        names: their names.
        used: the names of those that the program reads; the others are tensors of any content.
        needed: the rows that the call needs.
    """
    found: dict[str, torch.Tensor] = {}
    for of, mask in (("read", needed.read), ("attended", needed.attended)):
        wanted = {name for name in used if name.startswith(f"{of}_")}
        if of == "attended" and "read_within" in used:
            wanted.add("attended_inverse")
        if not wanted:
            continue
        flat, tokens = mask.reshape(-1), mask.shape[1]
        rows = found[f"{of}_rows"] = flat.nonzero().view(-1)
        if f"{of}_batch" in wanted:
            found[f"{of}_batch"] = rows // tokens
        if f"{of}_length" in wanted:
            found[f"{of}_length"] = rows % tokens
        if f"{of}_ends" in wanted:
            found[f"{of}_ends"] = mask.sum(1).cumsum(0)
        if f"{of}_inverse" in wanted:
            # A row outside of the set gets the position of one that is in it.
            found[f"{of}_inverse"] = flat.cumsum(0).sub_(1).clamp_(min=0).view(mask.shape)
    if "read_within" in used:
        found["read_within"] = found["attended_inverse"].view(-1)[found["read_rows"]]
    empty = torch.empty(0, dtype=torch.int64, device=needed.read.device)
    return [found.get(name, empty) for name in names]


def _to_json(module: torch.fx.GraphModule) -> list[Any]:
    """Return the calls of a graph.

    Raises:
        UnstorableError: an argument has no form in JSON.
    """
    return [
        [node.op, node.name, _name_of(node.target), dump_argument(node.args), dump_argument(node.kwargs)]
        for node in module.graph.nodes
    ]


def _name_of(target: Any) -> str:
    if isinstance(target, (str, OpOverload)):
        return str(target)
    return f"{target.__module__}:{target.__name__}"


def _from_json(nodes: Sequence[Any]) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    made: dict[str, torch.fx.Node] = {}
    for op, name, target, *call in nodes:
        args, kwargs = (load_argument(value, made) for value in call)
        if op == "output":
            graph.output(tuple(args[0]))
        elif op == "placeholder":
            made[name] = graph.placeholder(name)
        else:
            made[name] = graph.call_function(_target(target), tuple(args), kwargs)
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _target(name: str) -> Any:
    module, colon, function = name.partition(":")
    if colon:
        return getattr(importlib.import_module(module), function)
    return operator_named(name)
