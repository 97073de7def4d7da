"""Location of the export cache, as the settings define it."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from torch2ort.cache.store.store import DEFAULT_LIMIT, RefusedError, Store
from torch2ort.log import logger
from torch2ort.options import Options

_NAME = "torch2ort"


def cache_folder(options: Options) -> Path | None:
    """Return the folder of the export cache; ``None`` if the settings switch the cache off.

    Args:
        options: ``cache_dir`` names the folder; ``None`` there means :func:`users_folder`.

    Raises:
        RefusedError: the user has no home folder.
    """
    folder = options.cache_dir
    if isinstance(folder, bool):
        return None
    return users_folder() if folder is None else Path(folder)


def users_folder() -> Path | None:
    """Return ``$XDG_CACHE_HOME/torch2ort``, or ``~/.cache/torch2ort`` if that is unset or relative.

    The rule is that of the XDG Base Directory Specification 0.8.

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
    """Return the store in :func:`cache_folder`; ``None`` if the settings switch the cache off.

    Raises:
        RefusedError: the folder cannot serve as a store.
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
