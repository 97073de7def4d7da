"""Operators that run in PyTorch's own kernels, as Functions of torch2ort.

An operator without an exact translation to ONNX becomes a node whose Function calls the ATen operator and,
where autograd differentiates the call, PyTorch's own derivative of it. Random operators come here too: they
draw from PyTorch's generator, so ``torch.manual_seed`` has the same effect as in eager PyTorch. A chain of
tokens (each random call's last output is the next one's last input) keeps ONNX Runtime from reordering them.

``Dropout`` and ``Bernoulli`` replace ONNX's operators of these names when torch2ort runs a graph: in a file,
other runtimes compute the nodes with their own random numbers.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from torch2ort._torch import dispatch as private
from torch2ort._torch.dispatch import OpOverload
from torch2ort.errors import ModelLoadError
from torch2ort.kernels.meta_dtype_fixes import eager_dtypes
from torch2ort.kernels.recurrent import fake_operator, has_fake_operator
from torch2ort.kernels.zero_tensors import with_memory

# Operators that a file must not call: they read the disk.
_FORBIDDEN = frozenset({"from_file"})

# Operators of libraries whose own kernels run, forward and backward. A file may name only these, as any other
# operator may do anything.
LIBRARY_OPERATORS = frozenset(
    {"transformers::grouped_mm_fallback", "transformers::grouped_mm_fallback_backward"}
)
# torch2ort's own operators, which a file may name, too.
_OWN_OPERATORS = frozenset({"torch2ort::python_number"})


# Operators whose kernels omit values that a derivative reads, if PyTorch's grad mode is off.
READ_GRAD_MODE = frozenset({torch.ops.aten.mkldnn_rnn_layer.default})

# The keys of a varying number: see :class:`OperatorCall`.
_OF_SIZES = ("size", "minus", "difference")
# The keys of a tensor, and of the number in it.
_OF_TENSORS = ("tensor", "permuted", "item")

# Makes an argument of a call from its tensors.
_Fill = Callable[[Sequence[torch.Tensor]], Any]


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One call of an ATen operator, without its tensors.

    Attributes:
        operator: the overload to call.
        arguments: positional arguments; ``{"tensor": i}`` is tensor ``i`` of the site,
            ``{"permuted": [i, order]}`` that tensor with its dimensions in another order,
            ``{"item": i}`` the number in that tensor, and
            ``{"size": d}`` a varying number: the size of dimension ``d`` of the last tensor, which has no
            elements; ``{"minus": d}`` is its negative, ``{"difference": [d, e]}`` the difference of two
            dimensions.
        keywords: keyword arguments, likewise.
        random: whether it draws from PyTorch's generator; if so, it takes and returns a token.
        views: whether its result is a view of an argument.
        tensors: number of tensor arguments, including the one with the sizes, without the token.
        rest: the plain values after the tensors, if ``operator(*tensors, *rest)`` is the whole call: no
            keywords, no permuted or computed arguments, and one result, which is no view; else ``None``.
        mask: for each result whether it is computed, if the operator is a derivative with a mask; else
            ``None``.
        orders: for each result the order of its dimensions; empty if no result is permuted.
        constants: positional and keyword arguments, with ``None`` in the places of tensors.
        filled: the positions and names of arguments that depend on tensors, each with the function that makes
            it.
    """

    operator: OpOverload
    arguments: Sequence[Any]
    keywords: dict[str, Any]
    random: bool
    views: bool
    tensors: int
    rest: tuple[Any, ...] | None
    mask: Sequence[bool] | None
    orders: Sequence[Sequence[int] | None]
    constants: tuple[Sequence[Any], dict[str, Any]]
    filled: tuple[Sequence[tuple[int, _Fill]], Sequence[tuple[str, _Fill]]]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Call the operator; return its outputs as a flat tuple of tensors."""
        if self.rest is not None:
            return (self.operator(*tensors, *self.rest),)
        result = self.result(tensors[: self.tensors])
        flat: list[torch.Tensor] = []
        for i, value in enumerate((result,) if isinstance(result, torch.Tensor) else result):
            # A result that the mask excludes is unused; kernels and fake kernels return different values for
            # it.
            if value is None or (self.mask is not None and not self.mask[i]):
                flat.append(torch.empty(0))
            elif isinstance(value, torch.Tensor):
                flat.append(value)
            else:
                flat.extend(value)
        for i, order in enumerate(self.orders):
            if order is not None:
                flat[i] = flat[i].permute(*order)
        return tuple(t.clone() for t in flat) if self.views else tuple(flat)

    def result(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the operator's own result for these tensors, including the one with sizes."""
        arguments, keywords = list(self.constants[0]), self.constants[1]
        for i, fill in self.filled[0]:
            arguments[i] = fill(tensors)
        if self.filled[1]:
            keywords = {**keywords, **{name: fill(tensors) for name, fill in self.filled[1]}}
        if private.is_abstract(tensors):
            found = fake_operator(self.operator)(*arguments, **keywords)
            return eager_dtypes(self.operator, arguments, keywords, found)
        if self.operator in READ_GRAD_MODE:
            with torch.enable_grad():
                return self.operator(*arguments, **keywords)
        return self.operator(*arguments, **keywords)


