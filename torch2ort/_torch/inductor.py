"""Private names of inductor, and the versions tried.

| name | tried on |
| --- | --- |
| torch._inductor.aoti_compile_and_package, aoti_load_package | 2.11.0, 2.13.0, 2.15.0 |
| torch._inductor.compile, torch._inductor.graph.GraphLowering.compile_to_module, codegen | 2.12.1, 2.13.0 |
| torch._inductor.config.patch | 2.12.1, 2.13.0 |
| torch._inductor.cpp_builder.CppBuilder, CppTorchOptions | 2.12.1, 2.13.0 |
| torch._inductor.cpu_vec_isa.pick_vec_isa | 2.11.0, 2.13.0, 2.15.0 |
| ShapeEnv.create_symbol, create_symintnode, guards | 2.11.0, 2.12.1, 2.13.0 |
| DimDynamic, ConstantSource, FakeTensorMode | 2.11.0, 2.12.1, 2.13.0 |

Where a name is missing in a version that was not tried, the packages of the first line are used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import sympy
import torch

_Function = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


class InductorTrace:
    """Fake tensors, some of whose sizes vary.

    Args:
        hints: a number for each size that varies, by name. Compiled code is correct for all sizes, and
            fastest for these.

    Attributes:
        sizes: the symbolic sizes, by name.
    """

    def __init__(self, hints: Mapping[str, int]) -> None:
        from torch._dynamo.source import ConstantSource
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

        self._environment = ShapeEnv()
        self._mode = FakeTensorMode(shape_env=self._environment)
        self.sizes: dict[str, Any] = {}
        for name, hint in hints.items():
            source = ConstantSource(name)
            made = self._environment.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
            self.sizes[name] = self._environment.create_symintnode(made, hint=hint, source=source)

    def tensor(self, dtype: torch.dtype, sizes: Sequence[Any]) -> torch.Tensor:
        """Return a contiguous tensor."""
        with self._mode:
            return torch.empty(sizes, dtype=dtype)

    def conditions(self) -> list[sympy.Expr]:
        """Return the conditions on sizes that code compiled for such tensors assumes."""
        return [guard.expr for guard in self._environment.guards]


def wrapper_of(
    function: _Function, arguments: tuple[torch.Tensor, ...], sizes: Sequence[Any] = (), *, threads: int
) -> str:
    """Return the code that inductor generates for a function of contiguous tensors, without compiling it.

    The code is Python with kernels in C++.

    Args:
        function: takes and returns tensors.
        arguments: sample tensors, or tensors of a :class:`InductorTrace`.
        sizes: the symbolic sizes of the trace. The generated code takes them before the tensors.
        threads: as for :func:`compile_package`.
    """
    import torch._inductor
    from torch._inductor.graph import GraphLowering
    from torch.fx.experimental.proxy_tensor import make_fx

    written: list[str] = []
    thread, compile_to_module = threading.get_ident(), GraphLowering.compile_to_module

    class Nothing:
        def call(self, *args: Any) -> None:
            """Do nothing; never called."""

    def write(lowering: Any) -> Any:
        if threading.get_ident() != thread:  # another thread compiles meanwhile, and will run its module
            return compile_to_module(lowering)
        code, _ = lowering.codegen()
        written.append(code.value)
        return Nothing()

    traced: Any = make_fx(
        lambda *given: tuple(function(given[len(sizes) :])), tracing_mode="symbolic" if sizes else "fake"
    )
    with torch.no_grad(), mock.patch.object(GraphLowering, "compile_to_module", write):
        # A hit in one of inductor's caches would skip the code generation.
        options = {**_settings(threads), "cpp_wrapper": False, "force_disable_caches": True}
        given = [*sizes, *arguments]
        torch._inductor.compile(traced(*given), given, options=options)
    (code,) = written
    return code


def compile_library(source: str, folder: Path, *, threads: int) -> bytes:
    """Compile C++ source that contains inductor's kernels, with inductor's compiler options.

    Args:
        source: the C++ source.
        folder: an empty folder.
        threads: as for :func:`compile_package`.
    """
    from torch._inductor import config
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    path = folder / "regions.cpp"
    path.write_text(source)
    with config.patch(_settings(threads)):
        options = CppTorchOptions(vec_isa=pick_vec_isa())
        builder = CppBuilder(name=path.stem, sources=str(path), BuildOption=options, output_dir=str(folder))
        builder.build()
        return Path(builder.get_target_file_path()).read_bytes()


def compile_package(
    function: _Function, arguments: tuple[torch.Tensor, ...], path: Path, *, threads: int
) -> None:
    """Compile a function of contiguous tensors for this machine.

    Args:
        function: takes and returns tensors.
        arguments: sample tensors.
        path: the file of the package.
        threads: 1, or -1 for the number of threads at run time.
    """
    import torch._inductor

    program = torch.export.export(_Module(function), arguments)
    torch._inductor.aoti_compile_and_package(
        program, package_path=str(path), inductor_configs=_settings(threads)
    )


def load_package(path: Path) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """Return the function that runs a package, on tensors like those of its compilation, without checks.

    Args:
        path: the file of the package, which may be deleted afterwards.
    """
    import torch._inductor

    found: Any = torch._inductor.aoti_load_package(str(path))
    run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]] = found.loader.boxed_run
    return run


def _settings(threads: int) -> dict[str, Any]:
    return {
        # Results are rounded where eager PyTorch rounds them.
        "emulate_precision_casts": True,
        "cpp.threads": threads,
        "cpp.dynamic_threads": threads < 0,
    }


class _Module(torch.nn.Module):
    def __init__(self, function: _Function) -> None:
        super().__init__()
        self._function = (function,)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self._function[0](tensors))
