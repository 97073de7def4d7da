"""Recurrent nets whose length varies.

PyTorch runs ``aten::lstm`` and similar operators on abstract tensors step by step, which fixes the length in
the trace. While a model is traced, operators of torch2ort replace them: these stand-ins only compute the
sizes of the results. They stay in the program, as later passes run it on abstract tensors again.

Under torch.autocast, the results that are in half precision depend on the cell, and on the kernels of oneDNN.
They are found by a call of PyTorch with sequences of one element. Autocast is off in the abstract call, and
torch.export switches oneDNN off, so the settings of both are arguments.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Container, Iterator, Sequence
from typing import Any, Final

import torch

from torch2ort._torch import dispatch as private
from torch2ort.errors import UnsupportedOperatorError

_SETTINGS: Final = (
    "bool has_biases, int num_layers, float dropout, bool train, bool bidirectional, bool batch_first, "
    "*, str autocast='', bool onednn=True"
)
_library = torch.library.Library("torch2ort", "FRAGMENT")
_library.define(
    f"lstm(Tensor input, Tensor[] hx, Tensor[] params, {_SETTINGS}) -> (Tensor, Tensor, Tensor)",
    tags=[torch.Tag.nondeterministic_seeded],
)
for _name in ("gru", "rnn_tanh", "rnn_relu"):
    _library.define(
        f"{_name}(Tensor input, Tensor hx, Tensor[] params, {_SETTINGS}) -> (Tensor, Tensor)",
        tags=[torch.Tag.nondeterministic_seeded],
    )

_OWN: Final = {
    private.recurrent(name): getattr(torch.ops.torch2ort, name).default for name in private.RECURRENT
}
ORIGINALS: Final[dict[Any, Any]] = {
    own: getattr(torch.ops.aten, name).input
    for name, own in zip(private.RECURRENT, _OWN.values(), strict=True)
}


_STAND_INS: Final = {operator: own for own, operator in ORIGINALS.items()}


def fake_call(function: Any, arguments: Sequence[Any], *, onednn: bool) -> Any | None:
    """Return the operator that replaces a call of ``function`` in a trace; ``None`` if none does.

    Args:
        function: the function that is called.
        arguments: its arguments.
        onednn: whether oneDNN is on when the graph runs.

    Raises:
        UnsupportedOperatorError: the call is on a GPU under autocast.
    """
    # The first arguments of a packed sequence are its data and its batch sizes.
    packed = len(arguments) > 3 and isinstance(arguments[3], (list, tuple))
    own = None if packed else _OWN.get(function)
    if own is None:
        return None
    if torch.is_autocast_enabled("cuda") and arguments[0].device.type == "cuda":
        # The half-precision results of cuDNN have not been compared with eager PyTorch.
        raise UnsupportedOperatorError(
            f"{function.__name__} was called on {arguments[0].device} under torch.autocast, whose types of a "
            f"recurrent net on a GPU are untested. Call it in a block "
            f"`with torch.autocast('cuda', enabled=False):`"
        )
    return _as_autocast_is(own, onednn)


def fake_operator(operator: Any) -> Any:
    """Return the stand-in of ``operator`` for tensors without data; ``operator`` itself if it has none."""
    own = _STAND_INS.get(operator)
    return operator if own is None else _as_autocast_is(own, bool(torch.backends.mkldnn.enabled))


def has_fake_operator(operator: Any) -> bool:
    """Return True if ``operator`` has a stand-in for tensors without data."""
    return operator in _STAND_INS


def _as_autocast_is(own: Any, onednn: bool) -> Any:
    """Return an operator of torch2ort with the settings of autocast as arguments."""
    if not torch.is_autocast_enabled("cpu"):
        return own
    dtype = str(torch.get_autocast_dtype("cpu")).removeprefix("torch.")
    return functools.partial(own, autocast=dtype, onednn=onednn)


def original(operator: Any) -> Any:
    """Return PyTorch's operator if ``operator`` is its stand-in, else ``operator`` itself."""
    return ORIGINALS.get(operator, operator)


def is_recurrent(operator: Any) -> bool:
    """Return True if ``operator`` is one of PyTorch's recurrent nets, or the stand-in of one."""
    return original(operator) in _STAND_INS


def restore(program: torch.export.ExportedProgram, wanted: Container[Any]) -> None:
    """Replace the stand-ins of the operators in ``wanted`` by these operators."""
    for node in program.graph_module.graph.nodes:
        if original(node.target) in wanted:
            node.target = original(node.target)


