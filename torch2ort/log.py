"""The logger ``torch2ort``: its records by level and by rank, and the suppression of libraries' records.

| level | rank 0 | other ranks |
| --- | --- | --- |
| ``ERROR``, ``WARNING`` (the default), ``INFO`` | records that a user can act on | nothing |
| ``DEVINFO`` | with onnxruntime's own INFO and the exporter's report | the same |
| ``DEBUG`` | everything | the same |
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from torch2ort.options import Options

logger = logging.getLogger("torch2ort")

DEVINFO = 15
logging.addLevelName(DEVINFO, "DEVINFO")

# Severities of onnxruntime.
_ORT_VERBOSE, _ORT_INFO, _ORT_FATAL = 0, 1, 4

# Libraries that an export calls; a user of an export cannot act on their records and deprecations.
_LIBRARIES = ("torch", "onnxscript", "onnx_ir", "onnx", "onnx_shape_inference", "onnxruntime", "sympy")
_MODULES = rf"({'|'.join(_LIBRARIES)})(\.|$)"
_OLD_NAMES = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)
# A warning of autograd's anomaly mode, in which a joint trace runs.
_ANOMALY = r"Error detected in \w+\. "


def rank() -> int:
    """Return the process's rank in ``torch.distributed``; 0 if that is not in use."""
    distributed = _distributed()
    return 0 if distributed is None else int(distributed.get_rank())


def is_shown(level: int) -> bool:
    """Return True if this rank shows records of this level."""
    return logger.isEnabledFor(level) and rank_logs()


def rank_logs() -> bool:
    """Return True if this rank logs: rank 0 always, others at the levels of developers, DEVINFO and below."""
    return rank() == 0 or logger.getEffectiveLevel() <= DEVINFO


def _is_for_this_rank(record: logging.LogRecord) -> bool:
    """Return True if this rank logs; at the levels of developers, add the rank to the record."""
    if rank_logs() and logger.getEffectiveLevel() <= DEVINFO and _has_others():
        record.msg = f"[rank {rank()}] {record.msg}"
    return rank_logs()


def _has_others() -> bool:
    distributed = _distributed()
    return distributed is not None and distributed.get_world_size() > 1


def _distributed() -> Any:
    """Return ``torch.distributed`` if it is in use; torch is not imported for that."""
    found = sys.modules.get("torch.distributed")
    return found if found is not None and found.is_available() and found.is_initialized() else None


def _root_is_silent(record: logging.LogRecord) -> bool:
    """Return True if the application has not set up logging, so `record` would be lost."""
    return not logging.getLogger().handlers


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]  # takes none on Python 3.10
    """A handler that writes to the current ``sys.stderr``."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr


def fallback_handler() -> logging.Handler:
    """Return a handler that writes to stderr the records that no handler of the application shows."""
    handler = _Stderr()
    handler.setFormatter(logging.Formatter("%(name)s [%(levelname)s] %(message)s"))
    handler.addFilter(_root_is_silent)
    return handler


logger.addFilter(_is_for_this_rank)
# Without a handler Python drops records below WARNING, and log_level="info" would show nothing. It is added
# once, here, so that no export adds one.
logger.addHandler(fallback_handler())


def apply_level(options: Options) -> None:
    """Set the logger to ``options.log_level``; ``None`` does not change it.

    Records go to the handlers that the application has set up, or else to stderr.

    Args:
        options: Settings of which ``log_level`` is read.
    """
    if options.log_level is not None:
        logger.setLevel(options.log_level.upper())


@contextlib.contextmanager
def no_new_handlers() -> Iterator[None]:
    """Remove handlers that the block adds to the root logger: only the application sets up logging."""
    root = logging.getLogger()
    before = list(root.handlers)
    try:
        yield
    finally:
        for handler in [h for h in root.handlers if h not in before]:
            root.removeHandler(handler)


def onnxruntime_severity() -> int:
    """Return ``SessionOptions.log_severity_level`` for sessions of onnxruntime.

    Above DEVINFO, sessions log no errors: these are raised, with more information than in onnxruntime's own
    line.
    """
    level = logger.getEffectiveLevel()
    if level <= logging.DEBUG:
        return _ORT_VERBOSE
    return _ORT_INFO if level <= DEVINFO else _ORT_FATAL


@contextlib.contextmanager
def suppress_libraries() -> Iterator[None]:
    """Suppress output of libraries in this thread during an export, unless the level is DEVINFO or below.

    Suppressed are deprecations that a library raises in its own code, its records of any level, and the
    warnings of autograd's anomaly mode. torch logs an error before it raises it, also if the export then
    continues in another way; an error that ends the export is raised with the library's error as its cause.
    Warnings, records and output of the model's code are kept, and no file descriptor is redirected, so the
    output of a debugger and of a crash is seen. torch's records are kept if the environment variable
    ``TORCH_LOGS`` is set.
    """
    if logger.getEffectiveLevel() <= DEVINFO:
        yield
        return
    noise = _Noise()
    handlers = _handlers()
    for handler in handlers:
        handler.addFilter(noise)
    try:
        with warnings.catch_warnings():
            for category in _OLD_NAMES:
                warnings.filterwarnings("ignore", category=category, module=_MODULES)
            warnings.filterwarnings("ignore", message=_ANOMALY, category=UserWarning)
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(noise)


class _Noise(logging.Filter):
    """A filter that drops records of libraries in the thread that made the filter."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        wanted = bool(os.environ.get("TORCH_LOGS"))
        self._libraries = frozenset(_LIBRARIES) - ({"torch"} if wanted else set())

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if the record is kept."""
        return record.name.partition(".")[0] not in self._libraries or record.thread != self._thread


def _handlers() -> list[logging.Handler]:
    """Return every handler that shows records of the libraries."""
    found = {*logging.getLogger().handlers}
    if logging.lastResort is not None:
        found.add(logging.lastResort)
    # A copy is iterated, as another thread may make a logger at the same time.
    for name, known in list(logging.root.manager.loggerDict.items()):
        if isinstance(known, logging.Logger) and name.partition(".")[0] in _LIBRARIES:
            found.update(known.handlers)
    return list(found)
