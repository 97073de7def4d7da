"""Refusal of calls of torch in forward that have effects besides computing, which a graph cannot repeat."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from torch2ort._torch import autograd as private
from torch2ort.errors import ExportError
from torch2ort.support.install_paths import is_pythons, real_path
from torch2ort.support.replaced import replaced
from torch2ort.support.source_lines import is_users, line_in

_QUANTISES = frozenset(
    {torch.quantize_per_tensor, torch.quantize_per_tensor_dynamic, torch.quantize_per_channel}
)
_ASKS_FOR_INFERENCE = (torch.is_inference, torch.Tensor.is_inference)
_BACKWARD = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
# The module whose `forward` calls the model's.
_TRACES = "torch2ort.capture.trace"
# The modes of these libraries only observe, or belong to the trace.
_LIBRARIES = ("torch", "torch2ort")
# Libraries that format sizes for messages, even if the messages are not used.
_WRITES_MESSAGES = ("transformers",)
_SEEDS = "Seed before the call, and leave torch's random state alone in forward"

_BRANCHES = (
    "Compute both branches and choose with torch.where, unroll the loop, or put that part of the model into "
    "a torch.autograd.Function"
)


@contextlib.contextmanager
def refused_calls(model: torch.nn.Module) -> Iterator[None]:
    """Refuse, in the code inside, changes of torch's state: random state, dtype, operators, saved tensors.

    Args:
        model: the model, for messages.
    """
    random: Any = torch.random
    generator, enter = random.default_generator, torch.autograd.graph.saved_tensors_hooks.__enter__
    name = type(model).__name__

    def refuse(what: str, remedy: str) -> None:
        line = line_in(traceback.extract_stack()) or "forward"
        raise ExportError(f"{name}: {line} {what}, which a graph cannot do. {remedy}")

    class Seeded:
        """Random generator that torch's functions use inside."""

        def __getattr__(self, attribute: str) -> Any:
            if attribute in ("manual_seed", "seed", "set_state") and is_forwards():
                if _is_of_dynamo(sys._getframe(2)):
                    refuse(
                        "has a part of it traced by dynamo, as torch.cond and torch.while_loop do", _BRANCHES
                    )
                refuse("sets torch's random state", _SEEDS)
            return getattr(generator, attribute)

    def entered(hooks: Any) -> Any:
        # save_on_cpu moves tensors to the host and back, which changes nothing.
        if not isinstance(hooks, torch.autograd.graph.save_on_cpu) and (
            _is_users_call(sys._getframe(1)) and is_forwards()
        ):
            refuse(
                "packs what autograd saves (saved_tensors_hooks)",
                "Use torch.utils.checkpoint, or have a torch.autograd.Function pack what it saves",
            )
        return enter(hooks)

    with (
        replaced(random, default_generator=Seeded()),
        replaced(torch.autograd.graph.saved_tensors_hooks, __enter__=entered),
        _refused_settings(refuse),
        _refused_texts(refuse),
    ):
        yield


@contextlib.contextmanager
def _refused_settings(refuse: Callable[[str, str], None]) -> Iterator[None]:
    """Refuse to switch the default dtype, and to change operators while they are dispatched."""
    default, dispatches = torch.set_default_dtype, private.TorchDispatchMode.__enter__

    def set_default_dtype(dtype: torch.dtype) -> None:
        if dtype != torch.get_default_dtype() and is_forwards():
            refuse("switches torch's default dtype", "Switch it before the call, or name the dtype")
        default(dtype)

    def entered(mode: Any) -> Any:
        if type(mode).__module__.partition(".")[0] not in _LIBRARIES and is_forwards():
            refuse(
                f"enters the TorchDispatchMode {type(mode).__qualname__}",
                "Change the operators in a TorchFunctionMode, or run the mode around the original model",
            )
        return dispatches(mode)

    with (
        replaced(torch, set_default_dtype=set_default_dtype),
        replaced(private.TorchDispatchMode, __enter__=entered),
    ):
        yield