def _output(
    input: torch.Tensor, state: torch.Tensor, bidirectional: bool, batch_first: bool, dtype: torch.dtype
) -> torch.Tensor:
    length, batch = (input.shape[1], input.shape[0]) if batch_first else (input.shape[0], input.shape[1])
    output = input.new_empty((length, batch, (2 if bidirectional else 1) * state.shape[-1]), dtype=dtype)
    # With batch_first, PyTorch's kernels return a transposed view.
    return output.transpose(0, 1) if batch_first else output


_Like = tuple[torch.dtype, tuple[int, ...]]


def _types(
    name: str,
    input: torch.Tensor,
    states: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    settings: tuple[Any, ...],
    autocast: str,
    onednn: bool,
) -> tuple[torch.dtype, ...]:
    """Return the element types of the results: those of the arguments, or those under autocast.

    Args:
        name: one of :data:`private.RECURRENT`.
        input: the sequences.
        states: the initial states.
        params: the weights.
        settings: the other arguments.
        autocast: the dtype that autocast on CPU casts to; empty if it is off.
        onednn: whether oneDNN is on.
    """
    if input.device.type != "cpu" or not autocast:
        return (input.dtype, *(state.dtype for state in states))
    given = (_like(input, (0, 1)), *(_like(state, (1,)) for state in states))
    return _autocast_types(name, autocast, onednn, given, tuple(_like(p) for p in params), settings)


def _like(tensor: torch.Tensor, ones: Container[int] = ()) -> _Like:
    """Return the type and the sizes of a tensor, with sizes above 1 set to 1 in the dimensions ``ones``."""
    return tensor.dtype, tuple(
        1 if i in ones and not (isinstance(n, int) and n == 0) else int(n) for i, n in enumerate(tensor.shape)
    )


@contextlib.contextmanager
def _autocast(dtype: torch.dtype, onednn: bool) -> Iterator[None]:
    """Set ``torch.autocast("cpu", dtype)``, without recording it in a trace, and oneDNN on or off."""
    flags = torch.backends.mkldnn.set_flags(onednn)
    before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", before[0])
        torch.set_autocast_dtype("cpu", before[1])
        torch.backends.mkldnn.set_flags(*flags)


@functools.lru_cache(maxsize=256)
def _autocast_types(
    name: str,
    autocast: str,
    onednn: bool,
    given: tuple[_Like, ...],
    params: tuple[_Like, ...],
    settings: tuple[Any, ...],
) -> tuple[torch.dtype, ...]:
    """Return the element types of the results of a call with zeros under autocast."""
    biases, layers, _, *rest = settings
    with private.as_in_eager(), torch.no_grad(), _autocast(getattr(torch, autocast), onednn):
        input, *states = (torch.zeros(shape, dtype=kind) for kind, shape in given)
        weights = [torch.zeros(shape, dtype=kind) for kind, shape in params]
        begins = states if name == "lstm" else states[0]
        # A call without dropout draws no random numbers.
        results = private.recurrent(name)(input, begins, weights, biases, layers, 0.0, *rest)
    return tuple(result.dtype for result in results)


@torch.library.register_fake("torch2ort::lstm", lib=_library)
def _fake_lstm(
    input: torch.Tensor,
    hx: list[torch.Tensor],
    params: list[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    *,
    autocast: str = "",
    onednn: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden, cell = hx
    settings = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
    types = _types("lstm", input, hx, params, settings, autocast, onednn)
    output = _output(input, hidden, bidirectional, batch_first, types[0])
    return (
        output,
        hidden.new_empty(hidden.shape, dtype=types[1]),
        cell.new_empty(cell.shape, dtype=types[2]),
    )


def _fake_of_one_state(
    name: str,
    input: torch.Tensor,
    hx: torch.Tensor,
    params: list[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    *,
    autocast: str = "",
    onednn: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    settings = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
    of_output, of_state = _types(name, input, [hx], params, settings, autocast, onednn)
    output = _output(input, hx, bidirectional, batch_first, of_output)
    return output, hx.new_empty(hx.shape, dtype=of_state)


for _name in ("gru", "rnn_tanh", "rnn_relu"):
    torch.library.register_fake(
        f"torch2ort::{_name}", functools.partial(_fake_of_one_state, _name), lib=_library
    )
