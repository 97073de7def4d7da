"""Sessions with inputs and outputs on a GPU, on a given stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch2ort.errors import EngineError
from torch2ort.providers import CUDA, Provider, name_of, session_providers
from torch2ort.runtime import _ort_private as private
from torch2ort.runtime.cuda.streams import SessionStream
from torch2ort.runtime.ortvalues import plain, to_value

# Without it, a run waits for the device at its end.
_NO_WAIT = "disable_synchronize_execution_providers"


def device_of(providers: Sequence[Provider] | None) -> torch.device:
    """Return the device of the tensors of sessions with these providers.

    Args:
        providers: those of the options; ``None`` is the CPU.
    """
    for one in providers or ():
        if name_of(one) == CUDA:
            settings = {} if isinstance(one, str) else dict(one[1])
            return torch.device("cuda", int(settings.get("device_id", "0")))
    return torch.device("cpu")


def on_stream(providers: Sequence[Provider] | None, stream: SessionStream) -> list[Any]:
    """Return providers in the form that a session accepts, CUDA's with a stream.

    The stream is no part of the options, as the options are part of keys that other processes read.

    Args:
        providers: those of the options.
        stream: the session's stream.
    """
    made = []
    for one in session_providers(providers):
        name, settings = (one, {}) if isinstance(one, str) else one
        is_cuda = name == CUDA
        made.append((name, {**settings, "user_compute_stream": str(stream.address)}) if is_cuda else one)
    return made


class DeviceRun:
    """Runs of a session whose outputs stay on a device, without waiting for them.

    Args:
        session: the session.
        outputs: names of the requested outputs.
        device: the outputs' device.
    """

    def __init__(self, session: Any, outputs: Sequence[str], device: torch.device) -> None:
        self._session, self._outputs = session, list(outputs)
        self._places = [private.device_place(device.type, device.index or 0)] * len(outputs)
        self._settings = private.onnxruntime().RunOptions()
        self._settings.add_run_config_entry(_NO_WAIT, "1")

    def __call__(self, names: Sequence[str], values: Sequence[Any]) -> Any:
        """Return one OrtValue per output.

        Args:
            names: names of the inputs.
            values: one OrtValue per input.
        """
        vector = private.pybind().OrtValueVector
        given, found = vector(), vector()
        for value in values:
            given.push_back(value)
        self._session._sess.run_with_ortvaluevector(
            self._settings, list(names), given, self._outputs, found, self._places
        )
        return found


class DeviceFeeds:
    """Conversion of a session's feeds to OrtValues on its device.

    Args:
        device: the session's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def values(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Return one OrtValue per tensor.

        Raises:
            EngineError: a tensor is on another device, and is no number on the CPU.
        """
        return [to_value(self._there(tensor)) for tensor in tensors]

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == self._device:
            return plain(tensor)
        if tensor.is_cpu and not tensor.dim() and not tensor.requires_grad:
            # As in PyTorch, a number on the CPU may be used with tensors of any device.
            return plain(tensor).to(self._device, non_blocking=True)
        raise EngineError(
            f"a tensor is on {tensor.device}, and the sessions of this graph were made for tensors on "
            f"{self._device}. Move it there with .to({str(self._device)!r})"
        )
