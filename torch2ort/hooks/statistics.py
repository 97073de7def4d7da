"""Statistics of each module's outputs and of their gradients, written per step."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import torch

from torch2ort._torch.dispatch import is_fake
from torch2ort.errors import OptionError
from torch2ort.hooks.statistics_records import Record, Writer, statistics, steps
from torch2ort.hooks.subscriber import RunContext, SubscriberBase
from torch2ort.hooks.subscriber import steps as steps_of_models
from torch2ort.log import rank


class StatisticsSubscriber(SubscriberBase):
    """A subscriber that writes statistics of modules' output tensors and their gradients, one file per step.

    The files ``step_000000.jsonl`` are the same for a model in eager PyTorch and on ONNX Runtime: a line of
    JSON for each tensor, with its module, shape, dtype, min, max, mean, std, zeros, nan and inf. ``python -m
    torch2ort compare A B`` shows the first difference between two runs. In a distributed run, each rank other
    than the first writes to a subfolder such as ``rank_1``. An input tensor that a module returns unchanged
    has no gradient of its own.

    Args:
        folder: of the files; it is created.
        start_step: first call of the model, from 0; ``None`` for 0.
        end_step: the call after the last one; ``None`` for no end.
        depth: depth of the deepest modules: 0 for the model only, 1 for its children, too; ``None`` for all.
        overwrite: whether older files in the folder may be deleted.

    Raises:
        OptionError: a number is not allowed, or the folder contains files of another run.
    """

    only_watches = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        start_step: int | None = None,
        end_step: int | None = None,
        depth: int | None = None,
        *,
        overwrite: bool = False,
    ) -> None:
        super().__init__(start_step, end_step, depth)
        path = Path(folder)
        if not overwrite and steps(path):
            raise OptionError(
                f"StatisticsSubscriber: the folder {path} holds statistics of another run; name "
                f"another one, or pass overwrite=True."
            )
        self._key = f"statistics#{next(_numbers)}"
        _folders[self._key] = path

    def attached(self, model: str) -> None:
        """Delete older files of the folder, and begin to write; see :meth:`SubscriberBase.attached`."""
        if self._key in _sinks:
            raise OptionError(
                "StatisticsSubscriber: it is already subscribed to a model; make another one for this model."
            )
        folder = _folders[self._key]
        folder = folder / f"rank_{rank()}" if rank() else folder
        for path in steps(folder).values():
            path.unlink()
        for other in folder.glob("rank_*") if not rank() else ():
            shutil.rmtree(other)
        _sinks[self._key] = _Sink(self, model, folder)

    def detached(self) -> None:
        """Stop writing, also in backwards that are still to come; see :meth:`SubscriberBase.detached`."""
        _sinks.pop(self._key, None)

    def post_forward_tensor_apply_impl(
        self, run_ctx: RunContext, module: torch.nn.Module, tensor_index: int, tensor: torch.Tensor
    ) -> torch.Tensor:
        """Return the tensor after a Function that writes its statistics."""
        result: torch.Tensor = Inspect.apply(
            tensor, self._key, run_ctx.name, type(module).__name__, tensor_index
        )
        return result


# Functions look these objects up by a text among their arguments, as a graph can contain the text. Folders
# are not part of a graph.
_sinks: dict[str, _Sink] = {}
_folders: dict[str, Path] = {}
_numbers = itertools.count()


class _Sink:
    """The destination of one subscriber's records.

    Args:
        subscriber: determines the steps to write.
        model: the name of its model in :data:`torch2ort.hooks.subscriber.steps`.
        folder: of the files.
    """

    def __init__(self, subscriber: StatisticsSubscriber, model: str, folder: Path) -> None:
        self._subscriber = subscriber
        self._model = model
        self._writer = Writer(folder)
        self._lock = threading.Lock()
        self._step = -1
        self._calls: dict[tuple[str, int], int] = {}

    @property
    def step(self) -> int:
        """Number of the model's running call."""
        return steps_of_models[self._model]

    def forward(self, step: int, module: str, kind: str, output: int, tensor: torch.Tensor) -> int:
        """Write a record of a module's output; return the number of the module's call in this step."""
        with self._lock:
            if step != self._step:
                self._step = step
                self._calls.clear()
            call = self._calls.get((module, output), 0)
            self._calls[module, output] = call + 1
        self.write(step, module, kind, "forward", output, call, tensor)
        return call

    def write(
        self, step: int, module: str, kind: str, direction: str, output: int, call: int, tensor: torch.Tensor
    ) -> None:
        """Write one record, if the subscriber's range contains the step."""
        if self._subscriber.is_active(step):
            record = Record(module, kind, direction, output, call, **statistics(tensor))  # type: ignore[arg-type]
            self._writer.write(step, record)


class Inspect(torch.autograd.Function):
    """A copy of a tensor whose statistics are written, in forward and in backward."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, key: str, module: str, kind: str, output: int
    ) -> torch.Tensor:
        """Return a copy: an input that a Function returns unchanged could not be written to in place."""
        ctx.place = None
        if not is_fake(tensor):
            sink = _sinks.get(key)
            if sink is not None:
                step = sink.step
                ctx.place = (
                    key,
                    step,
                    module,
                    kind,
                    output,
                    sink.forward(step, module, kind, output, tensor),
                )
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient unchanged."""
        sink = _sinks.get(ctx.place[0]) if ctx.place is not None else None
        if sink is not None and not is_fake(gradient):
            _, step, module, kind, output, call = ctx.place
            sink.write(step, module, kind, "backward", output, call, gradient)
        return gradient, None, None, None, None

    @staticmethod
    def alias_input(node: str) -> tuple[list[int], list[int]]:
        """Return the aliases: the gradient of the input is that of the copy."""
        return [-1], [0, -1, -1, -1, -1]
