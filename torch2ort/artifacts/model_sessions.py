"""Sessions over the ONNX files of a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch2ort.artifacts._onnxruntime import onnxruntime
from torch2ort.artifacts.read_training_json import Description, read_model
from torch2ort.artifacts.stateful_session import BoundRun, SessionRunner, make_session
from torch2ort.errors import ModelLoadError


@dataclass(frozen=True)
class OpenSession:
    """A session over one file.

    Attributes:
        session: the session.
        runner: runs the session, if the file calls Functions.
        inputs: names of its inputs.
    """

    session: onnxruntime.InferenceSession
    runner: SessionRunner | None
    inputs: frozenset[str]

    def run(
        self,
        given: Mapping[str, onnxruntime.OrtValue],
        written: Mapping[str, onnxruntime.OrtValue],
        results: Sequence[str],
    ) -> BoundRun:
        """Return a run of the file with these values bound.

        Args:
            given: values by names; those that are inputs are bound.
            written: output -> value that it is written to.
            results: outputs that are fetched.
        """
        fixed = {name: value for name, value in given.items() if name in self.inputs}
        return BoundRun(self.session, fixed, written, results, self.runner)


class SessionFactory:
    """A factory of sessions over the files of one training step.

    Args:
        description: of the step.
        providers: as for onnxruntime; ``None`` for the CPU.
        options: ``onnxruntime.SessionOptions``.
        functions: classes that the files may call, besides those that are registered.
        numbers: returns seed and step, which seed the random numbers of Functions.
    """

    def __init__(
        self,
        description: Description,
        providers: Sequence[Any] | None,
        options: Any,
        functions: Iterable[Any],
        numbers: Callable[[], tuple[int, int]],
    ) -> None:
        self._description, self._providers, self._options = description, providers, options
        # Several files may call the classes, so an iterator is read once.
        self._functions = tuple(functions) if isinstance(functions, Iterator) else functions
        self._numbers = numbers

    def open(self, path: Path, role: str | None = None) -> OpenSession:
        """Open a session over a file.

        Args:
            path: of the file.
            role: the name under which it was saved; ``None`` if it still has that name.

        Raises:
            ModelLoadError: the file is missing, damaged or another one, it calls Functions and PyTorch is
                missing, or onnxruntime does not load it.
            FunctionNotFoundError: a class that it calls was not supplied.
            OptionError: this onnxruntime lacks a provider, or options do not support Functions.
        """
        content = read_model(path.parent, path.name, self._description, role)
        runner = self._runner(content, path)
        session = make_session(content, str(path), self._providers, self._options, runner)
        return OpenSession(session, runner, frozenset(value.name for value in session.get_inputs()))

    def _runner(self, content: bytes, path: Path) -> SessionRunner | None:
        if not self._description.functions:
            return None
        try:
            from torch2ort.artifacts.python_op_runner import FunctionRuns
        except ImportError as error:
            raise ModelLoadError(
                f"{path}: the training step calls {', '.join(self._description.functions)}, Python code that "
                f"runs in PyTorch, which cannot be imported here ({error}). pip install torch, or export the "
                f"step again with the Functions mapped to ONNX operators (torch2ort.register_exporter) and "
                f"their gradients (torch2ort.register_gradient)"
            ) from error
        return FunctionRuns(content, str(path), self._functions, self._numbers, self._providers)
