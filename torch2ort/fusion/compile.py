"""Compilation of regions by torch's inductor: one run of the compiler makes one library for a graph.

A region that inductor does not compile to kernels only becomes a package of AOTInductor instead, one by one.
A package takes ten times as long, as a container for models is compiled into it, and is called through
Python.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import sympy
import torch

from torch2ort._torch import inductor as private
from torch2ort.cache.key.export_lock import exclusive
from torch2ort.cache.store.graph_entries import EntryContent
from torch2ort.cache.store.store import Entry
from torch2ort.fusion.cpp_source import CppProgram, program_of, text_of
from torch2ort.fusion.inductor_kernels import Kernel, UnknownCodeError, record_calls
from torch2ort.fusion.library_loader import loaded
from torch2ort.fusion.region import (
    Region,
    as_json,
    decode_region,
    read,
    read_shapes,
    shape_of,
    shapes_as_json,
)
from torch2ort.log import logger, suppress_libraries
from torch2ort.support.processor import processor_features
from torch2ort.support.startup_timing import SESSION, timed

_LIBRARY = "regions.so"
_PACKAGE = "region.pt2"
# The version of the libraries' calling convention and of the comparison that they passed.
_FORM = "3"
# Hints for varying sizes: large, so that inductor computes sums with care, and prime, so that it sees no
# pattern.
_HINTS = (4099, 4111, 4127, 4129, 4133, 4139, 4153, 4157)
Run = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class CompiledRegion:
    """A region that was just compiled.

    Attributes:
        run: runs the region; its results are not compared yet.
        kept: its entry for a store.
    """

    run: Run
    kept: EntryContent


@dataclass(frozen=True)
class CompileFailure:
    """A region that could not be compiled.

    Attributes:
        reason: the message of the error.
    """

    reason: str


def compile_regions(texts: Sequence[str]) -> dict[str, CompiledRegion | CompileFailure]:
    """Compile regions.

    Args:
        texts: of the regions, each once.
    """
    made = _in_one_library(texts) if texts else {}
    for text in texts:
        if isinstance(made[text], CompileFailure) and not decode_region(text).varying:
            made[text] = _in_a_package(text)
    return made


def restored(text: str, entry: Entry) -> Run | None:
    """Return the function that runs a region from a store; ``None`` if it does not load on this machine.

    Args:
        text: of the region.
        entry: of the store.
    """
    try:
        if _PACKAGE in entry.files:
            return _package(entry.files[_PACKAGE])
        program = _decoded(entry.manifest.data["program"])
        return loaded(entry.files[_LIBRARY], decode_region(text), program)
    except (OSError, AttributeError, RuntimeError) as error:
        logger.info("a fused region in the cache does not load: %s", error)
        return None


def surroundings() -> dict[str, str]:
    """Return what a library depends on besides its regions; no compiler is needed to know it."""
    return {
        "torch": torch.__version__,
        # The environment may request fewer vector instructions than the processor has.
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "threads": str(_threads()),
        # The compiler generates code for the processor that it runs on.
        "processor": processor_features(),
        "form": _FORM,
    }


@timed(SESSION)
@exclusive.exporting()
def _in_one_library(texts: Sequence[str]) -> dict[str, CompiledRegion | CompileFailure]:
    """Return the regions that inductor compiles to kernels only, and the reason for each of the others."""
    programs: dict[str, CppProgram] = {}
    parts: list[str] = []
    kernels: list[Kernel] = []
    made: dict[str, CompiledRegion | CompileFailure] = {}
    with _compiling() as folder:
        for text in texts:
            region = decode_region(text)
            entry = f"torch2ort_{hashlib.sha256(text.encode()).hexdigest()[:24]}"
            try:
                varying = tuple(region.varying)
                found = record_calls(_code_of(region), region.inputs, varying)
                programs[text], part = program_of(entry, found, varying)
            except Exception as error:  # a compiler may raise any error
                logger.info("a fused region is not compiled to a library: %s", _said(error))
                made[text] = CompileFailure(_said(error))
                continue
            parts.append(part)
            kernels.extend(kernel for kernel, _ in found.calls)
        if not programs:
            return made
        try:
            library = private.compile_library(text_of(parts, kernels), folder, threads=_threads())
            runs = {text: loaded(library, decode_region(text), p) for text, p in programs.items()}
        except Exception as error:  # likewise
            logger.info("fused regions are not compiled to a library: %s", _said(error))
            return made | dict.fromkeys(programs, CompileFailure(_said(error)))
    files = {_LIBRARY: library}
    return made | {
        t: CompiledRegion(run, EntryContent({"program": _encoded(run.program)}, files))
        for t, run in runs.items()
    }


@timed(SESSION)
@exclusive.exporting()
def _in_a_package(text: str) -> CompiledRegion | CompileFailure:
    region = decode_region(text)
    try:
        with _compiling() as folder:
            path = folder / _PACKAGE
            private.compile_package(region.run, _samples(region), path, threads=_threads())
            package = path.read_bytes()
        return CompiledRegion(_package(package), EntryContent({}, {_PACKAGE: package}))
    except Exception as error:  # likewise
        return CompileFailure(_said(error))


def _package(package: bytes) -> Run:
    with tempfile.TemporaryDirectory(prefix="torch2ort-") as folder:
        path = Path(folder, _PACKAGE)
        path.write_bytes(package)
        return private.load_package(path)


@contextmanager
def _compiling() -> Iterator[Path]:
    """Yield an empty folder; the compiler's messages are suppressed."""
    with (
        tempfile.TemporaryDirectory(prefix="torch2ort-") as folder,
        suppress_libraries(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 copies its own deprecated tree specs
        yield Path(folder)


def _code_of(region: Region) -> str:
    """Return the code that inductor writes for a region.

    Raises:
        UnknownCodeError: it would not be correct for all sizes.
    """
    if not region.varying:
        return private.wrapper_of(region.run, _samples(region), threads=_threads())
    trace = private.InductorTrace(dict(zip(region.varying, _HINTS, strict=False)))
    arguments = tuple(trace.tensor(dtype, shape_of(sizes, trace.sizes)) for dtype, sizes in region.inputs)
    code = private.wrapper_of(region.run, arguments, tuple(trace.sizes.values()), threads=_threads())
    for condition in trace.conditions():
        if not _is_of_large_sizes(condition):
            raise UnknownCodeError(f"its code is for sizes where {condition}")
    return code


def _is_of_large_sizes(condition: sympy.Expr) -> bool:
    """Return True if a condition requires large sizes, for which inductor computes sums with more care."""
    if not isinstance(condition, (sympy.StrictGreaterThan, sympy.GreaterThan)):
        condition = getattr(condition, "reversed", condition)
    if not isinstance(condition, (sympy.StrictGreaterThan, sympy.GreaterThan)):
        return False
    large = sympy.expand(condition.lhs - condition.rhs)
    return all(c > 0 for term, c in large.as_coefficients_dict().items() if term.free_symbols)


def _samples(region: Region) -> tuple[torch.Tensor, ...]:
    return tuple(region.samples(torch.Generator().manual_seed(0)))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def _encoded(program: CppProgram) -> str:
    return json.dumps([program.entry, shapes_as_json(program.outputs), as_json(program.temporaries)])


def _decoded(text: str) -> CppProgram:
    entry, outputs, temporaries = json.loads(text)
    return CppProgram(entry, read_shapes(outputs), tuple(map(read, temporaries)))


def _threads() -> int:
    """Return 1, or -1: the number of threads at the time of the run."""
    return 1 if torch.get_num_threads() == 1 else -1
