"""What operators do with memory: the one table.

ONNX Runtime may write a result over an input that nobody reads afterwards, and pass an input's memory on
as the result. Whoever hands memory out of a graph, or lets a Function write into it, asks here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Memory:
    """What one operator does.

    Attributes:
        passes_on: whether its first result may be its first input's memory.
        may_vanish: whether optimisers may put the first input in the place of the result.
        reshapes: whether the first result is the first input's memory in another shape, and no more.
        held_outside: whether somebody outside of the graph, or a body of it, may hold its results' memory.
        only_reads: whether it never writes a result over an input.
        owns: whether its results are memory of their own whatever the optimisers do.
        takes_sizes: whether it does not read what is in the memory of its inputs.
    """

    passes_on: bool = False
    may_vanish: bool = False
    reshapes: bool = False
    held_outside: bool = False
    only_reads: bool = False
    owns: bool = False
    takes_sizes: bool = False


_TABLE: dict[str, Memory] = {
    **dict.fromkeys(("Flatten", "Reshape", "Squeeze", "Unsqueeze"), Memory(passes_on=True, reshapes=True)),
    # A View has several results in one memory.
    **dict.fromkeys(("Dropout", "Identity", "View"), Memory(passes_on=True)),
    # To the type that its input has.
    "Cast": Memory(may_vanish=True),
    # A stop-gradient, or a kernel of PyTorch's: the planner knows of neither what it returns.
    "ATen": Memory(passes_on=True, held_outside=True),
    **dict.fromkeys(("If", "Loop", "Scan", "YieldOp"), Memory(held_outside=True)),
    **dict.fromkeys(("PythonOp", "PythonOpGrad"), Memory(held_outside=True, only_reads=True)),
    **dict.fromkeys(
        ("Conv", "Gemm", "LayerNormalization", "MatMul", "SimplifiedLayerNormalization"),
        Memory(only_reads=True, owns=True),
    ),
    **dict.fromkeys(("Shape", "Size"), Memory(takes_sizes=True)),
}
_OTHER = Memory()

# Operators that take no more than the sizes of their inputs.
SIZES = frozenset(name for name, memory in _TABLE.items() if memory.takes_sizes)


def memory_of(operator: str) -> Memory:
    """What an operator does; one that the table does not name may write over any input."""
    return _TABLE.get(operator, _OTHER)
