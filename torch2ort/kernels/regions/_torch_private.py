"""Every private name of torch that torch2ort.kernels.regions touches, with the versions tried.

| name | tried on |
| --- | --- |
| torch._inductor.aoti_compile_and_package, aoti_load_package | 2.11.0, 2.13.0, 2.15.0 |
| torch._inductor.cpu_vec_isa.pick_vec_isa | 2.11.0, 2.13.0, 2.15.0 |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch


def compile_package(
    function: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    arguments: tuple[torch.Tensor, ...],
    path: Path,
    *,
    threads: int,
) -> None:
    """Compile a function of contiguous tensors for this machine.

    Args:
        function: takes and gives tensors.
        arguments: some that it takes.
        path: where the package goes.
        threads: 1, or -1 for as many as there are when it runs.
    """
    import torch._inductor

    program = torch.export.export(_Module(function), arguments)
    settings: dict[str, Any] = {
        # Results are rounded where eager's are.
        "emulate_precision_casts": True,
        "cpp.threads": threads,
        "cpp.dynamic_threads": threads < 0,
    }
    torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=settings)


def load_package(path: Path) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """What runs a package: takes tensors as they were when it was compiled, and checks none of them.

    Args:
        path: of the package, which may be deleted afterwards.
    """
    import torch._inductor

    found: Any = torch._inductor.aoti_load_package(str(path))
    run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]] = found.loader.boxed_run
    return run


def compiler() -> dict[str, str]:
    """What compiled code depends on besides what it computes."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    return {"torch": torch.__version__, "vectors": str(pick_vec_isa())}


class _Module(torch.nn.Module):
    def __init__(self, function: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]) -> None:
        super().__init__()
        self._function = (function,)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self._function[0](tensors))
