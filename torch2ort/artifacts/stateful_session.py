"""The state of a training on its device, and runs that read one set of memory and write another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from torch2ort.artifacts._onnxruntime import onnxruntime
from torch2ort.artifacts.read_training_json import Tensor
from torch2ort.errors import EngineError, ModelLoadError, OptionError
from torch2ort.providers import checked, name_of, session_providers


class SessionRunner(Protocol):
    """A runner of the sessions over a file that calls Functions."""

    content: bytes

    def prepare(self, options: Any) -> None:
        """Prepare a session's options."""

    def run(self, session: Any, binding: Any) -> None:
        """Run a session once."""


def make_session(
    content: bytes,
    name: str,
    providers: Sequence[Any] | None,
    options: Any = None,
    runner: SessionRunner | None = None,
) -> onnxruntime.InferenceSession:
    """Make a session over one of the files.

    Args:
        content: of the file.
        name: of the file, for errors.
        providers: as for onnxruntime; ``None`` for the CPU.
        options: ``onnxruntime.SessionOptions``.
        runner: of a file that calls Functions; its content replaces ``content``.

    Raises:
        OptionError: this onnxruntime lacks a provider, or the providers are not a list.
        ModelLoadError: onnxruntime does not load the file.
    """
    wanted = _checked(providers)
    settings = options or onnxruntime.SessionOptions()
    if options is None:
        # Errors are raised, so onnxruntime need not log them.
        settings.log_severity_level = 4
        settings.use_deterministic_compute = True
    if runner is not None:
        runner.prepare(settings)
        content = runner.content
    try:
        session = onnxruntime.InferenceSession(content, settings, providers=wanted)
    except Exception as error:
        raise ModelLoadError(
            f"{name}: onnxruntime {onnxruntime.__version__} does not load it ({error})"
        ) from error
    for one in map(name_of, wanted):
        if one not in session.get_providers():
            # onnxruntime would only print a line, and train on the CPU.
            raise OptionError(
                f"providers names {one!r}, which onnxruntime {onnxruntime.__version__} could not start; its "
                f"own message on stderr says why"
            )
    return session


def _checked(given: Sequence[Any] | None) -> list[Any]:
    if given is None:
        return session_providers(None)
    try:
        return session_providers(checked(given))
    except ValueError as error:
        reason = str(error) or f"is {given!r}; expected a list of names or of (name, options) pairs"
        raise OptionError(f"providers {reason}") from None


def device_of(session: onnxruntime.InferenceSession) -> str:
    """Return the device of a session's tensors."""
    return "cuda" if session.get_providers()[0] == "CUDAExecutionProvider" else "cpu"


def on_device(array: np.ndarray[Any, Any], device: str) -> onnxruntime.OrtValue:
    """Return a copy of an array on a device."""
    made = onnxruntime.OrtValue.ortvalue_from_shape_and_type(list(array.shape), array.dtype.type, device, 0)
    made.update_inplace(np.ascontiguousarray(array).reshape(array.shape))
    return made


class DeviceTensors:
    """Two sets of named tensors on a device: one is read by a run, and the other is written.

    Args:
        arrays: name -> initial value.
        device: of the tensors.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray[Any, Any]], device: str) -> None:
        self.device = device
        self.names = tuple(arrays)
        self.sets = [{name: on_device(array, device) for name, array in arrays.items()} for _ in range(2)]
        self.current = 0

    def values(self) -> dict[str, onnxruntime.OrtValue]:
        """Return the current values."""
        return self.sets[self.current]

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return copies of the current values."""
        return {name: np.array(value.numpy()) for name, value in self.values().items()}

    def load(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Overwrite current values by new ones."""
        for name, array in arrays.items():
            self.values()[name].update_inplace(np.ascontiguousarray(array).reshape(array.shape))


class BoundRun:
    """Runs of one file with bound inputs and outputs.

    Args:
        session: over the file.
        fixed: input -> value that stays bound.
        written: output -> value that it is written to.
        results: outputs that are fetched.
        runner: of a file that calls Functions.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        fixed: Mapping[str, onnxruntime.OrtValue],
        written: Mapping[str, onnxruntime.OrtValue],
        results: Sequence[str],
        runner: SessionRunner | None = None,
    ) -> None:
        self._session, self._runner = session, runner
        self._binding = session.io_binding()
        for name, value in fixed.items():
            self._binding.bind_ortvalue_input(name, value)
        self._numbers: dict[str, onnxruntime.OrtValue] = {}
        shapes = {value.name: value.shape for value in session.get_outputs()}
        self._fetched: list[str] = []
        for name in results:
            if shapes[name] == []:
                kind = next(v.type for v in session.get_outputs() if v.name == name)
                number = onnxruntime.OrtValue.ortvalue_from_shape_and_type([], _NUMPY[kind], "cpu", 0)
                self._binding.bind_ortvalue_output(name, number)
                self._numbers[name] = number
            else:
                self._binding.bind_output(name, "cpu")
                self._fetched.append(name)
        for name, value in written.items():
            self._binding.bind_ortvalue_output(name, value)
        self._order = [*results, *written]
        self._results = tuple(results)

    def __call__(self, batch: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
        """Run once, as :meth:`arrays`, and return scalars as Python numbers."""
        found = self.arrays(batch)
        return {name: value.item() if name in self._numbers else value for name, value in found.items()}

    def arrays(self, batch: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        """Run once.

        Args:
            batch: the inputs that are not bound.

        Returns:
            The results.

        Raises:
            EngineError: onnxruntime failed. An exception of a Function is propagated unchanged.
        """
        binding = self._binding
        for name, array in batch.items():
            binding.bind_cpu_input(name, array)
        if self._runner is not None:
            self._runner.run(self._session, binding)
        else:
            try:
                self._session.run_with_iobinding(binding)
            except Exception as error:
                raise EngineError(f"onnxruntime failed in a training step: {error}") from error
        found: dict[str, Any] = {name: np.array(value.numpy()) for name, value in self._numbers.items()}
        if self._fetched:
            outputs = binding.get_outputs()
            found.update({name: outputs[self._order.index(name)].numpy() for name in self._fetched})
        return {name: found[name] for name in self._results}


_NUMPY: dict[str, Any] = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(int16)": np.int16,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}


def first_values(state: Mapping[str, Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    """Return zeros of the types and shapes of a state."""
    return {name: np.zeros([int(s) for s in one.shape], one.dtype) for name, one in state.items()}
