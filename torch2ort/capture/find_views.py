"""Search for the views among the outputs of a program, in its trace."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, Final

import sympy
import torch

from torch2ort._torch import dispatch as private
from torch2ort.capture.aliased_outputs import Origin
from torch2ort.capture.grad_mode_regions import GradModeRegions
from torch2ort.capture.output_views import ITEM, OutputView, Step, makes_views
from torch2ort.sizes import expressions as sizes
from torch2ort.sizes.symbols import named, program_size_names

_STRIDED: Final = torch.ops.aten.as_strided.default
# Operators with the sizes of another tensor as argument -> those with sizes.
_LIKE_ANOTHER: Final[dict[Any, Any]] = {
    torch.ops.aten.view_as.default: torch.ops.aten.view.default,
    torch.ops.aten.reshape_as.default: torch.ops.aten.reshape.default,
    torch.ops.aten.expand_as.default: torch.ops.aten.expand.default,
}


def views_of(
    program: torch.export.ExportedProgram, origins: Sequence[Origin], tracked: Sequence[bool], prefix: str
) -> tuple[OutputView | None, ...]:
    """Describe each output of ``program`` that is a view; ``None`` for other outputs.

    Args:
        program: the result of torch.export.
        origins: the outputs that are whole tensors of the caller's, or of one another.
        tracked: for each output, True if it requires a gradient.
        prefix: prefix of the names of parameters and buffers in the program.
    """
    return _Search(program, origins, tracked, prefix).views()


class _Search:
    """Search from each output of a program to the origin of its memory."""

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        origins: Sequence[Origin],
        tracked: Sequence[bool],
        prefix: str,
    ) -> None:
        self._names = program_size_names(program)
        self._tracked = tracked
        signature = program.graph_signature
        weights = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        self._given: dict[torch.fx.Node, tuple[str, int | str]] = {}
        self._symbols: set[str] = set()
        for node in program.graph.nodes:
            if node.name in signature.user_inputs:
                self._given[node] = ("input", signature.user_inputs.index(node.name))
                dims = (named(size, self._names) for size in node.meta["val"].shape)
                self._symbols |= {d for d in dims if isinstance(d, str)}
            elif node.name in weights:
                self._given[node] = ("weight", weights[node.name].removeprefix(prefix))
        self._regions = GradModeRegions(program.graph_module)
        (last,) = (node for node in program.graph.nodes if node.op == "output")
        mutated = len(last.args[0]) - len(origins)
        self._outputs = [self._regions.outside(node) for node in last.args[0][mutated:]]
        self._written = {
            _memory(node.args[0])
            for node in self._regions.nodes
            if self._regions.records(node) and _is_write(node) and isinstance(node.args[0], torch.fx.Node)
        }
        self._chains: list[list[tuple[torch.fx.Node, tuple[Step, ...]]]] = [
            [] if origin is not None or not isinstance(node, torch.fx.Node) else list(self._chain(node))
            for node, origin in zip(self._outputs, origins, strict=True)
        ]
        # The first entry of each chain is the output itself.
        self._position = {chain[0][0]: i for i, chain in reversed([*enumerate(self._chains)]) if chain}

    def views(self) -> tuple[OutputView | None, ...]:
        """Return a view or ``None`` for each output."""
        found = [self._view(i) if chain else None for i, chain in enumerate(self._chains)]
        bases = {v.base for v in found if v is not None}
        return tuple(
            self._sibling(i, found) if v is None and ("output", i) not in bases else v
            for i, v in enumerate(found)
        )

    def _view(self, position: int) -> OutputView | None:
        chain = self._chains[position]
        for node, steps in reversed(chain[1:]):
            base: tuple[str, int | str] | None = self._given.get(node)
            if base is not None and self._tracked[position] and _memory(node) in self._written:
                # The write may carry a gradient, which the caller's tensor does not have.
                return None
            if base is None and node in self._position and _holds_for_a_copy(steps, node):
                base = ("output", self._position[node])
            if base is not None and steps and _memory(node) == _memory(chain[0][0]):
                return OutputView(base, steps)
        return None

    def _sibling(self, position: int, views: Sequence[OutputView | None]) -> OutputView | None:
        """Return the output as a part of another one that covers all of the memory that both are views of."""
        chain = self._chains[position]
        if not chain or len(chain) == 1:
            return None
        mine, root = chain[0][0], chain[-1][0]
        if root in self._given or _memory(mine) != _memory(root):
            return None
        for other, their in enumerate(self._chains):
            if views[other] is not None or not their or their[-1][0] is not root:
                continue
            if not _is_all_of(their[0][0], root):
                continue
            value = mine.meta["val"]
            where = self._sizes((tuple(value.shape), value.stride(), value.storage_offset()))
            # The first output that covers the memory is the base of the others.
            if other == position or where is None:
                return None
            recorded = all(step.recorded for step in chain[-1][1])
            return OutputView(("output", other), (Step(str(_STRIDED), where, recorded=recorded),))
        return None

    def _chain(self, node: torch.fx.Node) -> Iterator[tuple[torch.fx.Node, tuple[Step, ...]]]:
        """Yield the tensors that ``node`` is a view of, itself first, with the steps from each to it."""
        steps: tuple[Step, ...] = ()
        node = self._original(node)
        yield node, steps
        while (step := self._step(node)) is not None:
            steps = (step, *steps)
            inner = node.args[0]
            assert isinstance(inner, torch.fx.Node)
            if step.operator == ITEM:
                node = inner
                continue
            node = self._original(inner)
            yield node, steps

    def _original(self, node: torch.fx.Node) -> torch.fx.Node:
        """Return the tensor that an in-place operator wrote and returned, or that a region got."""
        while True:
            found = _written_and_returned(self._regions.outside(node))
            if found is node:
                return node
            node = found

    def _step(self, node: torch.fx.Node) -> Step | None:
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], torch.fx.Node):
            return None
        if node.target is operator.getitem:
            return Step(ITEM, (node.args[1],)) if makes_views(node.args[0].target) else None
        if not makes_views(node.target):
            return None
        target, args = _LIKE_ANOTHER.get(node.target, node.target), node.args[1:]
        if target is not node.target:
            args = (tuple(node.meta["val"].shape),)
        given, kwargs = self._sizes(args), self._sizes(dict(node.kwargs))
        if given is None or kwargs is None:
            return None
        return Step(str(target), given, kwargs, self._regions.records(node))

    def _sizes(self, value: Any) -> Any:
        """Return ``value`` with a text for each varying size; ``None`` if no text can express it."""
        try:
            return self._express(value)
        except ValueError:
            return None

    def _express(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(map(self._express, value))
        if isinstance(value, dict):
            return {key: self._express(v) for key, v in value.items()}
        if isinstance(value, torch.fx.Node):
            value = value.meta.get("val")
        if isinstance(value, torch.SymInt):
            text = named(value, self._names)
            free: set[Any] = sizes.parse(str(text)).free_symbols
            if not {s.name for s in free} <= self._symbols:
                raise ValueError(text)
            return text if isinstance(text, str) else int(text)
        if value is None or isinstance(value, (bool, int, torch.dtype, torch.memory_format, torch.layout)):
            return value
        raise ValueError(value)


def _holds_for_a_copy(steps: Sequence[Step], base: torch.fx.Node) -> bool:
    """Return True if the steps also work on a graph's copy of ``base``, which is contiguous in memory."""
    value = base.meta["val"]
    is_same = _in_order(value) and str(value.storage_offset()) == "0"
    return is_same or all(step.operator != str(_STRIDED) for step in steps)