@contextlib.contextmanager
def _refused_texts(refuse: Callable[[str, str], None]) -> Iterator[None]:
    """Refuse the text of a number that is a symbol in the trace, as the text would contain the symbol's name.

    A library may format one that it uses for messages alone.
    """
    kinds: tuple[Any, ...] = (torch.SymInt, torch.SymFloat, torch.SymBool)
    before = [kind.__repr__ for kind in kinds]

    def telling(tell: Callable[[Any], str]) -> Callable[[Any], str]:
        def text(number: Any) -> str:
            told = tell(number)
            frame = sys._getframe(1)
            if _is_symbolic(told) and _reads_texts(frame) and is_forwards():
                refuse(
                    f"makes a text of a size or number that varies ({told})",
                    "Export for fixed sizes, or leave the text out of forward",
                )
            return told

        return text

    for kind, tell in zip(kinds, before, strict=True):
        kind.__repr__ = telling(tell)
    try:
        yield
    finally:
        for kind, tell in zip(kinds, before, strict=True):
            kind.__repr__ = tell


def _is_symbolic(text: str) -> bool:
    return text not in ("True", "False") and any(c.isalpha() for c in text.replace("e", ""))


def _reads_texts(frame: FrameType) -> bool:
    """Return True if a frame is the user's, who may use a text in any way."""
    name = str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] not in _WRITES_MESSAGES and is_users(frame.f_code.co_filename)


def refuse_call(model: torch.nn.Module, function: Any, arguments: dict[str, Any], *, derived: bool) -> None:
    """Refuse a function of torch that a graph cannot call.

    Args:
        model: the model, for messages.
        function: the function that is called.
        arguments: its arguments by name.
        derived: True if forward makes a tensor of its own require a gradient, which is refused later.

    Raises:
        ExportError: ``function`` is one, or draws from a generator of the user.
    """
    if function in _BACKWARD and not derived:
        what = (
            "runs a backward, which a graph cannot do inside of forward. Put that part of the model into a "
        )
        what += "torch.autograd.Function, or run it behind the call"
    elif private.in_gradient_transform():
        what = (
            "computes a derivative by torch.func (grad, vjp, jacrev, ...), which a graph cannot do inside of "
            "forward. Put that part of the model into a torch.autograd.Function"
        )
    elif function in _QUANTISES:
        what = (
            "makes a quantised tensor, which a graph cannot hold. Use torch.fake_quantize_per_tensor_affine, "
            "or put all that computes with it into one torch.autograd.Function, which keeps PyTorch's kernels"
        )
    elif function in _ASKS_FOR_INFERENCE and _is_users_call(sys._getframe(2)):
        what = (
            "asks whether a tensor was made in inference mode (is_inference), and one graph serves those "
            "that were and those that were not. Ask torch.is_inference_mode_enabled(), or ask in front of "
            "the call"
        )
    elif arguments.get("generator") is not None:
        what = "draws from a generator of its own, and a graph draws from torch's. Omit `generator`"
    else:
        return
    if not is_forwards():
        return
    raise ExportError(f"{type(model).__name__}: {line_in(traceback.extract_stack()) or 'forward'} {what}")


def _is_users_call(frame: FrameType | None) -> bool:
    """Return True if a frame is the user's, or one of Python's (such as ExitStack's) that the user called."""
    while frame is not None and is_pythons(real_path(frame.f_code.co_filename)):
        frame = frame.f_back
    return frame is not None and is_users(frame.f_code.co_filename)


def _is_of_dynamo(frame: FrameType | None) -> bool:
    """Return True if a frame is dynamo's, which restores the random state."""
    return frame is not None and str(frame.f_globals.get("__name__", "")).startswith("torch._dynamo.")


def is_forwards() -> bool:
    """Return True if the model's own code runs, and not that of a Function in it, which runs in each call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("torch2ort.pythonop."):
            return False
        if name == _TRACES and frame.f_code.co_name == "forward":
            return True
        frame = frame.f_back
    return False
