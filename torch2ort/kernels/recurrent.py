"""Recurrent nets whose length varies.

PyTorch runs ``aten::lstm`` and its like on abstract tensors by going through them step by step, which fixes
the length in the trace. While a model is traced, operators of torch2ort's own stand for them: they say the
sizes of the results and look no further. They stay in the program, as later passes run it on abstract tensors
again.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, Final

import torch

from torch2ort.kernels import _torch_private as private

_SETTINGS: Final = (
    "bool has_biases, int num_layers, float dropout, bool train, bool bidirectional, bool batch_first"
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


def stand_in(function: Any, arguments: Sequence[Any]) -> Any | None:
    """The operator that stands for a call of ``function`` in a trace; ``None`` if none does."""
    # A packed sequence has its data and its batch sizes in front.
    packed = len(arguments) > 3 and isinstance(arguments[3], (list, tuple))
    return None if packed else _OWN.get(function)


def abstract(operator: Any) -> Any:
    """What stands for ``operator`` where tensors have no data, else ``operator`` itself."""
    return _STAND_INS.get(operator, operator)


def original(operator: Any) -> Any:
    """PyTorch's operator where ``operator`` stands for one, else ``operator`` itself."""
    return ORIGINALS.get(operator, operator)


def is_recurrent(operator: Any) -> bool:
    """Whether ``operator`` is one of PyTorch's recurrent nets, or stands for one."""
    return original(operator) in _STAND_INS


def restore(program: torch.export.ExportedProgram, wanted: Container[Any]) -> None:
    """Put PyTorch's operators in the place of those that stand for one of ``wanted``."""
    for node in program.graph_module.graph.nodes:
        if original(node.target) in wanted:
            node.target = original(node.target)


def _output(input: torch.Tensor, state: torch.Tensor, bidirectional: bool, batch_first: bool) -> torch.Tensor:
    length, batch = (input.shape[1], input.shape[0]) if batch_first else (input.shape[0], input.shape[1])
    output = input.new_empty((length, batch, (2 if bidirectional else 1) * state.shape[-1]))
    # PyTorch's kernels give the same memory a second view.
    return output.transpose(0, 1) if batch_first else output


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden, cell = hx
    output = _output(input, hidden, bidirectional, batch_first)
    return output, hidden.new_empty(hidden.shape), cell.new_empty(cell.shape)


def _fake_of_one_state(
    input: torch.Tensor,
    hx: torch.Tensor,
    params: list[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _output(input, hx, bidirectional, batch_first), hx.new_empty(hx.shape)


for _name in ("gru", "rnn_tanh", "rnn_relu"):
    torch.library.register_fake(f"torch2ort::{_name}", _fake_of_one_state, lib=_library)
