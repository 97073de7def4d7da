"""The logger ``torch2ort``: what the package does, for people who want to watch it."""

from __future__ import annotations

import logging

from torch2ort.options import Options

logger = logging.getLogger("torch2ort")


def _root_is_silent(record: logging.LogRecord) -> bool:
    """Tell whether nobody has set up logging, so that `record` would be lost."""
    return not logging.getLogger().handlers


def _fallback_handler() -> logging.Handler:
    """Return a handler that writes to stderr what no other handler would show."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s [%(levelname)s] %(message)s"))
    handler.addFilter(_root_is_silent)
    return handler


def apply_level(options: Options) -> None:
    """Set the logger to ``options.log_level``; ``None`` leaves it as it is.

    Records go to the handlers that the application has set up, or else to stderr.

    Args:
        options: Settings of which ``log_level`` is read.
    """
    if options.log_level is None:
        return
    logger.setLevel(options.log_level.upper())
    # Without a handler Python drops records below WARNING, and log_level="info" would show nothing.
    if not logger.handlers:
        logger.addHandler(_fallback_handler())
