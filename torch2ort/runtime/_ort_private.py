"""Every private name of onnxruntime that torch2ort.runtime uses, with the versions that were tested.

Version 1.19.2 is that of onnxruntime-training.

| name (of onnxruntime.capi._pybind_state) | tried on |
| --- | --- |
| OrtValue.from_dlpack, OrtValue.to_dlpack | 1.19.2, 1.22.1 to 1.32.0 (not in 1.20.1) |
| OrtValue.ortvalue_from_shape_and_onnx_type, data_ptr, element_type | 1.20.1 |
| OrtValueVector.push_back | 1.19.2, 1.31.1 |
| OrtValueVector.to_dlpacks | 1.19.2, 1.22.1, 1.31.1 |
| OrtDevice, Severity | 1.19.2, 1.20.1, 1.31.1 |
| InferenceSession._sess.run_with_ort_values | 1.19.2, 1.20.1, 1.22.1, 1.24.4, 1.31.1 |
| InferenceSession._sess.run_with_ortvaluevector | 1.31.1, on the CPU |
| OrtDevice.make of the public OrtDevice, its _get_c_device | 1.31.1, on the CPU |
| InferenceSession._model_bytes | 1.19.2, 1.31.1 |
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from torch2ort.errors import RuntimeNotFoundError
from torch2ort.log import no_new_handlers

# Optimisers that are disabled in every session. GemmSumFusion fails an assertion, and with it the session,
# where a Gemm reads the third output of a node or a later one (1.19.2, 1.31.1). NoopElimination reads the
# first element of a constant that has none, and may remove the node that computes the operand of a sum
# (1.19.2 to 1.26.0; not 1.31.1). Fusions of a GELU from its operators accept 1.000005 as 1, and 1.4142 as the
# root of 2 (GeluFusion 1.19.2, GeluFusionL1 and L2 1.31.1). MatMulScaleFusion multiplies a product instead of
# its factor, so (x * 1e-30) @ y overflows where x @ y does (1.19.2, 1.31.1).
DISABLED_OPTIMIZERS = (
    "GemmSumFusion", "NoopElimination", "GeluFusion", "GeluFusionL1", "GeluFusionL2", "FastGeluFusion",
    "MatMulScaleFusion",
)  # fmt: skip


@functools.cache
def onnxruntime() -> Any:
    """Return the installed onnxruntime package.

    Raises:
        RuntimeNotFoundError: none is installed.
    """
    try:
        with no_new_handlers():  # onnxruntime-training 1.19.2 adds one
            return importlib.import_module("onnxruntime")
    except ImportError as error:
        raise RuntimeNotFoundError(
            f"running a model needs an ONNX Runtime package, and `import onnxruntime` failed ({error}). "
            f"Install one: pip install 'torch2ort[cpu]' (or gpu, training, training-gpu)"
        ) from error


def version() -> tuple[int, ...]:
    """Return the major and minor version of the installed onnxruntime."""
    return tuple(int(part) for part in onnxruntime().__version__.split(".")[:2])


@functools.cache
def pybind() -> Any:
    """Return onnxruntime's extension module."""
    onnxruntime()
    return importlib.import_module("onnxruntime.capi._pybind_state")


def device_place(kind: str, number: int) -> Any:
    """Return a device in the form in which a run expects the devices of its outputs.

    Args:
        kind: ``"cpu"`` or ``"cuda"``.
        number: the device's index.
    """
    return onnxruntime().OrtDevice.make(kind, number)._get_c_device()


@functools.cache
def needs_bool_flag() -> bool:
    """Return True if ``OrtValue.from_dlpack`` expects a flag for bool; since 1.32 it reads the capsule's."""
    return "is_bool_tensor" in pybind().OrtValue.from_dlpack.__doc__


def drop_model_bytes(session: Any) -> None:
    """Free the serialized model, with its weights, that a session stores for ``set_providers`` only."""
    session._model_bytes = None
