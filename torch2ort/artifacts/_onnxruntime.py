"""The first import of onnxruntime: that of onnxruntime-training 1.19.2 sets up the application's logging."""

from __future__ import annotations

from torch2ort.log import no_new_handlers

with no_new_handlers():
    import onnxruntime as onnxruntime