def encode_call(
    operator: OpOverload,
    arguments: Sequence[Any],
    keywords: dict[str, Any],
    *,
    random: bool,
    orders: Sequence[Sequence[int] | None] = (),
) -> str:
    """Return the text that :func:`decode_call` turns into a :class:`OperatorCall`.

    Args:
        operator: an overload of an operator; a file may call it if :func:`is_callable` returns True.
        arguments: positional arguments. ``{"tensor": i}`` is tensor ``i``, ``{"permuted": [i, order]}`` that
            tensor with its dimensions in that order, ``{"item": i}`` its number. ``{"size": d}`` is the size
            of dimension ``d`` of the tensor after all others, ``{"minus": d}`` its negative, and
            ``{"difference": [d, e]}`` the size of dimension ``d`` minus that of ``e``.
        keywords: keyword arguments, likewise.
        random: whether the operator draws from PyTorch's generator.
        orders: for each result the order of its dimensions; ``None`` for a result that is not permuted.

    Raises:
        TypeError: an argument is of a type that the text cannot hold.
    """
    name = operator.name().removeprefix("aten::")
    record: dict[str, Any] = {
        "operator": name,
        "arguments": [_encode(a) for a in arguments],
        "keywords": {k: _encode(a) for k, a in keywords.items()},
        "random": random,
    }
    if not is_callable(operator):
        record["schema"] = str(private.schema_of(operator))
    if any(order is not None for order in orders):
        record["orders"] = [_encode(order) for order in orders]
    return json.dumps(record, sort_keys=True)


def is_callable(operator: OpOverload) -> bool:
    """Return True if a file may call ``operator``, in PyTorch's kernel or in that of its library."""
    return operator.namespace == "aten" or operator.name() in LIBRARY_OPERATORS | _OWN_OPERATORS


def _packet(name: str) -> Any:
    """Return the operator of this name, with all its overloads.

    Raises:
        ModelLoadError: the operator's library is not imported.
    """
    if "::" not in name:
        return getattr(torch.ops.aten, name)
    namespace, _, base = name.partition("::")
    try:
        return getattr(getattr(torch.ops, namespace), base)
    except AttributeError:
        raise ModelLoadError(
            f"the model calls the operator {name}, which is not defined in this process; import the module "
            f"of {namespace} that defines it, as the model's own code does, before the model is loaded"
        ) from None


@functools.lru_cache(maxsize=4096)
def decode_call(text: str) -> OperatorCall:
    """Return the call that ``text`` describes.

    Raises:
        ModelLoadError: the text does not name an ATen operator that a graph may call.
    """
    return _decoded(text, any_library=False)


@functools.lru_cache(maxsize=4096)
def decode_library_call(text: str) -> OperatorCall:
    """Return the call that ``text`` describes, of an operator of any library, which no file may name.

    Raises:
        ModelLoadError: the operator is not registered in this process, or has another schema.
    """
    call = _decoded(text, any_library=True)
    written, found = json.loads(text)["schema"], str(private.schema_of(call.operator))
    if found != written:
        raise ModelLoadError(
            f"the graph was made for the operator {written}, and the one of that name that is registered in "
            f"this process is {found}; export the model again"
        )
    return call


