"""Where the export cache is, as the settings say."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from torch2ort.cache.store.store import DEFAULT_LIMIT, RefusedError, Store
from torch2ort.log import logger
from torch2ort.options import Options

_NAME = "torch2ort"


def cache_folder(options: Options) -> Path | None:
    """The folder of the export cache; ``None`` where the settings switch it off.

    Args:
        options: ``cache_dir`` names it, or leaves it to :func:`users_folder`.

    Raises:
        RefusedError: the user has no home folder.
    """
    folder = options.cache_dir
    if isinstance(folder, bool):
        return None
    return users_folder() if folder is None else Path(folder)


def users_folder() -> Path | None:
    """``$XDG_CACHE_HOME/torch2ort``; without that variable, or with a relative path, ``~/.cache/torch2ort``.

    The XDG Base Directory Specification 0.8 is the source of this rule.

    Raises:
        RefusedError: the user has no home folder.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):
        return Path(given, _NAME)
    try:
        return Path.home() / ".cache" / _NAME
    except RuntimeError as error:
        raise RefusedError(
            "the export cache is not used, because the user has no home folder; name a folder with cache_dir "
            "or TORCH2ORT_CACHE_DIR."
        ) from error


def opened_store(options: Options) -> Store | None:
    """The store of :func:`cache_folder`; ``None`` where the settings switch it off.

    Raises:
        RefusedError: the folder cannot serve as one.
    """
    folder = cache_folder(options)
    if folder is None:
        return None
    limit = options.cache_limit or DEFAULT_LIMIT
    store = Store(folder, limit)
    _log_once(folder, limit)
    return store


@functools.cache
def _log_once(folder: Path, limit: int) -> None:
    logger.info(
        "exports are kept in %s, %d MB at most; Options(cache_dir=False) or an empty TORCH2ORT_CACHE_DIR "
        "keeps none",
        folder,
        limit // 1_000_000,
    )
