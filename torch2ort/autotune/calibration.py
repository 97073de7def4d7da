"""Times of operators that were measured on this machine, for all processes of a user.

They are stored by processor, versions and threads, in a folder beside the user's export cache. Times of kinds
of operators are measured by ``python -m torch2ort calibrate``, those of single operators in a fraction of
each start's time. The built-in rule decides where no time was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch2ort.autotune.hardware_key import machine
from torch2ort.autotune.processor_rule import KINDS, faster_in_kernels
from torch2ort.cache.key.key import Key
from torch2ort.cache.store import location
from torch2ort.cache.store.graph_entries import EntryContent, store_entry
from torch2ort.cache.store.store import RefusedError, Store
from torch2ort.log import logger
from torch2ort.options import Options

_FOLDER = "calibration"
_NAME = "kinds of operators"
_KIND = "calibration"
# The highest ratio at which the other library replaces the rule's.
_WINS = 0.97


@dataclass(frozen=True)
class Calibration:
    """Measurements of the calibrations of this machine.

    Attributes:
        runs: the number of calibrations of this machine so far.
        ratios: the time of PyTorch's kernels divided by that of ONNX Runtime's, by kind of operator.
    """

    runs: int
    ratios: Mapping[str, float]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of operators that PyTorch's kernels compute."""
        ruled = faster_in_kernels()
        return tuple(
            kind
            for kind, ratio in self.ratios.items()
            if ratio < (1 / _WINS if KINDS[kind] <= ruled else _WINS)
        )


def calibration_store(options: Options) -> Store | None:
    """Return the store of this user's measurements; ``None`` where the settings or the system allow none.

    Args:
        options: the module's options.
    """
    if not options.calibrate or options.deterministic:
        return None
    try:
        folder = None if location.cache_folder(options) is None else location.users_folder()
        return None if folder is None else Store(folder / _FOLDER)
    except RefusedError as error:
        logger.info("measurements of this machine are not stored: %s", error)
        return None


def in_kernels(options: Options) -> frozenset[str]:
    """Return the operators that PyTorch's kernels compute if they are large, by measurement or by the rule.

    Args:
        options: the module's options.
    """
    found = calibrated(options)
    return faster_in_kernels() if found is None else frozenset().union(*(KINDS[kind] for kind in found.kinds))


def runs(options: Options) -> int:
    """Return how many times this machine was calibrated.

    Args:
        options: the module's options.
    """
    found = calibrated(options)
    return 0 if found is None else found.runs


def calibrated(options: Options) -> Calibration | None:
    """Return the last calibration of this machine; ``None`` if there is none, or it must not be read.

    Args:
        options: the module's options.
    """
    store = calibration_store(options)
    return None if store is None else _read(store, _key(options))


def note(options: Options, ratios: Mapping[str, float]) -> Calibration | None:
    """Store a calibration in the place of the last one.

    Args:
        options: the options of the process that measured.
        ratios: see :class:`Calibration`.

    Returns:
        The calibration; ``None`` if it could not be stored.
    """
    store, key = calibration_store(options), _key(options)
    if store is None:
        return None
    with store.lock(key.digest):
        before = _read(store, key)
        store.remove(key.digest)
        made = Calibration(1 if before is None else before.runs + 1, dict(ratios))
        reason = store_entry(
            store, key, _KIND, EntryContent({"runs": made.runs, "ratios": dict(made.ratios)}, {})
        )
    return made if reason is None else None


def _key(options: Options) -> Key:
    return Key.of(_NAME, {**machine(options), "measured": _NAME})


def _read(store: Store, key: Key) -> Calibration | None:
    entry = store.read(key.digest)
    if entry is None:
        return None
    data = entry.manifest.data
    return Calibration(int(data["runs"]), {kind: float(data["ratios"][kind]) for kind in KINDS})
