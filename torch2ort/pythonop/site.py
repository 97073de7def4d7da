"""A site: one call of a Function in an exported model.

All stages use the site: capture makes it, the exported node stores it as an attribute, loading reads it back,
and the runtime binds it to a class. Every decision that is the same in each run is made here, once.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch

from torch2ort.errors import ExportError
from torch2ort.pythonop.autocast import Autocast
from torch2ort.pythonop.caught_exceptions import ExceptClause

# A number, or the argument position and dimension that has this size; ``None`` if it is unknown.
Size = int | tuple[int, int] | None


# The message of eager PyTorch.
UNSAVABLE = (
    "Inference tensors cannot be saved for backward. Please do not use Tensors created in inference mode in "
    "computation tracked by autograd. To work around this, you can make a clone to get a normal tensor and "
    "use it in autograd, or use `torch.no_grad()` instead of `torch.inference_mode()`."
)


@final
class _TensorMarker:
    """Type of :data:`TENSOR`, the singleton that marks the place of a tensor."""

    def __repr__(self) -> str:
        return "TENSOR"

    def __reduce__(self) -> str:
        return "TENSOR"


TENSOR: Final = _TensorMarker()


@dataclass(frozen=True, slots=True)
class TensorType:
    """Element type and rank of a tensor, which stay the same when sizes vary."""

    dtype: torch.dtype
    rank: int


@dataclass(frozen=True, slots=True)
class Result:
    """Outputs of a site's ``forward`` and the memory that it keeps, as found by an abstract run.

    Attributes:
        inputs: type of each tensor argument, in call order.
        outputs: one entry per value that ``forward`` returns: :data:`TENSOR` or the constant itself.
        tensors: type of each tensor output; those of :attr:`hidden` follow the returned ones.
        returns_tuple: True if ``forward`` returned a tuple, False for a single value.
        non_differentiable: positions among the tensor outputs that get no gradient.
        mutated: argument positions whose tensor ``forward`` writes in place.
        returned_inputs: output position -> argument position, where a mutated argument is returned.
        hidden: mutated argument positions that ``forward`` does not return; each is one more tensor
            output after the returned ones, so that the write reaches the exported graph.
        kept: argument positions whose memory the Function still holds after ``forward``.
        saved: the positions among these that it passed to ``save_for_backward``, itself or as a view; only a
            trace uses them, and no file contains them.
        uses_rng: True if ``forward`` draws from PyTorch's random generator.
        effects: True if ``forward`` writes to Python objects, so that calls must keep the program's order.
        observed: True if a run of ``forward`` showed all this; otherwise a shape inferer did, and the rest
            is assumed and checked in each run.
        forward_map: output position -> argument position, where a declared in-place map says that the
            output is the argument's memory.
        backward_map: argument position -> output position, where it says that the argument's gradient is
            the memory of the output's gradient.
        kept_results: positions among the tensor outputs whose memory the Function still holds after
            ``forward``; ``None`` if that is unknown.
        sizes: the sizes of each tensor output, if the graph is valid for these only and each run checks them;
            otherwise empty.
        attributes: output position and name of each attribute that ``forward`` sets on an output; only a
            trace uses them, as ``saved``.
        repeated: output position -> last position at which ``forward`` returns the same tensor; only that
            position gets the gradient.
    """

    inputs: tuple[TensorType, ...]
    outputs: tuple[Any, ...]
    tensors: tuple[TensorType, ...]
    returns_tuple: bool
    non_differentiable: tuple[int, ...] = ()
    mutated: tuple[int, ...] = ()
    returned_inputs: tuple[tuple[int, int], ...] = ()
    hidden: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    saved: tuple[int, ...] = field(default=(), compare=False)
    uses_rng: bool = False
    effects: bool = False
    observed: bool = True
    forward_map: tuple[tuple[int, int], ...] = ()
    backward_map: tuple[tuple[int, int], ...] = ()
    kept_results: tuple[int, ...] | None = None
    sizes: tuple[tuple[Size, ...], ...] = ()
    attributes: tuple[tuple[int, str], ...] = field(default=(), compare=False)
    repeated: tuple[tuple[int, int], ...] = ()

    @property
    def checked(self) -> bool:
        """True if each run checks that the results of ``forward`` are those that the graph was made for."""
        return not self.observed or bool(self.sizes or self.repeated)

    @property
    def views(self) -> dict[int, int]:
        """The pairs of :attr:`forward_map` whose argument is not written to."""
        return {output: argument for output, argument in self.forward_map if argument not in self.mutated}


@dataclass(eq=False)
class Site:
    """One call of a Function: the class, the arguments, and the result.

    Attributes:
        func_name: qualified name of the Function, with ``#2`` and so on if several classes of one
            model share it.
        function: the class, or ``None`` while a loaded model's name is not resolved.
        arguments: one entry per argument of ``apply``: :data:`TENSOR` or the exact Python value.
        needs_input_grad: one entry per argument of ``apply``, as ``ctx.needs_input_grad`` shows it.
        training: True if the model was exported in training mode.
        internal: True if torch2ort made the site itself, to run an operator in PyTorch's kernel.
        originals: positions of the arguments that are parameters, buffers or inputs of the model, and not
            computed tensors: if a run has these very objects, ``forward`` gets them.
        written_back: the positions among ``originals`` of arguments that backward writes to.
        fresh: positions of the mutable arguments that the model's forward creates in each of its calls, such
            as a list: each call of the Function gets a copy.
        shared: ids of the containers inside of ``fresh`` arguments that have another owner, too, such as the
            model: they are not copied.
        keeps_state: True if the Function's ``forward`` writes to an argument that is not in ``fresh``.
        remembers: True if it writes to an object or tensor that exists after its call.
        caught: ``except`` clauses in the model's code that catch exceptions of the call.
        autocast: settings of autocast at the call; ``None`` if it is off there.
        result: result of ``forward``; ``None`` until the abstract run.
        shapes: shape of each tensor output in the trace; empty for a loaded site.
        key: name of this site that is unique in the process.
    """

    func_name: str
    function: type[torch.autograd.Function] | None
    arguments: tuple[Any, ...]
    needs_input_grad: tuple[bool, ...]
    training: bool
    internal: bool = False
    originals: tuple[int, ...] = ()
    written_back: tuple[int, ...] = ()
    fresh: tuple[int, ...] = ()
    shared: frozenset[int] = frozenset()
    keeps_state: bool = False
    remembers: bool = False
    caught: tuple[ExceptClause, ...] = ()
    autocast: Autocast | None = None
    result: Result | None = None
    shapes: tuple[tuple[int | torch.SymInt, ...], ...] = ()
    key: str = field(default="")

    def __post_init__(self) -> None:
        self.key = f"{self.func_name}@{next(_serial)}"
        _live[self.key] = self

    @property
    def tensor_positions(self) -> tuple[int, ...]:
        """Argument positions that hold tensors, in call order."""
        return tuple(i for i, value in enumerate(self.arguments) if value is TENSOR)

    @property
    def constants(self) -> dict[int, Any]:
        """Argument position -> exact Python value, for the arguments that are not tensors."""
        return {i: value for i, value in enumerate(self.arguments) if value is not TENSOR}

    @property
    def known_result(self) -> Result:
        """The result; :class:`ExportError` is raised if no abstract run has found it."""
        if self.result is None:
            raise ExportError(
                f"{self.func_name}: the outputs of this call were never inferred; export the model again"
            )
        return self.result

    def call_arguments(self, tensors: list[torch.Tensor]) -> list[Any]:
        """Return the arguments of one call: ``tensors`` at the tensor positions, constants elsewhere."""
        supply = iter(tensors)
        return [next(supply) if value is TENSOR else value for value in self.arguments]


@dataclass(frozen=True, slots=True)
class PythonOpSite:
    """Public description of a site in ``ExportedModel.python_ops``.

    Attributes:
        func_name: qualified name of the Function (with ``#2``, ... where classes share a name).
        function: the class, or ``None`` if the name is not resolved.
        node_name: name of the ``PythonOp`` node.
        arguments: argument position -> exact Python value of each non-tensor argument.
    """

    func_name: str
    function: type[torch.autograd.Function] | None
    node_name: str
    arguments: dict[int, Any]


def qualified_name(function: type) -> str:
    """Return ``module.qualname`` of a class, the name that registries and files use."""
    return f"{function.__module__}.{function.__qualname__}"


def site_by_key(key: str) -> Site:
    """Return the live site of that key; raise ``KeyError`` if the site no longer exists."""
    return _live[key]


# Sites by the opaque operator's string argument. References are weak, because the export owns its sites.
_live: weakref.WeakValueDictionary[str, Site] = weakref.WeakValueDictionary()
_serial = itertools.count()


def needed_inputs(site: Site) -> tuple[int, ...]:
    """Return the site's tensor arguments that need a gradient, counted among the tensor arguments."""
    return tuple(i for i, p in enumerate(site.tensor_positions) if site.needs_input_grad[p])
