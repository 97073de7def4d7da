"""Environment variables of onnxruntime's ORTModule, and the replacement of each.

The page docs/coming_from_ortmodule.md lists them, too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from torch2ort.support.user_warnings import warn

_NO_FALLBACK = "nothing falls back to eager PyTorch: a call is run on ONNX Runtime or refused by name"
_NEEDED_NO_MORE = "it is no longer needed"
_HALF_OF_A_STEP = "backward recomputes what is cheap, without a setting"

INSTEAD: Mapping[str, str] = {
    "ORTMODULE_ALLOW_AUTOGRAD_CHECKPOINT": f"{_NEEDED_NO_MORE}, checkpoint is a Function like any other",
    "ORTMODULE_ATEN_SDPA_FALLBACK": f"{_NEEDED_NO_MORE}, attention's derivative is PyTorch's kernel",
    "ORTMODULE_CACHE_DIR": "set TORCH2ORT_CACHE_DIR",
    "ORTMODULE_DEEPCOPY_BEFORE_MODEL_EXPORT": f"{_NEEDED_NO_MORE}, an export changes nothing in a model",
    "ORTMODULE_ENABLE_COMPUTE_OPTIMIZER": "there is no such pass",
    "ORTMODULE_ENABLE_CUSTOM_AUTOGRAD": f"{_NEEDED_NO_MORE}, Functions are always kept",
    "ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER": "there is no such pass",
    "ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER": "there is no such pass",
    "ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT": f"{_NEEDED_NO_MORE}, gradients are never copied into a graph",
    "ORTMODULE_ENABLE_TUNING": "set TORCH2ORT_AUTOTUNE=1",
    "ORTMODULE_ENABLE_ZERO_STAGE3": f"{_NEEDED_NO_MORE}, partitioned weights are gathered for a call",
    "ORTMODULE_FALLBACK_POLICY": _NO_FALLBACK,
    "ORTMODULE_FALLBACK_RETRY": _NO_FALLBACK,
    "ORTMODULE_JSON_CONFIG_PATH": "pass torch2ort.Options(...), or set TORCH2ORT_<FIELD>",
    "ORTMODULE_LOG_LEVEL": "set TORCH2ORT_LOG_LEVEL",
    "ORTMODULE_MAX_TUNING_DURATION_MS": "TORCH2ORT_AUTOTUNE=1 measures for 10 seconds at most",
    "ORTMODULE_MEMORY_OPT_CONFIG": _HALF_OF_A_STEP,
    "ORTMODULE_MEMORY_OPT_LEVEL": _HALF_OF_A_STEP,
    "ORTMODULE_ONNX_OPSET_VERSION": "set TORCH2ORT_OPSET",
    "ORTMODULE_PRINT_INPUT_DENSITY": "there is no such report",
    "ORTMODULE_PRINT_MEMORY_STATS": "there is no such report",
    "ORTMODULE_SAVE_ONNX_PATH": "set TORCH2ORT_SAVE_ONNX_DIR",
    "ORTMODULE_SKIPCHECK_POLICY": "checks are never skipped; TORCH2ORT_GUARDS=trust drops some",
    "ORTMODULE_TRITON_CONFIG_FILE": "there is no code generation by Triton",
    "ORTMODULE_TRITON_DEBUG": "there is no code generation by Triton",
    "ORTMODULE_TUNING_RESULTS_PATH": "TORCH2ORT_AUTOTUNE=1 stores its measurements in the export cache",
    "ORTMODULE_USE_EFFICIENT_ATTENTION": f"{_NEEDED_NO_MORE}, PyTorch chooses its kernel of attention",
    "ORTMODULE_USE_FLASH_ATTENTION": f"{_NEEDED_NO_MORE}, PyTorch chooses its kernel of attention",
    "ORTMODULE_USE_TRITON": "there is no code generation by Triton",
}

_warned: set[str] = set()


def warn_of_former_names(environ: Mapping[str, str] = os.environ) -> None:
    """Warn, once per process, of each variable of ORTModule that is set and has no effect on torch2ort."""
    for name in sorted(INSTEAD.keys() & environ.keys() - _warned):
        _warned.add(name)
        warn(
            f"the environment variable {name} is of onnxruntime's ORTModule and has no effect on torch2ort: "
            f"{INSTEAD[name]}. See docs/coming_from_ortmodule.md"
        )