def _decoded(text: str, *, any_library: bool) -> OperatorCall:
    try:
        record = json.loads(text)
        base, _, overload = record["operator"].partition(".")
        if "::" in base and not (any_library or base in LIBRARY_OPERATORS | _OWN_OPERATORS):
            raise KeyError(base)
        operator = getattr(_packet(base), overload or "default")
        arguments, keywords, random = record["arguments"], dict(record["keywords"]), bool(record["random"])
        orders = record.get("orders", [])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"not a call of an ATen operator: {text!r} ({error})") from None
    if base in _FORBIDDEN or operator._schema.is_mutable:
        raise ModelLoadError(f"the model calls aten::{record['operator']}, which no exported graph may call")
    views = any(r.alias_info is not None for r in operator._schema.returns)
    tensors = sum(_count([arguments, keywords], kind) for kind in _OF_TENSORS)
    own = not views and not keywords and not orders and not has_fake_operator(operator)
    own = own and [str(r.type) for r in operator._schema.returns] == ["Tensor"]
    front, rest = arguments[:tensors], tuple(arguments[tensors:])
    plain = front == [{"tensor": i} for i in range(tensors)] and all(map(_is_plain, rest))
    names = [a.name for a in operator._schema.arguments]
    mask = {**dict(zip(names, arguments, strict=False)), **keywords}.get("output_mask")
    tensors += any(_count([arguments, keywords], kind) for kind in _OF_SIZES)
    made = {name: _prepared(value, tensors) for name, value in (*enumerate(arguments), *keywords.items())}
    return OperatorCall(
        operator=operator,
        arguments=arguments,
        keywords=keywords,
        random=random,
        views=views,
        tensors=tensors,
        rest=rest if own and plain else None,
        mask=mask,
        orders=orders,
        constants=([made[i][0] for i in range(len(arguments))], {name: made[name][0] for name in keywords}),
        filled=(_fills(made, range(len(arguments))), _fills(made, keywords)),
    )


