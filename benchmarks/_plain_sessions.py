"""Plain sessions over files, and their latencies."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
from _timing import interleaved_medians
from torch import Tensor


def session(model: onnx.ModelProto, x: Tensor) -> tuple[Callable[[], object], np.ndarray[Any, Any]]:
    """Return a function that runs a plain session, and its first output."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    feeds = {session.get_inputs()[0].name: x.numpy()}
    return lambda: session.run(None, feeds), session.run(None, feeds)[0]


def latency(files: dict[str, onnx.ModelProto], x: Tensor) -> tuple[float, float]:
    """Return the ratio of the latencies of "ours" and "theirs", and the seconds of the second.

    The session that is made first is some 5 % slower, even of the same file, so each one is first once.
    """
    ratio, seconds = 1.0, 0.0
    for order in (("ours", "theirs"), ("theirs", "ours")):
        runs = {way: session(files[way], x)[0] for way in order}
        times = interleaved_medians(runs, rounds=120, calls=3, clock=time.thread_time)
        ratio *= times["ours"] / times["theirs"]
        seconds += times["theirs"] / 2
    return math.sqrt(ratio), seconds
