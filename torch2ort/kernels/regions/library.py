"""Compiled regions: made by torch's inductor, kept in the export cache, loaded once a process."""

from __future__ import annotations

import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from torch2ort.cache.key.exclusive import exclusive
from torch2ort.cache.key.key import Key
from torch2ort.cache.store.shelf import Kept, keep
from torch2ort.cache.store.store import Store
from torch2ort.errors import EngineError
from torch2ort.kernels.regions import _torch_private as private
from torch2ort.kernels.regions.region import Region, decode_region, in_float32
from torch2ort.log import quiet
from torch2ort.startup import SESSION, timed
from torch2ort.warning import warn

_PACKAGE = "region.pt2"
_Run = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
# Rounding: between these are a fused kernel's results and those of its operators one by one.
_BOUNDS = {
    torch.float32: (1e-4, 1e-4),
    torch.float64: (1e-7, 1e-7),
    torch.bfloat16: (1.6e-2, 1e-3),
    torch.float16: (2e-3, 2e-4),
}

_HALF = frozenset({torch.bfloat16, torch.float16})


@dataclass
class _Libraries:
    """The libraries of the process, by the text of their region; ``None`` for one that was not to be had."""

    loaded: dict[str, _Run | None] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


_LIBRARIES = _Libraries()


def library_of(text: str) -> _Run:
    """What runs a region that :func:`compiled` was asked for.

    Args:
        text: of the region.

    Raises:
        EngineError: nobody asked, or there was no compiler.
    """
    run = _LIBRARIES.loaded.get(text)
    if run is None:
        raise EngineError(
            "a fused region of the graph is not compiled in this process. Delete the export cache, or set "
            "Options(fuse=False)"
        )
    return run


def compiled(text: str, store: Store | None) -> bool:
    """Whether a region can be run as one kernel: found in the store, or compiled now.

    Args:
        text: of the region.
        store: where libraries are kept; ``None`` keeps them for this process alone.
    """
    with _LIBRARIES.lock:
        if text not in _LIBRARIES.loaded:
            _LIBRARIES.loaded[text] = obtained(text, store)
        return _LIBRARIES.loaded[text] is not None


def obtained(text: str, store: Store | None) -> _Run | None:
    """What runs a region: out of the store, or compiled now; ``None``, with a warning, if it cannot be.

    Args:
        text: of the region.
        store: as for :func:`compiled`.
    """
    key = Key.of("region", {"region": text, **private.compiler(), "threads": str(_threads())})
    kept = None if store is None else store.read(key.digest)
    if kept is not None:
        return _loaded(kept.files[_PACKAGE])
    try:
        package = _compile(decode_region(text))
        run = _loaded(package)
        difference = _difference(text, run)
    except Exception as error:  # whatever a compiler can say
        reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
        warn(
            f"Options(fuse=True): torch's inductor does not compile a region here ({reason}), so its "
            f"operators run one by one. Is there a C++ compiler?"
        )
        return None
    if difference:
        warn(f"Options(fuse=True): a compiled region is not used, as its {difference}.")
        return None
    if store is not None:
        keep(store, key, "fused region", Kept({}, {_PACKAGE: package}))
    return run


@timed(SESSION)
@exclusive.exporting()
def _compile(region: Region) -> bytes:
    generator = torch.Generator().manual_seed(0)
    with (
        tempfile.TemporaryDirectory(prefix="torch2ort-") as folder,
        quiet(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 copies its own deprecated tree specs
        path = Path(folder, _PACKAGE)
        private.compile_package(region.run, tuple(region.samples(generator)), path, threads=_threads())
        return path.read_bytes()


def _loaded(package: bytes) -> _Run:
    with tempfile.TemporaryDirectory(prefix="torch2ort-") as folder:
        path = Path(folder, _PACKAGE)
        path.write_bytes(package)
        return private.load_package(path)


def _difference(text: str, run: _Run) -> str:
    """How a library's results differ from those of PyTorch's kernels; empty if only by rounding."""
    region = decode_region(text)
    tensors = region.samples(torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = region.run(tensors), run(list(tensors))
    for position, (one, other) in enumerate(zip(expected, found, strict=True)):
        if (other.dtype, other.shape) != (one.dtype, one.shape) or not other.is_contiguous():
            return f"output {position} has another type, shape or order than that of PyTorch's kernels"
        relative, absolute = _BOUNDS.get(one.dtype, (0.0, 0.0))
        if torch.allclose(other, one, rtol=relative, atol=absolute, equal_nan=True):
            continue
        if one.dtype not in _HALF or not _is_nearer(other, one, _in_float32(text, tensors)[position]):
            return f"output {position} differs from that of PyTorch's kernels"
    return ""


def _in_float32(text: str, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """What PyTorch's kernels give where the region's halves are float32."""
    region = decode_region(in_float32(text))
    with torch.no_grad():
        return region.run([t.to(dtype) for t, (dtype, _) in zip(tensors, region.inputs, strict=True)])


def _is_nearer(found: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether results in a half precision are as near to those in float32 as PyTorch's are.

    PyTorch's LayerNorm, for one, adds the gradients of its weight up in bfloat16, compiled code in float32.
    """
    finite = torch.isfinite(expected) & torch.isfinite(exact)
    other = torch.where(finite, 0, expected)
    if not torch.equal(torch.where(finite, 0, found).nan_to_num(), other.nan_to_num()):
        return False
    errors = [(t.float() - exact)[finite].abs().max() for t in (found, expected)]
    return bool(errors[0] <= errors[1])


def _threads() -> int:
    """One, or as many as there are when it runs."""
    return 1 if torch.get_num_threads() == 1 else -1
