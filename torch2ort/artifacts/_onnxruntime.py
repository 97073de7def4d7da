"""The first import of onnxruntime, without the logging handlers that onnxruntime-training 1.19.2 installs."""

from __future__ import annotations

from torch2ort.errors import RuntimeNotFoundError
from torch2ort.log import no_new_handlers

try:
    with no_new_handlers():
        import onnxruntime as onnxruntime
except ImportError as error:
    raise RuntimeNotFoundError(
        f"training files need an ONNX Runtime package, and `import onnxruntime` failed ({error}); "
        f"pip install onnxruntime, or onnxruntime-gpu"
    ) from error