class AtenKernel(Function):
    """One ATen operator, forward and backward, in PyTorch's kernels."""

    @staticmethod
    def forward(ctx: Any, text: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the outputs of the call that ``text`` describes, then a token if it is random."""
        call = decode_call(text)
        if not (call.random or any(ctx.needs_input_grad)):
            return call(tensors)
        ctx.set_materialize_grads(False)
        inputs = tensors[: call.tensors]
        outputs = forward_with_graph(ctx, call, inputs) if any(ctx.needs_input_grad) else call(inputs)
        # Some outputs have no gradient, such as integers and Bessel functions.
        edges = ctx.graph.outputs if any(ctx.needs_input_grad) else [None] * len(outputs)
        ctx.mark_non_differentiable(*(o for o, edge in zip(outputs, edges, strict=True) if edge is None))
        if call.random:
            token = torch.zeros(1, dtype=torch.int64)
            ctx.mark_non_differentiable(token)
            return (*outputs, token)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return gradients by PyTorch's derivative of the operator."""
        pairs = [
            (e, g) for e, g in zip(ctx.graph.outputs, grads, strict=False) if e is not None and g is not None
        ]
        if not pairs:
            return (None,) * len(ctx.needs_input_grad)
        return backward_of_graph(ctx, *zip(*pairs, strict=True))


def backward_of_graph(
    ctx: Any, edges: Sequence[GradientEdge], grads: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """Return gradients of a Function's arguments by the graph that :func:`forward_with_graph` stored in ctx.

    Args:
        ctx: the context.
        edges: the edges at which gradients arrive.
        grads: the gradients.
    """
    graph: AutogradGraph = ctx.graph
    wanted = [edge for edge in graph.inputs if edge is not None]
    graph.saved[:] = ctx.saved_tensors
    try:
        # The graph is retained as long as ctx exists: the user may call backward a second time.
        found = iter(torch.autograd.grad(edges, wanted, grads, allow_unused=True, retain_graph=True))
    finally:
        graph.saved.clear()
    result = [None if edge is None else _compact(next(found)) for edge in graph.inputs]
    return (None, *result, *(None,) * (len(ctx.needs_input_grad) - 1 - len(result)))


class DropoutNoise(Function):
    """The factor by which eager dropout on CPU multiplies: 0, or 1 / (1 - p)."""

    @staticmethod
    def forward(
        ctx: Any, p: float, order: tuple[int, ...], like: torch.Tensor, *token: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return noise of the shape of ``like``, and a token.

        Args:
            ctx: the context.
            p: probability of a zero.
            order: dimensions of the eager tensor from the slowest to the fastest in memory, along
                which PyTorch fills in random numbers.
            like: any tensor of the wanted shape and element type.
            token: the previous random call's token, if there is one.
        """
        del token
        noise = _noise(p, order, like)
        after = torch.zeros(1, dtype=torch.int64)
        ctx.mark_non_differentiable(noise, after)
        return noise, after

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, ...]:
        """Return no gradients: noise has none."""
        return (None,) * len(ctx.needs_input_grad)


def _noise(p: float, order: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Return the factors by which eager dropout multiplies; see :class:`DropoutNoise`."""
    shape = [like.shape[d] for d in order]
    noise = torch.empty(shape, dtype=like.dtype, device=like.device).bernoulli_(1 - p).div_(1 - p)
    if tuple(order) == tuple(sorted(order)):
        return noise
    return noise.permute([order.index(d) for d in range(len(order))]).contiguous()


class Dropout(Function):
    """Eager dropout on CPU, for a node that is ONNX's own operator in a file."""

    @staticmethod
    def forward(
        ctx: Any, p: float, order: tuple[int, ...], dtype: torch.dtype, source: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``source`` times noise, and the mask of the elements that were kept.

        Args:
            ctx: the context.
            p: probability of a zero.
            order: as for :class:`DropoutNoise`.
            dtype: the dtype in eager PyTorch, which may be narrower than that of ``source``: it rounds.
            source: the input, whose values are representable in ``dtype``.
        """
        narrow = source.to(dtype)
        noise = _noise(p, order, narrow)
        return (narrow * noise).to(source.dtype), noise != 0

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, ...]:
        """Return no gradients: no file computes them."""
        return (None,) * len(ctx.needs_input_grad)


class Bernoulli(Function):
    """Ones with a probability, else zeros, for a node that is ONNX's own operator in a file."""

    @staticmethod
    def forward(ctx: Any, p: float, like: torch.Tensor) -> torch.Tensor:
        """Draw numbers of the shape and element type of ``like``."""
        return torch.empty_like(like).bernoulli_(p)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, ...]:
        """Return no gradients: random numbers have none."""
        return (None,) * len(ctx.needs_input_grad)


def _compact(tensor: torch.Tensor | None) -> torch.Tensor | None:
    # An empty tensor counts as contiguous with any strides in PyTorch, but not across DLPack.
    if tensor is None or tensor.numel():
        return None if tensor is None else with_memory(tensor)
    return torch.empty(tensor.shape, dtype=tensor.dtype)


@dataclass(slots=True)
class AutogradGraph:
    """PyTorch's graph of one call; the tensors that it saved are stored in ctx, where the runtime sees them.

    Attributes:
        inputs: for each tensor argument, the edge at which its gradient leaves; ``None`` without one.
        outputs: for each output, the edge at which its gradient arrives; ``None`` without one.
        saved: the tensors that the nodes of the graph saved, while a derivative is computed; else empty.
            The nodes' hooks hold this list. They do not hold this object, as that would keep the edges alive:
            the garbage collector does not traverse autograd's nodes.
        zero_edge: an edge to start from if no output has a gradient: its node returns ``None`` for each
            output, so autograd calls the operator's derivative without gradients. ``None`` for operators
            whose derivative is not called then.
    """

    inputs: list[GradientEdge | None]
    outputs: list[GradientEdge | None]
    saved: list[torch.Tensor]
    zero_edge: GradientEdge | None = None


class _Entry(Function):
    """A view of a tensor that requires a gradient, without a leaf that would keep the tensor's memory."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        return None, None


_anchor = torch.empty(0, requires_grad=True)


class _Nothing(Function):
    """A node that returns no gradients for its inputs, so autograd calls their nodes without gradients."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


def forward_with_graph(
    ctx: Any, call: OperatorCall, tensors: Sequence[torch.Tensor], *, runs_without: bool = False
) -> tuple[torch.Tensor, ...]:
    """Run a call and return its outputs; store PyTorch's graph of it as ``ctx.graph``, and its saved tensors.

    Args:
        ctx: the context of the Function that calls it.
        call: the call.
        tensors: its arguments: those of the Function from the second on.
        runs_without: whether its derivative is also called if no output has a gradient.
    """
    saved: list[torch.Tensor] = []
    graph = AutogradGraph([], [], saved)

    def pack(tensor: torch.Tensor) -> int:
        saved.append(tensor.detach())
        return len(saved) - 1

    is_recurrent = has_fake_operator(call.operator)
    if is_recurrent and not private.is_abstract(tensors):
        # A recurrent net saves tensors of each position, hundreds of calls of a hook. Its graph keeps them
        # itself instead, in memory that is not the runtime's.
        tensors = [t if isinstance(t, torch.nn.Parameter) else t.clone() for t in tensors]
    with torch.enable_grad():
        entries = [
            _Entry.apply(_anchor, t) if needed else t
            for t, needed in zip(tensors, ctx.needs_input_grad[1:], strict=False)
        ]
        with nullcontext() if is_recurrent else saved_tensors_hooks(pack, saved.__getitem__):
            outputs = call(entries)
        tracked = [t for t in outputs if t.requires_grad]
        if runs_without and tracked:
            graph.zero_edge = get_gradient_edge(_Nothing.apply(*tracked))
    if is_recurrent:
        saved += [t.detach() for t in tensors]
    graph.inputs = [get_gradient_edge(t) if t.requires_grad else None for t in entries]
    graph.outputs = [get_gradient_edge(t) if t.requires_grad else None for t in outputs]
    ctx.graph = graph
    ctx.save_for_backward(*saved)
    saved.clear()
    return tuple(t.detach() for t in outputs)


def _encode(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_encode(v) for v in value]
    if isinstance(value, dict) and len(value) == 1 and value.keys() <= {*_OF_TENSORS, *_OF_SIZES}:
        return value
    for kind in (torch.dtype, torch.layout, torch.memory_format):
        if isinstance(value, kind):
            return {kind.__name__: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    raise TypeError(f"an argument of type {type(value).__name__} cannot be written into a graph")


def _decode(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "size":
        return tensors[-1].shape[content]
    if kind == "minus":
        return -tensors[-1].shape[content]
    if kind == "difference":
        return tensors[-1].shape[content[0]] - tensors[-1].shape[content[1]]
    if kind == "permuted":
        return tensors[content[0]].permute(content[1])
    if kind == "item":
        return _item(tensors[content])
    if kind == "device":
        return torch.device(content)
    return getattr(torch, content)


def _item(tensor: torch.Tensor) -> bool | int | float:
    """Return the number in a tensor; any number of its type for an abstract one, as no size depends on it."""
    if private.is_abstract([tensor]):
        return torch.ones((), dtype=tensor.dtype, device="cpu").item()
    return tensor.item()


def _prepared(value: Any, tensors: int) -> tuple[Any, _Fill | None]:
    """Return the result of :func:`_decode`, or ``None`` and a function of the tensors if it depends on them.

    Args:
        value: an argument of a call in its encoded form.
        tensors: how many tensors the call has.
    """
    if not isinstance(value, (dict, list)):
        return value, None
    if isinstance(value, list):
        parts = [_prepared(v, tensors) for v in value]
        if all(fill is None for _, fill in parts):
            return [part for part, _ in parts], None
        return None, lambda given: [part if fill is None else fill(given) for part, fill in parts]
    ((kind, content),) = value.items()
    if kind == "tensor":
        return None, itemgetter(content)
    if kind in ("permuted", "item") or kind in _OF_SIZES:
        return None, lambda given: _decode(value, given[:tensors])
    return _decode(value, ()), None


def _fills(made: Mapping[Any, tuple[Any, _Fill | None]], names: Iterable[Any]) -> list[tuple[Any, _Fill]]:
    return [(name, fill) for name in names if (fill := made[name][1]) is not None]


def _is_plain(value: Any) -> bool:
    return not isinstance(value, (dict, list))


def _count(value: Any, kind: str) -> int:
    if isinstance(value, list):
        return sum(_count(v, kind) for v in value)
    if isinstance(value, dict):
        return 1 if set(value) == {kind} else sum(_count(v, kind) for v in value.values())
    return 0
