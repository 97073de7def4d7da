"""Statistics of tensors as lines of JSON, in one file per step."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

_FILE = re.compile(r"step_(\d+)\.jsonl")


@dataclass(frozen=True)
class Record:
    """Statistics of one tensor in one step.

    Attributes:
        module: path of the module that returned it, ``""`` for the model.
        kind: class of that module.
        direction: ``"forward"`` for the tensor, ``"backward"`` for its gradient.
        output: its index among the tensors that the module returned.
        call: number of the module's call in this step.
        shape: its sizes.
        dtype: as ``"float32"``.
        min: smallest finite element; ``None`` if no element is finite. Statistics of complex tensors are
            those of the absolute values.
        max: largest finite element.
        mean: of the finite elements.
        std: standard deviation of the finite elements, without Bessel's correction.
        zeros: number of elements that are 0.
        nan: number of elements that are NaN.
        inf: number of elements that are infinite.
    """

    module: str
    kind: str
    direction: str
    output: int
    call: int
    shape: tuple[int, ...]
    dtype: str
    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    zeros: int
    nan: int
    inf: int

    @property
    def place(self) -> tuple[str, str, int, int]:
        """The key of the record's tensor, the same in two runs of one model."""
        return self.direction, self.module, self.call, self.output


def statistics(tensor: torch.Tensor) -> dict[str, object]:
    """Return the fields of a :class:`Record` that describe the contents of a tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    values = tensor.detach()
    values = values.to_dense() if values.is_sparse else values
    values = (values.abs() if values.is_complex() else values).to(torch.float64)
    finite = values[values.isfinite()]
    has = finite.numel() > 0
    return {
        "shape": tuple(tensor.shape),
        "dtype": dtype,
        "min": float(finite.min()) if has else None,
        "max": float(finite.max()) if has else None,
        "mean": float(finite.mean()) if has else None,
        "std": math.sqrt(float(finite.var(correction=0))) if has else None,
        "zeros": int((values == 0).sum()),
        "nan": int(values.isnan().sum()),
        "inf": int(values.isinf().sum()),
    }


class Writer:
    """A writer that appends records to the files of a folder; no file stays open.

    Args:
        folder: created at the first write.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()

    def write(self, step: int, record: Record) -> None:
        """Append one record."""
        line = json.dumps(asdict(record))
        with self._lock:
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(self._folder / f"step_{step:06d}.jsonl", "a", encoding="utf-8") as stream:
                stream.write(line + "\n")


def steps(folder: Path) -> dict[int, Path]:
    """Return the files of a folder by step, in order."""
    matches = ((_FILE.fullmatch(path.name), path) for path in folder.iterdir()) if folder.is_dir() else ()
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def read(path: Path) -> Iterator[Record]:
    """Yield the records of a file, in the order in which they were written.

    Raises:
        ValueError: a line is not a record.
    """
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            fields = json.loads(line)
            yield Record(**{**fields, "shape": tuple(fields["shape"])})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path}, line {number}: not a record of a StatisticsSubscriber ({error})"
            ) from error