def _is_write(node: torch.fx.Node) -> bool:
    return isinstance(node.target, private.OpOverload) and node.target._schema.is_mutable and bool(node.args)


def _written_and_returned(node: torch.fx.Node) -> torch.fx.Node:
    """Return the argument that an in-place operator writes to and returns; for others ``node`` itself."""
    inner = node.args[0] if _is_write(node) else None
    alike = isinstance(inner, torch.fx.Node) and _geometry(inner) == _geometry(node)
    return inner if alike else node  # type: ignore[return-value]


def _geometry(node: torch.fx.Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ""
    return f"{_memory(node)} {value.shape} {value.stride()} {value.storage_offset()}"


def _memory(node: Any) -> object:
    """Return an identity that is equal for tensors of one memory in the trace."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else node


def _is_all_of(whole: torch.fx.Node, root: torch.fx.Node) -> bool:
    """Return True if a view is every element of a contiguous tensor, in order."""
    view, tensor = whole.meta.get("val"), root.meta.get("val")
    if not isinstance(view, torch.Tensor) or not isinstance(tensor, torch.Tensor):
        return False
    # Compared as texts, as a size or an offset may be an unknown number out of a tensor.
    in_order = _in_order(view) and _in_order(tensor) and str(view.storage_offset()) == "0"
    return in_order and sympy.sympify(str(view.numel())) == sympy.sympify(str(tensor.numel()))


def _in_order(tensor: torch.Tensor) -> bool:
    expected: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if str(stride) != str(expected):
            return False
        expected = expected * size
    return True
