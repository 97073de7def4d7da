"""The logger ``torch2ort``: what the package does, by level and by rank, and the noise that it keeps out.

| level | rank 0 | other ranks |
| --- | --- | --- |
| ``ERROR``, ``WARNING`` (the default), ``INFO`` | what a user can act on | nothing |
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

# Libraries that an export runs through, whose records and deprecations no user of an export can act on.
_LIBRARIES = ("torch", "onnxscript", "onnx_ir", "onnx", "onnx_shape_inference", "onnxruntime", "sympy")
_MODULES = rf"({'|'.join(_LIBRARIES)})(\.|$)"
_OLD_NAMES = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)
# A warning of autograd's anomaly mode, in which a joint trace runs.
_ANOMALY = r"Error detected in \w+\. "


def rank() -> int:
    """The process's rank in ``torch.distributed``; 0 where that is not in use."""
    distributed = _distributed()
    return 0 if distributed is None else int(distributed.get_rank())


def is_shown(level: int) -> bool:
    """Whether a record of this level is shown by this rank."""
    return logger.isEnabledFor(level) and speaks()


def speaks() -> bool:
    """Whether this rank says something: the first one always, others to who develops."""
    return rank() == 0 or logger.getEffectiveLevel() <= DEVINFO


def _is_for_this_rank(record: logging.LogRecord) -> bool:
    """Whether this rank speaks; to who develops a record says whose it is."""
    if speaks() and logger.getEffectiveLevel() <= DEVINFO and _has_others():
        record.msg = f"[rank {rank()}] {record.msg}"
    return speaks()


def _has_others() -> bool:
    distributed = _distributed()
    return distributed is not None and distributed.get_world_size() > 1


def _distributed() -> Any:
    """``torch.distributed`` if it is in use; a process that never imported torch does not now."""
    found = sys.modules.get("torch.distributed")
    return found if found is not None and found.is_available() and found.is_initialized() else None


def _root_is_silent(record: logging.LogRecord) -> bool:
    """Tell whether nobody has set up logging, so that `record` would be lost."""
    return not logging.getLogger().handlers


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]  # takes none on Python 3.10
    """Writes to what ``sys.stderr`` is at that moment."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr


def fallback_handler() -> logging.Handler:
    """A handler that writes to stderr what no handler of the application's would show."""
    handler = _Stderr()
    handler.setFormatter(logging.Formatter("%(name)s [%(levelname)s] %(message)s"))
    handler.addFilter(_root_is_silent)
    return handler


logger.addFilter(_is_for_this_rank)
# Without a handler Python drops records below WARNING, and log_level="info" would show nothing. It is added
# once, here, so that no export adds one.
logger.addHandler(fallback_handler())


def apply_level(options: Options) -> None:
    """Set the logger to ``options.log_level``; ``None`` leaves it as it is.

    Records go to the handlers that the application has set up, or else to stderr.

    Args:
        options: Settings of which ``log_level`` is read.
    """
    if options.log_level is not None:
        logger.setLevel(options.log_level.upper())


@contextlib.contextmanager
def no_new_handlers() -> Iterator[None]:
    """Take off the root logger what the block puts there: to set up logging is the application's to do."""
    root = logging.getLogger()
    before = list(root.handlers)
    try:
        yield
    finally:
        for handler in [h for h in root.handlers if h not in before]:
            root.removeHandler(handler)


def onnxruntime_severity() -> int:
    """What a session of onnxruntime may write to stderr, for ``SessionOptions.log_severity_level``.

    Its errors are raised, so that its own red lines about them only stand in front of what says more.
    """
    level = logger.getEffectiveLevel()
    if level <= logging.DEBUG:
        return _ORT_VERBOSE
    return _ORT_INFO if level <= DEVINFO else _ORT_FATAL


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep out what libraries say in this thread while they export, unless the level is DEVINFO or below.

    Deprecations that a library raises in its own code, its records of any level, and what autograd's anomaly
    mode says: torch logs and warns of an error before it raises it, also where an export then takes another
    way, and an error that ends the export is raised with the library's as its cause. What the model's code
    says, logs or prints stays, and no descriptor is touched, so that a debugger and a crash are seen.
    ``TORCH_LOGS`` in the environment asks for torch's records, and gets them.
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
    """Drops what libraries log in the thread that made it."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        wanted = bool(os.environ.get("TORCH_LOGS"))
        self._libraries = frozenset(_LIBRARIES) - ({"torch"} if wanted else set())

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether somebody may want to see the record."""
        return record.name.partition(".")[0] not in self._libraries or record.thread != self._thread


def _handlers() -> list[logging.Handler]:
    """Every handler that shows records of the libraries."""
    found = {*logging.getLogger().handlers}
    if logging.lastResort is not None:
        found.add(logging.lastResort)
    # A copy: another thread may make a logger meanwhile.
    for name, known in list(logging.root.manager.loggerDict.items()):
        if isinstance(known, logging.Logger) and name.partition(".")[0] in _LIBRARIES:
            found.update(known.handlers)
    return list(found)
